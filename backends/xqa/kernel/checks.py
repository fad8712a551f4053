# mypy: ignore-errors
"""One small kernel for each instruction, of one block of 32 threads: it reads registers, does one thing, and writes
what each lane got. `emulator/hardware.py` runs them on a GPU and in the emulator, and compares.
"""

from mla.backends.xqa.isa import (
    EVICT_FIRST,
    EVICT_NORMAL,
    barrier,
    cp_async16,
    cp_async_commit,
    cp_async_wait_0,
    exp2,
    float_of_bits,
    high_e4m3_to_fp16,
    high_fp16,
    high_product,
    larger,
    ldmatrix_x2,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_u32,
    log2,
    low_e4m3_to_fp16,
    low_fp16,
    mma_bf16,
    mma_e4m3,
    mma_fp16,
    pack_bf16,
    pack_fp16,
    permute,
    quotient,
    shared_base,
    shuffle_up,
    shuffle_xor,
    store_f32,
    store_u32,
    thread_index,
    warp_max,
    warp_sum,
)
from mla.backends.xqa.kernel.numbers import int64, select


def word(source, i):
    return load_u32(source + (thread_index() * 16 + i) * 4, 1)


def put(result, i, value):
    store_u32(result + (thread_index() * 16 + i) * 4, value, 1)


def put_float(result, i, value):
    store_f32(result + (thread_index() * 16 + i) * 4, value, 1)


def four(source, i):
    return word(source, i), word(source, i + 1), word(source, i + 2), word(source, i + 3)


def floats(source, i):
    return (
        float_of_bits(word(source, i)),
        float_of_bits(word(source, i + 1)),
        float_of_bits(word(source, i + 2)),
        float_of_bits(word(source, i + 3)),
    )


def put_floats(result, values):
    put_float(result, 0, values[0])
    put_float(result, 1, values[1])
    put_float(result, 2, values[2])
    put_float(result, 3, values[3])


def put_words(result, values):
    put(result, 0, values[0])
    put(result, 1, values[1])
    put(result, 2, values[2])
    put(result, 3, values[3])


def check_mma_bf16(source, result):
    put_floats(result, mma_bf16(four(source, 0), (word(source, 4), word(source, 5)), floats(source, 8)))


def check_mma_fp16(source, result):
    put_floats(result, mma_fp16(four(source, 0), (word(source, 4), word(source, 5)), floats(source, 8)))


def check_mma_e4m3(source, result):
    put_floats(result, mma_e4m3(four(source, 0), (word(source, 4), word(source, 5)), floats(source, 8)))


def into_shared(source):
    """64 bytes of each lane by cp.async: lane i's from byte 64 i on; the last 16 of lane 31 are zero-filled.

    Half of them by one policy, half by the other: which it is changes no byte.
    """
    smem = shared_base()
    lane = thread_index()
    for i in range(4):
        size = 16 - 16 * ((lane == 31) & (i == 3))
        policy = select(i < 2, int64(EVICT_NORMAL), int64(EVICT_FIRST))
        cp_async16(smem + lane * 64 + i * 16, source + int64(lane) * 64 + i * 16, size, 1, policy)
    cp_async_commit()
    cp_async_wait_0()
    barrier()
    return smem


def check_ldmatrix_x4(source, result):
    put_words(result, ldmatrix_x4(into_shared(source) + thread_index() * 48))


def check_ldmatrix_x4_trans(source, result):
    put_words(result, ldmatrix_x4_trans(into_shared(source) + (thread_index() * 7 & 127) * 16))


def check_ldmatrix_x2(source, result):
    x, y = ldmatrix_x2(into_shared(source) + thread_index() * 64)
    put(result, 0, x)
    put(result, 1, y)


def check_formats(source, result):
    bits = word(source, 0)
    x = float_of_bits(word(source, 1))
    y = float_of_bits(word(source, 2))
    put(result, 0, low_e4m3_to_fp16(bits))
    put(result, 1, high_e4m3_to_fp16(bits))
    put(result, 2, pack_bf16(x, y))
    put(result, 3, pack_fp16(x, y))
    put_float(result, 4, low_fp16(bits))
    put_float(result, 5, high_fp16(bits))
    put(result, 6, permute(bits, word(source, 3), 0x6420))
    put(result, 7, permute(bits, word(source, 3), 0x3120))
    put_float(result, 8, larger(x, y))


def check_lanes(source, result):
    x = float_of_bits(word(source, 1))
    n = word(source, 3) & 0x3FFFFFFF
    put_float(result, 0, shuffle_xor(x, 1))
    put_float(result, 1, shuffle_xor(x, 16))
    put(result, 2, shuffle_up(n, 1))
    put(result, 3, shuffle_up(n, 8))
    put(result, 4, quotient(n, 7 + thread_index()))
    put(result, 5, high_product(n << 1, word(source, 0)))
    put(result, 6, warp_sum(n))
    put_float(result, 7, warp_max(x))
    put_float(result, 8, warp_max(-larger(x, -x)))


def check_math(source, result):
    x = float_of_bits(word(source, 1))
    put_float(result, 0, exp2(x))
    put_float(result, 1, log2(x * x))
