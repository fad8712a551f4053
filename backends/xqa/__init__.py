"""backend="xqa": tensor-core kernels in Python, compiled with Numba CUDA; made for sm_120, they run from sm_80 on.

Nothing but PyTorch is imported until a call runs here: no Numba, no CUDA bindings.

    backend.py      what it claims, why it refuses        kernel/      the kernels, as plain Python functions
    plan.py         configuration, grids, arguments       isa.py       the instructions they are made of
    launcher.py     prepared calls, two launches          config.py    what is fixed when they are compiled
    driver.py       the CUDA driver                       specialize.py   kernels for a configuration and a machine
    compiler.py     Numba to PTX                          emulator/    the same kernels on a CPU, every access checked
    machine_code.py PTX to machine code                   aot.py       registers, spills and instructions, with no GPU
"""

from mla.backends.xqa.backend import XqaBackend, backend

__all__ = ["XqaBackend", "backend"]
