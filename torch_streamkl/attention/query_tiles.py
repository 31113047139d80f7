"""Computes compiled graphs on a CPU by query tiles: whole rows, with a row kernel from Inductor.

A query tile is a block of query rows of a few heads, with every key that they may see. It takes
two products into a small workspace, one compiled pass over its rows (attention/compiled_rows.py),
and a product for each gradient. Beyond inputs and gradients, the memory is one query tile. If the
row weights are known beforehand, `forward_with_gradients` computes each product once; otherwise
`forward` and `backward` compute the scores twice.

attention/torch_impl.py computes what a query tile cannot hold, and everything if Inductor cannot
compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from torch_streamkl.attention import torch_impl
from torch_streamkl.attention.compiled_rows import (
    COPIES,
    WORKSPACE,
    RowForm,
    rows_backward,
    rows_forward,
)
from torch_streamkl.attention.problem import (
    AttentionProblem,
    Gradients,
    NeedsGrad,
    RowStatistics,
    Side,
    bottom_right_offset,
    in_dtypes_of_inputs,
    sums_of_sequence,
    zero_sums,
)
from torch_streamkl.cpu import compiled
from torch_streamkl.cpu.compiled import Described
from torch_streamkl.program.masks import visible_keys

QUERY_TILE_ELEMENTS = 2**19  # scores of one side, of grouped heads (GQA)
MOST_AT_ONCE = 4  # such groups of heads, one a thread
LEAST_QUERIES = 16  # of a query tile, whatever the number of keys: matmuls of fewer rows are slow
MOST_ELEMENTS = 2**22  # of a query tile of so few queries
DEVICE = "cpu"  # of all tensors: torch.set_default_device() may say another
CONTIGUOUS = torch.contiguous_format
_P = ParamSpec("_P")
_R = TypeVar("_R")
NOTHING = NeedsGrad(False, False, False, False)


class NotCompiledError(Exception):
    """Raised if Inductor cannot compile a row kernel. A warning has said so."""


@dataclass(frozen=True)
class QueryTile:
    """Holds the ranges of one batch element's heads, queries and keys."""

    batch: int
    heads: slice
    queries: slice
    keys: slice

    @property
    def num_rows(self) -> int:
        return self.num_heads * (self.queries.stop - self.queries.start)

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


def limit(problem: AttentionProblem) -> str | None:
    """Explains why query tiles cannot compute a problem; None if they can."""
    if problem.device.type != "cpu":
        return f"are for the CPU, got device {problem.device.type}"
    if problem.head_mean:
        return "take as many heads on both sides, got averaged heads of the teacher"
    if problem.teacher_lse is not None:
        return "compute log-sum-exps themselves, got known ones"
    least = LEAST_QUERIES * problem.seqlen_k * head_group(problem)
    if least > MOST_ELEMENTS:
        return f"hold {MOST_ELEMENTS} scores, got rows of {problem.seqlen_k} keys"
    return None


