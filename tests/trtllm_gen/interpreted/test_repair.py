"""The repair itself: once, for the versions it was made for, leaving nothing behind, and fast."""

from __future__ import annotations

import time

import pytest
import torch
import triton
import triton.language as tl

from mla.backends.trtllm_gen.interpreter import SUPPORTED, active, repair, unsupported


def test_an_error_in_a_kernel_leaves_the_language_as_it_was() -> None:
    @triton.jit
    def broken_kernel(out):
        tl.store(out, tl.undefined_name)

    before = tl.load, tl.range, tl.extra.cuda.gdc_wait
    with pytest.raises(Exception, match="undefined_name"):
        broken_kernel[(1,)](torch.zeros(1))
    assert (tl.load, tl.range, tl.extra.cuda.gdc_wait) == before


@triton.jit
def fma_kernel(source):
    x = tl.load(source + tl.arange(0, 2))
    tl.store(source + tl.arange(0, 2), tl.fma(x, x, x))


def test_what_is_not_repaired_says_so() -> None:
    with pytest.raises(Exception, match="fma of bf16 is not repaired"):
        fma_kernel[(1,)](torch.ones(2, dtype=torch.bfloat16))
    values = torch.tensor([2.0, 3.0])
    fma_kernel[(1,)](values)
    assert values.tolist() == [6, 12]


def test_a_second_repair_changes_nothing() -> None:
    patched = triton.runtime.interpreter.InterpreterBuilder.create_dot
    repair()
    assert triton.runtime.interpreter.InterpreterBuilder.create_dot is patched
    assert active()


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.1+git1a2b3c"])
def test_versions_that_are_repaired(version: str) -> None:
    assert unsupported(version) == ""


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_another_version_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oldest, newest = (".".join(map(str, pair)) for pair in SUPPORTED)
    assert f"Triton {oldest} to {newest}, and this is {version}" in unsupported(version)
    monkeypatch.setattr("mla.backends.trtllm_gen.interpreter._state.repaired", False)
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(RuntimeError, match="bf16 and e4m3 numbers are wrong"):
        repair()


@triton.jit
def tile_kernel(q, kv, out, n, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    row, col, key = tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    a = tl.load(q + row[:, None] * D + col[None, :])
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, n, BN):
        k = tl.load(kv + (start + key)[:, None] * D + col[None, :], mask=(start + key < n)[:, None], other=0.0)
        acc = tl.dot(tl.dot(a, tl.trans(k)).to(k.dtype), k, acc)
    tl.store(out + row[:, None] * D + col[None, :], acc)


def test_speed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    q, kv, out = (torch.zeros(rows, 512, dtype=torch.bfloat16) for rows in (16, 1024, 16))
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        tile_kernel[(1,)](q, kv, out.float(), 1024, BM=16, BN=64, D=512)
        seconds.append(time.perf_counter() - start)
    with capsys.disabled():
        print(f"\ninterpreter: {min(seconds) / 16 * 1000:.1f} ms for 16 rows by 64 keys of 512 numbers")
