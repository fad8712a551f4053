"""From PTX to machine code: by the GPU's own driver, or with no GPU by NVIDIA's linker library or its assembler."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mla.backends.xqa.toolchain import cuda_bindings


class AssemblyError(RuntimeError):
    """The PTX was refused, or nothing that assembles it was found."""


def chip(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def by_driver(ptx: str) -> bytes:
    """Machine code for the GPU whose context is current."""
    driver = cuda_bindings("driver")

    def checked(result: Any) -> Any:
        status, *values = result
        if int(status) != 0:
            raise AssemblyError(f"the CUDA driver refused the kernel's PTX: {status.name}")
        return values[0] if len(values) == 1 else values

    state = checked(driver.cuLinkCreate(0, [], []))
    try:
        text = ptx.encode() + b"\0"
        kind = driver.CUjitInputType.CU_JIT_INPUT_PTX
        checked(driver.cuLinkAddData(state, kind, text, len(text), b"kernel.ptx", 0, [], []))
        address, size = checked(driver.cuLinkComplete(state))
        return ctypes.string_at(int(address), size)
    finally:
        driver.cuLinkDestroy(state)


def with_no_gpu(ptx: str, capability: tuple[int, int]) -> bytes:
    """Machine code for any chip, on any machine.

    Raises:
        AssemblyError: neither the linker library nor an assembler is here, or the PTX is refused.
    """
    problems = []
    for assemble in (_by_linker, _by_assembler):
        try:
            return assemble(ptx, capability)
        except _Absent as absent:
            problems.append(str(absent))
    raise AssemblyError(f"nothing here turns PTX into machine code: {'; '.join(problems)}")


class _Absent(Exception):
    pass


def _by_linker(ptx: str, capability: tuple[int, int]) -> bytes:
    """nvJitLink, as in the package nvidia-nvjitlink."""
    try:
        nvjitlink = cuda_bindings("nvjitlink")
        nvjitlink.version()
    except Exception as error:
        raise _Absent("nvJitLink cannot be loaded (pip install nvidia-nvjitlink)") from error
    handle = nvjitlink.create(2, [f"-arch={chip(capability)}", "-O3"])
    try:
        text = ptx.encode() + b"\0"
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), "kernel.ptx")
            nvjitlink.complete(handle)
        except Exception as error:
            log = bytearray(nvjitlink.get_error_log_size(handle))
            nvjitlink.get_error_log(handle, log)
            raise AssemblyError(f"nvJitLink refused the PTX: {bytes(log).decode(errors='replace')}") from error
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        return bytes(code)
    finally:
        nvjitlink.destroy(handle)


def _by_assembler(ptx: str, capability: tuple[int, int]) -> bytes:
    """ptxas, wherever it is found. One that is older than the PTX is asked again with the newest version it knows."""
    tools = [tool for name in ("ptxas", "ptxas-blackwell") for tool in find_tool(name)]
    if not tools:
        raise _Absent("there is no ptxas")
    complaint = ""
    for tool in reversed(tools):
        with tempfile.TemporaryDirectory() as folder:
            source, code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            for _ in range(2):
                source.write_text(ptx)
                command = [str(tool), f"-arch={chip(capability)}", "-O3", str(source), "-o", str(code)]
                run = subprocess.run(command, capture_output=True, text=True, check=False)
                if run.returncode == 0:
                    return code.read_bytes()
                complaint = run.stderr.strip()
                known = re.search(r"Unsupported \.version .*current version is '([\d.]+)'", complaint)
                if known is None:
                    break
                # The kernels use nothing that is new in the last versions, and the assembler would say so.
                ptx = re.sub(r"^\.version [\d.]+$", f".version {known[1]}", ptx, flags=re.MULTILINE)
    raise AssemblyError(f"ptxas refused the PTX: {complaint}")


def find_tool(name: str) -> Iterator[Path]:
    """Where one of NVIDIA's command-line tools may be: on the path, in a CUDA toolkit, in Python packages."""
    on_path = shutil.which(name)
    if on_path is not None:
        yield Path(on_path)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield from _if_file(Path(os.environ[variable], "bin", name))
    for package, places in {"nvidia": ("*/bin", "*/nvvm/bin"), "triton": ("backends/nvidia/bin",)}.items():
        found = find_spec(package)
        for root in (found.submodule_search_locations or []) if found is not None else []:
            for place in places:
                for folder in sorted(Path(root).glob(place)):
                    yield from _if_file(folder / name)


def _if_file(path: Path) -> Iterator[Path]:
    if path.is_file() and os.access(path, os.X_OK):
        yield path


def disassemble(code: bytes) -> list[str]:
    """The instructions of a cubin's kernels, one a line, without addresses and encodings.

    Raises:
        AssemblyError: neither cuobjdump nor nvdisasm was found, or they cannot read it.
    """
    commands = [[str(tool), "-sass"] for tool in find_tool("cuobjdump")]
    commands += [[str(tool), "-c"] for tool in find_tool("nvdisasm")]
    complaint = "there is no cuobjdump and no nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(code)
        for command in commands:
            run = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
            if run.returncode == 0:
                lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+([^;]*);", run.stdout, flags=re.MULTILINE)
                if lines:
                    return [re.sub(r"\s+", " ", line).strip() for line in lines]
            complaint = run.stderr.strip() or f"{command[0]} printed no instructions"
    raise AssemblyError(f"the machine code cannot be disassembled: {complaint}")
