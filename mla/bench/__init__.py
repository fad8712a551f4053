"""Backends and published kernels on the same work, in one run: `mla bench`.

* `cases`, `floors`: what is computed, and the least time that it can take on a device of measured ceilings.
* `inputs`, `gate`: the tensors, and the judge that every contender passes before it is timed.
* `contenders`, `peers`: who takes part.
* `timing`, `ceilings`: how a call is timed, and the device's own rates in the same run.
* `run`, `results`, `pictures`: the loop, its record as JSON, and the record drawn.
"""
