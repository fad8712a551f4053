"""What the compiler makes of a kernel for each chip, with no GPU: registers, spills, shared memory, instructions.

`compile_ahead` compiles one kernel for one chip, `compile_all` many; each in a process of its own, since a compiler may
abort and since Triton must not be interpreting. `python -m mla.backends.trtllm_gen.machine_code FILE.md` writes the
table of all shipped configurations.

Compiling succeeds for kernels that no chip can launch: shared memory is compared with the chip's limit here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla.backends.trtllm_gen import compiling

Chip = tuple[int, int]

SHARED_LIMITS: dict[Chip, int] = {
    (8, 0): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (12, 0): 99 << 10,
}
"""Bytes of shared memory that one block may have, by compute capability: the CUDA programming guide's table."""

TENSOR_MEMORY_LIMIT = 512
"""Columns of tensor memory that a multiprocessor has, on the chips that have one (10.x)."""

LOADS = ("LDG", "LDGSTS", "UTMALDG", "LDSM")
BARRIERS = ("BAR", "SYNCS")


class CompileError(RuntimeError):
    """A kernel does not compile for a chip; the text is the compiler's."""


@dataclass(frozen=True)
class Job:
    """One kernel for one chip. Names that the kernel does not have are ignored: configurations share what they can.

    Attributes:
        name: what the configuration is called.
        kernel_ref: "module:attribute", or "path/to/file.py:attribute", of a @triton.jit or @gluon.jit function.
        signature: argument -> Triton type, such as "*bf16", "i32" or "fp32"; constants may be left out, and so may what
            the kernel's own annotations tell.
        constants: argument -> value, for `tl.constexpr` arguments and for those that are constant in this compilation.
        divisible_by_16: arguments whose value is a multiple of 16 (pointers: in bytes).
        chip: compute capability.
        num_warps, num_stages: as at a launch. options: any further ones, such as {"maxnreg": 168}.
    """

    name: str
    kernel_ref: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible_by_16: tuple[str, ...]
    chip: Chip
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MachineCode:
    """What came out of a job.

    Attributes:
        name, chip: of the job.
        error: why there is no machine code, or "". All below is zero or empty then.
        registers: per thread.
        stack_bytes: per thread, spilled registers and local arrays together.
        spill_stores, spill_loads: bytes per thread that the compiler had no register for.
        loop_spills: instructions of these in the innermost loops that copy asynchronously or multiply.
        unguarded: places where warps that are late may read what was handed over to others, see `compiling.unguarded`.
        narrow_stores: instructions that store one or two bytes of each thread to global memory.
        shared_bytes: per block.
        tensor_memory: columns per block.
        instructions: opcode without its modifiers -> how often it stands in the code.
        matrix_instructions: the same for the tensor cores' opcodes, with modifiers.
        serialized: the compiler's reasons for running warp-group matrix instructions one after another.
        seconds: how long compiling took.
    """

    name: str
    chip: Chip
    error: str = ""
    registers: int = 0
    stack_bytes: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    loop_spills: int = 0
    unguarded: int = 0
    narrow_stores: int = 0
    shared_bytes: int = 0
    tensor_memory: int = 0
    instructions: Mapping[str, int] = field(default_factory=dict)
    matrix_instructions: Mapping[str, int] = field(default_factory=dict)
    serialized: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def spills(self) -> bool:
        """Whether anything lives in local memory: by the compiler's word, by the stack, or by the instructions."""
        local = self.instructions.get("LDL", 0) + self.instructions.get("STL", 0)
        return self.spill_stores + self.spill_loads + self.stack_bytes + local > 0

    @property
    def fits(self) -> bool:
        """Whether the chip has the shared and the tensor memory that a block asks for.

        With too much tensor memory Triton makes a kernel of it that only traps.
        """
        return self.shared_bytes <= SHARED_LIMITS[self.chip] and self.tensor_memory <= TENSOR_MEMORY_LIMIT


def compile_ahead(
    kernel_ref: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible_by_16: tuple[str, ...],
    chip: Chip,
    num_warps: int = 4,
    num_stages: int = 3,
    *,
    name: str = "",
    **options: Any,
) -> MachineCode:
    """Compile one kernel for one chip; the arguments are those of `Job`.

    Raises:
        CompileError: it does not compile.
    """
    job = Job(name, kernel_ref, signature, constants, divisible_by_16, chip, num_warps, num_stages, options)
    (code,) = compile_all([job])
    if code.error:
        raise CompileError(f"{kernel_ref} does not compile for sm_{chip[0]}{chip[1]}: {code.error}")
    return code


