"""Groups a kernel's arguments: runtime arguments of sides and masks, compile-time CONFIG.

NamedTuples keep a launch readable: a kernel gets `student`, `teacher` and `masks`, and passes them
whole to its helpers. A launch passes None for an absent tensor, and CONFIG says so. A tuple that a
jit function returns holds no None, because Triton 3.6 could not return it, but a pointer that is
never read.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, NamedTuple

from torch_streamkl.program.divergence_forms import Bilinear


class SideArgs(NamedTuple):
    """Holds pointers, strides (in elements) and factors of the student or the teacher."""

    q: Any
    q_b: Any
    q_h: Any
    q_m: Any
    q_d: Any
    k: Any
    k_b: Any
    k_h: Any
    k_n: Any
    k_d: Any
    bias: Any
    bias_b: Any
    bias_h: Any
    bias_m: Any
    bias_n: Any
    slopes: Any
    sink: Any
    scale: Any  # of the dot product; without a softcap also 1 / temperature and log2(e)
    softcap: Any
    group: Any  # query heads that share one key head


class MaskArgs(NamedTuple):
    """Holds everything that decides which keys a row may see."""

    mask: Any
    mask_b: Any
    mask_h: Any
    mask_m: Any
    mask_n: Any
    key_lengths: Any
    window_left: Any
    window_right: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqlen_q: Any
    seqlen_k: Any


class Window(NamedTuple):
    """Counts the keys before and after a row's position that it sees, if the kernel's flags bound
    them.
    """

    window_left: Any
    window_right: Any


class Mean(NamedTuple):
    """Holds log2 of the mean over teacher heads, for some query blocks (triton/head_mean.py)."""

    ptr: Any  # [rows, keys], float32
    stride: Any  # of a row


class SideConfig(NamedTuple):
    """Holds the compile-time choices of one side; SIDE inside of the kernels."""

    DIM: int  # head_dim, and the power of two that holds it
    BLOCK_D: int
    TOGETHER: int  # known vector alignment in elements, if strides are no multiples of 16
    SOFTCAP: bool
    BIAS: bool
    ALIBI: bool
    SINK: bool
    FLOOR: float  # log-probabilities above which no clamp is reached


class Config(NamedTuple):
    """Holds the compile-time choices of one kernel; CONFIG inside of the kernels."""

    BLOCK_M: int  # query rows of a tile
    BLOCK_N: int  # keys of a tile
    STUDENT: SideConfig
    TEACHER: SideConfig
    HAS_MASK: bool
    KEY_MASK: bool  # ... that is the same for all heads and rows, as one of padding is
    HAS_LEFT: bool  # a window bound on that side
    HAS_RIGHT: bool
    DENSE: bool  # a mask of pairs, a bias, full float32: all tiles are masked by elements
    FILLED: bool  # keys that are not allowed have a finite score and count
    FILL_VANISHES: bool  # ... but not where they have no probability: NOTE in row_state.py
    TWO_PASS: bool  # the functional is not linear in the log-probabilities
    GUARDED: bool  # ... but is where the clamps are not reached
    PRECISION: str  # of float32 dot products


class Form(NamedTuple):
    """Holds the coefficients of a functional.Bilinear at compile time; COEFFICIENTS in kernels."""

    TT: float
    TS: float
    ST: float
    SS: float
    T: float
    S: float
    SQUARES: float = 0.0  # of (P - S)^2; all others are 0 then

    @staticmethod
    def of(form: Bilinear | None) -> Form:
        """Returns the coefficients of a form, 0 without one."""
        return Form(*astuple(form or Bilinear()))


class State(NamedTuple):
    """Holds the running state of a block of rows (RowState in base 2), and data of guards and
    fills.
    """

    m_t: Any
    l_t: Any
    m_s: Any
    l_s: Any
    a: Any  # moments; of SQUARES the sums of D^2 and D e_s, NOTE [Squares] in row_state.py
    b: Any
    low_t: Any  # lowest allowed score
    low_s: Any
    count: Any  # allowed keys; of SQUARES the sum of e_s^2


class Bound(NamedTuple):
    """Holds one side as one program sees it: pointers at its batch element, head and sequence."""

    q: Any
    k: Any
    bias_offset: Any
    slope: Any
    sink: Any


class Sequence(NamedTuple):
    """Holds sizes of the program's sequence, and where its mask starts."""

    start_q: Any  # first row of q, and of the keys, in packed tensors
    start_k: Any
    num_rows: Any
    num_keys: Any
    num_valid: Any  # keys that key_lengths admits
    offset: Any  # key position that query 0 is aligned with
    mask_offset: Any


class Problem(NamedTuple):
    """Holds what all tiles of a sequence share."""

    student: Any  # SideArgs
    teacher: Any
    masks: Any  # MaskArgs
    seq: Any  # Sequence
    inv_temperature: Any  # times log2(e)


class Outputs(NamedTuple):
    """Holds pointers to values and statistics of rows."""

    value: Any
    s_stats: Any  # log-sum-exps, and stats_stride after them the deltas
    t_stats: Any
    stats_stride: Any


class GradientArgs(NamedTuple):
    """Holds pointer and strides of (splits of) a gradient to q or k, and its factor."""

    ptr: Any
    split: Any
    b: Any
    h: Any
    n: Any
    scale: Any


class Rows(NamedTuple):
    """Holds a block of query rows: what stays while the keys stream past."""

    qs: Any
    qt: Any
    student: Any  # Bound
    teacher: Any
    offs: Any


class Sums(NamedTuple):
    """Holds the second pass's sums over keys of f, h and g, and the number of allowed keys."""

    value: Any
    h: Any
    g: Any
    count: Any
