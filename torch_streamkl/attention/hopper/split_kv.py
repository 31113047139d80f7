"""Splits the KV range of the last partial wave, and combines the states that the splits write.

NOTE [Split-KV]
A multiprocessor runs one block at a time, and without a causal mask all blocks take equally long.
So the last wave may leave most multiprocessors idle. There PARTS programs share a block, each with
a part of its keys, which fills the wave. A second kernel combines the states that they wrote.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_streamkl.attention.triton.forward import below_clamps, finite_lse, store_rows
from torch_streamkl.attention.triton.forward_splits import load_state
from torch_streamkl.kernels.row_state import finish, merge


@gluon.jit
def block_of(beyond, num_whole, PARTS: gl.constexpr):
    """Returns the block of program num_whole + beyond; earlier blocks have one program each."""
    return num_whole + gl.where(beyond < 0, beyond, beyond // PARTS)


@gluon.jit
def tiles_of_split(num_tiles, beyond, PARTS: gl.constexpr):
    """Returns the first tile and the end of a program's split."""
    part = beyond % PARTS
    first = gl.where(beyond < 0, 0, num_tiles * part // PARTS)
    stop = gl.where(beyond < 0, num_tiles, num_tiles * (part + 1) // PARTS)
    return first, stop


@triton.jit
def finish_rows(state, row, inside, outputs, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr):
    """Writes values and statistics; NaN for rows to be recomputed (NOTE [Frozen row max])."""
    lse_t, lse_s, value, student_delta, teacher_delta = finish(
        state, 0.0, 0.0, COEFFICIENTS, CONFIG
    )
    again = state.l_t != state.l_t
    if CONFIG.GUARDED:
        again |= below_clamps(state, finite_lse(lse_t), finite_lse(lse_s), CONFIG)
    value = tl.where(again, float("nan"), value)
    store_rows(outputs, row, inside, lse_t, lse_s, value, student_delta, teacher_delta)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def combine_kernel(
    state_ptr, field_stride, split_stride, first_row, num_rows, outputs,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes values and statistics of the last rows from the states of their splits.

    Rows are [batch * num_heads * seqlen_q].
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < num_rows
    state = load_state(state_ptr + offs, field_stride, inside)
    for part in tl.static_range(1, PARTS):
        state = merge(
            state,
            load_state(state_ptr + part * split_stride + offs, field_stride, inside),
            COEFFICIENTS,
        )
    row = first_row + offs.to(tl.int64)
    finish_rows(state, row, inside, outputs, COEFFICIENTS, CONFIG)
