"""The whole contract, kernel by kernel: the oracle's suite goes through the emulator."""

from __future__ import annotations

import pytest

from mla.backends.xqa.emulator.backend import CONSUMER, EmulatedBackend
from mla.backends.xqa.plan import Machine
from mla.testing import PROPERTIES, Case, Profile, judge_property
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


def test_many_query_tokens_share_a_tile(emulate):
    """Of 32 rows in a tile each sees another number of keys: all but the first are added one by one."""
    emulate(Case(lengths=(50, 20), q_len=32, heads=1, page_size=8, out="float32"))


def test_addresses_pass_32_bits(emulate):
    """The pool is 4.3 GB of address space, and nearly none of it is memory."""
    emulate(Case(lengths=(70, 3), heads=4, far_pages=58_300, tail="zero"))
