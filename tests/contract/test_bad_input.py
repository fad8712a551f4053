"""Every wrong argument is named with what was received and expected, and a failing call changes no bit of anything."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import mla

B, Q, H, P, N, W = 2, 2, 3, 4, 6, 3


def good(**changes: Any) -> dict[str, Any]:
    """Arguments of a legal call, with changes."""
    random = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {
        "query": torch.randn(B, Q, H, 576, generator=random).bfloat16(),
        "kv_cache": torch.randn(N, P, 576, generator=random).bfloat16(),
        "workspace_buffer": torch.full((64,), 7, dtype=torch.uint8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.arange(B * W, dtype=torch.int32).view(B, W),
        "seq_lens": torch.tensor([7, 12], dtype=torch.int32),
        "max_seq_len": 12,
        "out": torch.full((B, Q, H, 512), 3.0).bfloat16(),
        "lse": torch.full((B * Q, H), 5.0),
        "sinks": torch.ones(H),
    }
    return arguments | changes


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


META = torch.device("meta")
SPARSE = {"sparse_mla_top_k": 5, "block_tables": ints(B, Q, 5)}

WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("query of rank 3", {"query": halves(B, H, 576)}, ValueError, r"query has shape \[2, 3, 576\], 3 dimensions; expected \[B, Q, H, 576\].*unsqueeze"),
    ("query of rank 5", {"query": halves(1, B, Q, H, 576)}, ValueError, r"query has shape \[1, 2, 2, 3, 576\], 5 dimensions"),
    ("query of width 512", {"query": halves(B, Q, H, 512)}, ValueError, r"query has shape .* last dimension 512; expected \[B, Q, H, 576\]"),
    ("query without heads", {"query": halves(B, Q, 0, 576)}, ValueError, r"query has shape \[2, 2, 0, 576\], no heads; .* H >= 1"),
    ("query with last stride 2", {"query": halves(B, Q, H, 1152)[..., ::2]}, ValueError, r"query has strides \[.*, 2\]; expected a last stride of 1"),
    ("integer query", {"query": ints(B, Q, H, 576)}, TypeError, r"query has dtype int32; expected bfloat16 or float16 or float8_e4m3fn"),
    ("complex query", {"query": torch.zeros(B, Q, H, 576, dtype=torch.complex64)}, TypeError, r"query has dtype complex64; expected"),
    ("e5m2 query", {"query": halves(B, Q, H, 576).to(torch.float8_e5m2)}, TypeError, r"query has dtype float8_e5m2; expected"),
    ("query as a list", {"query": [[0.0] * 576]}, TypeError, r"query is a list; expected a torch.Tensor, \[B, Q, H, 576\]"),
    ("sparse-layout query", {"query": torch.zeros(B, Q, H, 576).to_sparse()}, TypeError, r"query has layout torch.sparse_coo; expected a strided"),
    ("cache of rank 2", {"kv_cache": halves(N * P, 576)}, ValueError, r"kv_cache has shape \[24, 576\], 2 dimensions; expected \[N, P, 576\] or \[N, 1, P, 576\]"),
    ("cache of rank 5", {"kv_cache": halves(N, 1, 1, P, 576)}, ValueError, r"kv_cache has shape .*, 5 dimensions; expected"),
    ("cache with two kv heads", {"kv_cache": halves(N, 2, P, 576)}, ValueError, r"kv_cache has shape \[6, 2, 4, 576\]; expected .* one latent per token"),
    ("cache of width 577", {"kv_cache": halves(N, P, 577)}, ValueError, r"kv_cache has shape .* last dimension 577; expected"),
    ("packed 656-byte cache", {"kv_cache": torch.zeros(N, P, 656, dtype=torch.uint8)}, ValueError, r"kv_cache has shape \[6, 4, 656\], last dimension 656; expected .*packed rows"),
    ("page size 0", {"kv_cache": halves(N, 0, 576)}, ValueError, r"kv_cache has shape \[6, 0, 576\], page size 0; expected .* P >= 1"),
    ("page size 0 in rank 4", {"kv_cache": halves(N, 1, 0, 576)}, ValueError, r"kv_cache has shape .* page size 0"),
    ("cache with last stride 2", {"kv_cache": halves(N, P, 1152)[..., ::2]}, ValueError, r"kv_cache has strides \[.*, 2\]; expected a last stride of 1"),
    ("cache as None", {"kv_cache": None}, TypeError, r"kv_cache is a NoneType; expected a torch.Tensor"),
    ("fp16 query, bf16 cache", {"query": halves(B, Q, H, 576).half()}, TypeError, r"query has dtype float16 and kv_cache bfloat16; expected equal dtypes"),
    ("bf16 query, fp16 cache", {"kv_cache": halves(N, P, 576).half()}, TypeError, r"query has dtype bfloat16 and kv_cache float16"),
    ("e4m3 query, bf16 cache", {"query": halves(B, Q, H, 576).to(torch.float8_e4m3fn)}, TypeError, r"query has dtype float8_e4m3fn and kv_cache bfloat16"),
    ("fp32 query, e4m3 cache", {"query": torch.zeros(B, Q, H, 576), "kv_cache": halves(N, P, 576).to(torch.float8_e4m3fn)}, TypeError, r"query has dtype float32 and kv_cache float8_e4m3fn"),
    ("e5m2 cache", {"kv_cache": halves(N, P, 576).to(torch.float8_e5m2)}, TypeError, r"query has dtype bfloat16 and kv_cache float8_e5m2"),
    ("e4m3fnuz cache", {"kv_cache": halves(N, P, 576).to(torch.float8_e4m3fnuz)}, TypeError, r"kv_cache float8_e4m3fnuz"),
    ("bytes as cache", {"kv_cache": torch.zeros(N, P, 576, dtype=torch.uint8)}, TypeError, r"query has dtype bfloat16 and kv_cache uint8; .*view\(torch.float8_e4m3fn\)"),
    ("nope 192", {"qk_nope_head_dim": 192}, ValueError, r"qk_nope_head_dim is 192; expected 128"),
    ("rank 256", {"kv_lora_rank": 256}, ValueError, r"kv_lora_rank is 256; expected 512"),
    ("rope 0", {"qk_rope_head_dim": 0}, ValueError, r"qk_rope_head_dim is 0; expected 64"),
    ("rank as float", {"kv_lora_rank": 512.0}, TypeError, r"kv_lora_rank is a float; expected an int"),
    ("table with too few rows", {"block_tables": ints(B - 1, W)}, ValueError, r"block_tables has shape \[1, 3\]; expected \[B, W\] = \[2, W\]"),
    ("table with too many rows", {"block_tables": ints(B * Q, W)}, ValueError, r"block_tables has shape \[4, 3\]; expected \[B, W\] = \[2, W\]"),
    ("table of rank 1", {"block_tables": ints(W)}, ValueError, r"block_tables has shape \[3\]; expected"),
    ("table of rank 3, dense", {"block_tables": ints(B, Q, W)}, ValueError, r"block_tables has shape \[2, 2, 3\]; expected \[B, W\] = \[2, W\], since the call is dense"),
    ("float table", {"block_tables": torch.zeros(B, W)}, TypeError, r"block_tables has dtype float32; expected int32 or int64"),
    ("int16 table", {"block_tables": torch.zeros(B, W, dtype=torch.int16)}, TypeError, r"block_tables has dtype int16; expected int32 or int64"),
    ("table as lists", {"block_tables": [[0] * W] * B}, TypeError, r"block_tables is a list; expected a torch.Tensor"),
    ("sparse table of rank 2", SPARSE | {"block_tables": ints(B, 5)}, ValueError, r"block_tables has shape \[2, 5\]; expected \[B, Q, K\] = \[2, 2, 5\], since the call is sparse"),
    ("sparse table with another K", SPARSE | {"block_tables": ints(B, Q, 4)}, ValueError, r"block_tables has shape \[2, 2, 4\]; expected \[B, Q, K\] = \[2, 2, 5\]"),
    ("sparse table with another Q", SPARSE | {"block_tables": ints(B, 1, 5)}, ValueError, r"block_tables has shape \[2, 1, 5\]; expected \[B, Q, K\] = \[2, 2, 5\]"),
    ("negative top-k", {"sparse_mla_top_k": -1}, ValueError, r"sparse_mla_top_k is -1; expected an int >= 0"),
    ("top-k as bool", {"sparse_mla_top_k": True}, TypeError, r"sparse_mla_top_k is a bool; expected an int"),
    ("lengths of wrong shape", {"seq_lens": ints(B + 1)}, ValueError, r"seq_lens has shape \[3\]; expected \[B\] = \[2\]"),
    ("lengths of rank 2", {"seq_lens": ints(B, 1)}, ValueError, r"seq_lens has shape \[2, 1\]; expected"),
    ("float lengths", {"seq_lens": torch.ones(B)}, TypeError, r"seq_lens has dtype float32; expected int32 or int64"),
    ("lengths as a list", {"seq_lens": [7, 12]}, TypeError, r"seq_lens is a list; expected a torch.Tensor"),
    ("negative max_seq_len", {"max_seq_len": -1}, ValueError, r"max_seq_len is -1; expected an int >= 0"),
    ("max_seq_len as tensor", {"max_seq_len": torch.tensor(12)}, TypeError, r"max_seq_len is a Tensor; expected an int \(reading"),
    ("max_seq_len as float", {"max_seq_len": 12.0}, TypeError, r"max_seq_len is a float; expected an int"),
    ("max_seq_len as None", {"max_seq_len": None}, TypeError, r"max_seq_len is a NoneType; expected an int"),
    ("out of wrong shape", {"out": halves(B, Q, H, 576)}, ValueError, r"out has shape \[2, 2, 3, 576\]; expected \[B, Q, H, 512\] = \[2, 2, 3, 512\]"),
    ("out of rank 3 with Q = 2", {"out": halves(B * Q, H, 512)}, ValueError, r"out has shape \[4, 3, 512\]; expected"),
    ("out with too many requests", {"out": halves(B + 1, Q, H, 512)}, ValueError, r"out has shape \[3, 2, 3, 512\]; expected"),
    ("fp64 out", {"out": torch.zeros(B, Q, H, 512, dtype=torch.float64)}, TypeError, r"out has dtype float64; expected bfloat16 or float16 or float32"),
    ("e4m3 out", {"out": halves(B, Q, H, 512).to(torch.float8_e4m3fn)}, TypeError, r"out has dtype float8_e4m3fn; expected"),
    ("out with last stride 2", {"out": halves(B, Q, H, 1024)[..., ::2]}, ValueError, r"out has strides \[.*, 2\]; expected a last stride of 1"),
    ("expanded out", {"out": halves(1, Q, H, 512).expand(B, Q, H, 512)}, ValueError, r"out has strides \[0, .*elements share memory"),
    ("out as a list", {"out": []}, TypeError, r"out is a list; expected a torch.Tensor"),
    ("bmm1 as None", {"bmm1_scale": None}, TypeError, r"bmm1_scale is a NoneType; expected a float or a float32 tensor"),
    ("bmm2 as string", {"bmm2_scale": "1"}, TypeError, r"bmm2_scale is a str; expected a float"),
    ("bmm1 as bool", {"bmm1_scale": True}, TypeError, r"bmm1_scale is a bool; expected a float"),
    ("bmm1 complex", {"bmm1_scale": 1j}, TypeError, r"bmm1_scale is a complex; expected a float"),
    ("bmm1 of nan", {"bmm1_scale": math.nan}, ValueError, r"bmm1_scale is nan; expected a number that is finite"),
    ("bmm2 of infinity", {"bmm2_scale": math.inf}, ValueError, r"bmm2_scale is inf; expected a number that is finite"),
    ("bmm1 beyond fp32", {"bmm1_scale": 1e39}, ValueError, r"bmm1_scale is 1e\+39; expected a number that is finite in float32"),
    ("bmm1 as fp64 tensor", {"bmm1_scale": torch.ones(1, dtype=torch.float64)}, TypeError, r"bmm1_scale is a tensor of dtype float64; expected"),
    ("bmm2 as bf16 tensor", {"bmm2_scale": torch.ones(1).bfloat16()}, TypeError, r"bmm2_scale is a tensor of dtype bfloat16; expected"),
    ("bmm1 with two elements", {"bmm1_scale": torch.ones(2)}, ValueError, r"bmm1_scale is a tensor of shape \[2\], 2 elements; expected"),
    ("bmm2 without elements", {"bmm2_scale": torch.ones(0)}, ValueError, r"bmm2_scale is a tensor of shape \[0\], 0 elements; expected"),
    ("bmm1 elsewhere", {"bmm1_scale": torch.ones(1, device=META)}, ValueError, r"bmm1_scale is on meta; expected cpu"),
    ("sinks of wrong length", {"sinks": torch.ones(H + 1)}, ValueError, r"sinks has shape \[4\]; expected .* \[H\] = \[3\]"),
    ("sinks of rank 2", {"sinks": torch.ones(1, H)}, ValueError, r"sinks has shape \[1, 3\]; expected"),
    ("two sinks in a list", {"sinks": [torch.ones(H)] * 2}, ValueError, r"sinks is a list of 2; expected"),
    ("no sink in a tuple", {"sinks": ()}, ValueError, r"sinks is a tuple of 0; expected"),
    ("numbers as sinks", {"sinks": [0.5]}, TypeError, r"sinks is a float; expected a torch.Tensor"),
    ("a number as sinks", {"sinks": 0.5}, TypeError, r"sinks is a float; expected a torch.Tensor"),
    ("integer sinks", {"sinks": torch.ones(H, dtype=torch.int64)}, TypeError, r"sinks has dtype int64; expected"),
    ("workspace as int", {"workspace_buffer": 1024}, TypeError, r"workspace_buffer is a int; expected a torch.Tensor"),
    ("strided workspace", {"workspace_buffer": torch.zeros(64)[::2]}, ValueError, r"workspace_buffer has strides \[2\].*contiguous"),
    ("enable_pdl as int", {"enable_pdl": 1}, TypeError, r"enable_pdl is a int; expected a bool"),
    ("return_lse as tensor", {"return_lse": torch.tensor(True)}, TypeError, r"return_lse is a Tensor; expected a bool"),
    ("lse of wrong shape", {"lse": torch.zeros(B * Q, H + 1)}, ValueError, r"lse has shape \[4, 4\]; expected \[B\*Q, H\] = \[4, 3\] or \[B, Q, H\] = \[2, 2, 3\]"),
    ("lse transposed in meaning", {"lse": torch.zeros(H, B * Q)}, ValueError, r"lse has shape \[3, 4\]; expected"),
    ("fp64 lse", {"lse": torch.zeros(B * Q, H, dtype=torch.float64)}, TypeError, r"lse has dtype float64; expected float32"),
    ("expanded lse", {"lse": torch.zeros(1, H).expand(B * Q, H)}, ValueError, r"lse has strides \[0, 0, 1\].*elements share memory"),
    ("lse as bool", {"lse": True}, TypeError, r"lse is a bool; expected a torch.Tensor"),
    ("lse base 10", {"return_lse_base": "base10"}, ValueError, r"return_lse_base is 'base10'; expected 'base2', 'basee' or None"),
    ("lse base 2 as int", {"return_lse_base": 2}, TypeError, r"return_lse_base is a int; expected 'base2', 'basee' or None"),
    ("deterministic as int", {"deterministic": 1}, TypeError, r"deterministic is a int; expected a bool"),
    ("deterministic as None", {"deterministic": None}, TypeError, r"deterministic is a NoneType; expected a bool"),
    ("lse base as list", {"return_lse_base": ["base2"]}, TypeError, r"return_lse_base is a list; expected 'base2', 'basee' or None"),
    ("backend as list", {"backend": ["reference"]}, TypeError, r"backend is a list; expected a str"),
    ("unknown backend", {"backend": "cutlass"}, ValueError, r"backend is 'cutlass'; expected 'auto' or one of the known backends: .*reference, trtllm-gen, xqa"),
    ("backend as None", {"backend": None}, TypeError, r"backend is a NoneType; expected a str"),
]  # fmt: skip

WRONG += [
    (
        f"{name} elsewhere",
        {name: good()[name].to(META)},
        ValueError,
        rf"{name} is on meta; expected cpu, the device of query",
    )
    for name in ("kv_cache", "block_tables", "seq_lens", "sinks", "workspace_buffer", "out", "lse")
]


def snapshot(value: Any) -> Any:
    """The bytes of every tensor in an argument, and of everything else itself."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" or value.layout is not torch.strided:
            return None
        return value.detach().clone().contiguous().flatten().view(torch.uint8)
    return [snapshot(part) for part in value] if isinstance(value, (list, tuple)) else None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a == b if not isinstance(a, list) else all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("changes", "kind", "text"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_argument_is_named_and_nothing_is_touched(changes, kind, text):
    arguments = good(**changes)
    before = {name: snapshot(value) for name, value in arguments.items()}
    with pytest.raises(kind, match=text) as caught:
        mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert type(caught.value) is kind
    assert all(same(before[name], snapshot(value)) for name, value in arguments.items())


@pytest.mark.parametrize(("changes", "kind", "text"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
@pytest.mark.parametrize("ask", [mla.explain, mla.warmup], ids=["explain", "warmup"])
def test_explain_and_warmup_raise_what_the_call_raises(ask, changes, kind, text):
    with pytest.raises(kind, match=text):
        ask(**good(**changes))


def test_the_unchanged_arguments_are_legal():
    arguments = good()
    out = mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert out is arguments["out"]
    assert not (arguments["lse"] == 5.0).any()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("query", lambda a: a["query"][..., :512]),
        ("kv_cache", lambda a: a["kv_cache"].view(-1)[: B * Q * H * 512].view(B, Q, H, 512)),
    ],
)
def test_an_output_that_shares_memory_with_an_input_is_refused(name, make):
    arguments = good()
    arguments["out"] = make(arguments)
    before = {key: snapshot(value) for key, value in arguments.items()}
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert all(same(before[key], snapshot(value)) for key, value in arguments.items())


def test_lse_may_not_share_memory_with_sinks_or_out():
    shared = torch.zeros(B * Q * H)
    with pytest.raises(ValueError, match="lse shares memory with sinks"):
        mla.trtllm_batch_decode_with_kv_cache_mla(**good(lse=shared.view(B * Q, H), sinks=shared[:H]))
    out = torch.zeros(B, Q, H, 512)
    with pytest.raises(ValueError, match="out shares memory with lse"):
        mla.trtllm_batch_decode_with_kv_cache_mla(**good(out=out, lse=out.view(-1)[: B * Q * H].view(B * Q, H)))


def test_outputs_interleaved_with_inputs_in_one_buffer_are_legal():
    buffer = torch.zeros(B, Q, H, 576 + 512, dtype=torch.bfloat16)
    buffer[..., :576] = good()["query"]
    arguments = good(query=buffer[..., :576], out=buffer[..., 576:])
    assert torch.equal(
        mla.trtllm_batch_decode_with_kv_cache_mla(**arguments), mla.trtllm_batch_decode_with_kv_cache_mla(**good())
    )
    assert torch.equal(buffer[..., :576], good()["query"])


def test_a_refusal_carries_every_reason_and_is_a_value_error():
    with pytest.raises(mla.BackendUnsupported, match="xqa refused: ") as caught:
        mla.trtllm_batch_decode_with_kv_cache_mla(**good(), backend="xqa")
    assert isinstance(caught.value, ValueError)
    assert set(caught.value.reasons) == {"xqa"}
    assert all(sentence for sentence in caught.value.reasons["xqa"])


def test_every_parameter_of_the_call_has_a_wrong_value_here():
    import inspect

    parameters = set(inspect.signature(mla.trtllm_batch_decode_with_kv_cache_mla).parameters)
    tried = {name for _, changes, _, _ in WRONG for name in changes}
    assert tried == parameters


def test_messages_name_the_parameter_that_is_wrong():
    for _, changes, _, text in WRONG:
        assert any(re.match(rf"\^?{name}\b", text) or name in text for name in changes), text