def _with_fallback(name: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a function of a problem: it runs `torch_impl` if query tiles cannot compute the
    problem.
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if limit(args[0]) is None:  # type: ignore[arg-type]
            try:
                return function(*args, **kwargs)
            except NotCompiledError:
                pass
        found: _R = getattr(torch_impl, name)(*args, **kwargs)
        return found

    return call


def _sequences(
    problem: AttentionProblem,
) -> Iterator[tuple[slice, slice, AttentionProblem]]:
    """Yields the ranges of rows and keys of each packed sequence, with its problem."""
    if problem.is_packed:
        yield from problem.sequences()
    else:
        yield slice(None), slice(None), problem


def _forward(
    problem: AttentionProblem, row_weight: Tensor | None, needs_grad: NeedsGrad
) -> tuple[Tensor, RowStatistics, Gradients]:
    q = problem.student.q
    results = q.new_empty((*q.shape[:3], 5), dtype=problem.compute_dtype)
    sums = zero_sums(problem, needs_grad)
    form = _form(problem, needs_grad)
    for rows, keys, sequence in _sequences(problem):
        if sequence.seqlen_k == 0:
            value, stats = torch_impl.forward(sequence)
            parts = (value[None], stats.student, stats.teacher)
            results[:, :, rows] = torch.cat(parts).permute(1, 2, 3, 0)
            continue
        work = _Work(sequence, needs_grad, sums_of_sequence(sums, rows, keys))
        weight = _weight_of(sequence, row_weight, rows) if needs_grad != NOTHING else None
        for query_tile in work.query_tiles():
            inputs = work.inputs(query_tile)
            if weight is not None:
                inputs["row_weight"] = _of_rows(weight, query_tile)
            inputs |= work.workspace(query_tile)
            (out,) = work.run(rows_forward, form, inputs)
            shape = (query_tile.num_heads, -1, 5)
            results[:, :, rows][query_tile.batch, query_tile.heads, query_tile.queries] = out.view(
                shape
            )
            work.add_gradients(query_tile, work.tiles)
    value, *rest = results.unbind(-1)
    stats = RowStatistics(torch.stack(rest[:2]), torch.stack(rest[2:]))
    return value.contiguous(), stats, (sums[0], sums[1], sums[2], sums[3])


def _backward(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, needs_grad: NeedsGrad
) -> Gradients:
    sums = zero_sums(problem, needs_grad)
    form = _form(problem, needs_grad)
    statistics = torch.cat((stats.student, stats.teacher)).permute(1, 2, 3, 0)
    for rows, keys, sequence in _sequences(problem):
        if sequence.seqlen_k == 0:
            continue
        work = _Work(sequence, needs_grad, sums_of_sequence(sums, rows, keys))
        weight = _weight_of(sequence, grad, rows)
        for query_tile in work.query_tiles():
            known = statistics[:, :, rows][query_tile.batch, query_tile.heads, query_tile.queries]
            inputs = work.inputs(query_tile)
            inputs["row_weight"] = _of_rows(weight, query_tile)
            inputs["statistics"] = (known.reshape(-1, 4), "r4")
            inputs |= work.workspace(query_tile)
            work.run(rows_backward, form, inputs)
            work.add_gradients(query_tile, work.more_tiles)
    return in_dtypes_of_inputs(problem, sums)


def _weight_of(problem: AttentionProblem, weight: Tensor | None, rows: slice) -> Tensor:
    if weight is None:
        return torch.ones((1, 1, 1), dtype=problem.compute_dtype, device=DEVICE)
    return weight[:, :, rows].to(problem.compute_dtype)


def _of_rows(x: Tensor, query_tile: QueryTile) -> tuple[Tensor, str]:
    """Views [batch, heads, queries] or [1, 1, 1] as a column of a query tile's rows."""
    if x.shape == (1, 1, 1):
        return x.view(1, 1), "11"
    return x[query_tile.batch, query_tile.heads, query_tile.queries].reshape(-1, 1), "r1"


def _form(problem: AttentionProblem, needs_grad: NeedsGrad) -> RowForm:
    return RowForm(
        functional=problem.functional.text,
        softcaps=(bool(problem.student.softcap), bool(problem.teacher.softcap)),
        has_temperature=problem.temperature != 1.0,
        fills=problem.mask_value != -math.inf and problem.has_masked_keys,
        student=needs_grad.student,
        teacher=needs_grad.teacher,
    )


def head_group(problem: AttentionProblem) -> int:
    """Counts the query heads that a query tile holds together: those with common keys."""
    sides = problem.sides
    group = math.lcm(*(side.group for side in sides))
    return group if problem.num_heads % group == 0 else problem.num_heads


class _Work:
    """Holds one problem's query tiles: workspace, inputs, and the gradients they add to."""

    def __init__(
        self, problem: AttentionProblem, needs_grad: NeedsGrad, sums: list[Tensor | None]
    ) -> None:
        self.problem, self.needs_grad, self.sums = problem, needs_grad, sums
        self.dtype = problem.compute_dtype
        group, keys = head_group(problem), problem.seqlen_k
        queries = max(LEAST_QUERIES, QUERY_TILE_ELEMENTS // (keys * group))
        self.queries = max(1, min(problem.seqlen_q, queries))
        # short rows of several heads fill half of a query tile; and matmuls of as many heads as
        # there are threads share those better than the few rows of one
        elements = keys * self.queries * group
        groups = min(torch.get_num_threads(), MOST_AT_ONCE, max(1, MOST_ELEMENTS // elements))
        groups = max(groups, QUERY_TILE_ELEMENTS // 2 // elements)
        self.heads = min(problem.num_heads, groups * group)
        size = self.heads * self.queries * keys
        self.tiles = [problem.student.q.new_empty(size, dtype=self.dtype) for _ in range(2)]
        self.more_tiles: list[Tensor] = []
        self.bounds = _bounds(problem)
        self.position = torch.arange(problem.seqlen_q, dtype=self.dtype, device=DEVICE)[:, None]
        self.position += bottom_right_offset(problem.seqlen_q, keys)
        self.numbers: dict[int, Tensor] = {}
        self.copies = torch.ones((1, COPIES), dtype=self.dtype, device=DEVICE)

    def query_tiles(self) -> Iterator[QueryTile]:
        """Yields all query tiles; those with common keys follow each other."""
        problem = self.problem
        for batch in range(problem.batch):
            for h in range(0, problem.num_heads, self.heads):
                heads = slice(h, min(h + self.heads, problem.num_heads))
                self.keys = [self._keys_of(side, batch, heads) for side in self.problem.sides]
                self.d_keys = [
                    None if dk is None else torch.zeros_like(k.mT, memory_format=CONTIGUOUS)
                    for k, dk in zip(self.keys, self.sums[1::2], strict=True)
                ]
                for i in range(0, problem.seqlen_q, self.queries):
                    queries = slice(i, min(i + self.queries, problem.seqlen_q))
                    yield QueryTile(batch, heads, queries, _visible_keys(problem, queries))
                for side, d_keys, dk in zip(
                    self.problem.sides, self.d_keys, self.sums[1::2], strict=True
                ):
                    if dk is not None and d_keys is not None:
                        dk[batch, side.kv_heads(heads)] = d_keys.mT

    def _keys_of(self, side: Side, batch: int, heads: slice) -> Tensor:
        return side.k[batch, side.kv_heads(heads)].to(self.dtype)

    def inputs(self, query_tile: QueryTile) -> Described:
        """Computes the dot products of both sides, and collects what converts them into scores."""
        problem, inputs = self.problem, Described()
        self.folded, self.blocks = [], []
        for name, side, keys, tile in zip(
            "st", self.problem.sides, self.keys, self.tiles, strict=True
        ):
            q = side.q[query_tile.batch, query_tile.heads, query_tile.queries].to(self.dtype)
            q = q.reshape(keys.shape[0], -1, q.shape[-1])  # grouped heads (GQA) as rows
            out = tile[: query_tile.num_rows * query_tile.num_keys].view(
                *q.shape[:2], query_tile.num_keys
            )
            torch.bmm(q, keys[:, query_tile.keys].transpose(1, 2), out=out)
            self.folded.append(q)
            self.blocks.append(out)
            inputs[name] = (out.view(-1, query_tile.num_keys), "rk")
        outside = problem.seqlen_k - query_tile.num_keys
        if outside not in self.numbers:
            self.numbers[outside] = self._numbers_of(outside)
        inputs["numbers"] = (self.numbers[outside], "n")
        inputs["copies"] = (self.copies, "1n")
        for name, bound in self.bounds.items():
            column = bound[query_tile.batch if bound.shape[0] > 1 else 0, query_tile.queries]
            inputs[name] = (
                (column - query_tile.keys.start).repeat(query_tile.num_heads)[:, None],
                "r1",
            )
        if problem.mask is not None:
            # as numbers: Inductor's vectors of booleans take twice as long as all else of a pass
            inputs["mask"] = _tile_of(problem.mask, query_tile, self.dtype)
        for name, side in zip(("student", "teacher"), self.problem.sides, strict=True):
            if side.bias is not None:
                inputs[f"{name}_bias"] = _tile_of(side.bias, query_tile)
            if side.alibi_slopes is not None:
                inputs[f"{name}_alibi"] = self._per_head(side.alibi_slopes, query_tile)
                column = self.position[query_tile.queries] - query_tile.keys.start
                inputs["position"] = (column.repeat(query_tile.num_heads, 1), "r1")
            if side.sink is not None:
                inputs[f"{name}_sink"] = self._per_head(side.sink, query_tile)
        return inputs

    def workspace(self, query_tile: QueryTile) -> Described:
        """Keeps one more tile for each side: tiles that every call allocates cause page faults."""
        shape = (query_tile.num_rows, query_tile.num_keys)
        self.more_tiles = self.more_tiles or [torch.empty_like(x) for x in self.tiles]
        parts = (tile[: math.prod(shape)].view(shape) for tile in self.more_tiles)
        return {name: (x, "rk") for name, x in zip(WORKSPACE, parts, strict=True)}

    def _numbers_of(self, outside: int) -> Tensor:
        student, teacher = self.problem.sides
        fill = self.problem.mask_value
        values = (student.scale, teacher.scale, student.softcap, teacher.softcap,
                  self.problem.temperature, fill, outside)  # fmt: skip
        return torch.tensor(values, dtype=self.dtype, device=DEVICE)

    def _per_head(self, x: Tensor, query_tile: QueryTile) -> tuple[Tensor, str]:
        count = query_tile.queries.stop - query_tile.queries.start
        column = x[query_tile.heads].to(self.dtype).repeat_interleave(count)
        return column[:, None], "r1"

    def run(self, body: compiled.Body, form: RowForm, inputs: Described) -> tuple[Tensor, ...]:
        run = compiled.find(body, form, inputs)
        if run is None:
            raise NotCompiledError
        return tuple(run([x.contiguous() for x, _ in inputs.values()]))

    def add_gradients(self, query_tile: QueryTile, tiles: list[Tensor]) -> None:
        """Multiplies the gradients to the dot products, which the row kernel left in ``tiles``."""
        for i, (block, tile) in enumerate(zip(self.blocks, tiles, strict=True)):
            d_dots = tile[: block.numel()].view(block.shape)
            dq, d_keys = self.sums[2 * i], self.d_keys[i]
            if dq is not None:
                out = dq[query_tile.batch, query_tile.heads, query_tile.queries]
                keys = self.keys[i][:, query_tile.keys]
                if d_dots.shape[0] == out.shape[0]:
                    torch.bmm(d_dots, keys, out=out)
                else:
                    out.copy_(torch.bmm(d_dots, keys).view(out.shape))
            if d_keys is not None:
                # head_dim times keys: a fifth faster than the other way around
                d_keys[:, :, query_tile.keys].baddbmm_(self.folded[i].mT, d_dots)


def _bounds(problem: AttentionProblem) -> dict[str, Tensor]:
    """Returns the first key of every query, and the end, int32 [batch or 1, seqlen_q]."""
    offset = bottom_right_offset(problem.seqlen_q, problem.seqlen_k)
    i = torch.arange(problem.seqlen_q, dtype=torch.int32, device=DEVICE)[None] + offset
    bounds = {}
    if problem.window_left is not None:
        bounds["first"] = i - problem.window_left
    if problem.window_right is not None:
        bounds["stop"] = i + (problem.window_right + 1)
    if problem.key_lengths is not None:
        lengths = problem.key_lengths.to(torch.int32)[:, None]
        stop = bounds.get("stop")
        bounds["stop"] = lengths.expand(-1, problem.seqlen_q) if stop is None else (
            torch.minimum(stop, lengths)
        )  # fmt: skip
    return bounds


def _visible_keys(problem: AttentionProblem, queries: slice) -> slice:
    """Returns the keys that the window admits for some of the queries; at least one key."""
    num_keys = problem.seqlen_k
    offset = bottom_right_offset(problem.seqlen_q, num_keys)
    seen = visible_keys(queries, offset, num_keys, problem.window_left, problem.window_right)
    start = min(seen.start, num_keys - 1)
    return slice(start, max(seen.stop, start + 1))


def _tile_of(
    x: Tensor, query_tile: QueryTile, dtype: torch.dtype | None = None
) -> tuple[Tensor, str]:
    """Returns a query tile's part of a tensor that broadcasts to scores, in two dimensions."""
    parts = (query_tile.heads, query_tile.queries, query_tile.keys)
    h, r, k = (
        part if size > 1 else slice(None) for part, size in zip(parts, x.shape[1:], strict=True)
    )
    block = x[query_tile.batch if x.shape[0] > 1 else 0, h, r, k].to(dtype or x.dtype)
    keys = "k" if x.shape[3] > 1 else "1"
    if block.shape[:2] == (1, 1) and query_tile.num_rows > 1:
        return block.reshape(1, -1), f"1{keys}"
    count = query_tile.queries.stop - query_tile.queries.start
    return block.expand(query_tile.num_heads, count, -1).reshape(
        query_tile.num_rows, -1
    ), f"r{keys}"


forward = _with_fallback("forward", lambda problem: _forward(problem, None, NOTHING)[:2])
forward_with_gradients = _with_fallback("forward_with_gradients", _forward)
backward = _with_fallback("backward", _backward)
