"""The algebra of (out, lse): parts over disjoint keys merge to the whole, and (0, -inf) is the identity."""

from __future__ import annotations

import math

import pytest
import torch

import mla
from mla.testing import Case, build

CALL = mla.trtllm_batch_decode_with_kv_cache_mla
BASES = ["base2", "basee"]


def states(*rows: tuple[float, float], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [S, 1, 4] and lses [S, 1] of scalar states (value, lse)."""
    outs = torch.tensor([value for value, _ in rows])[:, None, None].expand(-1, 1, 4).to(dtype)
    return outs, torch.tensor([lse for _, lse in rows])[:, None]


def test_two_keys_of_zero_and_eight_of_ten_give_eight():
    outs, lses = states((0.0, math.log2(2)), (10.0, math.log2(8)))
    out, lse = mla.merge_state(outs[0], lses[0], outs[1], lses[1])
    assert out.unique().tolist() == [8.0]
    assert lse.item() == pytest.approx(math.log2(10))
    natural, _ = mla.merge_state(outs[0], lses[0], outs[1], lses[1], lse_base="basee")  # the wrong base for these
    assert natural[0, 0].item() == pytest.approx(10 / (1 + math.exp(1 - 3)), rel=1e-6)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_the_identity_changes_no_bit(base, dtype, garbage):
    torch.manual_seed(0)
    out, lse = torch.randn(3, 2, 5, 512).to(dtype), torch.randn(6, 5) * 20
    nothing, none = torch.full_like(out, garbage), torch.full_like(lse, -math.inf)
    for merged in (
        mla.merge_state(out, lse, nothing, none, lse_base=base),
        mla.merge_state(nothing, none, out, lse, lse_base=base),
    ):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("garbage", [0.0, 7.0, math.nan, math.inf])
@pytest.mark.parametrize("count", [0, 1, 2, 15])
def test_merging_only_identities_gives_the_identity(base, garbage, count):
    out, lse = mla.merge_states(
        torch.full((3, count, 2, 8), garbage), torch.full((3, count, 2), -math.inf), lse_base=base
    )
    assert torch.equal(out, torch.zeros(3, 2, 8))
    assert torch.equal(lse, torch.full((3, 2), -math.inf))


def test_one_live_state_among_fifteen_empty_ones_comes_out_bit_for_bit():
    outs, lses = torch.full((4, 16, 2, 8), math.nan), torch.full((4, 16, 2), -math.inf)
    outs[:, 11], lses[:, 11] = torch.randn(4, 2, 8), torch.randn(4, 2)
    out, lse = mla.merge_states(outs, lses)
    assert torch.equal(out, outs[:, 11])
    assert torch.equal(lse, lses[:, 11])


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("size", [-1e4, 1e4, 3e38])
def test_large_logarithms_stay_finite(base, size):
    outs, lses = states((1.0, size), (3.0, size))
    out, lse = mla.merge_states(outs, lses, lse_base=base)
    assert out.unique().tolist() == [2.0]
    assert lse.isfinite().all()


def test_a_nan_in_a_live_state_is_not_hidden():
    outs, lses = states((math.nan, 0.0), (3.0, 1.0))
    assert mla.merge_states(outs, lses)[0].isnan().all()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_of_the_keys_merge_to_the_whole(base, parts):
    call = build(
        Case(
            lengths=(61, 5, 0), heads=6, page_size=1, lse_base=base, out="float32", tail="zero", table_slack=parts * 61
        )
    )
    whole, whole_lse = call.run(CALL)
    whole, whole_lse = whole.clone(), whole_lse.clone()
    table, lengths = call.arguments["block_tables"], call.arguments["seq_lens"]
    outs, lses = [], []
    for part in range(parts):
        columns = table[:, part::parts].contiguous()  # with one-token pages, every parts-th key
        counts = (lengths - part + parts - 1).clamp(min=0) // parts
        changes = {"block_tables": columns, "seq_lens": counts, "out": None}
        out, lse = CALL(**call.arguments | changes | {"out": torch.empty_like(whole)})
        outs.append(out[:, 0])
        lses.append(lse)
    out, lse = mla.merge_states(torch.stack(outs, 1), torch.stack(lses, 1), lse_base=base)
    torch.testing.assert_close(out, whole[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
    folded, folded_lse = outs[0], lses[0]
    for other, other_lse in zip(outs[1:], lses[1:], strict=True):
        folded, folded_lse = mla.merge_state(folded, folded_lse, other, other_lse, lse_base=base)
    torch.testing.assert_close(folded, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(folded_lse, lse, rtol=1e-6, atol=1e-6)


def test_a_sink_is_a_state_without_a_value():
    call = build(Case(lengths=(30, 0), heads=5, q_len=2, lse_base="basee", out="float32", sinks="normal"))
    sunk, sunk_lse = call.run(CALL)
    plain, plain_lse = CALL(**call.arguments | {"sinks": None, "out": None, "lse": None})
    sinks = call.arguments["sinks"].expand(4, 5)
    out, lse = mla.merge_state(plain.float(), plain_lse, torch.zeros_like(sunk), sinks.contiguous(), lse_base="basee")
    torch.testing.assert_close(out, sunk, rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(lse, sunk_lse, rtol=1e-6, atol=1e-6)


def test_flat_and_full_lse_shapes_are_the_same_rows():
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(6, 4)
    flat = mla.merge_state(out, lse, out.flip(0), lse.flip(0))
    full = mla.merge_state(out, lse.view(2, 3, 4), out.flip(0), lse.flip(0).view(2, 3, 4))
    assert torch.equal(flat[0], full[0])
    assert torch.equal(flat[1], full[1].view(6, 4))


GOOD = {
    "out_a": torch.zeros(2, 4, 8),
    "lse_a": torch.zeros(2, 4),
    "out_b": torch.zeros(2, 4, 8),
    "lse_b": torch.zeros(2, 4),
}


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"out_b": torch.zeros(2, 4, 9)}, ValueError, r"out_b has shape \[2, 4, 9\]; expected \[2, 4, 8\], that of out_a"),
        ({"lse_b": torch.zeros(2, 5)}, ValueError, r"lse_b has shape \[2, 5\]; expected \[2, 4\], that of lse_a"),
        ({"lse_a": torch.zeros(3, 4), "lse_b": torch.zeros(3, 4)}, ValueError, r"lse_a has shape \[3, 4\]; expected \[2, 4\]"),
        ({"out_b": torch.zeros(2, 4, 8).half()}, TypeError, r"out_b has dtype float16; expected float32, that of out_a"),
        ({"lse_a": torch.zeros(2, 4).half(), "lse_b": torch.zeros(2, 4).half()}, TypeError, r"lse_a has dtype float16; expected float32 or float64"),
        ({"out_a": torch.zeros(2, 4, 8).int(), "out_b": torch.zeros(2, 4, 8).int()}, TypeError, r"out_a has dtype int32; expected a float"),
        ({"out_a": torch.zeros(8), "out_b": torch.zeros(8)}, ValueError, r"out_a has shape \[8\], 1 dimensions; expected \[..., H, R\]"),
        ({"lse_b": torch.zeros(2, 4, device="meta")}, ValueError, r"lse_b is on meta; expected cpu"),
        ({"out_a": 1.0}, TypeError, r"out_a is a float; expected a torch.Tensor"),
        ({"lse_base": "base10"}, ValueError, r"^lse_base is 'base10'"),
    ],
)  # fmt: skip
def test_wrong_states_are_named(changes, kind, text):
    with pytest.raises(kind, match=text):
        mla.merge_state(**GOOD | changes)


def test_wrong_stacks_of_states_are_named():
    with pytest.raises(ValueError, match=r"outs has shape \[4, 8\], 2 dimensions; expected \[..., S, H, R\]"):
        mla.merge_states(torch.zeros(4, 8), torch.zeros(4))
    with pytest.raises(ValueError, match=r"lses has shape \[2, 4\]; expected \[2, 3, 4\]"):
        mla.merge_states(torch.zeros(2, 3, 4, 8), torch.zeros(2, 4))
