"""Peers are found without being imported, say so when they are absent, and are called with what they take.

The kernels themselves need a GPU. Here stand-ins of the same names and parameters compute the formula from the very
arguments that they get, so an adaptor that lays a table, a list or a length out wrongly is found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla.bench import gate
from mla.bench.cases import BenchCase
from mla.bench.contenders import Unable
from mla.bench.inputs import make
from mla.bench.peers import PEERS, choose

CPU = torch.device("cpu")
DENSE = BenchCase("dense", (100, 3, 65), heads=4)
TOKENS = BenchCase("tokens", (70, 5), heads=2, q_len=3)
FP16 = BenchCase("fp16", (70, 5), heads=2, page_size=16, dtype="fp16")
FP8 = BenchCase("fp8", (70, 5), heads=2, dtype="fp8")
SPARSE = BenchCase("sparse", (130, 150), heads=64, q_len=2, top_k=128)


def attend(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """[H, D], [n, D] -> [H, 512]."""
    keys = keys.float()
    return torch.softmax(scale * (query.float() @ keys.T), -1) @ keys[:, :512]


def paged(pool: torch.Tensor, pages: torch.Tensor, n: int) -> torch.Tensor:
    """[N, P, D], page ids -> the first n keys."""
    return pool[pages.long()].flatten(0, 1)[:n]


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, *,
                           softmax_scale, causal, use_legacy, is_fp8_kvcache=False, descale_q=None, descale_k=None):  # fmt: skip
    assert use_legacy
    assert is_fp8_kvcache == (k_cache.dtype is torch.float8_e4m3fn) == (tile_scheduler_metadata.num_splits is not None)
    (batch, q_len), out = q.shape[:2], torch.empty(*q.shape[:3], head_dim_v)
    for b in range(batch):
        for t in range(q_len):
            n = int(cache_seqlens[b]) - (q_len - 1 - t if causal else 0)
            out[b, t] = attend(q[b, t], paged(k_cache[:, :, 0], block_table[b], n), softmax_scale)
    return out, None


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, *, use_legacy, return_log2_lse):
    out = torch.stack([attend(q[i], kv[indices[i, 0].long(), 0], sm_scale) for i in range(len(q))])
    return out, None, None


class Wrapper:
    def __init__(self, scratch: torch.Tensor, backend: str) -> None:
        assert (backend, scratch.dtype) == ("fa3", torch.uint8)

    def plan(self, *plan: Any) -> None:
        self.kept = plan

    def run(self, q_nope, q_pe, ckv, kpe):
        rows, starts, pages, lens, heads, rank, rope, page_size, causal, scale, *_ = self.kept
        assert (rank, rope, page_size, heads) == (512, 64, ckv.shape[1], q_nope.shape[1])
        query, pool = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1)
        out = torch.empty_like(q_nope)
        for b in range(len(lens)):
            own = pages[starts[b] : starts[b + 1]]
            for row in range(int(rows[b]), int(rows[b + 1])):
                n = int(lens[b]) - (int(rows[b + 1]) - 1 - row if causal else 0)
                out[row] = attend(query[row], paged(pool, own, n), scale).to(out.dtype)
        return out


def vllm_decode(q, k, v, o, lse, tables, lengths, sums, splits, scale, page_size, *, k_scale, v_scale, is_mla):
    assert is_mla
    assert k.shape[1:3] == (page_size, 1)
    assert sums.shape == (*q.shape[:2], splits, 513)
    for i in range(len(q)):
        o[i] = attend(q[i], paged(k[:, :, 0], tables[i], int(lengths[i])), scale).to(o.dtype)


def sglang_decode(q, k, v, o, starts, slots, sums, lse, counts, splits, scale, k_scale, v_scale):
    assert sums.shape[2] == lse.shape[2] == splits
    assert (counts == splits).all()
    for i in range(len(q)):
        o[i] = attend(q[i], k[slots[starts[i] : starts[i + 1]], 0], scale).to(o.dtype)


STAND_INS = {
    "flashmla": SimpleNamespace(
        FlashMLASchedMeta=lambda: SimpleNamespace(tile_scheduler_metadata=None, num_splits=None),
        get_mla_decoding_metadata=lambda lens, rows, heads, **named: (torch.zeros(1), torch.zeros(1)),
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        flash_mla_sparse_fwd=flash_mla_sparse_fwd,
    ),
    "flashinfer": SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper),
    "vllm": SimpleNamespace(decode_attention_fwd=vllm_decode),
    "sglang": SimpleNamespace(decode_attention_fwd=sglang_decode),
}
TAKEN = {
    "flashmla": (DENSE, TOKENS, FP8, SPARSE),
    "flashinfer": (DENSE, TOKENS, FP16),
    "vllm": (DENSE, TOKENS, FP16),
    "sglang": (DENSE, FP16),
}
NOT_TAKEN = [
    ("flashmla", FP16, "the page size is 16; FlashMLA takes 64"),
    ("flashmla", BenchCase("few", (200,), heads=16, top_k=128), "H is 16, K is 128; FlashMLA's sparse kernel takes"),
    ("flashmla", BenchCase("short", (128,), heads=64, q_len=2, top_k=128), "a list is longer than what its token sees"),
    ("flashmla", BenchCase("x", (200,), heads=64, top_k=128, dtype="fp8"), "the pool is in fp8"),
    ("flashinfer", SPARSE, "the case is sparse; FlashInfer's fa3 kernel is dense"),
    ("flashinfer", FP8, "the pool is in fp8; FlashInfer's fa3 kernel takes bf16 and fp16"),
    ("vllm", FP8, "the pool is in fp8; vLLM's Triton kernel takes bf16 and fp16"),
    ("sglang", TOKENS, "Q is 3; SGLang's Triton decode kernel takes 1"),
]


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in TAKEN.items() for case in cases], ids=lambda x: getattr(x, "name", x)
)  # fmt: skip
def test_an_adaptor_tells_its_kernel_the_whole_truth(name: str, case: BenchCase) -> None:
    inputs = make(case, CPU)
    right = gate.answer(inputs)
    ways = PEERS[name].prepare(STAND_INS[name], inputs)  # type: ignore[arg-type]
    assert len({way.label for way in ways}) == len(ways) == (5 if name in ("vllm", "sglang") else 1)
    for way in ways:
        assert gate.judge(way.run(), right, must_hold=False).verdict == "right"


@pytest.mark.parametrize(("name", "case", "why"), NOT_TAKEN, ids=lambda x: getattr(x, "name", x))
def test_what_a_kernel_cannot_do_is_told(name: str, case: BenchCase, why: str) -> None:
    with pytest.raises(Unable, match=why.replace("(", r"\(")):
        PEERS[name].prepare(STAND_INS[name], make(case, CPU))  # type: ignore[arg-type]


def test_a_peer_is_found_by_its_file_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in PEERS.values():
        file = tmp_path.joinpath(*peer.modules[0].split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    tops = {peer.modules[0].split(".")[0] for peer in PEERS.values()}
    if tops & set(sys.modules):
        pytest.skip("a peer is in use in this process")
    assert {peer.module_name() for peer in PEERS.values()} == {peer.modules[0] for peer in PEERS.values()}
    assert not tops & set(sys.modules)
    with pytest.raises(Unable, match="FlashMLA runs on an NVIDIA GPU alone"):
        PEERS["flashmla"].contender().prepare(make(DENSE, CPU))


def test_single_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sgl_decode.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert PEERS["sglang"].module_name() == "sgl_decode"


def test_an_absent_peer_takes_part_only_to_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    peer = PEERS["flashinfer"]
    assert peer.module_name() is None
    assert choose(None) == []
    with pytest.raises(Unable, match=r"not installed: no module flashinfer\.mla on the path"):
        peer.contender().prepare(make(DENSE, CPU))


def test_peers_are_chosen_by_name() -> None:
    assert [peer.name for peer in choose(["all"])] == list(PEERS)
    assert [peer.name for peer in choose(["vllm", "flashmla"])] == ["flashmla", "vllm"]
    assert choose([]) == []
    with pytest.raises(ValueError, match="no peer is named 'fa4'; the peers are flashmla, flashinfer, sglang, vllm"):
        choose(["fa4"])
