"""The smallest program that hands data over as the Hopper kernels do: NOTE in sanitize.py."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SIZE = gl.constexpr(64)


@gluon.jit
def _write(x_ptr, y_ptr, numbers, written):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    numbers.store(gl.load(x_ptr + gl.arange(0, SIZE, layout=layout)))
    mbarrier.arrive(written, count=1)


@gluon.jit
def _read(x_ptr, y_ptr, numbers, written):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(written, 0)
    gl.store(y_ptr + gl.arange(0, SIZE, layout=layout), numbers.load(layout))


@gluon.jit
def hand_over_kernel(x_ptr, y_ptr):
    """One warp writes to shared memory and arrives, four wait and read."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    numbers = gl.allocate_shared_memory(gl.float32, [SIZE], plain)
    written = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(written, count=1)
    gl.warp_specialize(
        [(_read, (x_ptr, y_ptr, numbers, written)), (_write, (x_ptr, y_ptr, numbers, written))],
        [1],
        [24],
    )


def hand_over(x: Tensor) -> Tensor:
    """A copy of 64 numbers, by way of shared memory and an mbarrier."""
    y = torch.empty_like(x)
    hand_over_kernel[(1,)](x, y, num_warps=4)
    return y
