"""Names the positions that a mask selects, and those that tensors hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_streamkl.program.canonical import factors_of, linear, terms_of
from torch_streamkl.program.graph import Axis, Node, Size, Source, index, size_of
from torch_streamkl.program.reductions import substitute
from torch_streamkl.program.walks import has_op, walk


@dataclass(frozen=True)
class MaskedRows:
    """Names the rows that a mask selects: of its dimensions from ``first`` to ``last``.

    Along the others it does not vary, as a mask of tokens that was expanded over a vocabulary. It
    is broadcast along ``lacking`` dimensions before the first, which are dimensions of the rows.
    """

    mask: fx.Node
    first: int
    last: int
    lacking: int = 0

    @property
    def rank(self) -> int:
        """Returns how many dimensions the mask selects rows of."""
        return self.lacking + self.last - self.first + 1

    @property
    def varying(self) -> list[int]:
        """Returns which of its dimensions have more than one position, counted from the first."""
        sizes = self.mask.meta["val"].shape[self.first : self.last + 1]
        return [*range(self.lacking), *(self.lacking + i for i, n in enumerate(sizes) if n != 1)]


@dataclass(frozen=True)
class Positions:
    """Names the positions along a dimension at which a mask holds: a column of its `nonzero`."""

    rows: MaskedRows
    dim: int  # from the first one of the rows

    @property
    def mask(self) -> fx.Node:
        return self.rows.mask

    def __repr__(self) -> str:
        return f"{self.mask}.nonzero[{self.dim}]"


def source_name(x: Node) -> Any:
    """Returns the name of the tensor that an expression captures; None of anything else."""
    return x.value.name if x.op == "capture" and isinstance(x.value, Source) else None


def nodes_read(*exprs: Node) -> dict[fx.Node, None]:
    """Returns the nodes of a trace that expressions read, masks among them, in a fixed order."""
    names = map(source_name, walk(exprs))
    nodes = (x.mask if isinstance(x, Positions) else x for x in names)
    return dict.fromkeys(x for x in nodes if isinstance(x, fx.Node))


def key_of(at: Node) -> Node:
    """Returns positions whatever their axes are called."""
    return substitute(at, {a: index(Axis("position", a.size)) for a in at.axes})


def is_view(at: Node) -> bool:
    """Returns whether a view has positions: an offset, and indices times their strides."""
    return all(not x.axes or scaled_index(x) is not None for _, x in terms_of(at)[1])


def scaled_index(x: Node) -> tuple[Axis, list[Node]] | None:
    """Returns the axis of an index times sizes, and the sizes; None if it is something else."""
    factors = factors_of(x)
    indices = [f.value for f in factors if f.op == "index"]
    sizes = [f for f in factors if f.op == "size"]
    return (indices[0], sizes) if len(indices) == 1 and len(sizes) == len(factors) - 1 else None


def is_signed(at: Node, size: Size) -> bool:
    """Returns whether a position may be counted from the end of a dimension of this size.

    That of a part of the dimension, as `narrow` reads it, is counted from the end of the part.
    """
    if at.op != "where" or at.args[0].op != "nonnegative":
        return False
    from_front = at.args[1]
    from_end = linear(0.0, [(1.0, from_front), (1.0, size_of(size))])
    return at.args[0].args[0] is from_front and at.args[2] is from_end


def undivided(above: Node, below: Node, size: Node) -> Node | None:
    """Returns the position of which two are the quotient and the remainder by a size."""
    digits = above.op, below.op
    if digits != ("floor_divide", "remainder") or above.args[0] is not below.args[0]:
        return None
    return above.args[0] if all(_is_size(x.args[1], size) for x in (above, below)) else None


def _is_size(x: Node, size: Node) -> bool:
    return x is size or (x.op == size.op and x.value == size.value)


def is_index(at: Node) -> bool:
    """Returns whether positions are read by an index: those of a tensor, or what no view has."""
    return is_relative(at) or any(
        x.op == "capture" or _moves_around(x) or _repeats(x) for x in walk([at])
    )


def is_relative(at: Node) -> bool:
    """Returns whether positions are those of a table of biases, as a clamped i - j is."""
    return len(at.axes) > 1 and has_op(at, "clamp_min", "clamp_max")


def _moves_around(x: Node) -> bool:
    """Whether positions are shifted and begin anew, as of `roll`."""
    return x.op == "remainder" and x.args[0].op == "linear" and x.args[0].value[0] != 0.0


def _repeats(x: Node) -> bool:
    """Whether a position is one of several in a row, as many as a size says."""
    return x.op == "floor_divide" and x.args[0].op == "index" and x.args[1].op == "size"
