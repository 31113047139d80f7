"""Defines what the parts of the Hopper backward pass to each other.

`own` is the side whose gradient a kernel computes, and `other` the other one: the student and the
teacher, or the reverse.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

# what `along` finds of a row, in this order
OWN_LSE, OTHER_LSE, DELTA, GRAD, CLAMP = (gl.constexpr(i) for i in range(5))
NUM_STATISTICS = gl.constexpr(5)
# what some row of a tile has: a negative incoming gradient (FOLDED), a probability below the clamp
NEGATIVE, CLAMPED = gl.constexpr(1), gl.constexpr(2)


class Task(NamedTuple):
    """Holds the compile-time choices of a launch; TASK inside of the kernel."""

    ROWS: bool  # dQ, otherwise dK
    STUDENT: bool  # own is the student
    PERSISTENT: bool  # a program computes several blocks: NOTE [Persistent kernels]
    HAS_LEFT: bool  # these as in arguments.Config
    HAS_RIGHT: bool
    HAS_MASK: bool
    IS_PACKED: bool
    # the gradient is COEFFICIENTS.TS (P - S): no logarithms, and the teacher's row sum is 1
    PLAIN: bool
    CLAMP: float  # if PLAIN: P counts for keys with S >= CLAMP only, as in its row sum; 0 is none
    SQUARES: float  # the gradient is own (SQUARES (other - own) - delta) if not 0: no logarithms
    FOLDED: bool  # NOTE [Folded gradients] in backward_loader.py
    COEFFICIENTS: Any
    GROUP_SIZE: int  # of dK: query heads of one of its SPLITS, which share a key head on each side
    SPLITS: int  # programs of an outer block: of dK for some of its heads each, of dQ of its tiles
    DIM: int  # head_dim of own
    HEAD_DIM: int  # columns of a tile of own: head_dim or, where that is none, a power of two
    OTHER_DIM: int
    BLOCK: int  # outer rows of a warp group
    INNER: int  # rows of an inner tile
    GROUPS: int  # warp groups that accumulate
    SLOTS: int  # of inner tiles in shared memory, a power of two
    PINNED: bool  # NOTE [A matmul always in flight] in backward.py
    OWN_BIAS: bool  # scores of the side have a bias
    OTHER_BIAS: bool
    SAME_BIAS: bool  # one bias for both sides: read once
    WHOLE_TILES: bool  # of a bias: no inner tile ends beyond it
    ADDS: bool  # dK, and dQ in the same kernel: NOTE [dQ by atomics] in attention/hopper/atomic.py


class Tiles(NamedTuple):
    """Holds shared memory: outer tiles of each warp group, stages of inner tiles, barriers."""

    own_outer: Any
    other_outer: Any
    own_inner: Any
    other_inner: Any
    statistics: Any  # of the inner rows, by stage
    marks: Any  # by stage: NEGATIVE and CLAMPED, of dK's inner rows
    outer_full: Any  # one for all warp groups; if PERSISTENT by warp group
    outer_empty: Any  # of persistent kernels alone
    full: Any
    empty: Any


class Side(NamedTuple):
    """Configures one side of a launch."""

    outer: Any  # descriptors of its outer and inner tiles
    inner: Any
    group: Any  # query heads that share a key head
    scale: Any
    bias: Any  # biases.Bias


class Sides(NamedTuple):
    """Holds both sides, and the factor of their biases."""

    own: Any
    other: Any
    bias_scale: Any


class Statistics(NamedTuple):
    """Holds pointers to the row statistics, and where those of the first head begin."""

    own: Any
    other: Any
    delta: Any
    grad: Any
    head_row: Any


class Launch(NamedTuple):
    """Holds what the warp groups of a program share."""

    tiles: Any
    handover: Any  # atomic.Handover where TASK.ADDS
    sides: Any
    grid: Any
    masks: Any  # arguments.MaskArgs
    blocks: Any  # masks.MaskBlocks
    stats: Any
    output: Any


class Work(NamedTuple):
    """Holds an outer block, and the range of inner tiles that it meets."""

    b: Any  # in the tensors: packed ones have one batch element
    first_head: Any  # of the queries: the head of dQ, the first that shares the keys of dK
    own_key_head: Any
    other_key_head: Any
    out_head: Any  # of the gradient, whose shares are heads of their own
    start: Any  # first row or key of the block
    first_tile: Any  # of the inner tiles
    num_tiles: Any  # of all heads together
    num_loads: Any  # an even number if not PERSISTENT: the last tile may come twice
    masks: Any  # Bounds
    seq: Any  # arguments.Sequence
    stats: Any  # Statistics
    list: Any  # of a mask's inner blocks: masks.list_at


class Place(NamedTuple):
    """Holds a warp group's state in a block: its outer tiles, and the inner ones that it needs."""

    own_outer: Any
    other_outer: Any
    first: Any  # of its outer rows
    outer: Any  # all of them
    kept: Any  # of dQ: their statistics
    marks: Any
    used: Any  # inner tiles of the program's blocks before
    start_whole: Any  # the tiles from here to stop_whole need no mask
    stop_whole: Any
    end: Any  # after the last tile


class Output(NamedTuple):
    """Holds the gradient, or the program's share of it: pointer, strides and factor."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    scale: Any