def compile_all(jobs: Iterable[Job], *, processes: int = 2) -> list[MachineCode]:
    """Compile every job, `processes` at a time, each in a process of its own. Results come in the jobs' order.

    A job that does not compile, or whose compiler dies, has an `error`; the others are not disturbed.
    """
    asked = list(jobs)
    with tempfile.TemporaryDirectory(prefix="mla-machine-code-") as folder:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "COV", "PYTEST"))}
        changes = {"TRITON_HOME": folder, "TRITON_DUMP_PTXAS_LOG": "1"}
        found_as_here = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "CUDA_VISIBLE_DEVICES": ""}
        run = subprocess.run(
            [sys.executable, "-P", compiling.__file__],  # by its file: kernels that need no PyTorch wait for none
            input=pickle.dumps((folder, processes, [_as_dict(job) for job in asked])),
            env=kept | changes | found_as_here,
            capture_output=True,
            check=False,
        )
        if run.returncode:
            raise CompileError(f"the compiling process ended with {run.returncode}: {run.stderr.decode()[-4000:]}")
        return [_result(job, Path(folder, f"{index}.json")) for index, job in enumerate(asked)]


def _as_dict(job: Job) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(job).items()}


def _result(job: Job, file: Path) -> MachineCode:
    found = json.loads(file.read_text())
    return MachineCode(job.name, job.chip, **found | {"serialized": tuple(found.get("serialized", ()))})


def table(codes: Iterable[MachineCode]) -> str:
    """A Markdown table, one row per result."""
    head = ["chip", "configuration", "registers", "spilled", "shared memory", "tensor cores", "loads", "barriers"]
    head.append("remarks")
    rows = [head, ["---"] * len(head), *map(_row, codes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(code: MachineCode) -> list[str]:
    first = [f"sm_{code.chip[0]}{code.chip[1]}", code.name]
    if code.error:
        lines = code.error.splitlines()
        why = next((line for line in lines if line.startswith("ptxas ")), lines[0])
        return [*first, *[""] * 6, f"does not compile: {re.sub(r'/[^ ]*[.]ptx, ', '', why)}"]
    remarks = [reason.partition(":")[0] for reason in code.serialized]
    if code.tensor_memory > TENSOR_MEMORY_LIMIT:
        remarks.append(f"does not fit: {code.tensor_memory} columns of tensor memory")
    elif not code.fits:
        remarks.append("does not fit")
    return [
        *first,
        str(code.registers),
        _spilled(code),
        f"{code.shared_bytes} of {SHARED_LIMITS[code.chip]}",
        _counts(code.matrix_instructions),
        _counts({name: code.instructions[name] for name in LOADS if name in code.instructions}),
        str(sum(count for name, count in code.instructions.items() if name in BARRIERS)),
        ", ".join(remarks),
    ]


def _spilled(code: MachineCode) -> str:
    if not code.spills:
        return "0"
    loops = f", {code.loop_spills} in loops" if code.loop_spills else ""
    return f"{code.spill_stores + code.spill_loads or code.stack_bytes} B{loops}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def main(file: str, configurations: str = "mla.backends.trtllm_gen.configurations") -> None:
    """Compile what the module's `shipped(chip)` lists for each chip, and write the page about it."""
    shipped = importlib.import_module(configurations).shipped
    jobs = [job_of(configuration, chip) for chip in SHARED_LIMITS for configuration in shipped(chip)]
    Path(file).write_text(document(compile_all(jobs)))


def job_of(configuration: Any, chip: Chip) -> Job:
    """The job of a configuration: anything with the attributes of a `Job` but the chip; `options` may be missing."""
    names = ("name", "kernel_ref", "signature", "constants", "divisible_by_16", "num_warps", "num_stages")
    values = {name: getattr(configuration, name) for name in names}
    return Job(**values, chip=chip, options=getattr(configuration, "options", {}))


def document(codes: Iterable[MachineCode]) -> str:
    """The page about machine code."""
    return TEXT.format(triton=importlib.metadata.version("triton"), table=table(codes))


TEXT = """\
# What the compiler makes of the kernels

Every shipped configuration of the Triton kernels, compiled ahead of time by Triton {triton} with no GPU. This is what
was compiled, not what was run. `python -m mla.backends.trtllm_gen.machine_code docs/aot_trtllm_gen.md` writes this
page.

* registers: per thread. spilled: bytes per thread, stores and loads together; in loops: how many such instructions
  stand in the loops over keys.
* shared memory: bytes of a block, and how many a block of the chip may have.
* tensor cores, loads: how often the instructions stand in the code (loops once). LDGSTS and UTMALDG copy from global to
  shared memory asynchronously; LDG goes through registers.
* remarks: C75xx is the assembler's word for matrix instructions that it runs one after another.

{table}
"""


if __name__ == "__main__":  # pragma: no cover
    main(sys.argv[1])
