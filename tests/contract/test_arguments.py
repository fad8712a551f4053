"""Buffers given and returned, the forms of the scales, and dtype pairs."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math

import pytest
import torch

import mla
from mla.testing import Case, assert_close, build

CALL = mla.trtllm_batch_decode_with_kv_cache_mla


def test_the_signature_is_the_published_one():
    parameters = inspect.signature(CALL).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "block_tables",
        "seq_lens", "max_seq_len", "sparse_mla_top_k", "out", "bmm1_scale", "bmm2_scale", "sinks", "enable_pdl", "backend",
    ]  # fmt: skip
    defaults = {name: parameters[name].default for name in positional[9:]}
    assert defaults == {
        "sparse_mla_top_k": 0, "out": None, "bmm1_scale": 1.0, "bmm2_scale": 1.0, "sinks": None, "enable_pdl": None, "backend": "auto",
    }  # fmt: skip
    keywords = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {"return_lse": False, "lse": None, "return_lse_base": None, "deterministic": False}


@pytest.mark.parametrize("q_len", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_given_out_is_filled_and_returned_itself(backend, q_len, dtype):
    call = build(Case(lengths=(9, 20), q_len=q_len, heads=3, lse="none"))
    out = torch.full((2, q_len, 3, 512), math.nan, dtype=dtype)
    result = CALL(**call.arguments | {"out": out}, backend=backend)
    assert result is out
    assert_close(out, dataclasses.replace(call.problem, out_dtype=dtype))


def test_a_rank_three_out_is_legal_for_one_token(backend):
    call = build(Case(lengths=(9, 20), heads=3, lse="none"))
    out = torch.full((2, 3, 512), math.nan).bfloat16()
    assert CALL(**call.arguments | {"out": out}, backend=backend) is out
    assert torch.equal(out[:, None], CALL(**call.arguments, backend=backend))


@pytest.mark.parametrize(("query", "cache"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"), ("float32", "float32")])  # fmt: skip
def test_a_new_out_is_bfloat16_of_rank_four_for_every_input(backend, query, cache):
    out, lse = build(Case(lengths=(5, 3), q_len=1, heads=2, query=query, cache=cache)).run(CALL, backend=backend)
    assert (out.dtype, tuple(out.shape)) == (torch.bfloat16, (2, 1, 2, 512))
    assert lse is not None
    assert (lse.dtype, tuple(lse.shape)) == (torch.float32, (2, 2))


@pytest.mark.parametrize(("batch", "q_len"), [(0, 1), (0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("top_k", [0, 4])
def test_no_rows_give_empty_results_of_the_right_shape(backend, batch, q_len, top_k):
    tables = torch.zeros(*((batch, q_len, top_k) if top_k else (batch, 3)), dtype=torch.int32)
    out, lse = CALL(
        torch.empty(batch, q_len, 16, 576).bfloat16(), torch.empty(4, 64, 576).bfloat16(), None, 128, 512, 64, tables,
        torch.ones(batch, dtype=torch.int32), 64, top_k, return_lse=True, backend=backend,
    )  # fmt: skip
    assert tuple(out.shape) == (batch, q_len, 16, 512)
    assert tuple(lse.shape) == (batch * q_len, 16)


def test_the_given_lse_is_filled_and_returned_itself(backend):
    call = build(Case(lengths=(9, 20), q_len=2, heads=3))
    expected = CALL(**call.arguments, backend=backend)[1]
    flat, rows, transposed = torch.full((4, 3), 9.0), torch.full((2, 2, 3), 9.0), torch.full((3, 4), 9.0).T
    for lse in (flat, rows, transposed):
        out, returned = CALL(**call.arguments | {"lse": lse}, backend=backend)
        assert returned is lse
        assert torch.equal(lse.reshape(4, 3), expected)
        assert out.shape == (2, 2, 3, 512)


def test_a_given_lse_is_filled_even_when_it_is_not_returned(backend):
    call = build(Case(lengths=(9,), heads=3))
    lse = torch.full((1, 3), 9.0)
    out = CALL(**call.arguments | {"lse": lse, "return_lse": False}, backend=backend)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(lse, CALL(**call.arguments, backend=backend)[1])


def test_lse_rows_are_tokens_and_columns_are_heads_even_when_both_number_the_same(backend):
    call = build(Case(lengths=(9,) * 4, q_len=4, heads=16))
    lse = CALL(**call.arguments, backend=backend)[1]
    for row, head in ((0, 15), (15, 0), (6, 9)):
        one = {
            "query": call.arguments["query"][row // 4 : row // 4 + 1, :, head : head + 1],
            "block_tables": call.arguments["block_tables"][row // 4 : row // 4 + 1],
            "seq_lens": call.arguments["seq_lens"][row // 4 : row // 4 + 1],
        }
        alone = CALL(**call.arguments | one, backend=backend)[1]
        assert lse[row, head].item() == pytest.approx(alone[row % 4, 0].item(), rel=1e-6)


def test_bmm2_does_not_reach_the_lse(backend):
    base = Case(lengths=(9,), heads=3)
    assert torch.equal(
        build(base).run(CALL, backend=backend)[1],
        build(dataclasses.replace(base, bmm2=3.0)).run(CALL, backend=backend)[1],
    )


@pytest.mark.parametrize("value", [0.1352, 1 / 3, 1.0])
def test_every_form_of_a_scale_means_the_same_bits(backend, device, value):
    call = build(Case(lengths=(9, 40), q_len=2, heads=3, lse_base="basee"), device)
    forms = [value, torch.tensor(value), torch.tensor([value]), torch.full((1, 1, 1, 1), value)]
    results = []
    for form in forms:
        moved = form.to(device) if isinstance(form, torch.Tensor) else form
        results.append(CALL(**call.arguments | {"bmm1_scale": moved, "bmm2_scale": moved}, backend=backend))
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def test_a_scale_tensor_is_read_when_the_call_runs(backend):
    call = build(Case(lengths=(9,), heads=3))
    scale = torch.tensor([0.1])
    first = CALL(**call.arguments | {"bmm1_scale": scale}, backend=backend)[0]
    scale.fill_(0.5)
    second = CALL(**call.arguments | {"bmm1_scale": scale}, backend=backend)[0]
    assert not torch.equal(first, second)
    assert torch.equal(second, CALL(**call.arguments | {"bmm1_scale": 0.5}, backend=backend)[0])


@pytest.mark.parametrize("pair", [("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn"), ("float16", "float8_e4m3fn")], ids=str)  # fmt: skip
@pytest.mark.parametrize(("bmm1", "bmm2"), list(itertools.product((0.05, 0.1352, 1.0), (0.5, 1.0, 3.0))))
def test_no_factor_is_hidden_for_any_dtype(backend, pair, bmm1, bmm2):
    call = build(Case(lengths=(20, 3), heads=3, query=pair[0], cache=pair[1], bmm1=bmm1, bmm2=bmm2))
    assert_close(call.run(CALL, backend=backend), call.problem)


def test_out_is_linear_in_bmm2(backend):
    base = Case(lengths=(20,), heads=3, out="float32")
    one, three = (
        build(base).run(CALL, backend=backend)[0],
        build(dataclasses.replace(base, bmm2=3.0)).run(CALL, backend=backend)[0],
    )
    torch.testing.assert_close(three, 3.0 * one, rtol=2.0**-22, atol=0.0)


def test_every_e4m3_code_is_read_as_torch_reads_it(backend):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for code in codes[~codes.float().isnan()]:
        cache = code.expand(1, 1, 576).contiguous()
        out = CALL(
            torch.zeros(1, 1, 1, 576).to(torch.float8_e4m3fn), cache, None, 128, 512, 64, torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32), 1, out=torch.empty(1, 1, 1, 512), backend=backend,
        )  # fmt: skip
        assert torch.equal(out, torch.full_like(out, code.float().item()))


@pytest.mark.parametrize(
    ("heads", "q_len", "batch"), list(itertools.product((8, 12, 20, 32, 96, 128), (1, 2, 3), (1, 2)))
)
def test_e4m3_is_right_for_every_mix_of_heads_tokens_and_requests(backend, heads, q_len, batch):
    call = build(Case(lengths=(11,) * batch, q_len=q_len, heads=heads, query="float8_e4m3fn", cache="float8_e4m3fn"))
    assert_close(call.run(CALL, backend=backend), call.problem)


def test_calls_with_other_shapes_in_between_leave_no_trace(backend):
    one, four = Case(lengths=(9,) * 4, heads=3), Case(lengths=(9,), q_len=4, heads=3)
    first = [build(case).run(CALL, backend=backend)[0].clone() for case in (one, four)]
    again = [build(case).run(CALL, backend=backend)[0] for case in (one, four, one, four)]
    assert all(torch.equal(first[i % 2], out) for i, out in enumerate(again))


@pytest.mark.parametrize("pdl", [None, True, False])
def test_enable_pdl_changes_no_bit(backend, pdl):
    call = build(Case(lengths=(9,), heads=3))
    out = CALL(**call.arguments | {"enable_pdl": pdl}, backend=backend)[0]
    assert torch.equal(out, call.run(CALL, backend=backend)[0])


def test_the_call_is_no_part_of_an_autograd_graph(backend):
    call = build(Case(lengths=(9,), heads=3, sinks="normal"))
    tracked = {name: call.arguments[name].clone().requires_grad_() for name in ("query", "kv_cache", "sinks")}
    out, lse = CALL(**call.arguments | tracked, backend=backend)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert torch.equal(out, call.run(CALL, backend=backend)[0])


def test_sinks_of_other_floats_are_cast(backend):
    call = build(Case(lengths=(9,), heads=3, sinks="normal"))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        cast = call.arguments["sinks"].to(dtype)
        out = CALL(**call.arguments | {"sinks": cast}, backend=backend)[0]
        assert torch.equal(out, CALL(**call.arguments | {"sinks": (cast.float(),)}, backend=backend)[0])
