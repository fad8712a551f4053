"""Each instruction has its stand-in, its assembly is well formed, and the formats are those of PyTorch."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch

from mla.backends.xqa import isa
from mla.backends.xqa.emulator import formats, fragments, hardware, picture
from mla.backends.xqa.emulator.lanes import Lanes
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.instruction import INSTRUCTIONS, REGISTERS

RANDOM = np.random.default_rng(0)


@pytest.fixture
def lanes() -> Lanes:
    return Lanes(GlobalMemory(), 4096, 32, 0)


@pytest.mark.parametrize("instruction", INSTRUCTIONS.values(), ids=lambda instruction: instruction.name)
def test_the_stand_in_has_the_same_name_and_operands(instruction):
    stand_in = inspect.signature(getattr(Lanes, instruction.name))
    assert list(stand_in.parameters)[1:] == [name for name, _ in instruction.arguments]


@pytest.mark.parametrize("instruction", INSTRUCTIONS.values(), ids=lambda instruction: instruction.name)
def test_the_assembly_names_every_operand_once_declared(instruction):
    text, constraints = instruction.assembly()
    assert not re.search(r"<\w+>", text)
    operands = [kind for _, kind in instruction.arguments] + ([instruction.result] if instruction.result else [])
    registers = sum(REGISTERS[kind][1] for kind in operands)
    assert {int(number) for number in re.findall(r"\$(\d+)", text)} == set(range(registers))
    assert len([one for one in constraints.split(",") if one and not one.startswith("~")]) == registers


def test_a_name_that_is_called_nowhere_says_where_it_runs():
    with pytest.raises(RuntimeError, match="barrier runs on a GPU or in the emulator"):
        isa.barrier()
    with pytest.raises(RuntimeError, match="shared_base runs on a GPU or in the emulator"):
        isa.shared_base()


def numbers(count: int = 4096) -> np.ndarray:
    """fp32 numbers of all sizes, the borders of every format among them."""
    x = RANDOM.standard_normal(count).astype(np.float32) * np.float32(2.0) ** RANDOM.integers(-40, 40, count)
    borders = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 6e-8, 2.9e-8, 3.3895314e38, 3.4e38, 1e-45]
    return np.concatenate([x, np.array(borders, np.float32)]).astype(np.float32)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_rounding_is_that_of_pytorch(name):
    x = numbers()
    to, dtype = {"bf16": (formats.fp32_to_bf16, torch.bfloat16), "fp16": (formats.fp32_to_fp16, torch.float16)}[name]
    with np.errstate(over="ignore"):
        got = torch.from_numpy(to(x).view(np.int16)).view(dtype)
    expected = torch.from_numpy(x).to(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_widening_is_that_of_pytorch():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    got = torch.from_numpy(formats.e4m3_to_fp32(codes.numpy()))
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    halves = torch.from_numpy(formats.E4M3_AS_FP16.view(np.int16)).view(torch.float16).float()
    assert torch.equal(halves.isnan(), expected.isnan())
    assert torch.equal(halves.nan_to_num(), expected.nan_to_num())
    bits = np.arange(1 << 16, dtype=np.uint16)
    for widen, dtype in ((formats.bf16_to_fp32, torch.bfloat16), (formats.fp16_to_fp32, torch.float16)):
        wide = torch.from_numpy(bits.view(np.int16)).view(dtype).float()
        assert torch.equal(torch.from_numpy(widen(bits)).nan_to_num(), wide.nan_to_num())


def test_a_nan_becomes_the_one_nan_of_a_conversion(lanes):
    """PTX ISA 9.7.9.22: a conversion of NaN gives the canonical NaN of the format, whatever its bits were."""
    signalling, quiet = 0x7F800001, 0xFFC12345
    for bits in (signalling, quiet):
        x = np.full(32, bits, np.uint32).view(np.float32)
        assert set(lanes.pack_bf16(x, np.float32(1.0))) == {0x3F807FFF}
        assert set(lanes.pack_fp16(np.float32(1.0), x)) == {0x7FFF3C00}
    halves = np.full(32, 0xFE017CA1, np.uint32)  # two more, of fp16
    assert set(lanes.low_fp16(halves).view(np.uint32)) == {0x7FFFFFFF}
    assert set(lanes.high_fp16(halves).view(np.uint32)) == {0x7FFFFFFF}
    e4m3 = np.full(32, 0xFF7F, np.uint32)
    assert set(lanes.low_e4m3_to_fp16(e4m3)) == {0x7FFF7FFF}


def test_the_upper_half_of_a_product_is_that_of_unsigned_numbers(lanes):
    x, y = np.array([0xFFFFFFFF, 0x80000000, 7, -1]), np.array([0xFFFFFFFF, 2, 9, 3])
    assert list(lanes.high_product(np.resize(x, 32), np.resize(y, 32)))[:4] == [0xFFFFFFFE, 1, 0, 2]
    assert lanes.high_product(-1, -1) == 0xFFFFFFFE


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
def test_mma_is_a_matrix_product(lanes, kind):
    """The registers are filled lane by lane from two matrices, by the drawing of owners."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}[kind]
    per_word = 4 // dtype.itemsize
    a = torch.randn(16, 8 * per_word).to(dtype)
    b = torch.randn(8 * per_word, 8).to(dtype)
    c = torch.randn(16, 8)
    a_words = a.view(torch.int32).numpy().view(np.uint32)  # [16, 8]
    b_words = b.T.contiguous().view(torch.int32).numpy().view(np.uint32).T  # [8, 8 columns]
    registers = {
        **{f"a{i}": np.zeros(32, np.uint32) for i in range(4)},
        **{f"b{i}": np.zeros(32, np.uint32) for i in range(2)},
        **{f"c{i}": np.zeros(32, np.float32) for i in range(4)},
    }
    for fragment, words in (("A", a_words), ("B", b_words), ("C", c.numpy())):
        for row, cells in enumerate(picture.owners(fragment)):
            for column, cell in enumerate(cells):
                lane, register = cell.split(":")
                registers[register][int(lane)] = words[row, column]
    d = getattr(lanes, f"mma_{kind}")(
        [registers[f"a{i}"] for i in range(4)],
        [registers[f"b{i}"] for i in range(2)],
        [registers[f"c{i}"] for i in range(4)],
    )
    got = torch.from_numpy(fragments.matrix_c(d))
    assert torch.allclose(got, a.float() @ b.float() + c, atol=1e-4)
    assert all(np.array_equal(x, y) for x, y in zip(fragments.registers_of_c(fragments.matrix_c(d)), d, strict=True))


