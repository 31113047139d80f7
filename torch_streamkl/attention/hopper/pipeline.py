"""Moves tiles through the stages of shared memory of the Hopper kernels.

NOTE [Pipeline stages]
Tile i (in the forward: pair of tiles i) is in stage i % SLOTS of shared memory (`stage_of`), and
is the (i // SLOTS)-th user of its stage, whose barriers complete one phase a user (`phase_of`). A
stage is loaded again when every warp group has released it. The descriptors of a stage should
depend on the iteration of a loop: those that do not are computed before the loop, and may be
spilled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from torch_streamkl.attention.hopper.warp_groups import phase_of, stage_of, start_scores

# Triton 3.6 has it under the second name
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def wait_for(tiles, i, more, SLOTS: gl.constexpr):
    """Waits until pair i is in its stage; `more` is false past the end.

    Past the end, matmuls read whatever the stage holds, and nobody reads the result.
    """
    mbarrier.wait(tiles.full.index(stage_of(i, SLOTS)), phase_of(i, SLOTS), pred=more)


@gluon.jit
def release(tiles, i, SLOTS: gl.constexpr):
    """Releases the stage of pair i: this warp group has read both sides."""
    mbarrier.arrive(tiles.empty.index(stage_of(i, SLOTS)), count=1)


@gluon.jit
def skip_stages(tiles, start, stop, SLOTS: gl.constexpr):
    """Waits for and releases the stages of pairs that none of the warp group's rows sees."""
    for i in range(start, stop):
        wait_for(tiles, i, True, SLOTS)
        release(tiles, i, SLOTS)


@gluon.jit
def wait_for_load(tiles, load, more, SLOTS: gl.constexpr):
    """Waits until a load of one tile is in its stage, as `wait_for` does."""
    mbarrier.wait(tiles.full.index(load % SLOTS), load // SLOTS & 1, pred=more)


@gluon.jit
def release_load(tiles, load, SLOTS: gl.constexpr):
    """Releases the stage of one tile that this warp group has read."""
    mbarrier.arrive(tiles.empty.index(load % SLOTS), count=1)


@gluon.jit
def start_load(q, keys, load, zero, SLOTS: gl.constexpr):
    """Issues q @ the keys of a load of one tile."""
    return start_scores(q, keys.index(load % SLOTS), zero)
