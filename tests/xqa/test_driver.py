"""What the driver is asked for, with a made-up driver in its place; the real one is asked in `test_on_a_gpu.py`."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla.backends.xqa import backend, disk_cache, launcher, machine_code, toolchain
from mla.backends.xqa import driver as driver_module
from mla.backends.xqa.config import Config
from mla.backends.xqa.driver import CudaError, Driver
from mla.testing import Case, build


class Status(int):
    @property
    def name(self) -> str:
        return {0: "CUDA_SUCCESS", 200: "CUDA_ERROR_INVALID_IMAGE"}.get(self, "CUDA_ERROR_UNKNOWN")


class MadeUpCuda:
    """The functions of `cuda.bindings.driver` that are used. `fails` names those that do."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic",
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout",
        CU_FUNC_ATTRIBUTE_NUM_REGS="registers",
        CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES="local",
    )
    CUjitInputType = SimpleNamespace(CU_JIT_INPUT_PTX="ptx")
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="serialization")

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.asked: list[tuple[Any, ...]] = []
        self.context = 0
        self.images = {b"good"}

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (Status(999 if name in self.fails else 0), *values)

    def cuDriverGetVersion(self):  # noqa: N802
        return self._answer("version", 13000)

    def cuCtxGetCurrent(self):  # noqa: N802
        return self._answer("current", self.context)

    def cuDeviceGet(self, index):  # noqa: N802
        return self._answer("device", index)

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return self._answer("retain", 5)

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.context = context
        return self._answer("set current")

    def cuModuleLoadData(self, image):  # noqa: N802
        return (Status(0 if image in self.images else 200), "module")

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return self._answer("function", f"function {name.decode()}")

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.asked.append((attribute, value))
        return self._answer("attribute")

    def cuFuncGetAttribute(self, attribute, function):  # noqa: N802
        return self._answer("get", {"registers": 126, "local": 0}[attribute])

    def cuFuncLoad(self, function):  # noqa: N802
        self.asked.append(("load", function))
        return self._answer("load")

    def cuLaunchKernel(self, *arguments):  # noqa: N802
        self.asked.append(("launch", *arguments))
        return self._answer("launch")

    def CUlaunchAttribute(self):  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace())

    def CUlaunchConfig(self):  # noqa: N802
        return SimpleNamespace()

    def cuLaunchKernelEx(self, form, function, parameters, extra):  # noqa: N802
        self.asked.append(("launch ex", form.hStream, form.gridDimX, form.blockDimX, form.sharedMemBytes))
        return self._answer("launch")

    def cuLinkCreate(self, count, options, values):  # noqa: N802
        return self._answer("link", "state")

    def cuLinkAddData(self, state, kind, data, size, *_):  # noqa: N802
        self.asked.append(("ptx", data[:-1].decode()))
        return self._answer("add")

    def cuLinkComplete(self, state):  # noqa: N802
        self.linked = ctypes.create_string_buffer(b"good")
        return self._answer("complete", ctypes.addressof(self.linked), 4)

    def cuLinkDestroy(self, state):  # noqa: N802
        self.asked.append(("destroy", state))


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    made_up = MadeUpCuda()
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    for module in (toolchain, machine_code):
        monkeypatch.setattr(module, "cuda_bindings", lambda name: made_up)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 78, raising=False)
    monkeypatch.setattr(driver_module, "compile_ptx", lambda config, kernel, capability: f"{kernel} for {capability}")
    return made_up


@pytest.fixture
def gpu(cuda) -> Driver:
    return Driver(torch.device("cuda", 0))


def compiled(cuda: MadeUpCuda) -> list[str]:
    return [what for name, what in (asked[:2] for asked in cuda.asked) if name == "ptx"]


def test_a_kernel_is_compiled_once_and_then_found_on_disk(cuda, gpu):
    for _ in range(2):
        loaded = gpu.load(Config(), "decode", 90_000)
        assert (loaded.function, loaded.registers, loaded.local_bytes) == ("function mla_xqa_decode", 126, 0)
    assert compiled(cuda) == ["decode for (9, 0)"]
    assert ("destroy", "state") in cuda.asked


def test_shared_memory_past_48_kb_is_asked_for_and_kernels_are_loaded_before_any_launch(cuda, gpu):
    gpu.load(Config(), "decode", 90_000)
    assert cuda.asked[-3:] == [("dynamic", 90_000), ("carveout", 100), ("load", "function mla_xqa_decode")]
    cuda.asked.clear()
    gpu.load(Config(), "merge", 1_000)
    assert [asked[0] for asked in cuda.asked] == ["ptx", "destroy", "carveout", "load"]


def test_both_kernels_divide_a_multiprocessors_memory_alike(cuda, gpu):
    asked = []
    for kernel, shared_bytes in (("decode", 90_000), ("merge", 1_000)):
        cuda.asked.clear()
        gpu.load(Config(), kernel, shared_bytes)
        asked.append([value for name, value in (one[:2] for one in cuda.asked) if name == "carveout"])
    assert asked == [[100], [100]]


