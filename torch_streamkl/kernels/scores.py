"""Computes score tiles in Triton: loads, dot products, the score transform, masks."""

import triton
import triton.language as tl

from torch_streamkl.kernels.arguments import Bound, Sequence
from torch_streamkl.kernels.row_state import LOG2E

MASK_CHUNK = tl.constexpr(512)  # keys that a program looks at together for where padding ends


@triton.jit
def bind_sequence(masks, b, h, CONFIG: tl.constexpr):
    """Returns sizes and masks of batch element (or packed sequence) b and student head h."""
    start_q = 0
    start_k = 0
    num_rows = masks.seqlen_q
    num_keys = masks.seqlen_k
    if masks.cu_seqlens_q is not None:
        start_q = tl.load(masks.cu_seqlens_q + b)
        start_k = tl.load(masks.cu_seqlens_k + b)
        num_rows = tl.load(masks.cu_seqlens_q + b + 1) - start_q
        num_keys = tl.load(masks.cu_seqlens_k + b + 1) - start_k
    num_valid = num_keys
    if masks.key_lengths is not None:
        num_valid = tl.minimum(num_keys, tl.load(masks.key_lengths + b).to(tl.int32))
    mask_offset = b.to(tl.int64) * 0
    if CONFIG.HAS_MASK:
        mask_offset = b.to(tl.int64) * masks.mask_b + h.to(tl.int64) * masks.mask_h
    return Sequence(
        start_q, start_k, num_rows, num_keys, num_valid, num_keys - num_rows, mask_offset
    )


