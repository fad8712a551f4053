"""What L2 is told of the cache rows that are copied: their lines are replaced first where the launch reads few of them."""

from __future__ import annotations

import pytest
import torch

from mla.backends.xqa.emulator.backend import EmulatedBackend
from mla.backends.xqa.emulator.launch import run_block
from mla.backends.xqa.emulator.trace import Trace
from mla.backends.xqa.isa import EVICT_FIRST, EVICT_NORMAL
from mla.backends.xqa.kernel.memory import SHORT_STREAM
from mla.problem import Problem

TILE_BYTES = 32 * 576 * 2  # of 32 tokens in 16 bits, and of 64 in 8 bits
MOST = SHORT_STREAM // TILE_BYTES  # tiles by EVICT_FIRST


def policies(lengths, *, dtype=torch.bfloat16, q_len=1, top_k=0):
    """Of the copies that the first block starts. All tokens are the same page's, so that they need no memory."""
    batch, page_size = len(lengths), 64
    columns = -(-max(lengths) // page_size)
    table = (batch, q_len, top_k) if top_k else (batch, columns)
    p = Problem.from_call(
        query=torch.zeros(batch, q_len, 4, 576, dtype=dtype),
        kv_cache=torch.zeros(1, page_size, 576, dtype=dtype),
        workspace_buffer=None,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=torch.zeros((), dtype=torch.int32).expand(table).contiguous(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        max_seq_len=max(lengths),
        sparse_mla_top_k=top_k,
        bmm1_scale=1.0,
    )
    out = torch.empty(batch, q_len, 4, 512, dtype=torch.bfloat16)
    emulation = EmulatedBackend(teams=1000, watch=False).prepare(p, out)
    trace = Trace()
    run_block(emulation.decode, emulation.memory, 0, watch=False, trace=trace)
    return {int(copy.operands["policy"]) for copy in trace.of("cp_async16", "load_tile")}


FORMS = {
    "one request": lambda tiles: policies([32 * tiles]),
    "its last tile is not full": lambda tiles: policies([32 * tiles - 31]),
    "more requests than threads": lambda tiles: policies([32] * 300 + [32 * (tiles - 300)]),
    "two query tokens read the same keys": lambda tiles: policies([32 * tiles], q_len=2),
    "e4m3": lambda tiles: policies([64 * tiles], dtype=torch.float8_e4m3fn),
}


@pytest.mark.parametrize("form", FORMS)
def test_few_bytes_are_replaced_first_and_many_are_not(form):
    assert FORMS[form](MOST) == {EVICT_FIRST}
    assert FORMS[form](MOST + 1) == {EVICT_NORMAL}


def test_in_sparse_mode_visible_slots_are_counted_not_lengths():
    per_token = MOST // 4
    assert policies([1 << 20] * 2, q_len=2, top_k=32 * per_token) == {EVICT_FIRST}
    assert policies([1 << 20] * 2, q_len=2, top_k=32 * (per_token + 1)) == {EVICT_NORMAL}
    assert policies([30_000] * 2, q_len=2, top_k=32 * (per_token + 1)) == {EVICT_FIRST}


def test_short_streams_are_up_to_192_mib():
    assert SHORT_STREAM == 192 * 1024 * 1024
    assert MOST == 5461
