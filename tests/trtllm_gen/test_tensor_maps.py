"""Maps of a pool for the copy engine, as far as no GPU is needed: which pools have one, its type, and when it is made."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla.testing import Case, build

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize(
    ("shape", "strides", "rows"),
    [
        ((5, 64, 576), (64 * 576, 576, 1), 320),
        ((5, 128, 576), (128 * 576, 576, 1), 640),
        ((5, 64, 576), (64 * 640, 640, 1), 320),  # rows with room between them
        ((5, 64, 576), (100 * 576, 576, 1), 464),  # pages with room for 36 rows between them
        ((5, 64, 576), (0, 576, 1), 64),  # one page under five numbers
        ((1, 64, 576), (64 * 576, 576, 1), 64),
        ((5, 64, 576), (64 * 576 + 8, 576, 1), 0),  # room for a part of a row
        ((5, 64, 576), (576, 0, 1), 0),  # one row under all numbers of a page
        ((5, 32, 576), (32 * 576, 576, 1), 0),
        ((5, 96, 576), (96 * 576, 576, 1), 0),
        ((0, 64, 576), (64 * 576, 576, 1), 0),
        ((1 << 25, 64, 576), (64 * 576, 576, 1), 0),  # rows are counted in 31 bits
        (((1 << 25) - 1, 64, 576), (64 * 576, 576, 1), (1 << 31) - 64),
    ],
)
def test_a_pool_whose_pages_are_rows_of_one_matrix_has_a_map(
    shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> None:
    from mla.backends.trtllm_gen.tensor_maps import pool_rows

    problem = build(Case(lengths=(64,))).problem
    pool = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
    changed = dataclasses.replace(problem, kv_cache=pool, num_pages=shape[0], page_size=shape[1])
    assert pool_rows(changed) == rows


def test_a_sparse_call_has_none() -> None:
    from mla.backends.trtllm_gen.tensor_maps import pool_rows

    assert pool_rows(build(Case(lengths=(64,), page_size=64)).problem) > 0
    assert pool_rows(build(Case(lengths=(64,), page_size=64, top_k=8)).problem) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_the_type_that_is_compiled_ahead_of_time_is_the_one_that_a_call_has(dtype: torch.dtype) -> None:
    from triton.runtime.jit import mangle_type

    from mla.backends.trtllm_gen.tensor_maps import COLUMNS, DTYPES, TensorMaps, type_of

    maps = TensorMaps(320, 576, dtype).descriptors(1 << 20)
    assert [mangle_type(map_) for map_ in maps] == [type_of(columns, DTYPES[dtype]) for columns in COLUMNS]


def launch_like_triton_s(below: Any) -> Any:
    launcher = below

    def launch(*arguments: Any) -> None:
        launcher(*arguments)

    return launch


def compiled_with(launch: Any) -> Any:
    return SimpleNamespace(run=SimpleNamespace(launch=launch), metadata=SimpleNamespace(tensordesc_meta=["a", "b"]))


def test_maps_are_encoded_once_for_each_place_that_a_pool_moves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    from mla.backends.trtllm_gen.tensor_maps import TensorMaps

    made: list[tuple[int, str]] = []

    def encode(map_: Any, meta: str) -> list[Any]:
        made.append((map_.base.data_ptr(), meta))
        return [f"{meta} of {map_.base.data_ptr()}", *map_.shape, *map_.strides]

    def below(*arguments: Any) -> None:
        pass

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    maps = TensorMaps(320, 640, torch.bfloat16)
    assert maps.launch_of(compiled_with(launch_like_triton_s(below))) is below
    for address in (4096, 4096, 8192, 8192, 4096):
        shape = (320, 576, 640, 1)
        assert maps.at(address) == (f"a of {address}", *shape, f"b of {address}", *shape)
    assert made == [(address, meta) for address in (4096, 8192, 4096) for meta in "ab"]


@pytest.mark.parametrize("missing", ["the launch below", "the encoder"])
def test_where_triton_is_built_otherwise_it_encodes_the_maps_itself(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    from triton.backends.nvidia import driver

    from mla.backends.trtllm_gen.tensor_maps import TensorMaps

    launch: Any = print if missing == "the launch below" else launch_like_triton_s(print)
    if missing == "the encoder":
        monkeypatch.delattr(driver, "make_tensordesc_arg")
    maps = TensorMaps(320, 576, torch.bfloat16)
    assert maps.launch_of(compiled_with(launch)) is launch
    latent, rope = maps.at(4096)
    assert (latent.base.data_ptr(), latent.block_shape, rope.block_shape) == (4096, [64, 512], [64, 64])
    assert maps.at(4096)[0] is latent
    assert maps.at(8192)[0].base.data_ptr() == 8192


def test_the_launch_below_is_found_in_this_triton() -> None:
    from triton.backends.nvidia import driver

    from mla.backends.trtllm_gen.tensor_maps import TensorMaps

    signature = {0: "*bf16", 1: "tensordesc<bf16[64, 512],X>"}
    launch = driver.wrap_handle_tensordesc(print, signature, [{}])
    assert TensorMaps(320, 576, torch.bfloat16).launch_of(compiled_with(launch)) is print
