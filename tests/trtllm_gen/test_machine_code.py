"""Ahead-of-time compilation tells the truth: what is planted is found, on every chip, with no GPU."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla.backends.trtllm_gen import compiling
from mla.backends.trtllm_gen.machine_code import (
    SHARED_LIMITS,
    Chip,
    CompileError,
    Job,
    MachineCode,
    compile_ahead,
    compile_all,
    job_of,
    main,
    table,
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

FILE = str(Path(__file__).with_name("ahead_of_time_kernels.py"))
CHIPS = list(SHARED_LIMITS)
MATRIX = {(8, 0): "HMMA", (8, 9): "HMMA", (9, 0): "HGMMA", (10, 0): "UTCHMMA", (10, 3): "UTCHMMA", (12, 0): "HMMA"}
LONG_COPIES = {"LDGSTS", "UTMALDG"}


def chip_id(chip: Chip) -> str:
    return f"sm_{chip[0]}{chip[1]}"


def product(chip: Chip, m: int, n: int, k: int, stages: int, warps: int, kind: str = "bf16") -> Job:
    """[m, n] += [m, k] @ [k, n], in a loop of `stages`."""
    signature = {"a": f"*{kind}", "b": f"*{kind}", "c": "*fp32", "k": "i32"}
    constants = {"M": m, "N": n, "K": k, "STAGES": stages}
    name = f"{m}x{n}x{k}"
    return Job(name, f"{FILE}:product_kernel", signature, constants, ("a", "b", "c", "k"), chip, warps, stages)


DECENT = {chip: product(chip, 64, 64, 64, 2, 4) for chip in CHIPS}
SPILLING = {chip: product(chip, 64, 128, 16, 2, 1) for chip in CHIPS}
GREEDY = {chip: product(chip, 128, 128, 128, 5, 8) for chip in CHIPS}


@pytest.fixture(scope="module", params=CHIPS, ids=chip_id)
def chip(request: pytest.FixtureRequest) -> Chip:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def codes(chip: Chip) -> dict[str, MachineCode]:
    """The three planted kernels on one chip, compiled together."""
    jobs = {"decent": DECENT[chip], "spilling": SPILLING[chip], "greedy": GREEDY[chip]}
    return dict(zip(jobs, compile_all(jobs.values()), strict=True))


def test_a_decent_kernel_uses_the_chip_s_tensor_cores_and_spills_nothing(chip: Chip, codes: Any) -> None:
    code = codes["decent"]
    assert code.error == ""
    assert 0 < code.registers <= 255
    assert not code.spills
    assert code.fits
    assert code.shared_bytes > 0
    assert (code.tensor_memory > 0) == (chip[0] == 10)
    assert code.instructions[MATRIX[chip]] > 0
    assert sum(code.matrix_instructions.values()) == code.instructions[MATRIX[chip]]
    assert set(code.instructions) & LONG_COPIES
    assert code.serialized == ()


def test_a_kernel_that_spills_is_noticed(codes: Any) -> None:
    code = codes["spilling"]
    assert code.error == ""
    assert code.spills
    assert code.spill_stores > 0
    assert code.spill_loads > 0
    assert code.stack_bytes > 0
    assert code.instructions["LDL"] > 0
    assert code.instructions["STL"] > 0


def test_a_kernel_that_is_too_large_for_the_chip_is_noticed(chip: Chip, codes: Any) -> None:
    code = codes["greedy"]
    assert code.error == ""  # the compiler does not mind
    assert not code.fits
    assert code.shared_bytes > SHARED_LIMITS[chip]
    assert all(reason.startswith("C75") for reason in code.serialized)  # Triton 3.6 makes such code of it for sm_90


@pytest.mark.parametrize("chip", [(10, 0), (10, 3)], ids=chip_id)
def test_a_kernel_that_is_too_large_for_tensor_memory_is_noticed(chip: Chip) -> None:
    large = replace(product(chip, 128, 512, 32, 1, 8), kernel_ref=f"{FILE}:two_products_kernel")
    (code,) = compile_all([large])
    assert code.error == ""
    assert code.shared_bytes < SHARED_LIMITS[chip]
    assert code.tensor_memory > 512
    assert not code.fits
    assert code.matrix_instructions == {}  # a trap and nothing else


def test_the_reasons_for_serial_matrix_instructions_are_read() -> None:
    log = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in 'f'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in 'f'
ptxas info    : Function properties for f
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size
"""
    reason = "C7510: Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in 'f'"
    figures = {"registers": 168, "stack_bytes": 16, "spill_stores": 12, "spill_loads": 8}
    assert compiling.read_log(log) == figures | {"serialized": [reason]}
    with pytest.raises(ValueError, match="does not tell registers"):
        compiling.read_log("")