@triton.jit
def bind_rows(masks, block, bh, num_heads, ratio, CONFIG: tl.constexpr):
    """Returns batch element, head, first row and sequence of a block of rows of head bh of all
    batches.

    ``ratio`` heads share the masks of a student head.
    """
    b = bh // num_heads
    h = bh % num_heads
    return b, h, block * CONFIG.BLOCK_M, bind_sequence(masks, b, h // ratio, CONFIG)


@triton.jit
def bind_side(
    side, masks, seq, b, h, inv_temperature, STUDENT: tl.constexpr, CONFIG: tl.constexpr
):
    """Moves one side's pointers to query head h."""
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    b = b.to(tl.int64)
    if masks.cu_seqlens_q is not None:
        b = b * 0  # packed tensors have one batch element
    head = h.to(tl.int64)  # one head of a mask can already have 2^31 / num_heads elements
    q = side.q + b * side.q_b + head * side.q_h + seq.start_q.to(tl.int64) * side.q_m
    k = (
        side.k
        + b * side.k_b
        + (head // side.group) * side.k_h
        + seq.start_k.to(tl.int64) * side.k_n
    )
    slope = 0.0
    sink = 0.0
    if SIDE.ALIBI:
        slope = tl.load(side.slopes + h).to(tl.float32) * inv_temperature
    if SIDE.SINK:
        sink = tl.load(side.sink + h).to(tl.float32) * LOG2E
    bias_offset = b * 0
    if SIDE.BIAS:
        bias_offset = b * side.bias_b + head * side.bias_h
    return Bound(q, k, bias_offset, slope, sink)


@triton.jit
def load_tile(
    ptr, offs, num, stride, stride_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHECK: tl.constexpr, TOGETHER: tl.constexpr = 1,
):  # fmt: skip
    """Returns rows of q or k [rows, BLOCK_D]; rows past the end and padding columns are 0.

    So many elements TOGETHER lie at a multiple of their size.
    """
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = ptr + offs.to(tl.int64)[:, None] * stride + offs_d[None, :] * stride_d
    if TOGETHER > 1:
        size: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        ptrs = tl.multiple_of(ptrs, [size, TOGETHER * size])
    if CHECK:
        return tl.load(ptrs, mask=(offs[:, None] < num) & (offs_d[None, :] < DIM), other=0.0)
    elif DIM != BLOCK_D:
        return tl.load(ptrs, mask=offs_d[None, :] < DIM, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def query_tile(
    side, bound, offs, seq, CHECK: tl.constexpr, STUDENT: tl.constexpr, CONFIG: tl.constexpr
):
    """Loads rows of a side's q."""
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    return load_tile(
        bound.q, offs, seq.num_rows, side.q_m, side.q_d, SIDE.DIM, SIDE.BLOCK_D, CHECK,
        SIDE.TOGETHER,
    )  # fmt: skip


@triton.jit
def key_tile(
    side, bound, offs, seq, CHECK: tl.constexpr, STUDENT: tl.constexpr, CONFIG: tl.constexpr
):
    """Loads rows of a side's k."""
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    return load_tile(
        bound.k, offs, seq.num_keys, side.k_n, side.k_d, SIDE.DIM, SIDE.BLOCK_D, CHECK,
        SIDE.TOGETHER,
    )  # fmt: skip


@triton.jit
def gradient_ptrs(gradient, masks, share, b, head, rows, BLOCK_D: tl.constexpr):
    """Returns where rows of a gradient to q or k are written [rows, BLOCK_D]."""
    if masks.cu_seqlens_q is not None:
        b = b * 0  # packed tensors have one batch element
    out = gradient.ptr + share.to(tl.int64) * gradient.split
    out += b.to(tl.int64) * gradient.b + head.to(tl.int64) * gradient.h
    return out + (rows.to(tl.int64)[:, None] * gradient.n + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def tanh(x):
    """Computes tanh(x)."""
    # 1 - 2 / (1 + e^2x): right at both ends, where e^2x overflows or vanishes
    return 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))


@triton.jit
def transformed(
    dot,
    side,
    bound,
    seq,
    rows,
    cols,
    inside,
    inv_temperature,
    STUDENT: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Returns scores in units of log2(e) / temperature, and d(capped)/d(scaled dot) with a
    softcap.

    ``inv_temperature`` is log2(e) / temperature, and ``side.scale`` includes it unless a softcap
    stands between the two.
    """
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    slope = dot
    if SIDE.SOFTCAP:
        capped = tanh(dot * (side.scale / side.softcap))
        x = capped * (side.softcap * inv_temperature)
        slope = 1.0 - capped * capped
    else:
        x = dot * side.scale
    if SIDE.BIAS:
        ptrs = (
            side.bias
            + bound.bias_offset
            + rows.to(tl.int64) * side.bias_m
            + cols.to(tl.int64) * side.bias_n
        )
        x += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32) * inv_temperature
    if SIDE.ALIBI:
        x -= tl.abs(rows + seq.offset - cols).to(tl.float32) * bound.slope
    return x, slope


@triton.jit
def in_window(allowed, masks, seq, rows, cols, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Restricts the allowed (row, key) pairs to keys inside the row's window."""
    if LEFT:
        allowed &= cols >= rows + seq.offset - masks.window_left
    if RIGHT:
        allowed &= cols <= rows + seq.offset + masks.window_right
    return allowed


@triton.jit
def allowed_tile(masks, seq, rows, cols, inside, CONFIG: tl.constexpr):
    """Marks the (row, key) pairs of a tile that take part; rows and cols broadcast to it."""
    allowed = allowed_pairs(masks, seq, rows, cols, inside, CONFIG)
    if CONFIG.KEY_MASK:
        allowed &= admitted(masks, seq, cols)
    return allowed


@triton.jit
def allowed_pairs(masks, seq, rows, cols, inside, CONFIG: tl.constexpr):
    """Marks pairs as `allowed_tile` does, except for a key-padding mask."""
    allowed = inside & (cols < seq.num_valid)
    allowed = in_window(allowed, masks, seq, rows, cols, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT)
    if CONFIG.HAS_MASK and not CONFIG.KEY_MASK:
        ptrs = (
            masks.mask
            + seq.mask_offset
            + rows.to(tl.int64) * masks.mask_m
            + cols.to(tl.int64) * masks.mask_n
        )
        allowed &= tl.load(ptrs, mask=inside, other=0) != 0
    return allowed


@triton.jit
def admitted(masks, seq, keys):
    """Marks the keys that a key-padding mask, the same for all heads and rows, admits."""
    ptrs = masks.mask + seq.mask_offset + keys.to(tl.int64) * masks.mask_n
    return tl.load(ptrs, mask=keys < seq.num_keys, other=0) != 0


@triton.jit
def admitted_span(masks, seq):
    """Bounds a key-padding mask: first valid key, first hole after it, end.

    Padding on either side leaves [first, hole) and nothing else; in other masks keys that are
    admitted follow after the hole.
    """
    first = tl.full((), seq.num_valid, tl.int32)  # of one type, also where the number is constant
    hole = first
    end = tl.full((), 0, tl.int32)
    for chunk in tl.range(0, seq.num_valid, MASK_CHUNK):
        keys = chunk + tl.arange(0, MASK_CHUNK)
        is_admitted = admitted(masks, seq, keys) & (keys < seq.num_valid)
        first = tl.minimum(first, tl.min(tl.where(is_admitted, keys, seq.num_valid), 0))
        end = tl.maximum(end, tl.max(tl.where(is_admitted, keys + 1, 0), 0))
        is_hole = (keys > first) & (is_admitted == 0)
        hole = tl.minimum(hole, tl.min(tl.where(is_hole, keys, seq.num_valid), 0))
    return first, hole, end


@triton.jit
def key_range(masks, seq, m0, CONFIG: tl.constexpr):
    """Returns keys [first, stop) that some row of the block at m0 may see, [left, right) all
    rows.
    """
    first, left, right, stop = keys_of_rows(
        masks, seq, m0, CONFIG.BLOCK_M, CONFIG.BLOCK_N,
        CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.DENSE,
    )  # fmt: skip
    if CONFIG.KEY_MASK:
        start, hole, end = admitted_span(masks, seq)
        BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
        first = tl.maximum(first, start // BLOCK_N * BLOCK_N)
        stop = tl.maximum(tl.minimum(stop, end), first)
        if CONFIG.DENSE:
            left = first
            right = first
        else:
            left = tl.maximum(left, (start + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
            left = tl.minimum(tl.maximum(left, first), stop)
            right = tl.minimum(right, hole // BLOCK_N * BLOCK_N)
            right = tl.minimum(tl.maximum(right, left), stop)
    return first, left, right, stop


@triton.jit
def keys_of_rows(
    masks, seq, m0, ROWS: tl.constexpr, TILE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Returns key_range of the block of ROWS at m0, with bounds on boundaries of TILE keys."""
    last_row = tl.minimum(m0 + ROWS, seq.num_rows) - 1
    start = 0
    stop = seq.num_valid
    full_start = 0
    full_stop = seq.num_valid
    if LEFT:
        start = tl.maximum(start, m0 + seq.offset - masks.window_left)
        full_start = tl.maximum(full_start, last_row + seq.offset - masks.window_left)
    if RIGHT:
        stop = tl.minimum(stop, last_row + seq.offset + masks.window_right + 1)
        full_stop = tl.minimum(full_stop, m0 + seq.offset + masks.window_right + 1)
    return tiles(start, stop, full_start, full_stop, TILE, DENSE)


@triton.jit
def row_range(masks, seq, n0, CONFIG: tl.constexpr):
    """Returns rows [first, stop) that may see some key of the block at n0, [left, right) all keys.

    A mask of keys has no part in it.
    """
    return rows_of_keys(
        masks, seq, n0, CONFIG.BLOCK_N, CONFIG.BLOCK_M,
        CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.DENSE,
    )  # fmt: skip


@triton.jit
def rows_of_keys(
    masks, seq, n0, KEYS: tl.constexpr, TILE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Returns row_range of the block of KEYS at n0, with bounds on boundaries of TILE rows."""
    last_key = tl.minimum(n0 + KEYS, seq.num_keys) - 1
    start = 0
    stop = seq.num_rows
    full_start = 0
    full_stop = seq.num_rows
    if RIGHT:
        start = tl.maximum(start, n0 - seq.offset - masks.window_right)
        full_start = tl.maximum(full_start, last_key - seq.offset - masks.window_right)
    if LEFT:
        stop = tl.minimum(stop, last_key - seq.offset + masks.window_left + 1)
        full_stop = tl.minimum(full_stop, n0 - seq.offset + masks.window_left + 1)
    first, left, right, stop = tiles(start, stop, full_start, full_stop, TILE, DENSE)
    if n0 + KEYS > seq.num_valid:  # keys that key_lengths excludes: look at every element
        left = first
        right = first
    if n0 >= seq.num_valid:
        stop = first
    return first, left, right, stop


@triton.jit
def tiles(start, stop, full_start, full_stop, BLOCK: tl.constexpr, DENSE: tl.constexpr):
    """Returns the four bounds on tile boundaries: tiles in [first, left) and [right, stop) need a
    mask.
    """
    first = (tl.maximum(start, 0) // BLOCK) * BLOCK
    stop = tl.maximum(stop, first)
    left = ((full_start + BLOCK - 1) // BLOCK) * BLOCK
    right = (tl.maximum(full_stop, 0) // BLOCK) * BLOCK
    left = tl.minimum(tl.maximum(left, first), stop)
    right = tl.minimum(tl.maximum(right, left), stop)
    if DENSE:
        left = first
        right = first
    return first, left, right, stop