def test_code_on_disk_that_cannot_be_loaded_is_compiled_again(cuda, gpu):
    gpu.load(Config(), "decode", 90_000)
    cuda.images = set()
    with pytest.raises(CudaError, match="CUDA error CUDA_ERROR_INVALID_IMAGE while loading machine code on cuda:0"):
        gpu.load(Config(), "decode", 90_000)
    cuda.images = {b"good"}
    gpu.load(Config(), "decode", 90_000)
    assert len(compiled(cuda)) == 2


def test_ptx_that_the_driver_refuses_is_told(cuda, gpu):
    cuda.fails.add("complete")
    with pytest.raises(machine_code.AssemblyError, match="the CUDA driver refused the kernel's PTX"):
        gpu.load(Config(), "decode", 90_000)
    assert ("destroy", "state") in cuda.asked


def test_any_ptx_can_be_loaded(cuda, gpu):
    assert gpu.load_ptx("text", "check").function == "function check"
    assert compiled(cuda) == ["text"]


def test_a_thread_without_a_context_takes_that_of_pytorch(cuda, gpu):
    gpu.ensure_context()
    assert cuda.context == 5
    cuda.context = 6
    gpu.ensure_context()
    assert cuda.context == 6
    other = Driver(torch.device("cuda", 0))
    other.ensure_context()
    assert cuda.context == 6


def test_the_stream_is_that_of_pytorch(cuda, gpu, monkeypatch):
    assert gpu.stream() == 78
    assert gpu.is_capturing() is False
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    assert Driver(torch.device("cuda", 0)).stream() == 77


def test_launches_pass_what_they_were_given(cuda, gpu):
    loaded = gpu.load(Config(), "decode", 90_000)
    gpu.launcher(loaded, 264, 256, 90_000, 4096, dependent=False)(7)
    assert cuda.asked[-1] == ("launch", loaded.function, 264, 1, 1, 256, 1, 1, 90_000, 7, 4096, 0)
    gpu.launcher(loaded, 64, 128, 1_000, 4096, dependent=True)(8)
    assert cuda.asked[-1] == ("launch ex", 8, 64, 128, 1_000)


@pytest.mark.parametrize("dependent", [False, True])
def test_a_launch_that_fails_is_told(cuda, gpu, dependent):
    launch = gpu.launcher(gpu.load(Config(), "decode", 90_000), 1, 256, 90_000, 4096, dependent=dependent)
    cuda.fails.add("launch")
    with pytest.raises(CudaError, match="CUDA error CUDA_ERROR_UNKNOWN while launching a kernel on cuda:0"):
        launch(7)


@pytest.fixture
def devices(cuda, monkeypatch):
    """Two made-up GPUs; the tensors lie on the CPU, and only their addresses are passed on."""
    current = [0]

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(launcher, "_launchers", {})
    return current


def moved(case: Case, index: int) -> Any:
    """The problem of a case, with another device written on it."""
    from dataclasses import replace

    scratch = torch.empty(1 << 25, dtype=torch.uint8)
    return replace(build(case).problem, device=torch.device("cuda", index), capability=(9, 0), workspace=scratch)


@pytest.mark.parametrize("index", [0, 1])
def test_a_call_launches_twice_under_its_devices_guard(cuda, devices, monkeypatch, index):
    seen = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda asked: seen.append((asked, devices[0])) or 78)
    p = moved(Case(lengths=(9,), heads=4, lse="rows"), index)
    backend.run(p, torch.empty(1, 1, 4, 512, dtype=torch.bfloat16), p.lse)
    assert [asked[0] for asked in cuda.asked if asked[0].startswith("launch")] == ["launch", "launch ex"]
    assert seen == [(index, index)]
    assert devices == [0]


def test_warming_up_loads_and_launches_nothing(cuda, devices):
    p = moved(Case(lengths=(9,), heads=4), 1)
    out = torch.empty(1, 1, 4, 512, dtype=torch.bfloat16)
    backend.warmup(p, out, None)
    names = [asked[0] for asked in cuda.asked]
    assert names.count("ptx") == 2
    assert not [name for name in names if name.startswith("launch")]
    backend.run(p, out, None)
    assert [asked[0] for asked in cuda.asked].count("ptx") == 2
    assert len(launcher._launchers[1]._prepared) == 1


def test_a_bound_call_is_under_its_devices_guard(cuda, devices, monkeypatch):
    seen = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda asked: seen.append((asked, devices[0])) or 78)
    p = moved(Case(lengths=(9,), heads=4), 1)
    out = torch.empty(1, 1, 4, 512, dtype=torch.bfloat16)
    bound = backend.bind(p, out, None)
    arguments = (p.query, p.kv_cache, p.block_tables, p.seq_lens, out, None, None, p.bmm1_scale, 1.0, p.workspace, 9)
    bound(*arguments)
    devices[0] = 1
    bound(*arguments)
    assert seen == [(1, 1), (1, 1)]
    assert [asked[0] for asked in cuda.asked if asked[0].startswith("launch")] == ["launch", "launch ex"] * 2
