"""Adds up the gradients of a row program that blocks of rows contribute (blocks.py).

Operands of dot products without heads get matmuls, those with heads kernels. Captured tensors get
sums over the dimensions that they broadcast along.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_streamkl.program.graph import SUM
from torch_streamkl.rows import derive, tile
from torch_streamkl.rows.problem import ALL, RowProblem, Slices, part
from torch_streamkl.rows.program import KEY, PAIR, ROW
from torch_streamkl.rows.torch_impl import in_dtypes_of
from torch_streamkl.rows.triton import launches as row_kernels
from torch_streamkl.rows.triton.launches import row_argument
from torch_streamkl.rows.triton.materialized import Block, columns_source, rows_source

MEMBERS = 16  # query heads, at least, that a program of a key head's gradient adds up


class Gradients:
    """Holds the gradients that the blocks add to."""

    def __init__(self, problem: RowProblem, needs_grad: Sequence[bool]) -> None:
        self.problem, self.program = problem, problem.program
        plan = derive.backward_plan(problem.program)
        count = 2 * len(problem.operands)
        kinds = [c.kind for c in self.program.captures]
        self.tensors = problem.differentiable
        self.dots = {
            i: node
            for i, node in enumerate(plan.dots)
            if node is not None and (needs_grad[2 * i] or needs_grad[2 * i + 1])
        }
        self.captures = {
            i: node
            for i, node in enumerate(plan.captures)
            if node is not None
            and needs_grad[count + i]
            and (kinds[i] == ROW or not plan.nodes[node].head)
        }
        self.first_dot = {
            axis: min(i for i in self.dots if self.program.dot_heads[i] == axis)
            for axis in {self.program.dot_heads[i] for i in self.dots}
        }
        # a tensor of keys or pairs that differs between heads
        self.rest = [False] * count + [
            bool(need) and plan.captures[i] is not None and i not in self.captures
            for i, need in enumerate(needs_grad[count : count + len(kinds)])
        ]
        self.out: list[Tensor | None] = [
            self._allocated(n) if need else None
            for n, need in enumerate(needs_grad[: len(self.tensors)])
        ]
        # of column operands: sums of the last blocks in shares, and the batch elements of these
        self.splits: dict[int, tuple[slice, Tensor]] = {}

    def _dtype(self, n: int) -> torch.dtype:
        """Returns the dtype of sums of blocks: float32, except in matmuls of LM heads."""
        x = self.tensors[n]
        if n >= 2 * len(self.problem.operands):
            return torch.float32
        is_added = n % 2 == 1 and not self.problem.is_of_vocab
        return torch.float32 if is_added else x.dtype

    def _allocated(self, n: int) -> Tensor:
        """Allocates a gradient: zeros if blocks add to each other from the first one on."""
        x, dtype = self.tensors[n], self._dtype(n)
        is_written = n // 2 in self.dots and n < 2 * len(self.problem.operands)
        if is_written and n % 2:  # of a dot with heads, kernels add
            is_written = not self.program.dot_heads[n // 2] and dtype == x.dtype
        make = torch.empty if is_written else torch.zeros
        return make(x.shape, dtype=dtype, device=x.device)

    def finished(self, rest: list[Tensor | None] | None) -> list[Tensor | None]:
        for i in list(self.splits):
            self._add_splits(i)
        found = in_dtypes_of(self.out, self.tensors)
        for i, g in enumerate(rest or ()):
            found[i] = g if g is not None else found[i]
        return found

    def add(self, block: Block) -> None:
        """Adds what a block contributes."""
        joined: set[int] = set()
        for i, node in self.dots.items():
            if self.program.dot_heads[i]:
                joined.update(self._add_headed(block, i, node))
        for i, node in self.captures.items():
            if i not in joined:
                self.add_capture(block, i, node)
        alone = {i: node for i, node in self.dots.items() if not self.program.dot_heads[i]}
        if alone:
            for i, d in block.element_gradients(alone).items():
                self.add_to_rows(i, d, block.at)
                self.add_to_columns(i, d, block.at)

    def add_to_rows(self, i: int, d: Tensor, at: Slices) -> None:
        """Adds to the row operand of a dot without heads; its vocabulary blocks come in order."""
        dq, (batch, rows, keys) = self.out[2 * i], at
        if dq is None:
            return
        for b, each in enumerate(d, batch.start):
            vocab = part(self._matrix(2 * i + 1, b), keys)
            into = part(dq.select(0, b).select(0, 0), rows)
            _matmul_into(into, each, vocab, keys.start == 0)

    def add_to_columns(self, i: int, d: Tensor, at: Slices) -> None:
        """Adds to the column operand; its blocks of tokens come in order."""
        dk, (batch, rows, keys) = self.out[2 * i + 1], at
        if dk is None:
            return
        for b, each in enumerate(d, batch.start):
            tokens = part(self._matrix(2 * i, b), rows)
            into = part(dk.select(0, b).select(0, 0), keys)
            _matmul_into(into, each.t(), tokens, rows.start == 0)

    def _matrix(self, n: int, batch: int) -> Tensor:
        """Views an operand without heads as a matrix."""
        x = self.tensors[n]
        return x.select(0, batch if x.shape[0] > 1 else 0).select(0, 0)

    def _row_sums_of_dot(self, block: Block, i: int) -> dict[int, Tensor]:
        """Allocates the gradients of per-row tensors that the kernel of a dot product computes as
        well.
        """
        if self.out[2 * i] is None:
            return {}
        axis = self.program.dot_heads[i]
        size = (block.problem.batch, self.problem.num_heads(axis), block.problem.num_rows)
        found = {}
        for c, node in self.captures.items():
            is_of_rows = self.program.captures[c].kind == ROW
            if is_of_rows and block.nodes[node].head == axis and self.first_dot[axis] == i:
                place = self._place_of(block, c)
                found[c] = place if self._is_whole(c, axis) else place.new_empty(size)
        return found

    def _is_whole(self, i: int, axis: int) -> bool:
        """Whether a tensor of rows has every batch element, head of an axis and row itself.

        A block then has the only gradient to its rows.
        """
        return self.problem.captures[i].shape == self.problem.row_shape(axis)

    def _add_headed(self, block: Block, i: int, node: int) -> set[int]:
        """Adds to operands of a dot with heads, and to captured tensors that come with it."""
        batch, rows, _ = block.at
        axis = self.program.dot_heads[i]
        at_dot = [j for j, n in enumerate(block.nodes) if n.op == "dot" and n.value == i]
        row_sums = self._row_sums_of_dot(block, i)
        sums = tuple((c, self.captures[c]) for c in row_sums)
        every = (node, *at_dot, *(n for _, n in sums))
        given = {**block.arguments, **block.reads(every, axis)}
        dq, dk = self.out[2 * i], self.out[2 * i + 1]
        if dq is not None:
            for c, d in row_sums.items():
                given.update(row_argument(f"out{c}", d))
            mine = part(dq, batch, ALL, rows)
            given.update(row_kernels.operand_argument(f"da{i}", mine, f"da{i}_out"))
            launch = block.launch_of("dq", axis)
            source = rows_source(self.program, i, sums, block.is_exact)
            row_kernels.launch_rows(source, block.problem, dq.shape[1], launch, given)
        for c, d in row_sums.items():
            if not self._is_whole(c, axis):
                self._add_rows(block, c, d)
        if dk is not None:
            group = given[f"group{i}"]
            splits = max(1, group // MEMBERS) if group % MEMBERS == 0 else 1
            parts = self._shares_of(i, batch, splits)
            given.update(row_kernels.operand_argument(f"db{i}", parts.select(0, 0), f"db{i}_out"))
            given.update({f"db{i}_share": parts.stride(0), "num_splits": splits, "ADD": True})
            launch = block.launch_of("dk", axis)
            source = columns_source(self.program, i, block.is_exact)
            num_heads = dk.shape[1] * splits
            row_kernels.launch_columns(source, block.problem, num_heads, launch, given)
        return set(row_sums)

    def _shares_of(self, i: int, batch: slice, splits: int) -> Tensor:
        """Returns where blocks of these batch elements add to the gradient of a column operand."""
        dk = self.out[2 * i + 1]
        assert dk is not None
        if splits == 1:
            return part(dk, batch).unsqueeze(0)
        if i in self.splits and self.splits[i][0] != batch:
            self._add_splits(i)
        if i not in self.splits:
            mine = part(dk, batch)
            self.splits[i] = batch, mine.new_zeros(splits, *mine.shape)
        return self.splits[i][1]

    def _add_splits(self, i: int) -> None:
        batch, parts = self.splits.pop(i)
        dk = self.out[2 * i + 1]
        assert dk is not None
        mine = part(dk, batch)
        mine += parts.sum(0)

    def _place_of(self, block: Block, i: int) -> Tensor:
        """Returns where a block adds to the gradient of a tensor of rows."""
        target = self.out[2 * len(self.problem.operands) + i]
        assert target is not None
        return part(target, block.at[0], ALL, block.at[1])

    def _add_rows(self, block: Block, i: int, d: Tensor) -> None:
        """Adds a block's gradient to a tensor of rows."""
        into = self._place_of(block, i)
        into += d if d.shape == into.shape else d.sum_to_size(into.shape)

    def add_capture(self, block: Block, i: int, node: int) -> None:
        """Adds the gradient of a captured tensor: a sum over the dimensions that it broadcasts
        along.
        """
        batch, rows, keys = block.at
        kind = self.program.captures[i].kind
        target = self.out[2 * len(self.problem.operands) + i]
        assert target is not None
        if kind == ROW:
            axis = block.nodes[node].head
            heads = self.problem.num_heads(axis)
            d = target.new_zeros(block.problem.batch, heads, block.problem.num_rows)
            block.sums({0: (node, SUM)}, axis, row_argument("out0", d))
            self._add_rows(block, i, d)
            return
        found = block.masked_tensor(node)
        if kind == KEY:
            d = found.sum(1).unsqueeze(1)
            into = part(target, batch, ALL, keys)
        elif kind == PAIR:
            d = found.unsqueeze(1)
            into = part(target, batch, ALL, rows, keys)
        else:
            places = tile.column_places(self.problem, i, block.at).select(1, 0)
            places = places.expand(*found.shape[:-1], -1)
            inside = places < found.shape[-1]
            d = torch.where(inside, found.gather(-1, places.clamp_max(found.shape[-1] - 1)), 0.0)
            d, into = d.unsqueeze(1), part(target, batch, ALL, rows)
        into += d.sum_to_size(into.shape)


def _matmul_into(out: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Add a product, which has the operands' dtype, to a sum; or begin one."""
    if out.dtype != a.dtype:
        out += a @ b
    elif is_first:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)
