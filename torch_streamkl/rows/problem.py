"""Defines RowProblem: a row program together with the tensors of one call.

It gives sizes, head counts, result shapes and the compute dtype. Its method `of_block` returns the
same problem for a block of batch, rows and keys, as views. All implementations (reference, plain
torch, Triton) read a call through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.program.graph import ARGMAX
from torch_streamkl.program.masks import visible_keys
from torch_streamkl.rows.program import KEY, PAIR, ROW, VALUES, Program

Slices = tuple[slice, slice, slice]  # of batch, rows and keys


@dataclass(frozen=True, eq=False)
class RowProblem:
    """Holds row operands [batch, heads, rows, dim] and key operands [batch, kv heads, keys, dim],
    and captured tensors.
    """

    program: Program
    operands: tuple[tuple[Tensor, Tensor], ...]
    captures: tuple[Tensor, ...]
    lengths: Tensor | None
    mask: Tensor | None

    @staticmethod
    def of(text: str, tensors: Sequence[Tensor]) -> RowProblem:
        """Makes a problem from an operator's arguments, in the order of `Program.tensor_names`."""
        program = Program.of(text)
        if len(tensors) != len(program.tensor_names):
            raise ValueError(
                f"the row program has {len(program.tensor_names)} tensors, got {len(tensors)}"
            )
        rest = list(tensors)
        operands = tuple((rest.pop(0), rest.pop(0)) for _ in program.dot_heads)
        captures = tuple(rest.pop(0) for _ in program.captures)
        lengths = rest.pop(0) if program.keys.has_lengths else None
        mask = rest.pop(0) if program.keys.has_mask else None
        return RowProblem(program, operands, captures, lengths, mask)

    @property
    def like(self) -> Tensor:
        """Returns an operand: all have its device and dtype."""
        return self.operands[0][0]

    @property
    def is_on_gpu(self) -> bool:
        return self.like.device.type == "cuda"

    @property
    def is_of_vocab(self) -> bool:
        """Returns whether no dot has heads: LM heads."""
        return not any(self.program.dot_heads)

    @property
    def differentiable(self) -> list[Tensor]:
        """Returns the tensors that gradients go to: two operands of each dot, captured tensors."""
        return [*(x for pair in self.operands for x in pair), *self.captures]

    @property
    def batch(self) -> int:
        return self.like.shape[0]

    @property
    def num_rows(self) -> int:
        return self.like.shape[2]

    @property
    def num_keys(self) -> int:
        return self.operands[0][1].shape[2]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Returns the dtype of elements and per-row values."""
        is_double = self.like.dtype == torch.float64
        return torch.float64 if is_double else torch.float32

    def dtype_of(self, kind: str) -> torch.dtype:
        """Returns the dtype of per-row values of a kind."""
        return torch.int64 if kind == ARGMAX else self.compute_dtype

    def num_heads(self, axis: int) -> int:
        """Returns the size of an axis of heads; 0 is none."""
        if not axis:
            return 1
        return self.operands[self.program.dot_heads.index(axis)][0].shape[1]

    @property
    def max_heads(self) -> int:
        return max(q.shape[1] for q, _ in self.operands)

    def row_shape(self, axis: int) -> tuple[int, int, int]:
        return self.batch, self.num_heads(axis), self.num_rows

    def num_blocks(self, size: int) -> int:
        """Counts the blocks of as many keys each; the last may have fewer."""
        return -(-self.num_keys // size)

    def value_shape(self, head: int, size: int) -> tuple[int, ...]:
        """Returns the shape of per-row values; of rows and blocks for blocks of ``size`` keys."""
        return *self.row_shape(head), *((self.num_blocks(size),) if size else ())

    def keys_of(self, rows: slice) -> slice:
        """Returns the keys that some of the rows may have."""
        keys, shift = self.program.keys, self.num_keys - self.num_rows
        return visible_keys(rows, shift, self.num_keys, keys.left, keys.right)

    def of_block(self, batch: slice, rows: slice, keys: slice) -> RowProblem:
        """Returns the problem of a block (views), whose first row and key are its own."""
        along: dict[str, tuple[slice, ...]] = {ROW: (rows,), KEY: (keys,), PAIR: (rows, keys)}
        return RowProblem(
            self.program,
            tuple(
                (part(q, batch, ALL, rows), part(k, batch, ALL, keys)) for q, k in self.operands
            ),
            tuple(
                part(x, batch, ALL, *along.get(c.kind, (rows,)))
                for x, c in zip(self.captures, self.program.captures, strict=True)
            ),
            None if self.lengths is None else part(self.lengths, batch),
            None if self.mask is None else part(self.mask, batch, ALL, rows, keys),
        )

    def ids_of(self, capture: int) -> Tensor:
        """Returns the ids (keys) that a `columns` tensor refers to."""
        declared = self.program.captures[capture]
        return self.captures[declared.ids if declared.kind == VALUES else capture]


def part(x: Tensor, *slices: slice) -> Tensor:
    """Returns a block of the leading dimensions [batch, heads, ...], which may broadcast; None
    selects all.
    """
    for dim, each in enumerate(slices):
        if x.shape[dim] != 1:
            x = x.narrow(dim, each.start, each.stop - each.start) if each != ALL else x
    return x


ALL = slice(None)
