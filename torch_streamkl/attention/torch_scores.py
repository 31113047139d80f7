"""Computes scores and masks of blocks of rows and keys in plain torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.attention.problem import AttentionProblem, Side, bottom_right_offset
from torch_streamkl.cpu import elementwise
from torch_streamkl.program.masks import visible_keys
from torch_streamkl.runtime.workspace import ranges

# Scores of one side in one block. About ten temporaries of this size are alive in a block, and
# they should stay in a core's cache.
STREAMING_BLOCK_ELEMENTS = 2**18

STREAMING_MAX_KEYS = 512


@dataclass(frozen=True)
class StreamingBlocks:
    """Holds the block sizes of the plain torch implementation."""

    batch: int
    heads: int  # student heads, a multiple of every group of heads that shares keys
    queries: int
    keys: int


def torch_blocks(problem: AttentionProblem) -> StreamingBlocks:
    """Chooses long runs of keys first, then queries, then as many heads and batch elements as
    fit.
    """
    if problem.num_heads == 0:  # rows that data selects may be the heads of a compiled loss
        return StreamingBlocks(1, 1, 1, 1)
    teacher_ratio = problem.teacher.num_heads // problem.num_heads
    teacher_group = problem.teacher.group
    group = math.lcm(
        problem.student.group,
        # the fewest student heads whose teacher heads are whole groups; divides num_heads
        teacher_group // math.gcd(teacher_group, teacher_ratio),
    )
    keys = min(problem.seqlen_k, STREAMING_MAX_KEYS)
    queries = min(
        problem.seqlen_q,
        max(16, STREAMING_BLOCK_ELEMENTS // max(1, keys * group * teacher_ratio)),
        256,
    )
    room = max(1, STREAMING_BLOCK_ELEMENTS // max(1, keys * queries * teacher_ratio))
    heads = min(problem.num_heads, max(1, room // group) * group)
    batch = max(1, room // heads) if heads == problem.num_heads else 1
    return StreamingBlocks(batch, heads, max(1, queries), max(1, keys))


@dataclass(frozen=True)
class QueryBlock:
    """Describes one block of query rows: ranges over batch, student heads and queries."""

    batch: slice
    heads: slice
    queries: slice

    def of(self, x: Tensor) -> Tensor:
        return x[self.batch, self.heads, self.queries]


@dataclass
class ScoreBlock:
    """Holds the masked scores of one side for a block of rows and keys, and d(score)/d(q.k)."""

    scores: Tensor  # [batch, heads, queries, keys]
    slope: Tensor | float
    is_finite: bool  # known of those of allowed keys


@dataclass
class Mask:
    """Marks the allowed keys of a block, [batch or 1, heads or 1, queries or 1, keys or 1]."""

    allowed: Tensor

    @functools.cached_property
    def limit(self) -> Tensor:
        """Returns inf where a key is allowed, -inf elsewhere."""
        return elementwise.limits(self.allowed)


class Blocks:
    """Divides one sequence into blocks of rows and of keys."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        self.sizes = torch_blocks(problem)
        self.offset = bottom_right_offset(problem.seqlen_q, problem.seqlen_k)

    def rows(self) -> Iterator[QueryBlock]:
        """Yields blocks of query rows."""
        p, sizes = self.problem, self.sizes
        for batch in ranges(p.batch, sizes.batch):
            for heads in ranges(p.num_heads, sizes.heads):
                for queries in ranges(p.seqlen_q, sizes.queries):
                    yield QueryBlock(batch, heads, queries)

    def teacher_rows(self, rows: QueryBlock) -> QueryBlock:
        """Returns the same rows of the teacher's heads."""
        ratio = self.problem.teacher.num_heads // self.problem.num_heads
        heads = slice(rows.heads.start * ratio, rows.heads.stop * ratio)
        return QueryBlock(rows.batch, heads, rows.queries)

    def keys(self, rows: QueryBlock) -> Iterator[tuple[slice, Mask | None]]:
        """Yields blocks of keys that the window admits for at least one of the rows, with their
        masks: None where every key is allowed.
        """
        p = self.problem
        seen = visible_keys(rows.queries, self.offset, p.seqlen_k, p.window_left, p.window_right)
        for part in ranges(seen.stop - seen.start, self.sizes.keys):
            keys = slice(seen.start + part.start, seen.start + part.stop)
            yield keys, self._mask(rows, keys)

    def _mask(self, rows: QueryBlock, keys: slice) -> Mask | None:
        p = self.problem
        left, right = p.window_left, p.window_right
        if left is None and right is None and p.key_lengths is None:
            return None if p.mask is None else Mask(_broadcast_block(p.mask, rows, keys))
        i, j = self._positions(rows, keys, p.device)
        first, last = rows.queries.start + self.offset, rows.queries.stop - 1 + self.offset
        parts = []
        if left is not None and keys.start < last - left:
            parts.append((j >= i - left)[None, None])
        if right is not None and keys.stop - 1 > first + right:
            parts.append((j <= i + right)[None, None])
        if p.key_lengths is not None:
            parts.append(j[0] < p.key_lengths[rows.batch, None, None, None])
        if p.mask is not None:
            parts.append(_broadcast_block(p.mask, rows, keys))
        return Mask(functools.reduce(torch.bitwise_and, parts)) if parts else None

    def _positions(
        self, rows: QueryBlock, keys: slice, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns the positions of the rows (aligned with the keys), and of the keys."""
        i = torch.arange(rows.queries.start, rows.queries.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)[None, :]
        return i + self.offset, j

    def scores(self, side: Side, rows: QueryBlock, keys: slice, mask: Mask | None) -> ScoreBlock:
        """Returns scores of a block, -inf where a key is not allowed."""
        dtype = self.problem.compute_dtype
        kv_heads = side.kv_heads(rows.heads)
        k = side.k[rows.batch, kv_heads, keys].to(dtype)
        x = folded_queries(side, rows, dtype) @ k.transpose(-1, -2)  # [b, kv, g * queries, keys]
        shape = (
            x.shape[0],
            rows.heads.stop - rows.heads.start,
            rows.queries.stop - rows.queries.start,
            x.shape[-1],
        )
        x = x.view(shape).mul_(side.scale)
        slope: Tensor | float = 1.0
        if side.softcap:
            x.div_(side.softcap).tanh_()
            slope = 1.0 - x * x
            x.mul_(side.softcap)
        if side.bias is not None:
            x.add_(_broadcast_block(side.bias, rows, keys).to(dtype))
        if side.alibi_slopes is not None:
            i, j = self._positions(rows, keys, x.device)
            x.sub_(
                side.alibi_slopes[rows.heads].to(dtype)[:, None, None] * (i - j).abs().to(dtype)
            )
        if self.problem.temperature != 1.0:
            x.div_(self.problem.temperature)
        is_finite = side.bias is None
        if mask is not None:
            is_finite = elementwise.mask_(x, per_head(mask.limit, x.shape[1]))
        return ScoreBlock(x, slope, is_finite)

    def log_probabilities(
        self, side: Side, rows: QueryBlock, keys: slice, mask: Mask | None, lse: Tensor
    ) -> ScoreBlock:
        """Subtracts log-sum-exps, those `without_infinity`, from scores."""
        block = self.scores(side, rows, keys, mask)
        block.scores.sub_(lse.unsqueeze(-1))
        return block


def folded_queries(side: Side, rows: QueryBlock, dtype: torch.dtype) -> Tensor:
    """Returns queries as [batch, kv_heads, group * queries, head_dim]: GQA groups as rows."""
    kv_heads = side.kv_heads(rows.heads)
    q = rows.of(side.q).to(dtype)
    return q.unflatten(1, (kv_heads.stop - kv_heads.start, -1)).flatten(2, 3)


def _broadcast_block(x: Tensor, rows: QueryBlock, keys: slice) -> Tensor:
    """Returns one block of a tensor that broadcasts to [batch, heads, seqlen_q, seqlen_k]."""
    index = (rows.batch, rows.heads, rows.queries, keys)
    return x[tuple(r if size > 1 else slice(None) for r, size in zip(index, x.shape, strict=True))]


def per_head(allowed: Tensor, num_heads: int) -> Tensor:
    """Repeats a mask of the student's heads for all heads of a block."""
    if allowed.shape[1] in (1, num_heads):
        return allowed
    return allowed.repeat_interleave(num_heads // allowed.shape[1], dim=1)
