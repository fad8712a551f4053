"""What the kernels become on each chip, with no GPU: registers, spills, shared memory, instructions that matter.

`python -m mla.backends.xqa.aot` prints the table that is kept in `docs/aot_xqa.md`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mla.backends.xqa.compiler import compile_ptx
from mla.backends.xqa.config import SHARED_LIMIT, THREADS, Config
from mla.backends.xqa.machine_code import chip, disassemble, with_no_gpu
from mla.backends.xqa.plan import fit, kind_on

CHIPS = ((8, 0), (8, 9), (9, 0), (12, 0))
REGISTERS_PER_SM = 65536
FORMS = (
    Config("bf16", row_tiles=1),
    Config("bf16", row_tiles=2),
    Config("bf16", row_tiles=4),
    Config("fp16", row_tiles=2),
    Config("e4m3", row_tiles=1),
    Config("e4m3", row_tiles=2),
    Config("e4m3", row_tiles=4),
    Config("bf16_on_e4m3", row_tiles=1),
    Config("bf16_on_e4m3", row_tiles=2),
    Config("bf16_on_e4m3", row_tiles=4),
    Config("fp16_on_e4m3", row_tiles=2),
    Config("bf16", row_tiles=1, sparse=True),
    Config("bf16", row_tiles=2, sparse=True),
    Config("bf16", row_tiles=4, sparse=True),
    Config("e4m3", row_tiles=4, sparse=True),
    Config("bf16", row_tiles=2, aligned=False, out="fp32", out_pairs=False),
)
"""What the table shows: every kind, dense and sparse, with few rows and with many, and the slow path."""

COUNTED = ("HMMA", "QMMA", "LDSM", "LDGSTS", "BAR", "STL", "LDL")
"""Tensor cores (16 bits, 8 bits), ldmatrix, cp.async, barriers; stores and loads of spilled registers."""


@dataclass(frozen=True)
class Record:
    """One kernel on one chip.

    Attributes:
        capability, kernel, config: what it is.
        registers: of a thread. stack_bytes: of a thread's local memory, spills included.
        counts: instructions in the machine code, by the names in `COUNTED`.
    """

    capability: tuple[int, int]
    kernel: str
    config: Config
    registers: int
    stack_bytes: int
    counts: dict[str, int]

    @property
    def spills(self) -> int:
        """Instructions that move registers to local memory and back."""
        return self.counts["STL"] + self.counts["LDL"]

    @property
    def fits(self) -> bool:
        """As many blocks as planned share the registers, and one has the shared memory that it asks for."""
        enough = self.registers * THREADS * self.config.blocks_per_sm <= REGISTERS_PER_SM
        return enough and self.config.shared_bytes <= SHARED_LIMIT[self.capability]


def record(form: Config, kernel: str, capability: tuple[int, int]) -> Record:
    """Compile a kernel in the configuration that `form` takes on a chip, and look at it. Takes some seconds."""
    config = fit(form, capability)
    code = with_no_gpu(compile_ptx(config, kernel, capability), capability)
    registers, stack_bytes = resources(code)
    words = Counter(opcode(line) for line in disassemble(code))
    return Record(capability, kernel, config, registers, stack_bytes, {name: words[name] for name in COUNTED})


def opcode(line: str) -> str:
    """The operation of a line of machine code, without predicate and modifiers."""
    words = line.split()
    return words[1 if words[0].startswith("@") else 0].partition(".")[0]


def resources(code: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack) from the `.nv.info` section of a cubin, an ELF file."""
    (sections_at,) = struct.unpack_from("<Q", code, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + i * entry_size) for i in range(count)]
    names_at = sections[names_index][4]
    registers = stack_bytes = 0
    for name, _, _, _, begin, size, *_ in sections:
        if code[names_at + name : code.index(b"\0", names_at + name)] != b".nv.info":
            continue
        at, end = begin, begin + size
        while at < end:
            form, attribute, length = struct.unpack_from("<BBH", code, at)
            at += 4
            if form != 4:  # the value itself stands in the place of the length
                continue
            if attribute in (0x2F, 0x11):  # (symbol, registers) or (symbol, bytes of its frame)
                _, value = struct.unpack_from("<II", code, at)
                registers = max(registers, value if attribute == 0x2F else 0)
                stack_bytes = max(stack_bytes, value if attribute == 0x11 else 0)
            at += length
    return registers, stack_bytes


def claimed(form: Config, capability: tuple[int, int]) -> Config | None:
    """The form as this chip takes it, or None where e4m3 is refused."""
    if form.eight_bit and capability < (8, 9):
        return None
    return Config(**{**vars(form), "kind": kind_on(form.kind, capability), "dependent": capability >= (9, 0)})


def survey(forms: Iterable[Config] = FORMS, chips: Iterable[tuple[int, int]] = CHIPS) -> list[Record]:
    """The decode kernel in every form on every chip, and the merge kernel once per chip."""
    records = []
    for capability in chips:
        claims = (claimed(form, capability) for form in forms)
        taken = list(dict.fromkeys(fit(config, capability) for config in claims if config is not None))
        records += [record(config, "decode", capability) for config in taken]
        records += [record(taken[0], "merge", capability)]
    return records


def describe(config: Config) -> str:
    """What sets a configuration apart, in words."""
    words = [config.kind.replace("_", " ")]
    words += ["sparse"] * config.sparse
    words += ["not aligned"] * (not config.aligned)
    words += [f"{config.out} out"] * (config.out != "bf16")
    return ", ".join(words)


def markdown(records: Iterable[Record]) -> str:
    """The records as a table for the documentation."""
    columns = "chip, kernel, rows, keys in a tile, stages, blocks per SM, registers, spills, shared memory"
    columns += ", HMMA, QMMA, ldmatrix, cp.async"
    lines = [f"| {columns.replace(', ', ' | ')} |", "| --- | --- |" + " ---: |" * 11]
    for one in records:
        c, n = one.config, one.counts
        if one.kernel == "merge":
            cells = [chip(one.capability), "merge", "", "", "", "", one.registers, one.spills, "", "", "", "", ""]
        else:
            cells = [chip(one.capability), f"decode, {describe(c)}", c.rows, c.tile, c.stages, c.blocks_per_sm]
            cells += [one.registers, one.spills, c.shared_bytes, n["HMMA"], n["QMMA"], n["LDSM"], n["LDGSTS"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


PREAMBLE = """# The xqa kernels, compiled with no GPU

What each kernel becomes on each chip: printed by `python -m mla.backends.xqa.aot`, and held by tests (no spills, shared
memory within the chip's limit, the expected tensor-core instructions). Nothing here says that a kernel ran; it says
what would run. Limits of shared memory per block: {limits}.

`HMMA` multiplies 16-bit numbers, `QMMA` e4m3. Rows are query vectors that one read of a key serves. A chip without
e4m3 tensor cores behind `mma.sync` widens e4m3 to fp16 ("e4m3 by fp16").

"""


def page(records: Iterable[Record]) -> str:
    """The whole page."""
    limits = ", ".join(f"{chip(capability)} {SHARED_LIMIT[capability]}" for capability in CHIPS)
    return PREAMBLE.format(limits=limits) + markdown(records) + "\n"


if __name__ == "__main__":
    print(page(survey()), end="")
