"""The launcher, with the emulator in the place of the GPU: it reads the very buffer that a driver would be given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla.backends.xqa import launcher as launcher_module
from mla.backends.xqa.config import Config
from mla.backends.xqa.emulator.backend import CONSUMER
from mla.backends.xqa.emulator.launch import Grid, run_grid
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.launcher import FirstCallInCapture, Launcher
from mla.backends.xqa.plan import argument_names, argument_type
from mla.backends.xqa.specialize import KERNELS
from mla.problem import Problem
from mla.testing import Case, assert_close, build

C_TYPES = {"I64": ctypes.c_int64, "I32": ctypes.c_int32, "F32": ctypes.c_float}


class EmulatedGpu:
    """What `driver.Driver` is, on the CPU. `touchable` are the tensors of the call under way."""

    machine = CONSUMER

    def __init__(self) -> None:
        self.touchable: dict[str, torch.Tensor | None] = {}
        self.loaded: list[str] = []
        self.launched: list[tuple[str, int, bool]] = []
        self.capturing = False
        self.contexts = 0

    def ensure_context(self) -> None:
        self.contexts += 1

    def is_capturing(self) -> bool:
        return self.capturing

    def stream(self) -> int:
        return 7

    def load(self, config: Config, kernel: str, shared_bytes: int) -> tuple[Config, str]:
        self.loaded.append(kernel)
        return config, kernel

    def launcher(
        self, kernel: Any, blocks: int, threads: int, shared_bytes: int, parameters: int, *, dependent: bool
    ) -> Callable[[int], None]:
        config, name = kernel

        def launch(stream: int) -> None:
            self.launched.append((name, stream, dependent))
            names = argument_names(name)
            addresses = (ctypes.c_void_p * len(names)).from_address(parameters)
            arguments = {
                argument: C_TYPES[argument_type(argument)].from_address(address).value
                for argument, address in zip(names, addresses, strict=True)
            }
            memory = GlobalMemory()
            for which, tensor in self.touchable.items():
                memory.add(which, tensor, writable=which in ("out", "lse", "scratch"))
            run_grid(Grid(KERNELS[name], config, arguments, blocks, threads, shared_bytes), memory)

        return launch


@pytest.fixture
def gpu() -> EmulatedGpu:
    return EmulatedGpu()


@pytest.fixture
def run(gpu, monkeypatch):
    """run(launcher, case) -> (out, lse), judged; scratch is watched as it is made."""
    scratch_of = launcher_module._scratch

    def watched(*arguments: Any) -> tuple[torch.Tensor, int]:
        made, address = scratch_of(*arguments)
        gpu.touchable["scratch"] = made
        return made, address

    monkeypatch.setattr(launcher_module, "_scratch", watched)

    def go(launcher: Launcher, case: Case, bound: Any = None, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = build(case)
        p = Problem.from_call(**call.arguments | changes)
        out = p.out
        if out is None:
            out = torch.empty(p.batch, p.q_len, p.num_heads, 512, dtype=p.out_dtype)
        lse = torch.empty(p.batch, p.q_len, p.num_heads)
        gpu.touchable |= {"query": p.query, "cache": p.kv_cache, "tables": p.block_tables, "lengths": p.seq_lens}
        gpu.touchable |= {"sinks": p.sinks, "out": out, "lse": lse}
        for name in ("bmm1_scale", "bmm2_scale"):
            scale = getattr(p, name)
            gpu.touchable[name] = scale if isinstance(scale, torch.Tensor) else None
        if bound is None:
            launcher.run(p, out, lse)
        else:
            bound(p.query, p.kv_cache, p.block_tables, p.seq_lens, out, lse, p.sinks, p.bmm1_scale, p.bmm2_scale, p.workspace, p.max_seq_len)  # fmt: skip
        assert_close((out, lse), p)
        return out, lse

    return go


CASES = [
    Case(lengths=(150, 7, 0), heads=4),
    Case(lengths=(70, 33), q_len=2, heads=24, page_size=16, tables="int64", lens="int64", sinks="normal"),
    Case(lengths=(70,), heads=4, scale_form="tensor", bmm1=0.1, bmm2=3.0, out="float32", lse_base="basee"),
    Case(lengths=(70, 9), heads=4, top_k=40, q_len=2, slots="holes"),
    Case(lengths=(70,), heads=4, query="float8_e4m3fn", cache="float8_e4m3fn", bmm1=0.3, bmm2=-2.0),
    Case(lengths=(40,), heads=4, cache_layout="offset", out="bfloat16", out_layout="offset"),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_argument_arrives(gpu, run, case):
    run(Launcher(gpu), case)
    assert [name for name, _, _ in gpu.launched] == ["decode", "merge"]
    assert {stream for _, stream, _ in gpu.launched} == {7}


def test_a_second_call_of_a_form_compiles_nothing_and_takes_the_new_tensors(gpu, run):
    launcher = Launcher(gpu)
    for seed in range(3):
        run(launcher, Case(lengths=(70, 20 + seed), heads=4, seed=seed))
    assert gpu.loaded == ["decode", "merge"]
    assert len(launcher._prepared) == 1
    assert gpu.contexts == 3


def test_another_form_of_the_same_configuration_is_prepared_but_not_compiled(gpu, run):
    launcher = Launcher(gpu)
    run(launcher, Case(lengths=(70, 20), heads=4))
    run(launcher, Case(lengths=(70, 20, 5), heads=8, page_size=16))
    assert gpu.loaded == ["decode", "merge"]
    assert len(launcher._prepared) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 20},
        {"q_len": 5},
        {"out": "float32"},
        {"cache_layout": "offset"},
        {"top_k": 16},
        {"query": "float16", "cache": "float16"},
    ],
    ids=repr,
)
def test_another_configuration_is_compiled(gpu, run, changes):
    launcher = Launcher(gpu)
    run(launcher, Case(lengths=(70, 20), heads=4))
    run(launcher, Case(**{"lengths": (70, 20), "heads": 4} | changes))
    assert gpu.loaded.count("decode") == 2


def test_scales_may_change_between_calls_of_a_form(gpu, run):
    launcher = Launcher(gpu)
    for bmm1, bmm2 in ((0.05, 1.0), (0.1, -3.0)):
        run(launcher, Case(lengths=(70,), heads=4, bmm1=bmm1, bmm2=bmm2))
    run(launcher, Case(lengths=(70,), heads=4, bmm1=0.2, bmm2=2.0, scale_form="tensor"))
    run(launcher, Case(lengths=(70,), heads=4, bmm1=0.3, bmm2=0.5))
    assert len(launcher._prepared) == 1


def test_sinks_may_come_and_go_between_calls_of_a_form(gpu, run):
    launcher = Launcher(gpu)
    for sinks in ("none", "normal", "none"):
        run(launcher, Case(lengths=(70,), heads=4, sinks=sinks))
    assert len(launcher._prepared) == 1


def test_the_workspace_is_used_when_it_is_large_enough(gpu, run):
    launcher = Launcher(gpu)
    case = Case(lengths=(150,), heads=4)
    large = torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
    run(launcher, case, workspace_buffer=large)
    assert gpu.touchable["scratch"] is large
    small = torch.empty(64, dtype=torch.uint8)
    run(launcher, case, workspace_buffer=small)
    assert gpu.touchable["scratch"] is not small
    crooked = torch.full(((1 << 20) + 3,), 0xFF, dtype=torch.uint8)[3:]
    run(launcher, case, workspace_buffer=crooked)
    assert gpu.touchable["scratch"] is crooked


def test_a_first_call_in_a_capture_is_refused_and_nothing_is_launched(gpu, run):
    launcher = Launcher(gpu)
    case = Case(lengths=(70,), heads=4)
    gpu.capturing = True
    with pytest.raises(
        FirstCallInCapture, match=r"decode kernel for B=1 .* make the same call once before the capture"
    ):
        run(launcher, case)
    assert gpu.launched == []
    gpu.capturing = False
    run(launcher, case)
    gpu.capturing = True
    run(launcher, case)


def test_warming_up_compiles_and_launches_nothing(gpu, run):
    launcher = Launcher(gpu)
    case = Case(lengths=(70,), heads=4)
    p = build(case).problem
    out, lse = torch.empty(1, 1, 4, 512, dtype=torch.bfloat16), torch.empty(1, 1, 4)
    launcher.warmup(p, out, lse)
    assert gpu.loaded == ["decode", "merge"]
    assert gpu.launched == []
    gpu.capturing = True
    run(launcher, case)


def bound_to(launcher: Launcher, case: Case, **changes: Any) -> Any:
    p = Problem.from_call(**build(case).arguments | changes)
    out = torch.empty(p.batch, p.q_len, p.num_heads, 512, dtype=p.out_dtype)
    return launcher.bind(p, out, torch.empty(p.batch, p.q_len, p.num_heads))


def test_a_bound_call_takes_new_tensors_numbers_and_lengths(gpu, run):
    launcher = Launcher(gpu)
    case = Case(lengths=(70, 20), heads=4, sinks="normal")
    bound = bound_to(launcher, case)
    assert gpu.launched == []
    for seed, scale in ((1, 0.05), (2, 0.1)):
        run(launcher, replace(case, seed=seed, lengths=(70, 40 + seed), bmm1=scale, max_slack=seed), bound)
    run(launcher, replace(case, sinks="none", scale_form="tensor"), bound)
    assert len(launcher._prepared) == 1
    assert gpu.loaded == ["decode", "merge"]


@pytest.mark.parametrize("layout", ["cache_layout", "query_layout", "out_layout"])
def test_a_bound_call_with_other_alignment_goes_the_long_way(gpu, run, layout):
    launcher = Launcher(gpu)
    case = Case(lengths=(40,), heads=4, out="float32")
    bound = bound_to(launcher, case)
    run(launcher, replace(case, **{layout: "offset"}), bound)
    assert gpu.loaded.count("decode") == 2
    run(launcher, case, bound)
    assert gpu.loaded.count("decode") == 2


def test_a_bound_call_in_deterministic_mode_follows_max_seq_len(gpu, run):
    """It sizes scratch there."""
    launcher = Launcher(gpu)
    case = Case(lengths=(40,), heads=4)
    bound = bound_to(launcher, case, deterministic=True)
    for slack in (0, 10_000):
        run(launcher, replace(case, max_slack=slack, table_slack=200), bound, deterministic=True)


def test_prepared_forms_do_not_pile_up(gpu, run, monkeypatch):
    monkeypatch.setattr(launcher_module, "MOST_FORMS", 2)
    launcher = Launcher(gpu)
    for batch in (1, 2, 3):
        run(launcher, Case(lengths=(9,) * batch, heads=1))
    assert len(launcher._prepared) == 1


def test_the_dependent_launch_is_for_the_merge_kernel_of_new_chips(gpu, run):
    run(Launcher(gpu), Case(lengths=(9,), heads=1))
    assert gpu.launched == [("decode", 7, False), ("merge", 7, True)]
    gpu.launched.clear()
    run(Launcher(gpu), Case(lengths=(9,), heads=1), enable_pdl=False)
    assert gpu.launched == [("decode", 7, False), ("merge", 7, False)]


def test_a_forked_child_forgets_the_gpus_of_its_parent():
    launcher_module._launchers[99] = object()
    launcher_module._forget()
    assert launcher_module._launchers == {}