def test_ldmatrix_hands_out_fragments(lanes):
    """Rows of 16 bytes become a0 or b0; transposed, columns of 16-bit numbers do."""
    matrix = np.arange(8 * 8 * 4, dtype=np.uint16).reshape(32, 8)  # four matrices of 8 rows
    lanes.set_shared_u32x4(1024 + np.arange(32) * 16, list(np.ascontiguousarray(matrix).view(np.uint32).T), 1)
    lanes.barrier()
    plain = lanes.ldmatrix_x4(1024 + np.arange(32) * 16)
    turned = lanes.ldmatrix_x4_trans(1024 + np.arange(32) * 16)
    for i in range(4):
        one = matrix[8 * i : 8 * i + 8]
        for lane in range(32):
            g, t = lane // 4, lane % 4
            assert list(formats.halves(plain[i])[lane]) == [one[g, 2 * t], one[g, 2 * t + 1]]
            assert list(formats.halves(turned[i])[lane]) == [one[2 * t, g], one[2 * t + 1, g]]


def test_pictures_name_every_lane_once_per_register():
    for fragment, registers in (("A", 4), ("B", 2), ("C", 4)):
        cells = [cell for row in picture.owners(fragment) for cell in row]
        assert len(set(cells)) == len(cells) == 32 * registers
    assert "31:a3" in picture.draw("A")
    assert picture.lanes(np.arange(32)).splitlines()[7].endswith("0x0000001f")
    assert picture.lanes(np.ones(32, np.float32)).splitlines()[0] == "g=0  1  1  1  1"
    with pytest.raises(ValueError, match="expected"):
        picture.owners("D")


@pytest.mark.parametrize("name", hardware.CHECKS)
def test_the_check_of_each_instruction_runs_in_the_emulator_and_sees_a_difference(name):
    source = hardware.random_registers(name, seed=1)
    words = hardware.emulated(name, source)
    assert hardware.difference(name, words, words.clone()) is None
    lane, word = (int(i) for i in words.nonzero()[5])
    words_with_an_error = words.clone()
    words_with_an_error[lane, word] ^= 1 << 22
    assert hardware.difference(name, words_with_an_error, words) is not None
