"""Defines what the parts of the Hopper forward pass to each other.

`weight` is the weighting distribution, whose probabilities weight the moment, and `other` is the
reference distribution: the teacher and the student of forward KL.
"""

from typing import Any, NamedTuple


class SideTask(NamedTuple):
    """Holds the compile-time choices of one side."""

    DIM: int  # columns of its tiles
    COEFFICIENT: float  # of its log-probability in the moment
    CLAMPED: bool  # keeps its lowest score: NOTE [Clamps] in frozen_max.py
    BIASED: bool


class Task(NamedTuple):
    """Holds the compile-time choices of a launch; TASK inside of the kernel."""

    WEIGHT_IS_TEACHER: bool
    OTHER: SideTask
    WEIGHT: SideTask
    PERSISTENT: bool  # NOTE [Persistent kernels] in tile_scheduler.py
    WIDE: bool  # a stage holds one tile of one side: NOTE [Wide tiles] in frozen_max.py
    SECOND: bool  # a second pass over the keys: second_pass.py
    PAIRS: bool  # a stage's pair of tiles is one: NOTE [Pairs at once] in warp_groups.py
    SAME_BIAS: bool  # one bias for both sides: read once
    SQUARES: bool  # NOTE [Squares] in kernels/row_state.py
    PARTS: int  # programs of each of the last blocks: NOTE [Split-KV] in split_kv.py
    GROUPS: int  # warp groups that reduce
    SLOTS: int  # stages
    COEFFICIENTS: Any  # arguments.Form
    SPECIALIZED: Any  # second_pass.Specialized
    CONFIG: Any  # arguments.Config


class Tiles(NamedTuple):
    """Holds shared memory: queries of each warp group, stages of pairs of key tiles, barriers.

    If WIDE, both sides share their stages: tile i of `other` is load 2 i, that of `weight` load
    2 i + 1.
    """

    other_q: Any
    weight_q: Any
    other_k: Any
    weight_k: Any
    q_full: Any  # one for all warp groups; if PERSISTENT by warp group
    q_empty: Any  # of persistent kernels alone
    full: Any  # by stage, for both sides
    empty: Any


class Side(NamedTuple):
    """Configures one side of a launch."""

    q: Any  # descriptors of a warp group's queries, and of a tile or pair of keys
    k: Any
    group: Any  # query heads that share a key head
    scale: Any
    bias: Any  # biases.Bias


class Sides(NamedTuple):
    """Holds both sides, and the factor of their biases."""

    other: Any
    weight: Any
    bias_scale: Any


class Outputs(NamedTuple):
    """Holds pointers to values, statistics and the states of splits."""

    value: Any
    s_stats: Any
    t_stats: Any
    stats_stride: Any
    state: Any  # where a part writes the state of its head's row 0, fields apart by field_stride
    field_stride: Any


class Launch(NamedTuple):
    """Holds what the warp groups of a program share."""

    tiles: Any
    sides: Any
    grid: Any  # tile_scheduler.Grid
    masks: Any  # arguments.MaskArgs
    blocks: Any  # masks.MaskBlocks
    outputs: Any


class Place(NamedTuple):
    """Holds the state of a warp group: its queries, block and rows, and the pairs it has read."""

    oq: Any
    wq: Any
    block: Any  # tile_scheduler.Block
    first_row: Any
    rows: Any
    used: Any  # pairs of the program's blocks before
    end: Any  # after the last tile that its rows see
    sides: Any


class Sums(NamedTuple):
    """Holds sums per thread, relative to the frozen row max: sums of 2^x, moment, lowest scores.

    For squares, the sum of D^2 takes the place of the moment, and the sums of D e_s and e_s^2 the
    place of the lowest scores.
    """

    other: Any
    weight: Any
    moment: Any
    low_o: Any  # kept for a side with a clamp only
    low_w: Any
    base_o: Any
    base_w: Any
    ratio: Any  # of the row sums, of squares
