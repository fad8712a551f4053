"""The least work that a case asks for, and the least time that this takes on a device of measured ceilings.

Operations: 2 H (D + R) for each (query token, key) pair that the mask lets through. Bytes: every cache row that
somebody sees, once; the queries; the output in bf16. What a kernel reads twice, splits or merges is its own affair.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla.bench.cases import BenchCase

D, R = 576, 512
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
OUT_BYTES = 2
MATMUL_SPEEDUP = {"bf16": 1.0, "fp16": 1.0, "fp8": 2.0}
"""How much faster than in bf16 the device multiplies matrices of a format."""


@dataclass(frozen=True)
class Work:
    """What a case cannot do without."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Ceilings:
    """What the device did in the same run.

    Attributes:
        copy_gbs: GB/s of a device copy, bytes read and bytes written counted.
        read_gbs: GB/s of a sum over a large buffer.
        bf16_tflops: TFLOP/s of a large bf16 matrix product.
        empty_graph_us: microseconds of a graph that holds one tiny kernel: the floor of the method. None on a CPU.
    """

    copy_gbs: float
    read_gbs: float
    bf16_tflops: float
    empty_graph_us: float | None = None

    @property
    def gbs(self) -> float:
        """The memory ceiling: the better of copying and reading."""
        return max(self.copy_gbs, self.read_gbs)


def work(case: BenchCase) -> Work:
    """The operations and bytes of a case, counted exactly."""
    pairs = sum(case.visible(b, t) for b in range(case.batch) for t in range(case.q_len))
    rows = sum(case.visible(b, case.q_len - 1) for b in range(case.batch))  # the last token sees what the others see
    element = ELEMENT_BYTES[case.dtype]
    vectors = case.batch * case.q_len * case.heads
    return Work(
        flops=2 * pairs * case.heads * (D + R),
        bytes=rows * D * element + vectors * (D * element + R * OUT_BYTES),
    )


def floor_us(case: BenchCase, ceilings: Ceilings) -> float:
    """Microseconds below which the case cannot be: operations or bytes at their ceiling, whichever takes longer."""
    needed = work(case)
    computing = needed.flops / (ceilings.bf16_tflops * MATMUL_SPEEDUP[case.dtype] * 1e6)
    moving = needed.bytes / (ceilings.gbs * 1e3)
    return max(computing, moving)
