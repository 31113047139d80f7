"""Computes tiles of chosen keys: ids, gathered keys, scores of all heads of a query.

A program has one query. Its heads are the rows of a matrix, and chosen keys, gathered by their
ids, the other operand: a key is read once for all heads that share it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_streamkl.kernels.row_state import LOG2E


class Rows(NamedTuple):
    """Holds the chosen keys of queries."""

    ids: Any
    ids_b: Any
    ids_n: Any
    ids_k: Any
    first: Any  # of key_ranges, or None
    end: Any
    num_queries: Any
    num_keys: Any
    topk: Any


class Teacher(NamedTuple):
    """Holds the teacher's operands, and its log-sum-exps in nats."""

    q: Any
    q_b: Any
    q_h: Any
    q_n: Any
    k: Any
    k_b: Any
    k_h: Any
    k_n: Any
    lse: Any
    lse_b: Any
    lse_h: Any
    lse_n: Any
    scale: Any


class Student(NamedTuple):
    """Holds the student's operands."""

    q: Any
    q_b: Any
    q_h: Any
    q_n: Any
    k: Any
    k_b: Any
    k_n: Any
    weights: Any  # or None
    weights_b: Any
    weights_h: Any
    weights_n: Any
    scale: Any


class Config(NamedTuple):
    """Holds compile-time choices."""

    BLOCK_N: int  # chosen keys of a tile
    T_HEADS: int  # teacher heads
    T_GROUP: int  # teacher heads of a key head
    T_BLOCK_H: int  # teacher heads of a tile, padded
    T_DIM: int
    T_BLOCK_D: int  # of head_dim at once
    S_HEADS: int
    S_BLOCK_H: int  # all student heads, padded
    S_DIM: int
    S_BLOCK_D: int  # its head_dim, padded
    PRECISION: str  # of float32 products


