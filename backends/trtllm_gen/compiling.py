"""The process that compiles for `machine_code`: it loads Triton once, and forks for each job.

It is started by `machine_code.compile_all` alone, with a clean environment. A job whose compiler aborts takes its fork
along and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

JobDict = dict[str, Any]  # the fields of a `machine_code.Job`

NARROW_STORE = re.compile(r"STG\b.*[.][US](8|16)\b")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
LABEL = re.compile(r"^(\.L_x_\d+):")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
FIGURES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
}
OPERANDS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?[A-Z][\w.]*\s*([^;]*?)\s*;")
SERIALIZED = re.compile(r"\((C75\d\d)\) (.*)")


def work() -> None:
    """Read (folder, processes, jobs) from the standard input, and leave a file in the folder for each result."""
    folder, processes, jobs = pickle.load(sys.stdin.buffer)
    for reference in sorted({job["kernel_ref"] for job in jobs if ".py:" not in job["kernel_ref"]}):
        with contextlib.suppress(Exception):  # the job itself will tell
            find_kernel(reference)
    running: dict[int, int] = {}
    for index, job in enumerate(jobs):
        if len(running) == processes:
            _collect(folder, running)
        child = os.fork()
        if child == 0:
            _compile_and_end(job, folder, index)
        running[child] = index
    while running:
        _collect(folder, running)


def _compile_and_end(job: JobDict, folder: str, index: int) -> None:  # pragma: no cover - it ends without a report
    log = os.open(f"{folder}/{index}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/{index}.cache"  # a cached kernel would leave no log
    try:
        found = compile_here(job)
    except BaseException as error:  # a compiler may raise anything, and a fork must not go on as its parent
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(folder, f"{index}.json").write_text(json.dumps(found))
    os._exit(0)


def _collect(folder: str, running: dict[int, int]) -> None:
    child, status = os.wait()
    index = running.pop(child)
    file, log = Path(folder, f"{index}.json"), Path(folder, f"{index}.log")
    if not file.exists():
        told = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        file.write_text(json.dumps({"error": f"the compiler died ({os.waitstatus_to_exitcode(status)}): {told}"}))


def find_kernel(reference: str) -> Any:
    """The function that "module:attribute" or "path/to/file.py:attribute" names."""
    place, _, attribute = reference.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), attribute)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)


def compile_here(job: JobDict) -> dict[str, Any]:
    """Compile in this process: the fields of `machine_code.MachineCode` that are found."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = find_kernel(job["kernel_ref"])
    names = kernel.arg_names
    signature = signature_of(kernel, job)
    constants = {(names.index(name),): value for name, value in job["constants"].items() if name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in job["divisible_by_16"] if name in names}
    major, minor = job["chip"]
    target = GPUTarget("cuda", major * 10 + minor, 32)
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"], **job["options"]}
    log = io.StringIO()
    start = time.perf_counter()
    with contextlib.redirect_stdout(log):  # where TRITON_DUMP_PTXAS_LOG puts it
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=target, options=options)
    seconds = time.perf_counter() - start
    listing = disassemble(compiled.asm["cubin"])
    counts = opcodes(listing)
    classes: Counter[str] = Counter()
    for opcode, count in counts.items():
        classes[opcode.partition(".")[0]] += count
    return {
        "seconds": seconds,
        "shared_bytes": compiled.metadata.shared,
        "tensor_memory": compiled.metadata.tmem_size,
        "loop_spills": loop_spills(listing),
        "unguarded": unguarded(listing),
        "narrow_stores": sum(count for opcode, count in counts.items() if NARROW_STORE.match(opcode)),
        "instructions": dict(classes),
        "matrix_instructions": {
            name: count for name, count in counts.items() if name.partition(".")[0].endswith("MMA")
        },
        **read_log(log.getvalue()),
    }


def signature_of(kernel: Any, job: JobDict) -> dict[str, str]:
    """The type of every argument: a constant's, the job's, or that of the annotation.

    Raises:
        ValueError: an argument has none of the three.
    """
    annotated = {param.name: param.annotation_type for param in kernel.params}
    types = annotated | job["signature"] | dict.fromkeys(job["constants"], "constexpr")
    untyped = [name for name in kernel.arg_names if not types[name]]
    if untyped:
        raise ValueError(f"the signature of {job['kernel_ref']} does not tell the types of {', '.join(untyped)}")
    return {name: types[name] for name in kernel.arg_names}


def read_log(log: str) -> dict[str, Any]:
    """What the assembler says: registers, stack, spills, and why it serialises matrix instructions."""
    found: dict[str, Any] = {}
    for name, pattern in FIGURES.items():
        match = pattern.search(log)
        if match is None:
            raise ValueError(f"the assembler's log does not tell {name}: {log!r}")
        found[name] = int(match[1])
    found["serialized"] = sorted({f"{code}: {reason.strip()}" for code, reason in SERIALIZED.findall(log)})
    return found


def opcodes(listing: str) -> Counter[str]:
    """How often each opcode, with its modifiers, stands in a disassembly."""
    return Counter(INSTRUCTION.findall(listing))


def loop_spills(listing: str) -> int:
    """Instructions of a disassembly that spill or fetch spilled registers in innermost loops that copy or multiply."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops: list[range] = []
    for line in listing.splitlines():
        label, instruction = LABEL.match(line), INSTRUCTION.match(line)
        if label:
            labels[label[1]] = len(names)
        elif instruction:
            names.append(instruction[1].partition(".")[0])
            target = BRANCH.search(line)
            if target and target[1] in labels:
                loops.append(range(labels[target[1]], len(names)))
    at_work = [at for at, name in enumerate(names) if name.endswith("MMA") or name == "LDGSTS"]
    around = {min(found, key=len) for at in at_work if (found := [loop for loop in loops if at in loop])}
    innermost = [one for one in around if not any(_holds(one, other) for other in around)]
    return sum(names[at] in ("LDL", "STL") for at in set(chain.from_iterable(innermost)))


def unguarded(listing: str) -> int:
    """Barriers of a disassembly at which groups of warps get what to do, and which no other barrier guards.

    Triton hands over through shared memory at barrier 1 of all threads, and may write where warps that are late still
    read: a barrier has to stand between the last reading and that writing.
    """
    found, since = 0, ""
    for line in listing.splitlines():
        instruction = INSTRUCTION.match(line)
        name = instruction[1].partition(".")[0] if instruction else ""
        if name == "BAR":
            operands = OPERANDS.match(line)
            found += bool(operands and operands[1] == "0x1" and re.search("LDS .*STS ", since))
            since = ""
        elif name in ("LDS", "STS"):
            since += name + " "
    return found


def _holds(one: range, other: range) -> bool:
    return one != other and one.start <= other.start and other.stop <= one.stop


def disassembler() -> str:
    """The newest nvdisasm at hand: that of the package nvidia-cuda-nvdisasm, or the one that Triton brings."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nvidia-cuda-nvdisasm") or ():
            if file.name == "nvdisasm":
                return str(file.locate())
    import triton

    return str(triton.knobs.nvidia.nvdisasm.path)


def disassemble(cubin: bytes) -> str:
    """The machine code as text.

    Raises:
        RuntimeError: the disassembler does not know the chip. Triton 3.6's own does not know sm_103.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([disassembler(), "-c", file.name], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{run.stderr.strip()}: install nvidia-cuda-nvdisasm, whose disassembler is newer")
    return run.stdout


if __name__ == "__main__":  # pragma: no cover
    work()
