"""A block of threads on a CPU: the kernels' own code, run in lockstep over numpy vectors, with every access checked.

The code objects are those that Numba compiles (`mla.backends.xqa.specialize`). A number that differs from thread to
thread is a vector [threads]; one that all threads share is a plain Python number, and only such a one can steer a
branch or a loop. Found and raised as `EmulatorError`:

* a branch or loop bound that differs from thread to thread;
* an access outside every tensor, outside shared memory, or not aligned to its size; a write to an input; two blocks
  of a grid that write the same place;
* a read of shared memory before the copy into it was waited for;
* two warps at one place in shared memory, one of them writing, with no barrier in between;
* a 32-bit operand that does not fit into 32 bits.

    errors.py   what can be found
    formats.py  bf16, fp16 and e4m3 in numpy
    memory.py   global memory: the tensors that a kernel was given
    shared.py   shared memory: copies under way, and who touched what since the last barrier
    lanes.py    the instructions of `isa.py`, under the same names
    launch.py   a grid of blocks
    trace.py    what a block did, step by step
    picture.py  fragments drawn: which lane holds what
    backend.py  the whole backend on CPU tensors, for tests and for reading along

It needs numpy and torch, no GPU, no Numba. A tile of 16 rows and 32 tokens takes about 10 ms.
"""
