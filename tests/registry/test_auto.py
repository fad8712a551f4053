"""backend="auto": the table, the reasons, the one warning; and explicit names, which never fall back."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import warnings

import pytest
import torch

import mla
from mla import dispatch, registry
from mla import problem as problem_module
from mla.testing import Case, build

CALL = mla.trtllm_batch_decode_with_kv_cache_mla
TABLE = {
    (10, 0): ("trtllm-gen", "reference"),
    (10, 3): ("trtllm-gen", "reference"),
    (12, 0): ("xqa", "trtllm-gen", "reference"),
    (12, 1): ("xqa", "trtllm-gen", "reference"),
    (8, 0): ("trtllm-gen", "xqa", "reference"),
    (8, 6): ("trtllm-gen", "xqa", "reference"),
    (8, 9): ("trtllm-gen", "xqa", "reference"),
    (9, 0): ("trtllm-gen", "xqa", "reference"),
    (7, 5): ("reference",),
    (11, 0): ("reference",),
    (13, 0): ("reference",),
    None: ("reference",),
}


class Fake:
    """A backend that accepts unless told otherwise, and remembers that it ran."""

    def __init__(self, name: str, *reasons: str) -> None:
        self.name, self.reasons, self.ran = name, list(reasons), 0

    def why_not(self, problem: mla.Problem) -> list[str]:
        return self.reasons

    def run(self, problem: mla.Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        self.ran += 1
        out.fill_(1.0)
        if lse is not None:
            lse.fill_(2.0)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Each test has its own copy of the registry and its own memory of warnings."""
    mla.backends()
    copies = {name: dataclasses.replace(entry) for name, entry in registry._entries.items()}
    monkeypatch.setattr(registry, "_entries", copies)
    monkeypatch.setattr(dispatch, "_warned_devices", set())


def on(capability: tuple[int, int] | None, **case: object) -> mla.Problem:
    """A problem as it would be on a GPU of that capability."""
    device = torch.device("cpu" if capability is None else "cuda:0")
    return dataclasses.replace(build(Case(**case)).problem, device=device, capability=capability)


def pretend_kernels(*reasons: str) -> None:
    """Both kernels accept every problem, or refuse it for these reasons."""
    for name in ("trtllm-gen", "xqa"):
        registry.register_backend(name, Fake(name, *reasons), replace=True)


@pytest.mark.parametrize(("capability", "order"), TABLE.items(), ids=str)
def test_auto_follows_the_table(capability, order):
    pretend_kernels()
    problem = on(capability)
    assert dispatch.order_for(problem) == order
    explanation = dispatch.explain_problem(problem, "auto")
    assert explanation.backend == order[0]
    assert explanation.order == order
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mla.ReferenceFallbackWarning)
        assert dispatch.select(problem, "auto").name == order[0]


FEATURES = [
    {},
    {"top_k": 4},
    {"sinks": "normal"},
    {"q_len": 3},
    {"query": "float16", "cache": "float8_e4m3fn"},
    {"heads": 3},
]


@pytest.mark.parametrize(("capability", "feature"), list(itertools.product(TABLE, FEATURES)), ids=str)
def test_auto_passes_over_a_backend_that_refuses(capability, feature):
    pretend_kernels()
    refusing = TABLE[capability][0]
    if refusing == "reference":
        assert dispatch.select(on(capability, **feature), "auto").name == "reference" if capability is None else True
        return
    registry.register_backend(refusing, Fake(refusing, f"it has no {feature}"), replace=True)
    explanation = dispatch.explain_problem(on(capability, **feature), "auto")
    assert explanation.backend == TABLE[capability][1]
    assert explanation.reasons[refusing] == (f"it has no {feature}",)


def test_auto_falls_to_the_reference_on_a_gpu_with_one_warning_that_says_why():
    pretend_kernels("the moon is full", "the tide is out")
    problem = on((9, 0))
    why = "the moon is full; the tide is out"
    with pytest.warns(
        mla.ReferenceFallbackWarning, match=f"reference on cuda:0: it is an oracle.*trtllm-gen: {why}. xqa: {why}."
    ) as seen:
        assert [dispatch.select(problem, "auto").name for _ in range(2)] == ["reference", "reference"]
    assert len(seen) == 1


def test_asking_for_the_reference_by_name_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.select(on((9, 0)), "reference").name == "reference"
        assert dispatch.select(on(None), "auto").name == "reference"