@triton.jit
def bind(rows):
    """Returns row, batch element and query of a program, its first key, and the one after the
    last.
    """
    row = tl.program_id(0)
    b = (row // rows.num_queries).to(tl.int64)
    i = (row % rows.num_queries).to(tl.int64)
    first = 0
    end = rows.num_keys
    if rows.first is not None:
        first = tl.load(rows.first + row)
        end = tl.load(rows.end + row)
    return row, b, i, first, end


@triton.jit
def chosen(rows, b, i, first, end, start, CONFIG: tl.constexpr):
    """Returns ids of a tile, and which of them are entries."""
    slots = start + tl.arange(0, CONFIG.BLOCK_N)
    ptrs = rows.ids + b * rows.ids_b + i * rows.ids_n + slots.to(tl.int64) * rows.ids_k
    ids = tl.load(ptrs, mask=slots < rows.topk, other=-1)
    return ids, (ids >= first) & (ids < end)


@triton.jit
def gathered(ptr, stride, ids, inside, first_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns columns from first_d on of keys by their ids [BLOCK_N, BLOCK_D]; 0 where none is."""
    d = first_d + tl.arange(0, BLOCK_D)
    ptrs = ptr + ids.to(tl.int64)[:, None] * stride + d[None, :]
    if DIM % BLOCK_D == 0:
        return tl.load(ptrs, mask=inside[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def queries(ptr, stride, heads, exists, first_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns columns from first_d on of a query's heads [heads, BLOCK_D]."""
    d = first_d + tl.arange(0, BLOCK_D)
    ptrs = ptr + heads.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(ptrs, mask=exists[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def teacher_heads(tile, CONFIG: tl.constexpr):
    """Returns key head, heads and which of them exist of a tile of teacher heads."""
    PER_GROUP: tl.constexpr = (CONFIG.T_GROUP + CONFIG.T_BLOCK_H - 1) // CONFIG.T_BLOCK_H
    kv_head = tile // PER_GROUP
    of_group = (tile % PER_GROUP) * CONFIG.T_BLOCK_H + tl.arange(0, CONFIG.T_BLOCK_H)
    return kv_head, kv_head * CONFIG.T_GROUP + of_group, of_group < CONFIG.T_GROUP


@triton.jit
def first_teacher_queries(teacher, b, i, CONFIG: tl.constexpr):
    """Returns the queries of the first tile, which stay in memory if there is no other one."""
    _, heads, exists = teacher_heads(0, CONFIG)
    q = teacher.q + b * teacher.q_b + i * teacher.q_n
    return queries(q, teacher.q_h, heads, exists, 0, CONFIG.T_DIM, CONFIG.T_BLOCK_D)


@triton.jit
def teacher_products(
    teacher, b, i, ids, inside, tile, q, KEYS_FIRST: tl.constexpr, ONE: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns products of a tile of heads with keys: [keys, heads], or [heads, keys].

    With ONE, ``q`` has the only tile of queries.
    """
    kv_head, heads, exists = teacher_heads(tile, CONFIG)
    k_ptr = teacher.k + b * teacher.k_b + kv_head * teacher.k_h
    q_ptr = teacher.q + b * teacher.q_b + i * teacher.q_n
    if KEYS_FIRST:
        x = tl.full([CONFIG.BLOCK_N, CONFIG.T_BLOCK_H], 0.0, tl.float32)
    else:
        x = tl.full([CONFIG.T_BLOCK_H, CONFIG.BLOCK_N], 0.0, tl.float32)
    if ONE:
        k = gathered(k_ptr, teacher.k_n, ids, inside, 0, CONFIG.T_DIM, CONFIG.T_BLOCK_D)
        x = accumulated(q, k, x, KEYS_FIRST, CONFIG)
    else:
        for d in tl.range(0, CONFIG.T_DIM, CONFIG.T_BLOCK_D):
            k = gathered(k_ptr, teacher.k_n, ids, inside, d, CONFIG.T_DIM, CONFIG.T_BLOCK_D)
            q = queries(q_ptr, teacher.q_h, heads, exists, d, CONFIG.T_DIM, CONFIG.T_BLOCK_D)
            x = accumulated(q, k, x, KEYS_FIRST, CONFIG)
    return x


@triton.jit
def accumulated(q, k, x, KEYS_FIRST: tl.constexpr, CONFIG: tl.constexpr):
    """Returns x plus products of queries and keys."""
    if KEYS_FIRST:
        return tl.dot(k, tl.trans(q), x, input_precision=CONFIG.PRECISION)
    else:
        return tl.dot(q, tl.trans(k), x, input_precision=CONFIG.PRECISION)


@triton.jit
def mass_of_tile(teacher, b, i, ids, inside, tile, q, ONE: tl.constexpr, CONFIG: tl.constexpr):
    """Sums the probabilities of keys over a tile of heads."""
    _, heads, exists = teacher_heads(tile, CONFIG)
    x = teacher_products(teacher, b, i, ids, inside, tile, q, True, ONE, CONFIG)
    ptrs = teacher.lse + b * teacher.lse_b + heads.to(tl.int64) * teacher.lse_h
    lse = tl.load(ptrs + i * teacher.lse_n, mask=exists, other=float("inf"))
    p = tl.math.exp2(x * (teacher.scale * LOG2E) - (lse * LOG2E)[None, :])
    return tl.sum(p, 1)


@triton.jit
def teacher_mass(teacher, b, i, ids, inside, q, CONFIG: tl.constexpr):
    """Returns the mean of the teacher's probabilities of keys over its heads [BLOCK_N]."""
    PER_GROUP: tl.constexpr = (CONFIG.T_GROUP + CONFIG.T_BLOCK_H - 1) // CONFIG.T_BLOCK_H
    NUM_TILES: tl.constexpr = CONFIG.T_HEADS // CONFIG.T_GROUP * PER_GROUP
    if NUM_TILES == 1:
        ONE: tl.constexpr = CONFIG.T_DIM <= CONFIG.T_BLOCK_D
        mass = mass_of_tile(teacher, b, i, ids, inside, 0, q, ONE, CONFIG)
    else:
        mass = tl.full([CONFIG.BLOCK_N], 0.0, tl.float32)
        for tile in tl.range(0, NUM_TILES):
            mass += mass_of_tile(teacher, b, i, ids, inside, tile, q, False, CONFIG)
    return tl.where(inside, mass * (1.0 / CONFIG.T_HEADS), 0.0)


@triton.jit
def student_queries(student, b, i, CONFIG: tl.constexpr):
    """Returns the query's heads [S_BLOCK_H, S_BLOCK_D], and their weights."""
    heads = tl.arange(0, CONFIG.S_BLOCK_H)
    exists = heads < CONFIG.S_HEADS
    ptr = student.q + b * student.q_b + i * student.q_n
    q = queries(ptr, student.q_h, heads, exists, 0, CONFIG.S_DIM, CONFIG.S_BLOCK_D)
    weights = tl.where(exists, 1.0, 0.0)
    if student.weights is not None:
        ptrs = student.weights + b * student.weights_b + i * student.weights_n
        ptrs += heads.to(tl.int64) * student.weights_h
        weights = tl.load(ptrs, mask=exists, other=0.0).to(tl.float32)
    return q, weights


@triton.jit
def student_scores(student, q, weights, k, CONFIG: tl.constexpr):
    """Returns scores of keys [BLOCK_N], and the heads' products with them [BLOCK_N, S_BLOCK_H]."""
    x = tl.dot(k, tl.trans(q), input_precision=CONFIG.PRECISION) * student.scale
    if student.weights is not None:
        active = tl.where(x == x, tl.maximum(x, 0.0), x)  # NaN stays
        return tl.sum(active * weights[None, :], 1), x
    else:
        return tl.sum(x * weights[None, :], 1), x
