"""The suite on a right kernel, on a wrong one, and on one that claims little; profiles, shrinking, and reports."""

from __future__ import annotations

import dataclasses
import json

import pytest

import mla
from mla import registry
from mla.testing import (
    PROPERTIES,
    Case,
    Finding,
    Kernel,
    Profile,
    Report,
    build,
    judge_kernel,
    judge_property,
    judges,
    shrink,
)
from mla.testing.about import about
from mla.testing.properties import each
from mla.testing.report import as_html, as_json, as_text
from mla.testing.shrink import search
from mla.testing.suite import outcome


class SkipsTheLastKey(Kernel):
    def visible(self, p: mla.Problem, b: int, t: int) -> int:
        return max(super().visible(p, b, t) - 1, 0)


class Raises(Kernel):
    def visible(self, p: mla.Problem, b: int, t: int) -> int:
        raise RuntimeError("out of registers")


def by_name(name: str):
    return next(prop for prop in PROPERTIES if prop.name == name)


CLAIMS = {name: getattr(registry.load(name), "capabilities", None) for name in mla.backends()}


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
@pytest.mark.parametrize("name", [name for name, claimed in CLAIMS.items() if claimed is not None])
def test_every_known_backend_holds_every_property_it_claims(device, name, prop):
    profile = Profile.of(CLAIMS[name])
    if device not in profile.devices:
        pytest.skip(f"{name} runs on {' or '.join(profile.devices)}")
    if prop.gpu_only and device == "cpu":
        pytest.skip("needs a GPU")

    def call(**arguments):
        return mla.trtllm_batch_decode_with_kv_cache_mla(**arguments, backend=name)

    finding = judge_property(prop, call, profile, device)
    assert finding.failure is None, finding.failure
    assert finding.verdict == "holds"


@pytest.mark.parametrize("name", [name for name in CLAIMS if name != "reference"])
def test_a_kernel_that_does_not_run_on_a_cpu_refuses_every_property_there(name):
    assert "cpu" not in Profile.of(CLAIMS[name]).devices
    for prop in PROPERTIES:
        for case in prop.cases:
            if not prop.gpu_only:
                assert registry.load(name).why_not(build(case).problem)


def test_a_right_kernel_holds_everything_it_claims():
    findings = list(judge_kernel(Kernel("bfloat16", splits=3), Profile(pairs=(("bfloat16", "bfloat16"),)), examples=50))
    others = {finding.name: finding.verdict for finding in findings if finding.verdict != "holds"}
    assert others == {"dtypes": "not claimed", "far pages": "not judged here", "many rows": "not judged here"}
    assert len(findings) == len(PROPERTIES) + 1


def test_a_wrong_kernel_is_found_with_a_kind_and_a_small_case():
    finding = judge_property(by_name("mask"), SkipsTheLastKey(), Profile(), "cpu")
    assert finding.verdict == "fails"
    assert finding.failure is not None
    assert finding.failure.kind == "error"
    assert sum(finding.failure.smallest.lengths) <= 3
    assert outcome(by_name("mask").judge, SkipsTheLastKey(), finding.failure.smallest, "cpu") is not None


def test_a_kernel_that_raises_on_what_it_claims_fails_and_says_so():
    finding = judge_property(by_name("requests"), Raises(), Profile(), "cpu", shrinking=False)
    assert finding.failure is not None
    assert finding.failure.kind == "raised"
    assert "RuntimeError: out of registers" in finding.failure.text


def test_what_is_not_claimed_is_not_judged():
    modest = Profile(
        sparse=False, sinks=False, lse=False, max_q_len=1, strides=False, empty_rows=False, scale_tensors=False
    )
    findings = {finding.name: finding for finding in judge_kernel(Kernel(), modest, examples=0)}
    assert findings["sparse lists"].verdict == "not claimed"
    assert findings["sinks"].verdict == "not claimed"
    assert findings["strided pools"].judged == 1  # one of its cases has no stride at all
    assert findings["mask"].judged == 1
    assert findings["mask"].verdict == "holds"


def test_only_some_properties_can_be_asked_for_and_unknown_names_are_refused():
    assert [f.name for f in judge_kernel(Kernel(), Profile(), only=("mask", "heads"))] == ["mask", "heads"]
    with pytest.raises(ValueError, match="property is 'masks'; expected one of mask, length"):
        list(judge_kernel(Kernel(), Profile(), only=("masks",)))


def test_a_device_that_is_not_claimed_is_refused():
    with pytest.raises(ValueError, match="device is 'cpu'; expected one that the profile claims: cuda"):
        list(judge_kernel(Kernel(), Profile(devices=("cuda",))))


def test_names_of_properties_are_unique_and_every_case_builds():
    assert len({prop.name for prop in PROPERTIES}) == len(PROPERTIES)
    for prop in PROPERTIES:
        for case in prop.cases:
            if not prop.gpu_only:
                assert build(case).problem.batch == case.batch


# Cases


def test_a_case_prints_as_the_call_that_rebuilds_it():
    cases = [case for prop in PROPERTIES for case in prop.cases if not prop.gpu_only]
    assert all(eval(repr(case)) == case for case in cases)
    assert repr(Case()) == "Case()"


