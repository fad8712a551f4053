"""The CUDA driver, by way of `cuda.bindings`: load machine code, launch it. Works in the context that PyTorch made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mla.backends.xqa import disk_cache, machine_code, toolchain
from mla.backends.xqa.compiler import ENTRY, compile_ptx, relevant
from mla.backends.xqa.config import Config
from mla.backends.xqa.plan import Machine

Launch = Callable[[int], None]
"""Launches one kernel on the stream with this handle."""


@dataclass(frozen=True)
class Loaded:
    """A kernel on one GPU.

    Attributes:
        function: the driver's handle.
        registers, local_bytes: of a thread; local_bytes are spills.
    """

    function: Any
    registers: int
    local_bytes: int


class CudaError(RuntimeError):
    """The CUDA driver refused something."""


def _current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


class Driver:
    """One GPU. Not safe for use by several threads at once: the launcher sees to that."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = toolchain.cuda_bindings("driver")
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.machine = Machine((properties.major, properties.minor), properties.multi_processor_count)
        self._seen = threading.local()
        # Some times quicker than building a torch.cuda.Stream; what torch's own compiler uses.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)

    def _checked(self, result: Any, doing: str) -> Any:
        status, *values = result
        if int(status) != 0:
            raise CudaError(f"CUDA error {status.name} while {doing} on {self.device}")
        return values[0] if len(values) == 1 else values

    def ensure_context(self) -> None:
        """Make PyTorch's context current in this thread, if the thread has none yet. The device must be current."""
        if getattr(self._seen, "ready", False):
            return
        cuda = self._cuda
        current = self._checked(cuda.cuCtxGetCurrent(), "asking for the context")
        if int(current) == 0:
            handle = self._checked(cuda.cuDeviceGet(self.device.index), "asking for the device")
            context = self._checked(cuda.cuDevicePrimaryCtxRetain(handle), "taking the context")
            self._checked(cuda.cuCtxSetCurrent(context), "making the context current")
        self._seen.ready = True

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def stream(self) -> int:
        """The handle of PyTorch's current stream on this device."""
        return int(self._raw_stream(self.device.index))

    def load(self, config: Config, kernel: str, shared_bytes: int) -> Loaded:
        """Compile (or find on disk) and load a kernel; the device and its context are current."""
        cuda, config = self._cuda, relevant(config, kernel)
        version = self._checked(cuda.cuDriverGetVersion(), "asking for the driver's version")
        name = disk_cache.key(kernel, config, self.machine.capability, version, toolchain.versions())
        code = disk_cache.read(name)
        function = None if code is None else self._function(code, ENTRY[kernel], strict=False)
        if function is None:
            code = machine_code.by_driver(compile_ptx(config, kernel, self.machine.capability))
            disk_cache.write(name, code)
            function = self._function(code, ENTRY[kernel], strict=True)
        attribute = cuda.CUfunction_attribute
        if shared_bytes > 48 * 1024:
            most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(cuda.cuFuncSetAttribute(function, most, shared_bytes), "asking for shared memory")
        # Of every kernel alike: a multiprocessor divides its memory anew only when nothing runs on it, so a kernel that
        # asks for another division cannot start beside the one before it.
        all_of_it = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._checked(cuda.cuFuncSetAttribute(function, all_of_it, 100), "asking for shared memory")
        if hasattr(cuda, "cuFuncLoad"):  # now, not at the first launch, which may be inside a graph capture
            self._checked(cuda.cuFuncLoad(function), "loading a kernel")
        registers = self._checked(
            cuda.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function), "asking a kernel"
        )
        local = self._checked(
            cuda.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function), "asking a kernel"
        )
        return Loaded(function, int(registers), int(local))

    def load_ptx(self, ptx: str, entry: str) -> Loaded:
        """Assemble and load any kernel, past the cache: for experiments and checks."""
        return Loaded(self._function(machine_code.by_driver(ptx), entry, strict=True), 0, 0)

    def _function(self, code: bytes, entry: str, *, strict: bool) -> Any:
        """The entry of loaded machine code; None when it cannot be loaded and that is not an error."""
        status, module = self._cuda.cuModuleLoadData(code)
        if int(status) != 0 and not strict:
            return None
        self._checked((status,), "loading machine code")
        return self._checked(self._cuda.cuModuleGetFunction(module, entry.encode()), "looking for a kernel")

    def launcher(
        self, kernel: Loaded, blocks: int, threads: int, shared_bytes: int, parameters: int, *, dependent: bool
    ) -> Launch:
        """A function that launches a kernel with everything fixed but the stream and what lies at `parameters`.

        Args:
            kernel: from `load`.
            blocks, threads, shared_bytes: the launch.
            parameters: address of an array of addresses, one for each parameter.
            dependent: the kernel may start before the one before it has ended; it waits by itself.
        """
        cuda = self._cuda
        function = kernel.function

        def refused(status: Any) -> CudaError:
            return CudaError(f"CUDA error {status.name} while launching a kernel on {self.device}")

        if not dependent:
            launch_kernel = cuda.cuLaunchKernel

            def launch(stream: int) -> None:
                (status,) = launch_kernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, 0)
                if status != 0:
                    raise refused(status)

            return launch

        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        form = cuda.CUlaunchConfig()
        form.gridDimX, form.gridDimY, form.gridDimZ = blocks, 1, 1
        form.blockDimX, form.blockDimY, form.blockDimZ = threads, 1, 1
        form.sharedMemBytes = shared_bytes
        form.attrs, form.numAttrs = [attribute], 1
        launch_kernel_ex = cuda.cuLaunchKernelEx

        def launch_dependent(stream: int) -> None:
            form.hStream = stream
            (status,) = launch_kernel_ex(form, function, parameters, 0)
            if status != 0:
                raise refused(status)

        return launch_dependent
