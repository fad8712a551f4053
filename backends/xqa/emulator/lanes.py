"""The instructions of `isa.py` for all threads of a block at once, under the same names.

A value that differs from thread to thread is a vector [threads], a shared one is a plain number; instructions that read
memory at a shared address return a plain number, too. Integers are int64 here, registers of bits uint32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mla.backends.xqa.emulator import formats, fragments
from mla.backends.xqa.emulator.errors import EmulatorError
from mla.backends.xqa.emulator.formats import Array
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.emulator.shared import BASE, SharedMemory
from mla.backends.xqa.emulator.trace import Trace
from mla.backends.xqa.isa import EVICT_FIRST, EVICT_NORMAL

LANE = np.arange(32)


class Registers:
    """`cuda.local.array`: registers of each thread. Reading one gives what was written, never a view that changes."""

    def __init__(self, count: int, dtype: Any) -> None:
        self._values: list[Any] = [None] * count
        self._dtype = dtype

    def __setitem__(self, index: int, value: Any) -> None:
        self._values[index] = value

    def __getitem__(self, index: int) -> Any:
        value = self._values[index]
        if value is None or index < 0:
            raise EmulatorError("bounds", f"register {index} is read before it was written")
        return value


class Lanes:
    """One block: its threads' numbers, its shared memory, and each instruction as a method.

    Args:
        memory: what it may touch. shared_bytes, threads: the launch. block: its number in the grid.
        watch: look for races. banks: count bank conflicts. trace: where to write down what it does.
    """

    def __init__(
        self,
        memory: GlobalMemory,
        shared_bytes: int,
        threads: int,
        block: int,
        *,
        watch: bool = True,
        banks: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.trace = trace
        self.memory, self.block, self.threads = memory, block, threads
        self.warps = threads // 32
        self.shared = SharedMemory(shared_bytes, threads, watch=watch, banks=banks)
        self.everyone = np.ones(threads, bool)

    # ---- from whatever a kernel passes to what an instruction takes

    def floats(self, x: Any) -> Array:
        return np.broadcast_to(np.asarray(x, np.float32), self.threads)

    def bits(self, x: Any) -> Array:
        if isinstance(x, np.ndarray):
            return x if x.dtype == np.uint32 else (x.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
        return np.full(self.threads, int(x) & 0xFFFFFFFF, np.uint32)

    def integers(self, x: Any) -> Array:
        return np.broadcast_to(np.asarray(x, np.int64), self.threads)

    def flags(self, ok: Any) -> Array:
        return np.broadcast_to(np.asarray(ok) != 0, self.threads)

    def _addresses(self, x: Any) -> Array:
        """Of shared memory: they must fit into 32 bits."""
        at = self.integers(x)
        if int(at.min()) < 0 or int(at.max()) >= 1 << 31:
            raise EmulatorError("range", f"a 32-bit operand is {int(at.min())} to {int(at.max())}")
        return at

    def _by_warp(self, x: Array) -> Array:
        return x.reshape(self.warps, 32)

    # ---- who am I

    def thread_index(self) -> Array:
        return np.arange(self.threads, dtype=np.int64)

    def thread_index_anew(self) -> Array:
        return self.thread_index()

    def block_index(self) -> int:
        return self.block

    def shared_base(self) -> int:
        return BASE

    # ---- tensor cores

    def _mma(self, a: Any, b: Any, c: Any, kind: str) -> tuple[Array, ...]:
        widen = fragments.WIDEN[kind]
        left = fragments.matrix_a([self._by_warp(self.bits(x)) for x in a], widen)
        right = fragments.matrix_b([self._by_warp(self.bits(x)) for x in b], widen)
        sums = fragments.matrix_c([self._by_warp(self.floats(x)) for x in c])
        return tuple(x.reshape(-1) for x in fragments.registers_of_c(np.matmul(left, right) + sums))

    def mma_bf16(self, a: Any, b: Any, c: Any) -> tuple[Array, ...]:
        return self._mma(a, b, c, "bf16")

    def mma_fp16(self, a: Any, b: Any, c: Any) -> tuple[Array, ...]:
        return self._mma(a, b, c, "fp16")

    def mma_e4m3(self, a: Any, b: Any, c: Any) -> tuple[Array, ...]:
        return self._mma(a, b, c, "e4m3")

    # ---- matrices out of shared memory

    def _matrices(self, address: Any, count: int) -> Array:
        """[warps, count, 8 rows, 4 words], each row at the address that a lane gives."""
        at = self._addresses(address)
        lanes = None if count == 4 else np.flatnonzero(np.arange(self.threads) % 32 < 8 * count)
        words = self.shared.load(at if lanes is None else at[lanes], 16, lanes)
        return words.reshape(self.warps, count, 8, 4)

    def _plain(self, address: Any, count: int) -> tuple[Array, ...]:
        rows = self._matrices(address, count)
        return tuple(np.ascontiguousarray(rows[:, i]).reshape(-1) for i in range(count))

    def ldmatrix_x4(self, address: Any) -> tuple[Array, ...]:
        return self._plain(address, 4)

    def ldmatrix_x2(self, address: Any) -> tuple[Array, ...]:
        return self._plain(address, 2)

    def ldmatrix_x4_trans(self, address: Any) -> tuple[Array, ...]:
        columns = formats.halves(self._matrices(address, 4)).reshape(self.warps, 4, 4, 2, 8)  # rows as (t, low or high)
        words = formats.join(columns[:, :, :, 0], columns[:, :, :, 1]).transpose(0, 1, 3, 2)  # [warps, 4, g, t]
        return tuple(np.ascontiguousarray(words[:, i]).reshape(-1) for i in range(4))

    # ---- copies and barriers

    def cp_async16(self, to: Any, source: Any, size: Any, active: Any, policy: Any) -> None:
        where, wanted, on = self._addresses(to), self.integers(size), self.flags(active)
        if not np.isin(wanted, (0, 16)).all():
            raise EmulatorError("range", "a copy of 16 bytes reads 16 bytes or none")
        if not np.isin(policy, (EVICT_NORMAL, EVICT_FIRST)).all():
            raise EmulatorError("range", "a copy's policy is EVICT_NORMAL or EVICT_FIRST")
        data = self.memory.load(self.integers(source), 16, on & (wanted == 16))
        self.shared.copy(where, data.view(np.uint32), on)

    def cp_async_commit(self) -> None:
        self.shared.commit()

    def cp_async_wait_0(self) -> None:
        self.shared.wait(0)

    def cp_async_wait_1(self) -> None:
        self.shared.wait(1)

    def cp_async_wait_2(self) -> None:
        self.shared.wait(2)

    def barrier(self) -> None:
        self.shared.barrier()

    def barrier_any(self, flag: Any) -> int:
        self.shared.barrier()
        return int(self.flags(flag).any())

    def let_next_grid_start(self) -> None: ...

    def wait_for_last_grid(self) -> None: ...

    # ---- global memory

    def _load(self, address: Any, size: int, dtype: Any, ok: Any, otherwise: Any = 0) -> Any:
        if not isinstance(address, np.ndarray) and not isinstance(ok, np.ndarray):
            if not ok:
                return otherwise
            raw = self.memory.load(np.array([address], np.int64), size, np.ones(1, bool))
            return raw.view(dtype)[0, 0] if dtype == np.float32 else int(raw.view(dtype)[0, 0])
        active = self.flags(ok)
        raw = self.memory.load(self.integers(address), size, active).view(dtype)[:, 0]
        return np.where(active, raw, np.asarray(otherwise, dtype))

    def load_i32(self, address: Any, ok: Any, otherwise: Any) -> Any:
        loaded = self._load(address, 4, np.int32, ok, otherwise)
        return loaded.astype(np.int64) if isinstance(loaded, np.ndarray) else loaded

    def load_u32(self, address: Any, ok: Any) -> Any:
        return self._load(address, 4, np.uint32, ok)

    def load_u16(self, address: Any, ok: Any) -> Any:
        return self._load(address, 2, np.uint16, ok)

    def load_u8(self, address: Any, ok: Any) -> Any:
        return self._load(address, 1, np.uint8, ok)

    def load_f32(self, address: Any, ok: Any, otherwise: Any) -> Any:
        return self._load(address, 4, np.float32, ok, otherwise)

    def load_fresh_i32(self, address: Any) -> Any:
        return self._load(address, 4, np.int32, 1)

    def load_fresh_f32(self, address: Any, ok: Any, otherwise: Any) -> Any:
        return self._load(address, 4, np.float32, ok, otherwise)

    def load_fresh_f32x4(self, address: Any, ok: Any) -> tuple[Any, ...]:
        active = self.flags(ok)
        raw = self.memory.load(self.integers(address), 16, active).view(np.float32)
        raw = np.where(active[:, None], raw, np.float32(0))
        return tuple(np.ascontiguousarray(raw[:, i]) for i in range(4))

    def prefetch(self, address: Any, ok: Any) -> None:
        self.memory.load(self.integers(address), 1, self.flags(ok))  # only what may be read may be asked for

    def _store(self, address: Any, data: Array, ok: Any) -> None:
        raw = np.ascontiguousarray(data).reshape(self.threads, -1).view(np.uint8)
        self.memory.store(self.integers(address), raw, self.flags(ok))

    def store_i32(self, address: Any, value: Any, ok: Any) -> None:
        self._store(address, self.integers(value).astype(np.int32), ok)

    def store_f32(self, address: Any, value: Any, ok: Any) -> None:
        self._store(address, self.floats(value), ok)

    def store_f32x2(self, address: Any, value: Any, ok: Any) -> None:
        self._store(address, np.stack([self.floats(x) for x in value], 1), ok)

    def store_u32(self, address: Any, value: Any, ok: Any) -> None:
        self._store(address, self.bits(value), ok)

    def store_u16(self, address: Any, value: Any, ok: Any) -> None:
        self._store(address, self.bits(value).astype(np.uint16), ok)

    # ---- shared memory

    def _shared(self, address: Any, size: int, dtype: Any) -> Any:
        """[threads, numbers], or [numbers] at a shared address, which one thread of each warp reads here."""
        if isinstance(address, np.ndarray):
            return self.shared.load(self._addresses(address), size).view(dtype)
        words = self.shared.load(self._addresses(address)[: self.warps], size, np.arange(self.warps) * 32)
        return words[0].view(dtype)

    def shared_f32(self, address: Any) -> Any:
        return self._shared(address, 4, np.float32)[..., 0]

    def shared_f32x2(self, address: Any) -> tuple[Any, ...]:
        both = self._shared(address, 8, np.float32)
        return both[..., 0], both[..., 1]

    def shared_f32x4(self, address: Any) -> tuple[Any, ...]:
        four = self._shared(address, 16, np.float32)
        return four[..., 0], four[..., 1], four[..., 2], four[..., 3]

    def shared_u32(self, address: Any) -> Any:
        return self._shared(address, 4, np.uint32)[..., 0]

    def shared_i32(self, address: Any) -> Any:
        value = self._shared(address, 4, np.int32)[..., 0]
        return value.astype(np.int64) if value.ndim else int(value)

    def shared_u16(self, address: Any) -> Any:
        word = self._shared(address, 2, np.uint32)[..., 0]
        return (word >> ((np.asarray(address) & 2) * 8).astype(np.uint32)) & np.uint32(0xFFFF)

    def _set_shared(self, address: Any, words: Array, ok: Any = 1) -> None:
        data = np.ascontiguousarray(words).reshape(self.threads, -1).view(np.uint32)
        self.shared.store(self._addresses(address), data, self.flags(ok))

    def set_shared_f32(self, address: Any, value: Any, ok: Any) -> None:
        self._set_shared(address, self.floats(value), ok)

    def set_shared_f32x2(self, address: Any, value: Any) -> None:
        self._set_shared(address, np.stack([self.floats(x) for x in value], 1))

    def set_shared_f32x4(self, address: Any, value: Any) -> None:
        self._set_shared(address, np.stack([self.floats(x) for x in value], 1))

    def set_shared_u32(self, address: Any, value: Any) -> None:
        self._set_shared(address, self.bits(value))

    def set_shared_u32x2(self, address: Any, value: Any) -> None:
        self._set_shared(address, np.stack([self.bits(x) for x in value], 1))

    def set_shared_i32(self, address: Any, value: Any, ok: Any) -> None:
        self._set_shared(address, self.integers(value).astype(np.int32), ok)

    def set_shared_u32x4(self, address: Any, value: Any, ok: Any) -> None:
        self._set_shared(address, np.stack([self.bits(x) for x in value], 1), ok)

    # ---- between lanes

    def shuffle_xor(self, value: Any, mask: Any) -> Array:
        return self._by_warp(self.floats(value))[:, LANE ^ int(mask)].reshape(-1)

    def shuffle_up(self, value: Any, distance: Any) -> Array:
        from_lane = np.where(int(distance) <= LANE, LANE - int(distance), LANE)
        return self._by_warp(self.integers(value))[:, from_lane].reshape(-1)

    # ---- over a warp

    def _of_warps(self, results: Array) -> Any:
        """One result for each warp. Where they are the same in all warps it is a shared number."""
        return results[0] if (results == results[0]).all() else np.repeat(results, 32)

    def warp_sum(self, value: Any) -> Any:
        sums = self._by_warp(self.integers(value)).sum(1).astype(np.int32).astype(np.int64)
        result = self._of_warps(sums)
        return result if isinstance(result, np.ndarray) else int(result)

    def warp_max(self, value: Any) -> Any:
        numbers = self._by_warp(self.floats(value))
        if np.isnan(numbers).any():
            raise EmulatorError("range", "the largest of numbers one of which is NaN")
        return self._of_warps(numbers.max(1))

    # ---- arithmetic

    def exp2(self, x: Any) -> Any:
        result = np.exp2(np.asarray(x, np.float32))
        return np.where(np.abs(result) < np.float32(2.0**-126), np.float32(0), result)  # .ftz: no subnormals

    def log2(self, x: Any) -> Any:
        return np.log2(np.asarray(x, np.float32))

    def divide(self, x: Any, y: Any) -> Any:
        return np.asarray(x, np.float32) / np.asarray(y, np.float32)

    def larger(self, x: Any, y: Any) -> Any:
        return np.fmax(np.asarray(x, np.float32), np.asarray(y, np.float32))

    def quotient(self, x: Any, y: Any) -> Any:
        for value in (x, y):
            low, high = np.min(value), np.max(value)
            if low < 0 or high >= 1 << 32 or (value is y and low == 0):
                raise EmulatorError(
                    "division", f"{low} to {high} in a division of 32-bit numbers that are not negative"
                )
        return x // y

    def high_product(self, x: Any, y: Any) -> Any:
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            return ((self.bits(x).astype(np.uint64) * self.bits(y)) >> np.uint64(32)).astype(np.int64)
        return ((x & 0xFFFFFFFF) * (y & 0xFFFFFFFF)) >> 32

    def permute(self, x: Any, y: Any, selector: Any) -> Array:
        eight = np.stack([self.bits(x), self.bits(y)], 1).view(np.uint8)
        chosen = eight[:, [(int(selector) >> (4 * i)) & 7 for i in range(4)]]
        return np.ascontiguousarray(chosen).view(np.uint32)[:, 0]

    # ---- number formats

    def pack_bf16(self, low: Any, high: Any) -> Array:
        return formats.join(formats.fp32_to_bf16(self.floats(low)), formats.fp32_to_bf16(self.floats(high)))

    def pack_fp16(self, low: Any, high: Any) -> Array:
        return formats.join(formats.fp32_to_fp16(self.floats(low)), formats.fp32_to_fp16(self.floats(high)))

    def float_of_bits(self, bits: Any) -> Array:
        return self.bits(bits).view(np.float32)

    def low_fp16(self, x: Any) -> Array:
        return formats.fp16_to_fp32((self.bits(x) & 0xFFFF).astype(np.uint16))

    def high_fp16(self, x: Any) -> Array:
        return formats.fp16_to_fp32((self.bits(x) >> 16).astype(np.uint16))

    def _e4m3_pair(self, pair: Array) -> Array:
        return formats.join(formats.E4M3_AS_FP16[pair & 0xFF], formats.E4M3_AS_FP16[(pair >> 8) & 0xFF])

    def low_e4m3_to_fp16(self, x: Any) -> Array:
        return self._e4m3_pair(self.bits(x))

    def high_e4m3_to_fp16(self, x: Any) -> Array:
        return self._e4m3_pair(self.bits(x) >> 16)