def test_opcodes_are_counted_with_and_without_a_predicate() -> None:
    listing = """
.text.product_kernel:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/               @P0 LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
        /*0020*/              @!UP1 UTCHMMA gdesc[UR4], gdesc[UR6] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
.L_x_0:
"""
    counts = {"LDC": 1, "LDGSTS.E.BYPASS.128": 1, "UTCHMMA": 1, "HMMA.16816.F32.BF16": 2}
    assert compiling.opcodes(listing) == counts


def test_stores_of_two_bytes_are_counted() -> None:
    """How many numbers there are decides whether the last few of a thread may be stored together."""
    known = ("a", "out", "n")
    job = Job("converted", f"{FILE}:converted_kernel", {"a": "*bf16", "out": "*bf16"}, {"N": 1024}, known, (9, 0))
    together, one_by_one = compile_all([job, replace(job, divisible_by_16=known[:2])])
    assert (together.error, one_by_one.error) == ("", "")
    assert together.narrow_stores == 0
    assert one_by_one.narrow_stores == 1024 // (32 * job.num_warps)


def test_spills_are_counted_in_the_innermost_loops_that_copy_or_multiply() -> None:
    outer, inner, after = "LDL R1, [R2]", "STL [R2], R1", "LDL R3, [R2]"
    lines = [".L_x_0:", outer, "LDGSTS.E [R1], [R2]", ".L_x_1:", inner, "HMMA.16816.F32 R4, R8, R2, R4", inner,
             "@P0 BRA `(.L_x_1)", after, ".L_x_2:", after, "@P1 BRA `(.L_x_2)", "@!P0 BRA `(.L_x_0)", after, "BRA `(.L_x_3)",
             ".L_x_3:"]  # fmt: skip
    listing = "\n".join(line if line.endswith(":") else f"        /*0010*/   {line} ;" for line in lines)
    assert compiling.loop_spills(listing) == 2
    assert compiling.loop_spills(listing.replace("HMMA.16816.F32 R4, R8, R2, R4", "NOP")) == 5
    assert compiling.loop_spills("") == 0


def test_a_hand_over_that_warps_may_still_read_over_is_counted() -> None:
    def code(*lines: str) -> str:
        return "\n".join(f"        /*0010*/   {line} ;" for line in lines)

    sum_, read, give = "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", "LDS R7, [UR5+0x2da00]", "@P0 STS.128 [UR5+0x2da00], R4"
    all_, rest = "BAR.SYNC.DEFER_BLOCKING 0x1", "IMAD R5, R15, R9, R16"
    assert compiling.unguarded(code(sum_, read, rest, give, all_)) == 1
    assert compiling.unguarded(code(sum_, read, sum_, rest, give, all_)) == 0
    assert compiling.unguarded(code(sum_, give, read, all_, sum_, read, give, all_)) == 1
    assert compiling.unguarded(code(sum_, read, give, sum_, all_, read, rest, all_)) == 0
    assert compiling.unguarded("") == 0


def test_the_compiling_process_forks_for_each_job_and_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, lost = vars(DECENT[(8, 0)]), vars(replace(DECENT[(8, 0)], kernel_ref="mla.no_such_module:kernel"))
    dying = tmp_path / "dying.py"
    dying.write_text("import os\nos._exit(3)\n")
    jobs = [lost, good | {"kernel_ref": f"{dying}:kernel"}, lost]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps((str(tmp_path), 2, jobs)))))
    compiling.work()
    errors = [json.loads((tmp_path / f"{index}.json").read_text())["error"] for index in range(3)]
    assert [error.partition(":")[0] for error in errors] == [
        "ModuleNotFoundError",
        "the compiler died (3)",
        "ModuleNotFoundError",
    ]


def test_what_a_process_finds_by_itself_is_what_it_hands_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    job = DECENT[(9, 0)]
    here, (there,) = compiling.compile_here(vars(job)), compile_all([job])
    del here["seconds"]
    assert here == {name: getattr(there, name) for name in here} | {"serialized": list(there.serialized)}


def test_one_kernel_for_one_chip() -> None:
    code = compile_ahead(
        f"{FILE}:converted_kernel", {"a": "*fp8e4nv", "out": "*fp32"}, {"N": 256}, ("a", "out"), (9, 0)
    )
    assert code.matrix_instructions == {}
    assert code.registers > 0
    assert code.seconds > 0


def test_options_reach_the_compiler() -> None:
    job = DECENT[(9, 0)]
    code = compile_ahead(
        job.kernel_ref, job.signature, job.constants, job.divisible_by_16, job.chip, 4, 2, name="few", maxnreg=64
    )
    unlimited = compile_ahead(job.kernel_ref, job.signature, job.constants, (), job.chip, 4, 2)
    assert code.name == "few"
    assert unlimited.registers > 64
    assert code.registers <= 64


