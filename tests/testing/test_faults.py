"""The planted faults are faults: each is refused on its own cases, on which the honest kernel passes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from mla.testing import Case, Kernel
from mla.testing.faults import FAMILIES, FAULTS, Fault, judged_wrong
from mla.testing.faults.addressing import SignedWrap, Wrapping
from mla.testing.faults.fault import Judge, planted
from mla.testing.faults.raw import Careless
from mla.testing.judges import keeping, right_answer
from mla.testing.suite import outcome

EVERY_FAULT = [pytest.param(fault, id=name) for name, fault in FAULTS.items()]
ODD_CASES = (
    Case(lengths=(), heads=3),
    Case(lengths=(0, 0), q_len=2, heads=2, page_size=4, spare_pages=0, table_slack=0, sinks="normal"),
    Case(lengths=(2, 0, 9), q_len=4, heads=3, page_size=1, table_slack=0, tail="int_max", unread="max", lse="rows"),
    Case(lengths=(1, 20), heads=2, page_size=3, top_k=5, slots="front", tail="zero", out="float16", out_rank=3),
    Case(lengths=(0, 3), q_len=2, heads=1, top_k=4, slots="past", tables="int64", table_layout="spread", lse="none"),
    Case(lengths=(9, 33), heads=2, page_size=16, query="float8_e4m3fn", cache="float8_e4m3fn", cache_layout="layers"),
    Case(lengths=(1,), heads=17, page_size=1, spare_pages=0, lens="int64", workspace="noise", max_slack=1 << 30),
)
"""Legal calls at the edges of the contract."""


@pytest.fixture(scope="module", autouse=True)
def answers() -> Iterator[None]:
    """What is right on a case is worked out once for all faults."""
    with keeping({}):
        yield


def test_there_are_enough_and_each_is_described() -> None:
    assert len(FAULTS) >= 45
    for name, fault in FAULTS.items():
        assert name == fault.name
        assert fault.sentence.endswith(".")
        assert len(set(fault.shown_by)) >= 2
    assert len({fault.sentence for fault in FAULTS.values()}) == len(FAULTS)


def test_a_family_is_a_module() -> None:
    assert {fault.family for fault in FAULTS.values()} == {module.__name__.split(".")[-1] for module in FAMILIES}
    for fault in FAULTS.values():
        assert type(fault.make()).__module__.endswith(f".{fault.family}")


def test_the_honest_kernel_is_no_fault() -> None:
    kinds = [type(fault.make()) for fault in FAULTS.values()]
    assert not {Kernel, Careless, Wrapping} & set(kinds)
    assert len(set(kinds)) == len(kinds)


@cache
def honest_outcome(judge: Judge, case: Case) -> tuple[str, str] | None:
    return outcome(judge, Kernel(), case, "cpu")


@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_a_fault_is_refused_where_the_honest_kernel_passes(fault: Fault) -> None:
    for case in fault.shown_by:
        assert fault.concerns(case), f"{case} lacks one of {fault.needs}"
        assert honest_outcome(fault.judge, case) is None
        assert judged_wrong(fault, case), f"not refused on {case}"
        kind, text = outcome(fault.judge, fault.make(), case, "cpu") or ("", "")
        assert kind != "raised", text


@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_a_fault_raises_nowhere_and_is_right_where_it_does_not_matter(fault: Fault) -> None:
    for case in ODD_CASES:
        kind, text = outcome(right_answer, fault.make(), case, "cpu") or ("", "")
        assert kind != "raised", f"{case}: {text}"
        assert fault.concerns(case) or not kind, f"{case} is refused without {fault.needs}: {text}"


@pytest.mark.parametrize("case", ODD_CASES, ids=repr)
def test_the_careless_kernel_is_honest_until_a_step_is_wrong(case: Case) -> None:
    assert honest_outcome(right_answer, case) is None
    assert outcome(right_answer, Careless(), case, "cpu") is None


def test_moving_the_edge_is_the_only_thing_that_the_wrapping_faults_do_to_small_pools() -> None:
    case = FAULTS["signed-addresses-wrap"].shown_by[0]
    assert outcome(right_answer, SignedWrap(wrap=2**17), case, "cpu") is not None
    assert outcome(right_answer, SignedWrap(), case, "cpu") is None


def test_a_fault_that_remembers_begins_afresh_each_time() -> None:
    fault = FAULTS["result-of-the-first-call-kept"]
    assert all(outcome(right_answer, fault.make(), case, "cpu") is None for case in fault.shown_by)
    assert all(judged_wrong(fault, case) for case in fault.shown_by)


def test_a_name_is_planted_once_and_a_need_is_known() -> None:
    taken = next(iter(FAULTS))
    with pytest.raises(ValueError, match=f"the fault '{taken}' is planted twice"):
        planted("masking", taken, "It is another one.")
    with pytest.raises(ValueError, match="need is 'luck'; expected one of dense, sparse"):
        planted("masking", "another", "It needs luck.", needs=("luck",))
