"""Judges the places of maxima, which rounding decides where several elements are nearly largest.

Eager code rounds elements to their own type, and takes the first of those that are equal then. A
replacement that adds up the same products in another order has other elements next to a rounding,
and finds another one of them: in 4,096 rows of 32,000 logits in bfloat16 it does. Either place is
right if its element is as large as the largest one, up to the errors of both.

The errors are those of elements of the same size: a mask of -1e30 has one of 1e22. Elements that
are equal in float64, as masked ones are, are equal in a replacement, which has to find the first.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import argument, example, name_of
from torch_streamkl.fx_passes.validation.running import Result

ROUNDINGS = 2  # each place was found by elements with an error of their own
SIZE = 2  # times that of the largest element: what is not larger has errors like its own


@dataclass(frozen=True)
class Places:
    """Says of which elements a value of the user's graph is the place of the maximum."""

    elements: fx.Node
    dim: int

    @classmethod
    def of(cls, node: fx.Node) -> Places | None:
        """Returns None for a value that is something else."""
        made = node
        if node.target is operator.getitem and node.args[1] == 1:
            made = node.all_input_nodes[0]
        name = "argmax" if made is node else "max"
        source = made.all_input_nodes[0] if made.all_input_nodes else None
        x = example(source) if source is not None else None
        if name_of(made) != name or source is None or not isinstance(x, Tensor):
            return None
        default = None if made is node and x.dim() > 1 else -1
        dim = argument(made, 1, "dim", default)
        return cls(source, dim) if isinstance(dim, int) else None

    def agree(self, ours: Result, given: Result, exact: Result) -> Tensor | None:
        """Returns where a place is that of another element that is nearly the largest.

        None if it cannot be said.
        ``given`` and ``exact`` are runs of the elements, in their own type and in float64.
        """
        x, own, wide = ours.value, given.value, exact.value
        if not isinstance(x, Tensor) or not isinstance(own, Tensor) or own.shape != wide.shape:
            return None
        size = wide.shape[self.dim]
        error = (own.double() - wide).abs().nan_to_num(nan=0.0, posinf=0.0)
        largest = wide.amax(self.dim, keepdim=True)
        at = x.reshape(largest.shape)
        is_there = (at >= 0) & (at < size)
        found = wide.gather(self.dim, at.clamp(0, size - 1))
        is_alike = wide.abs() <= SIZE * largest.abs()
        allowed = ROUNDINGS * error.where(is_alike, 0.0).amax(self.dim, keepdim=True)
        is_nearly = (found >= largest - allowed) & (found < largest)
        return (is_there & is_nearly).reshape(x.shape)
