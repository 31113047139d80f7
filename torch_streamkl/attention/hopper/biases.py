"""Reads additive masks and biases on Hopper in the order of an accumulator's registers.

A thread holds pairs of neighbouring columns of two rows of a tile. With queries as rows it reads 4
bytes at a time. With keys as rows, for dK, it reads single elements, and a warp reads eight
neighbours. A warp group reads each tile once, from the cache that all heads share.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Bias(NamedTuple):
    """Holds a pointer, or None, and strides in elements; the stride of keys is 1."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_m: Any


@gluon.jit
def bias_of_rows(bias, b, h, first_row, first_key, num_rows, num_keys, like, MASKED: gl.constexpr):
    """Loads a tile with queries as rows, in the layout of `like`.

    MASKED: keys beyond the end get 0. Rows beyond the last get the last one's.
    """
    layout: gl.constexpr = like.type.layout
    row = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, layout))
    row = gl.minimum(first_row + row, num_rows - 1).to(gl.int64)
    key = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, layout))
    ptr = bias.ptr + (b.to(gl.int64) * bias.stride_b + h.to(gl.int64) * bias.stride_h)
    ptr += first_key
    ptrs = ptr + gl.expand_dims(row * bias.stride_m, 1) + gl.expand_dims(key.to(gl.int64), 0)
    if MASKED:
        inside = gl.expand_dims(first_key + key < num_keys, 0)
        return gl.load(ptrs, mask=inside, other=0.0)
    else:
        return gl.load(ptrs)


@gluon.jit
def bias_of_keys(bias, b, h, first_row, first_key, num_rows, num_keys, like, MASKED: gl.constexpr):
    """Loads a tile with keys as rows; MASKED: queries beyond the end get 0."""
    layout: gl.constexpr = like.type.layout
    key = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, layout))
    key = gl.minimum(first_key + key, num_keys - 1)
    row = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, layout))
    ptr = bias.ptr + (b.to(gl.int64) * bias.stride_b + h.to(gl.int64) * bias.stride_h)
    ptr += first_row.to(gl.int64) * bias.stride_m
    ptrs = ptr + gl.expand_dims(row * bias.stride_m, 0) + gl.expand_dims(key, 1)
    if MASKED:
        return gl.load(ptrs, mask=gl.expand_dims(first_row + row < num_rows, 0), other=0.0)
    else:
        return gl.load(ptrs)