def test_a_named_backend_never_falls_back():
    registry.register_backend("mine", Fake("mine", "the moon is full", "the tide is out"))
    with pytest.raises(
        mla.BackendUnsupported, match=r"(?s)mine refused: the moon is full.*mine refused: the tide is out"
    ) as caught:
        build(Case()).run(CALL, backend="mine")
    assert caught.value.reasons == {"mine": ("the moon is full", "the tide is out")}


@pytest.mark.parametrize("capability", [pair for pair, order in TABLE.items() if "trtllm-gen" in order], ids=str)
def test_what_no_kernel_is_made_for_falls_to_the_reference(capability):
    with pytest.warns(mla.ReferenceFallbackWarning, match="query/cache dtypes are float32/float32; it takes"):
        assert dispatch.select(on(capability, query="float32", cache="float32"), "auto").name == "reference"


def test_auto_with_no_backend_left_lists_every_reason():
    pretend_kernels("the moon is full")
    registry.register_backend("reference", Fake("reference", "closed on Sundays"), replace=True)
    with pytest.raises(mla.BackendUnsupported, match="closed on Sundays") as caught:
        dispatch.select(on((12, 0)), "auto")
    assert set(caught.value.reasons) == {"xqa", "trtllm-gen", "reference"}


def test_auto_never_picks_a_backend_outside_the_table():
    registry.register_backend("mine", Fake("mine"))
    assert dispatch.select(on(None), "auto").name == "reference"
    assert dispatch.explain_problem(on(None), "auto").verdicts["mine"].state == "accepts"


def test_a_registered_backend_runs_by_name():
    fake = Fake("mine")
    mla.register_backend("mine", fake)
    out, lse = build(Case(lengths=(3, 3), q_len=2)).run(CALL, backend="mine")
    assert (fake.ran, out.unique().tolist(), lse.unique().tolist()) == (1, [1.0], [2.0])


def test_no_rows_launch_nothing():
    fake = Fake("mine")
    mla.register_backend("mine", fake)
    build(Case(lengths=())).run(CALL, backend="mine")
    assert fake.ran == 0


def test_another_vendors_gpu_is_anything_else(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert problem_module.compute_capability(torch.device("cuda:0")) is None


def test_the_capability_is_the_querys_devices_own(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or (8 + device.index, 0)
    )
    problem_module._capability_of.cache_clear()
    assert problem_module.compute_capability(torch.device("cuda:1")) == (9, 0)
    assert problem_module.compute_capability(torch.device("cuda:0")) == (8, 0)
    assert asked == [torch.device("cuda:1"), torch.device("cuda:0")]
    problem_module._capability_of.cache_clear()


def test_the_choice_is_the_same_in_another_process_and_in_another_order():
    code = "import mla\nfrom mla.testing import Case, build\nprint([mla.explain(**build(Case(lengths=(n,))).arguments).backend for n in (1, 9, 0)])"
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert runs == {"['reference', 'reference', 'reference']\n"}


# explain


def test_explain_says_what_the_call_does_and_why():
    explanation = mla.explain(**build(Case(lengths=(9,), sinks="normal")).arguments)
    text = str(explanation)
    assert explanation.backend == "reference"
    assert "backend='auto' runs: reference" in text
    assert "trtllm-gen: not considered by backend='auto'; by name: refused" in text
    assert "with sinks" in text
    assert set(explanation.reasons) == {"trtllm-gen", "xqa"}


def test_explain_of_a_refusing_backend_answers_instead_of_raising():
    explanation = mla.explain(**build(Case()).arguments, backend="xqa")
    assert explanation.backend is None
    assert "runs: none: the call raises" in str(explanation)


def test_explain_runs_nothing():
    fake = Fake("mine")
    mla.register_backend("mine", fake)
    call = build(Case(out="bfloat16", lse="flat"))
    assert mla.explain(**call.arguments, backend="mine").backend == "mine"
    assert fake.ran == 0
    assert call.arguments["out"].isnan().all()


def test_explain_takes_positional_arguments_like_the_call():
    a = build(Case()).arguments
    names = ["query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "block_tables", "seq_lens", "max_seq_len"]  # fmt: skip
    assert mla.explain(*(a[name] for name in names)).backend == "reference"
    with pytest.raises(TypeError):
        mla.explain(*(a[name] for name in names[:3]))