def test_the_same_case_gives_the_same_bits():
    a, b = build(Case(lengths=(9, 4), sinks="normal", top_k=5)), build(Case(lengths=(9, 4), sinks="normal", top_k=5))
    for name in ("query", "kv_cache", "block_tables", "sinks"):
        assert a.arguments[name].tolist() == b.arguments[name].tolist() or name == "kv_cache"
    assert a.arguments["kv_cache"].nan_to_num(7.0).equal(b.arguments["kv_cache"].nan_to_num(7.0))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": "int8"}, "query is 'int8'; expected one of 'bfloat16'"),
        ({"unread": "ones"}, "unread is 'ones'; expected one of 'nan'"),
        ({"out_rank": 3, "q_len": 2}, "out_rank 4, or 3 with q_len 1"),
        ({"far_pages": 9, "cache_layout": "layers"}, "far_pages is 9 and cache_layout 'layers'"),
    ],
)
def test_a_word_that_no_case_knows_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        Case(**changes)


def test_far_pages_move_every_address_and_change_no_answer():
    near = Case(lengths=(20, 3), page_size=4, tail="zero", top_k=0)
    for case in (near, dataclasses.replace(near, top_k=8)):
        far = dataclasses.replace(case, far_pages=1000)
        assert build(far).arguments["kv_cache"].shape[0] == build(case).arguments["kv_cache"].shape[0] + 1000
        a = build(case).run(mla.trtllm_batch_decode_with_kv_cache_mla)
        b = build(far).run(mla.trtllm_batch_decode_with_kv_cache_mla)
        assert a[0].equal(b[0])


def test_each_varies_one_field_at_a_time():
    assert each(Case(), heads=(1, 2), q_len=(3,)) == (Case(heads=1), Case(heads=2), Case(q_len=3))


# Profiles


def test_a_profile_says_what_it_lacks():
    profile = Profile(
        pairs=(("bfloat16", "bfloat16"),), page_sizes=(64,), heads=(16, 128), lse_bases=("basee",), out_dtypes=()
    )
    assert profile.why_not(Case(lse_base="basee")) == []
    lacking = profile.why_not(Case(query="float16", cache="float16", page_size=16, heads=4, out="bfloat16"))
    assert lacking == ["float16 query with float16 cache", "bfloat16 out", "lse in base2", "H = 4", "page size 16"]


def test_a_case_is_adapted_only_where_its_property_does_not_look():
    profile = Profile(page_sizes=(64,), heads=(16, 128), lse=False)
    adapted = profile.adapt(Case(lengths=(9,), page_size=16, heads=4))
    assert adapted == Case(lengths=(9,), page_size=64, heads=16, lse="none")
    assert profile.adapt(Case(lse="flat")) is None
    assert Profile(sparse=False).adapt(Case(top_k=4)) is None
    assert Profile(any_table=False).adapt(Case()) == Case(tail="zero", table_slack=0)
    assert Profile(lse_bases=("basee",)).adapt(Case()) == Case(lse_base="basee")
    assert Profile(pairs=(("float16", "float16"),)).adapt(Case()) == Case(query="float16", cache="float16")


def test_a_backends_claims_become_a_profile():
    profile = Profile.of(mla.Capabilities(sparse=False, max_heads=3, page_sizes=(32,), device_types=("cuda",)))
    assert (profile.sparse, profile.heads, profile.page_sizes, profile.devices) == (False, (1, 2, 3), (32,), ("cuda",))
    assert ("float64", "float64") in Profile.of(mla.Capabilities()).pairs


# Judges


def test_many_rows_are_judged_by_a_sample_and_all_must_be_finite():
    case = Case(lengths=(2,) * 300, heads=1, page_size=2, tail="zero")
    assert outcome(judges.sampled_rows_are_right, Kernel(), case, "cpu") is None

    class LastIsNan(Kernel):
        def store(self, p, out, lse, b, t, row, row_lse):
            super().store(p, out, lse, b, t, row if b != 137 else row / 0, row_lse)

    class FirstIsWrong(Kernel):
        def store(self, p, out, lse, b, t, row, row_lse):
            super().store(p, out, lse, b, t, row + (b == 0), row_lse)

    assert outcome(judges.sampled_rows_are_right, LastIsNan(), case, "cpu")[0] == "nan"
    assert outcome(judges.sampled_rows_are_right, FirstIsWrong(), case, "cpu")[0] == "error"


def test_a_result_on_another_device_is_named():
    def elsewhere(**arguments):
        out, lse = Kernel()(**arguments)
        return out.to("meta"), lse

    assert outcome(judges.right_answer, elsewhere, Case(), "cpu") == ("device", "out is on meta; expected cpu")


def test_a_shrink_that_meets_a_fault_on_the_gpu_reports_that_case():
    class FaultsWhenSmall(Kernel):
        def visible(self, p: mla.Problem, b: int, t: int) -> int:
            if p.num_heads == 1:
                raise RuntimeError("CUDA error: an illegal instruction was encountered")
            return max(super().visible(p, b, t) - 1, 0)

    finding = judge_property(by_name("mask"), FaultsWhenSmall(), Profile(), "cpu")
    assert finding.failure.kind == "crashed"
    assert finding.failure.smallest.heads == 1
    assert finding.failure.case == by_name("mask").cases[0]


