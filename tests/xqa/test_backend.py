"""What the backend says of problems: it refuses with sentences, and knows what of its toolchain is missing."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import mla
from mla.backends.xqa import backend, toolchain
from mla.backends.xqa.config import KINDS, SHARED_LIMIT, SHARED_PER_SM, Config
from mla.backends.xqa.emulator.backend import EmulatedBackend
from mla.backends.xqa.plan import AT_LEAST, Machine, fit, plan_for
from mla.testing import Case, build

GPU = torch.device("cuda", 0)


def on_a_gpu(case: Case = Case(lengths=(5,)), capability: tuple[int, int] = (12, 0), **changes):  # noqa: B008
    """The problem of a case as if it lay on a GPU: only shapes and dtypes are looked at."""
    return replace(build(case).problem, device=GPU, capability=capability, **changes)


@pytest.fixture
def complete(monkeypatch):
    monkeypatch.setattr(toolchain, "missing", lambda: ())


def test_it_is_a_backend():
    assert isinstance(backend, mla.Backend)
    assert backend.name == "xqa"


def test_on_a_cpu_the_device_is_the_reason():
    assert backend.why_not(build(Case()).problem) == ["the tensors are on cpu; it runs on cuda"]


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("capability", SHARED_LIMIT, ids=str)
def test_it_takes_the_whole_contract_on_the_chips_it_claims(capability):
    for case in (Case(), Case(top_k=5, heads=130, q_len=3), Case(page_size=7, out="float32", sinks="normal")):
        assert backend.why_not(on_a_gpu(case, capability)) == []


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("query", ["float8_e4m3fn", "bfloat16"])
def test_e4m3_begins_with_sm_89(query):
    case = Case(query=query, cache="float8_e4m3fn")
    (why,) = backend.why_not(on_a_gpu(case, (8, 6)))
    assert why == "the cache is float8_e4m3fn and the device is sm_86; it converts e4m3 from sm_89 on"
    assert backend.why_not(on_a_gpu(case, (8, 9))) == []


@pytest.mark.usefixtures("complete")
def test_other_chips_and_wide_formats_are_refused():
    (why,) = backend.why_not(on_a_gpu(capability=(7, 5)))
    assert why.startswith("the device is sm_75; it runs on sm_80")
    (why,) = backend.why_not(on_a_gpu(Case(query="float32", cache="float32")))
    assert why.startswith("query/cache dtypes are float32/float32")


@pytest.mark.usefixtures("complete")
def test_sizes_that_it_cannot_count_are_refused():
    (why,) = backend.why_not(on_a_gpu(page_size=1 << 30))  # two columns
    assert why == "block_tables hold 2147483648 tokens for each request; it counts up to 1073741824"
    (why,) = backend.why_not(on_a_gpu(batch=1 << 16, page_size=1 << 25))
    assert (
        why
        == "65536 requests with tables of 67108864 tokens may be 137439215616 pieces of work; it counts up to 2146435072"
    )
    (why,) = backend.why_not(on_a_gpu(Case(top_k=4), num_pages=1 << 26))
    assert why.startswith("the pool has 4294967296 token slots; in sparse mode")
    assert backend.why_not(on_a_gpu(num_pages=1 << 26)) == []


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("bound", [0, 1 << 31, 1 << 40])
def test_max_seq_len_is_no_reason(bound):
    """Calls that differ in it are taken for one another."""
    assert backend.why_not(on_a_gpu(max_seq_len=bound)) == []


def test_what_is_missing_of_the_toolchain_is_a_reason(monkeypatch):
    monkeypatch.setattr(toolchain, "missing", lambda: ("Numba is not installed", "no driver"))
    assert backend.why_not(on_a_gpu(capability=(7, 5)))[1:] == ["Numba is not installed", "no driver"]


@pytest.fixture
def fresh():
    """`toolchain.missing` asked anew, now and afterwards."""
    toolchain.missing.cache_clear()
    yield toolchain.missing
    toolchain.missing.cache_clear()


def driver(version: int = 13000, status: int = 0):
    failed = SimpleNamespace(name="CUDA_ERROR_UNKNOWN", __int__=lambda: status)
    outcome = type("Status", (), {"__int__": lambda self: status, "name": failed.name})()
    return SimpleNamespace(cuDriverGetVersion=lambda: (outcome, version))


def with_modules(monkeypatch, **modules):
    """`cuda.bindings` made of these; an exception is raised instead of an import."""

    def bindings(name: str):
        module = modules[name]
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(toolchain, "cuda_bindings", bindings)


def with_packages(monkeypatch, **versions):
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(toolchain.metadata, "version", version)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: object() if name in versions else None)


NVVM = SimpleNamespace(version=lambda: (2, 0))
ALL = {"numba": "0.61.0", "numba_cuda": "0.30.4", "nvidia_nvvm": "13.0.88"}


def test_nothing_is_missing_when_all_is_there(monkeypatch, fresh):
    with_packages(monkeypatch, **ALL)
    with_modules(monkeypatch, driver=driver(), nvvm=NVVM)
    assert fresh() == ()


@pytest.mark.parametrize(
    ("packages", "modules", "sentence"),
    [
        ({"numba": None}, {}, "Numba is not installed"),
        ({"numba_cuda": None}, {}, "numba-cuda is not installed"),
        ({"numba_cuda": "0.22.1"}, {}, "numba-cuda is 0.22.1; it needs 0.30 or newer"),
        ({}, {"driver": ImportError("No module named 'cuda'")}, "cuda-bindings cannot be imported (ImportError: No module named 'cuda')"),
        ({}, {"nvvm": RuntimeError("no libnvvm.so")}, "libnvvm, which turns Numba's code into PTX, cannot be loaded (RuntimeError: no libnvvm.so)"),
        ({}, {"driver": SimpleNamespace(cuDriverGetVersion=lambda: 1 / 0)}, "the CUDA driver cannot be loaded (ZeroDivisionError"),
        ({}, {"driver": driver(status=3)}, "the CUDA driver does not tell its version (CUDA_ERROR_UNKNOWN)"),
        ({}, {"driver": driver(12080)}, "libnvvm writes PTX for CUDA 13.0; the driver understands up to 12.8"),
    ],
)  # fmt: skip
def test_each_thing_that_can_be_missing_is_told(monkeypatch, fresh, packages, modules, sentence):
    with_packages(monkeypatch, **{name: version for name, version in (ALL | packages).items() if version is not None})
    with_modules(monkeypatch, **{"driver": driver(), "nvvm": NVVM} | modules)
    assert any(why.startswith(sentence) for why in fresh()), fresh()


def test_a_compiler_that_is_no_package_has_no_known_version(monkeypatch):
    with_packages(monkeypatch, numba="0.61.0")
    assert toolchain.compiler_version() is None
    assert "no numba-cuda" in toolchain.versions()
    assert "numba 0.61.0" in toolchain.versions()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capability", SHARED_LIMIT, ids=str)
@pytest.mark.parametrize("row_tiles", [1, 2, 4])
def test_every_configuration_fits_its_chip(kind, capability, row_tiles):
    config = fit(Config(kind=kind, row_tiles=row_tiles), capability)
    assert config.shared_bytes <= SHARED_LIMIT[capability]
    assert config.blocks_per_sm * (config.shared_bytes + 1024) <= SHARED_PER_SM[capability]
    assert config.stages >= 2
    assert config.row_tiles == min(row_tiles, 4 if capability == (9, 0) else 2)


def test_a_configuration_that_fits_nowhere_is_an_error(monkeypatch):
    monkeypatch.setitem(SHARED_LIMIT, (8, 6), 48 * 1024)
    with pytest.raises(ValueError, match="fits into the shared memory of sm_86"):
        fit(Config(), (8, 6))


def test_the_plan_of_a_problem():
    machine = Machine((9, 0), 132)
    p = build(Case(lengths=(5000,) * 4, heads=128)).problem
    plan = plan_for(p, torch.empty(4, 1, 128, 512, dtype=torch.bfloat16), machine)
    assert (plan.requests, plan.rows, plan.tiles, plan.teams, plan.decode_blocks) == (4, 128, 2, 66, 132)
    assert plan.at_least == AT_LEAST
    assert plan.config.row_tiles == 4
    assert plan.part_rows == 2 * 132 * 64
    assert (plan.slices, plan.merge_threads, plan.merge_blocks) == (1, 128, 4 * 128)
    one = build(Case(lengths=(5000,), heads=128)).problem
    plan = plan_for(one, torch.empty(1, 1, 128, 512, dtype=torch.bfloat16), machine)
    assert (plan.slices, plan.merge_threads, plan.merge_blocks) == (1, 512, 128)
    few = build(Case(lengths=(5000,), heads=16)).problem
    plan = plan_for(few, torch.empty(1, 1, 16, 512, dtype=torch.bfloat16), machine)
    assert (plan.slices, plan.merge_threads, plan.merge_blocks) == (4, 512, 16 * 4)
    tokens = few.table_width * few.page_size
    assert plan.teams == -(-(tokens // 32 + 1 + plan.overhead) // plan.at_least) < 132  # the table holds no more work
    some = build(Case(lengths=(32_000,), heads=16)).problem
    plan = plan_for(some, torch.empty(1, 1, 16, 512, dtype=torch.bfloat16), machine)
    assert plan.teams == plan.one_each == 132  # one to a multiprocessor
    more = build(Case(lengths=(32_000,) * 2, heads=16)).problem
    assert plan_for(more, torch.empty(2, 1, 16, 512, dtype=torch.bfloat16), machine).teams == 264
    sparse = build(Case(lengths=(5,) * 4, q_len=2, top_k=8, heads=16)).problem
    plan = plan_for(sparse, torch.empty(4, 2, 16, 512, dtype=torch.bfloat16), machine)
    assert (plan.requests, plan.rows, plan.tiles, plan.teams) == (8, 16, 1, 12)
    many = build(Case(lengths=(1,), heads=130)).problem
    plan = plan_for(many, torch.empty(1, 1, 130, 512, dtype=torch.bfloat16), Machine((12, 0), 2))
    assert (plan.tiles, plan.teams) == (5, 1)


def test_the_emulated_backend_claims_what_the_real_one_does():
    real, emulated = backend.capabilities, EmulatedBackend.capabilities
    assert replace(emulated, device_types=real.device_types, compute_capabilities=real.compute_capabilities) == real
