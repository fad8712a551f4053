"""A control for racecheck: a kernel that hands over to two groups of warps and does nothing else of note.

    compute-sanitizer --tool racecheck python benchmarks/hand_over.py [without]

With a barrier of each group's own, racecheck reports the words by which Triton tells groups what to do, as it does of
Hopper's decode kernel. `without` those barriers it reports nothing. The hand-over is the same code both times.
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS = gl.constexpr(128)  # of a group


@gluon.jit
def fill(out_ptr, number, GROUP: gl.constexpr, BARRIER: gl.constexpr):
    """This program's half of a row: `number` times 1 for the first group, times 2 for the second."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if BARRIER:
        gl.thread_barrier()
    at = out_ptr + (gl.program_id(0) * 2 + GROUP) * THREADS + gl.arange(0, THREADS, LAYOUT)
    gl.store(at, gl.full([THREADS], GROUP + 1, gl.float32, LAYOUT) * number)


@gluon.jit
def first_group(out_ptr, number, BARRIER: gl.constexpr):
    fill(out_ptr, number, 0, BARRIER)


@gluon.jit
def second_group(out_ptr, number, BARRIER: gl.constexpr):
    fill(out_ptr, number, 1, BARRIER)


@gluon.jit
def hand_over(out_ptr, number_ptr, BARRIER: gl.constexpr):
    """out [programs, 2, 128] = number * (1 for one group, 2 for the other)."""
    number = gl.load(number_ptr)
    gl.warp_specialize(
        [(first_group, (out_ptr, number, BARRIER)), (second_group, (out_ptr, number, BARRIER))], [4], [104]
    )


def main(barrier: bool) -> None:
    number = torch.full((1,), 3.0, device="cuda")
    out = torch.zeros(132, 2, 128, device="cuda")
    hand_over[(132,)](out, number, BARRIER=barrier, num_warps=4)
    wanted = torch.tensor([3.0, 6.0], device="cuda")[None, :, None].expand_as(out)
    print("right" if torch.equal(out, wanted) else "WRONG", "with barriers" if barrier else "without barriers")


if __name__ == "__main__":
    main(barrier=sys.argv[1:] != ["without"])