def test_what_was_measured_says_with_what(monkeypatch):
    monkeypatch.delenv("MLA_COMMIT", raising=False)
    facts = about("cpu")
    assert {"mla", "torch", "python", "date", "device"} <= set(facts)
    monkeypatch.setenv("MLA_COMMIT", "0123456789ab")
    assert about("cpu")["commit"] == "0123456789ab"


# Shrinking and searching


def test_a_failing_case_is_shrunk_to_what_makes_it_fail():
    case = Case(lengths=(40, 7, 130), q_len=3, heads=12, sinks="normal", page_size=16, cache_layout="layers")
    smallest = shrink.shrink(case, lambda c: c.sinks == "normal" and max(c.lengths) >= 7)
    assert smallest.sinks == "normal"
    assert (len(smallest.lengths), smallest.q_len, smallest.heads, smallest.cache_layout) == (1, 1, 1, "packed")
    assert 7 <= smallest.lengths[0] <= 40


def test_a_failure_that_does_not_come_again_leaves_the_case_as_it_is():
    case = Case(lengths=(40, 7))
    assert shrink.shrink(case, lambda c: False) == case


def test_random_search_stays_within_the_profile():
    seen = []
    profile = Profile(
        pairs=(("float16", "float16"),), sparse=False, heads=(8,), page_sizes=(32,), max_q_len=2, strides=False
    )
    judged, found, wrong = search(profile, seen.append, 60)
    assert judged == len(seen) > 20
    assert found is wrong is None
    assert all(not profile.why_not(case) for case in seen)
    _, found, wrong = search(profile, lambda case: ("error", "two of them") if len(case.lengths) > 1 else None, 60)
    assert found is not None
    assert len(found.lengths) == 2
    assert wrong == ("error", "two of them")


def test_a_search_stops_at_the_first_fault_on_the_gpu():
    seen = []

    def judge(case):
        seen.append(case)
        return ("crashed", "illegal address") if len(seen) == 5 else None

    judged, found, wrong = search(Profile(), judge, 60)
    assert (judged, len(seen), found) == (5, 5, seen[4])
    assert wrong == ("crashed", "illegal address")


def test_after_a_fault_on_the_gpu_nothing_more_is_judged_and_the_case_is_kept():
    class Faults(Kernel):
        def visible(self, p: mla.Problem, b: int, t: int) -> int:
            if p.q_len == 3:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
            return super().visible(p, b, t)

    findings = {finding.name: finding for finding in judge_kernel(Faults(), Profile(), examples=5)}
    assert findings["mask"].failure.kind == "crashed"
    assert findings["mask"].failure.text == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert findings["mask"].failure.smallest.q_len == 3
    assert findings["length"].verdict == "not judged here"
    assert "lost its GPU" in findings["length"].sentence
    assert findings["random problems"].judged == 0


def test_a_case_of_many_equal_requests_prints_short_and_rebuilds():
    case = Case(lengths=(2,) * 70_000)
    assert repr(case) == "Case(lengths=(2,) * 70000)"
    assert eval(repr(case)) == case


def test_without_hypothesis_nothing_is_drawn_and_cases_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(shrink, "available", lambda: False)
    assert search(Profile(), lambda case: None, 10) == (0, None, None)
    assert shrink.shrink(Case(lengths=(9, 9)), lambda case: True) == Case(lengths=(9, 9))


# Reports


def report_of(kernel: Kernel, **options: object) -> Report:
    findings = tuple(judge_kernel(kernel, Profile(), examples=0, only=("mask", "far pages"), **options))
    return Report("somebody:kernel", "cpu", Profile(), findings, {"torch": "2.x <3"})


def test_reports_name_the_verdict_the_kind_and_the_case():
    good, bad = report_of(Kernel()), report_of(SkipsTheLastKey(), shrinking=False)
    assert good.passed
    assert not bad.passed
    text = as_text(bad)
    assert "FAIL mask: each query token sees exactly" in text
    assert "numbers are further off than any rounding explains" in text
    assert "smallest failing case: Case(lengths=(13, 20)" in text
    assert "somebody:kernel on cpu: 0 properties hold, 1 fail, 1 not judged" in text
    whole = json.loads(as_json(bad))
    assert whole["passed"] is False
    assert whole["findings"][0]["failure"]["kind"] == "error"
    assert eval(whole["findings"][0]["failure"]["case"]) == bad.findings[0].failure.case
    page = as_html(bad)
    assert "somebody:kernel on cpu" in page
    assert "2.x &lt;3" in page
    assert 'class="fails"' in page
    assert 'class="holds"' in as_html(good)


def test_a_report_in_which_nothing_was_judged_has_not_passed():
    nothing = Finding("mask", "", "not claimed", 0, 3, 0, None, 0.0)
    assert not Report("k", "cpu", Profile(), (nothing,)).passed