def test_what_does_not_compile_says_why_and_disturbs_no_other(tmp_path: Path) -> None:
    abort = tmp_path / "abort.py"
    abort.write_text("import os\nos.write(2, b'LLVM ERROR: planted')\nos.abort()\n")
    good = DECENT[(8, 0)]
    jobs = [
        replace(good, kernel_ref=f"{abort}:kernel"),
        replace(
            good, kernel_ref=f"{FILE}:wrong_kernel", signature={"a": "*fp32"}, constants={"N": 3}, divisible_by_16=()
        ),
        replace(good, kernel_ref="mla.no_such_module:kernel"),
        replace(good, kernel_ref=f"{tmp_path / 'absent.txt.py'}:kernel"),
        good,
        good,
    ]
    jobs.insert(4, replace(good, signature={"a": "*bf16", "c": "*fp32"}))
    died, wrong, absent, no_file, untyped, *fine = compile_all(jobs)
    assert died.error.startswith("the compiler died (-6): LLVM ERROR: planted")
    assert "power of 2" in wrong.error
    assert "no_such_module" in absent.error
    assert "absent.txt.py" in no_file.error
    assert "does not tell the types of b, k" in untyped.error
    assert fine[0].error == fine[1].error == ""
    assert fine[0].instructions == fine[1].instructions
    with pytest.raises(CompileError, match="does not compile for sm_80: ModuleNotFoundError"):
        compile_ahead("mla.no_such_module:kernel", {}, {}, (), (8, 0))


def test_the_compiling_process_itself_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CompileError, match="the compiling process ended with 1"):
        compile_all([DECENT[(8, 0)]])


def test_an_interpreting_process_compiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (code,) = compile_all([DECENT[(8, 0)]])
    assert code.error == ""


def test_a_disassembler_that_does_not_know_the_chip_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="install nvidia-cuda-nvdisasm"):
        compiling.disassemble(b"no machine code")
    monkeypatch.setattr(compiling.importlib.metadata, "files", lambda name: None)
    assert os.path.basename(compiling.disassembler()) == "nvdisasm"


def test_the_page_has_a_row_for_each_configuration_and_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shipped(chip: Chip) -> list[SimpleNamespace]:
        return [SimpleNamespace(**vars(DECENT[chip]) | {"name": "decent"})] if chip[0] < 10 else []

    monkeypatch.setitem(sys.modules, "fake_configurations", SimpleNamespace(shipped=shipped))  # type: ignore[arg-type]
    main(str(tmp_path / "page.md"), "fake_configurations")
    page = (tmp_path / "page.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| sm_")]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| sm_80", "decent"],
        ["| sm_89", "decent"],
        ["| sm_90", "decent"],
    ]
    assert "HGMMA" in rows[2]
    assert "does not fit" not in page


def test_the_table_shouts() -> None:
    base = MachineCode("a", (9, 0), registers=168, shared_bytes=300_000, spill_stores=4, spill_loads=8)
    text = table(
        [
            replace(base, serialized=("C7512: because",), matrix_instructions={"HGMMA.64x64x16.F32.BF16": 8}),
            MachineCode("b", (12, 0), error="ValueError: no\nmore"),
            MachineCode(
                "c", (8, 0), error="PTXASError: error\n`ptxas` stderr:\nptxas /tmp/x.ptx, line 1; error: why\n"
            ),
            MachineCode("d", (10, 0), registers=4, tensor_memory=513),
            replace(base, spill_stores=0, spill_loads=0, stack_bytes=16, shared_bytes=10),
        ]
    )
    assert text.splitlines()[2:] == [
        "| sm_90 | a | 168 | 12 B | 300000 of 232448 | 8 HGMMA.64x64x16.F32.BF16 |  | 0 | C7512, does not fit |",
        "| sm_120 | b |  |  |  |  |  |  | does not compile: ValueError: no |",
        "| sm_80 | c |  |  |  |  |  |  | does not compile: ptxas line 1; error: why |",
        "| sm_100 | d | 4 | 0 | 0 of 232448 |  |  | 0 | does not fit: 513 columns of tensor memory |",
        "| sm_90 | a | 168 | 16 B | 10 of 232448 |  |  | 0 |  |",
    ]
    assert job_of(SimpleNamespace(**vars(DECENT[(8, 0)])), (8, 9)).chip == (8, 9)


def test_the_limits_are_those_of_the_programming_guide() -> None:
    kib = {chip_id(chip): limit / 1024 for chip, limit in SHARED_LIMITS.items()}
    assert kib == {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99}
