"""The kernels: plain Python functions of one thread, compiled by Numba for a GPU, or run by the emulator on a CPU.

Both take the very same code objects (`mla.backends.xqa.specialize`). They are written in lockstep style, which is what
lets the emulator run a whole block as vectors:

* a branch or loop bound depends on numbers that all threads of a block share; what differs from thread to thread is
  chosen by `select(condition, yes, no)`, or by the `ok` of a load or store;
* fp32 numbers are written `float32(2.0)`: a bare 2.0 would make Numba compute in fp64;
* no name is changed in place (`x = x + y`, not `x += y`).

    constants.py   the numbers that a configuration fixes
    numbers.py     small helpers on number formats, and those that a configuration chooses between
    schedule.py    which block takes which tokens, from the lengths on the device
    memory.py      from a token to its address; keys into shared memory, queries into registers, results out
    attend.py      one tile of keys: scores, softmax, values
    decode.py      the kernel that reads the cache
    merge.py       the kernel that joins the parts of a request that several blocks shared
"""
