"""The kernels are compiled for their real targets and looked at, with no GPU."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from mla.backends.xqa import machine_code, toolchain
from mla.backends.xqa.config import Config

numba_missing = toolchain._numba()
pytestmark = pytest.mark.skipif(bool(numba_missing), reason=f"nothing compiles here: {' '.join(numba_missing)}")

NEEDED = (
    ("bf16", 1, (8, 0)),
    ("bf16", 2, (8, 0)),
    ("e4m3", 2, (8, 9)),
    ("bf16", 1, (9, 0)),
    ("bf16", 2, (9, 0)),
    ("bf16", 4, (9, 0)),
    ("bf16_on_e4m3", 4, (9, 0)),
    ("e4m3", 1, (9, 0)),
    ("bf16_on_e4m3", 1, (9, 0)),
    ("bf16", 4, (10, 0)),
    ("bf16", 1, (12, 0)),
    ("bf16", 2, (12, 0)),
    ("e4m3", 1, (12, 0)),
    ("e4m3", 2, (12, 0)),
    ("fp16_on_e4m3", 2, (12, 0)),
)


@pytest.fixture(scope="module")
def aot():
    """The module, where something here can assemble and disassemble."""
    from mla.backends.xqa import aot
    from mla.backends.xqa.compiler import compile_ptx

    try:
        code = machine_code.with_no_gpu(compile_ptx(Config(), "merge", (9, 0)), (9, 0))
        machine_code.disassemble(code)
    except machine_code.AssemblyError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "record", functools.cache(aot.record))  # the page shows what a test looks at, too
        yield aot


@pytest.mark.parametrize(  # coverage slows Numba down, and all of these run the same lines
    ("kind", "row_tiles", "capability"),
    [pytest.param(*needed, marks=pytest.mark.no_cover if needed != NEEDED[0] else ()) for needed in NEEDED],
    ids=str,
)
def test_nothing_spills_and_the_tensor_cores_are_used(aot, kind, row_tiles, capability):
    form = aot.claimed(Config(kind, row_tiles=row_tiles), capability)
    record = aot.record(form, "decode", capability)
    assert record.spills == 0
    assert record.stack_bytes == 0
    assert record.fits
    counts, has = record.counts, record.config.constants
    rows = has["ROW_TILES"]
    steps = record.config.tile // 16  # of PV: 16 tokens each
    times = 2 if record.config.values_later else 1  # in the loop and after it
    loads = 9 if record.config.widened else 9 * has["TOKEN_BLOCKS"]
    loads += 9 * has["WARP_ROW_TILES"] * record.config.queries_in_shared
    assert counts["LDSM"] == loads + times * steps * (rows + has["VALUE_LOADS"])
    scores, values = 18 * has["WARP_ROW_TILES"] * has["TOKEN_BLOCKS"], times * steps * rows * 8
    if record.config.kind == "e4m3":
        assert (counts["QMMA"], counts["HMMA"]) == (scores, values)
    else:
        assert (counts["QMMA"], counts["HMMA"]) == (0, scores + values)
    assert counts["LDGSTS"] == (record.config.ahead + 1) * has["LOADS"]


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)], ids=str)
def test_the_merge_kernel_does_not_spill(aot, capability):
    record = aot.record(Config(), "merge", capability)
    assert record.spills == 0
    assert record.registers <= 64


def test_the_shared_memory_of_consumer_blackwell_suffices(aot):
    for form in aot.FORMS:
        assert aot.fit(form, (12, 0)).shared_bytes <= 101376


def test_the_dependent_launch_is_in_the_ptx_of_new_chips_alone(aot):
    from mla.backends.xqa.compiler import compile_ptx

    for dependent in (True, False):
        ptx = compile_ptx(replace(Config(), dependent=dependent), "merge", (9, 0))
        assert ("griddepcontrol.wait" in ptx) is dependent
        assert re.findall(r"\.visible \.entry (\w+)\(", ptx) == ["mla_xqa_merge"]
        assert ".local" not in ptx


def test_the_page_has_a_row_for_each_record(aot):
    records = aot.survey([Config()], [(12, 0)])
    page = aot.page(records)
    assert "| sm_120 | decode, bf16 | 16 | 32 | 2 | 1 |" in page
    assert page.count("| sm_120 |") == 2
    assert aot.describe(aot.FORMS[-1]) == "bf16, not aligned, fp32 out"
    assert aot.claimed(Config("e4m3"), (8, 0)) is None


def test_ptx_that_nobody_understands_is_told(aot):
    with pytest.raises(machine_code.AssemblyError, match="refused the PTX"):
        machine_code.with_no_gpu("this is no PTX", (9, 0))


def test_machine_code_that_nobody_understands_is_told(aot):
    with pytest.raises(machine_code.AssemblyError, match="cannot be disassembled"):
        machine_code.disassemble(b"this is no machine code")


def test_a_machine_without_tools_is_told(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(machine_code, "cuda_bindings", absent)
    monkeypatch.setattr(machine_code, "find_tool", lambda name: iter(()))
    with pytest.raises(machine_code.AssemblyError, match=r"nvJitLink cannot be loaded .*; there is no ptxas"):
        machine_code.with_no_gpu("", (9, 0))
    with pytest.raises(machine_code.AssemblyError, match="there is no cuobjdump and no nvdisasm"):
        machine_code.disassemble(b"")


def test_tools_are_found_in_a_toolkit_and_on_the_path(monkeypatch, tmp_path):
    tool = tmp_path / "bin" / "ptxas"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tool in set(machine_code.find_tool("ptxas"))
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tool.parent))
    assert next(machine_code.find_tool("ptxas")) == tool
