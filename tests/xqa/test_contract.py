"""The whole contract, kernel by kernel: the oracle's suite goes through the emulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mla.backends.xqa import plan
from mla.backends.xqa.emulator.backend import CONSUMER, EmulatedBackend
from mla.backends.xqa.plan import Machine
from mla.reference import decode
from mla.testing import PROPERTIES, Case, Profile, assert_close, build, judge_property
from mla.testing.suite import judge_kernel

PROFILE = Profile.of(EmulatedBackend.capabilities)
HOPPER = Machine((9, 0), 3)
E4M3 = {"query": "float8_e4m3fn", "cache": "float8_e4m3fn"}
ON_E4M3 = {"query": "bfloat16", "cache": "float8_e4m3fn"}


@pytest.mark.parametrize("prop", [prop for prop in PROPERTIES if not prop.gpu_only], ids=lambda prop: prop.name)
def test_every_property_holds(emulated_call, prop):
    finding = judge_property(prop, emulated_call(), PROFILE, "cpu", shrinking=False)
    assert finding.failure is None, finding.failure
    assert finding.verdict == "holds"


@pytest.mark.no_cover  # the properties run the same lines
@pytest.mark.parametrize("machine", [CONSUMER, HOPPER], ids=["sm_120", "sm_90"])
def test_random_problems_are_right(emulated_call, machine):
    (finding,) = judge_kernel(
        emulated_call(machine=machine), PROFILE, "cpu", examples=40, shrinking=False, only=("random problems",)
    )
    assert finding.failure is None, finding.failure


DEALT = [
    Case(lengths=(150, 0, 77, 1, 33), heads=4, page_size=16),
    Case(lengths=(0, 0, 0, 0, 0, 0, 64), heads=4, q_len=2, page_size=16),
    Case(lengths=(300,), heads=4, sinks="normal", lse_base="basee", out="float32"),
    Case(lengths=(64, 64, 64), heads=24, q_len=2, page_size=32),
    Case(lengths=(90, 20), q_len=3, heads=4, top_k=70, slots="holes"),
    Case(lengths=(200, 5), heads=20, **E4M3),
]


@pytest.mark.parametrize("case", DEALT, ids=repr)
@pytest.mark.parametrize("teams", [1, 2, 3, 5, 13])
def test_however_the_work_is_dealt_the_answer_is_right(emulate, case, teams):
    emulate(case, teams=teams)


@pytest.mark.parametrize("teams", [1, 3])
@pytest.mark.parametrize(
    "case",
    [
        *DEALT,
        Case(lengths=(0, 130, 7), heads=70, page_size=7, out="float32"),
        Case(lengths=(37, 4, 0), q_len=10, heads=4, page_size=16),
        Case(lengths=(90, 20), q_len=2, heads=40, top_k=70, slots="holes"),
        Case(lengths=(200, 5), heads=50, **E4M3),
        Case(lengths=(130, 5), heads=50, **ON_E4M3),
    ],
    ids=repr,
)
def test_values_that_are_added_later_are_right(emulate, case, teams):
    emulate(case, teams=teams, machine=HOPPER)


WITHOUT_WEIGHT = Case(lengths=(150, 40, 0, 33), heads=4, page_size=16, out="float32", lse="returned")


@pytest.mark.parametrize("machine", [CONSUMER, HOPPER], ids=["sm_120", "sm_90"])
@pytest.mark.parametrize("sinks", ["none", "normal"])
@pytest.mark.parametrize(
    "more", [{}, {"lengths": (90, 40), "top_k": 40, "slots": "holes"}, {"q_len": 3, "heads": 20}], ids=repr
)
def test_keys_whose_scores_are_all_minus_infinity_are_no_empty_row(emulated_call, machine, sinks, more):
    """0 / 0, unless a sink has weight; the identity of merging is for rows without a key."""
    call = build(replace(WITHOUT_WEIGHT, sinks=sinks, **more))
    call.arguments["query"][..., -1] = 1
    call.arguments["kv_cache"][..., -1] = -math.inf
    exact_out, exact_lse = decode(call.problem, torch.float64)
    for teams in (None, 1, 3):
        out, lse = call.run(emulated_call(machine=machine, teams=teams))
        assert torch.equal(out.isnan().view(-1), exact_out.isnan().view(-1))
        assert torch.equal(lse.isinf().view(-1), exact_lse.isinf().view(-1))
        assert not lse.isnan().any()
        assert (out.nan_to_num() == 0).all()
    assert bool(exact_out.isnan().any()) is (sinks == "none")


@pytest.mark.parametrize("at_least", [2, 4, 100])
def test_fewer_teams_take_part_when_there_is_little_work(emulate, at_least):
    emulate(Case(lengths=(150, 40), heads=4), teams=8, at_least=at_least)


def test_more_requests_than_threads(emulate):
    """The lengths are summed in rounds of as many as a block has threads."""
    emulate(Case(lengths=(1, 0, 3) * 200, heads=1, page_size=4), teams=3)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(150, 33), heads=4, q_len=2, page_size=16),
        Case(lengths=(150, 33), heads=40, page_size=16),
        Case(lengths=(150, 33), heads=4, **E4M3),
        Case(lengths=(150, 33), heads=40, **E4M3),
        Case(lengths=(150, 33), heads=40, **ON_E4M3),
    ],
    ids=repr,
)
def test_the_configuration_of_every_kind_of_chip_is_right(emulate, case, capability):
    """They differ in stages, and in how e4m3 meets e4m3."""
    emulate(case, machine=Machine(capability, 2))


@pytest.fixture
def small_pieces(monkeypatch):
    """Deterministic mode cuts requests into pieces of 64 tokens."""
    monkeypatch.setattr(plan, "PIECE_KEYS", 64)


LONE = Case(lengths=(300,), heads=4, page_size=16, out="float32")
TOGETHER = [
    replace(LONE, lengths=(300, 0, 77, 64)),
    replace(LONE, lengths=(300, 65, 129)),
    replace(LONE, lengths=(300, 40), q_len=2, heads=12, sinks="normal", lse_base="basee"),
    replace(LONE, lengths=(300, 90), top_k=200, slots="holes", q_len=2),
    replace(LONE, lengths=(200, 90), heads=20, **E4M3),
]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("case", TOGETHER, ids=repr)
def test_in_deterministic_mode_no_bit_depends_on_how_the_work_is_dealt(emulated_call, case):
    call = build(case)
    arguments = call.arguments | {"deterministic": True}
    results = [
        emulated_call(teams=teams, at_least=least)(**arguments) for teams, least in ((1, 1), (2, 1), (7, 1), (9, 3))
    ]
    assert_close(results[0], call.problem)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.usefixtures("small_pieces")
def test_in_deterministic_mode_no_bit_depends_on_the_rest_of_the_batch(emulated_call):
    call = build(replace(LONE, lengths=(300, 0, 77, 64)))
    whole = emulated_call()(**call.arguments | {"deterministic": True})
    for b in range(4):
        parts = {name: call.arguments[name][b : b + 1] for name in ("query", "block_tables", "seq_lens", "out")}
        alone = emulated_call()(**call.arguments | parts | {"deterministic": True, "max_seq_len": 4000})
        assert torch.equal(alone[0], whole[0][b : b + 1])
        assert torch.equal(alone[1], whole[1][b : b + 1])


def test_many_query_tokens_share_a_tile(emulate):
    """Of 32 rows in a tile each sees another number of keys: all but the first are added one by one."""
    emulate(Case(lengths=(50, 20), q_len=32, heads=1, page_size=8, out="float32"))


def test_addresses_pass_32_bits(emulate):
    """The pool is 4.3 GB of address space, and nearly none of it is memory."""
    emulate(Case(lengths=(70, 3), heads=4, far_pages=58_300, tail="zero"))
