"""Inserts captured tensors as a program reads them: views, selections and paddings of the user's.

A position is an expression of axes. Of ``offset + sum of stride * index`` it is a view: a slice,
flipped where strides are negative, padded where it leaves the tensor (what is read there is chosen
by no `where`). Positions that a tensor holds select.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from torch_streamkl.fx_passes.capture.retrace import outer_node
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import written_storages
from torch_streamkl.fx_passes.fx_utils.nodes import (
    descendants,
    name_of,
    needs_gradient,
    storage_of,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.sizes import expression, hint_of, is_one, is_unknown
from torch_streamkl.fx_passes.lowering.placed import Arranging, Placed
from torch_streamkl.fx_passes.reading.arrays import Dim
from torch_streamkl.fx_passes.reading.positions import scaled_index
from torch_streamkl.fx_passes.reading.sizes import Sizes
from torch_streamkl.program.canonical import linear, terms_of
from torch_streamkl.program.graph import INT, Axis, Node, Size, Source, const, constant, size_of

UNKNOWN_PLACE = "scores are sliced at a position of unknown size"
NO_VIEW = "an operand is read at positions that no view has"

aten = torch.ops.aten
LIFTED = {
    aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.detach_.default,
    aten.detach.default, aten.alias.default,
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """Represents stride * index along an axis."""

    stride: Size
    axis: Axis
    sign: int = 1


@dataclass(frozen=True)
class Affine:
    """Represents a position: an offset, and terms with the largest stride first."""

    offset: Node
    terms: tuple[Term, ...]

    @property
    def dim(self) -> Dim:
        return tuple(t.axis for t in self.terms)


def _may_need_gradient(x: fx.Node) -> bool:
    """Whether a tensor has a gradient, also if it is dropout in eval under no_grad.

    That one returns its input, which keeps its gradient; what is recorded of it is another tensor.
    """
    if needs_gradient(x):
        return True
    return x.target is F.dropout and any(map(_may_need_gradient, x.all_input_nodes))


class Captures:
    """Reads tensors of the user's graph at positions."""

    def __init__(
        self, arranging: Arranging, sizes: Sizes, outer: Mapping[fx.Node, fx.Node]
    ) -> None:
        self.arranging, self.build = arranging, arranging.build
        self.sizes, self.outer = sizes, outer

    def tensor(self, source: Source) -> fx.Node:
        """Returns the user's tensor, detached if no gradient flows to it."""
        name = source.name
        if name.op == "get_attr" and name not in self.outer:  # a constant, made by the user's code
            copies = descendants([name])
            found = (n for n in name.graph.nodes if n in copies and n in self.outer)
            name = next((n for n in found if n.target in LIFTED), name)
        x = self._sibling(name) or outer_node(name, self.outer)
        if not source.grad_flows and _may_need_gradient(x):
            return self.build.method("detach", x)
        return x

    def _sibling(self, node: fx.Node) -> fx.Node | None:
        """Returns a result that the user's code leaves out: ids of a topk whose values it has."""
        if node in self.outer or node.target is not operator.getitem:
            return None
        made, which = node.args
        for other in made.users if isinstance(made, fx.Node) else ():
            taken = self.outer.get(other)
            if taken is None or taken.target is not operator.getitem:
                continue
            result, index = taken.args
            if index != other.args[1]:
                continue
            assert isinstance(result, fx.Node)
            same = [u for u in result.users if u.target is operator.getitem and u.args[1] == which]
            written = written_storages(result.graph) if same else ()
            if any(storage_of(u) in written for u in same):
                raise Unsupported(f"a result of {name_of(result)} is written to in place")
            inserted: fx.Node = self.build.call(operator.getitem, result, which)
            return inserted
        return None

    def placed(
        self,
        x: fx.Node,
        at: Sequence[Node],
        index: Mapping[Node, Placed],
        whole: Collection[int] = (),
        signed: Collection[Node] = (),
    ) -> Placed:
        """Returns a tensor at positions; ``index`` has those that are no views, as tensors.

        ``whole`` are dimensions of which every position is read, whatever their symbols say, and
        ``signed`` positions that may be counted from the end.
        """
        selected = [d for d, p in enumerate(at) if p in index]
        dims: list[Dim] = [()] * len(at)
        removed = []
        for d in range(len(at)):
            if d in selected:
                continue
            affine = self.affine(at[d])
            assert affine is not None
            if d in whole:
                dims[d] = affine.dim
                continue
            x, found = self._viewed(x, d, affine)
            if found is None:
                removed.append(d)
            else:
                dims[d] = found
        for d in reversed(removed):  # before a selection moves dimensions
            x = self.build.method("squeeze", x, d)
            del dims[d]
        if selected:
            is_signed = any(at[d] in signed for d in selected)
            places = [d - sum(r < d for r in removed) for d in selected]
            x, dims = self._selected(x, places, [index[at[d]] for d in selected], dims, is_signed)
        return Placed(x, tuple(dims))

    # ------------------------------------------------------------------------- positions

    def affine(self, at: Node) -> Affine | None:
        """Returns a position as a view has it, None for any other."""
        number, terms = terms_of(at)
        offset = [(1.0, const(number, INT))]
        found = []
        for c, x in terms:
            if not x.axes:
                offset.append((c, x))
                continue
            term = self._term(c, x)
            if term is None:
                return None
            found.append(term)
        order = sorted(found, key=lambda t: self._rank(t.stride), reverse=True)
        return Affine(linear(0.0, offset), tuple(order))

    def _term(self, c: float, x: Node) -> Term | None:
        found = scaled_index(x)
        if found is None or c != int(c):
            return None
        axis, sizes = found
        stride = self.sizes.product([abs(int(c)), *(f.value for f in sizes)])
        return Term(stride, axis, 1 if c > 0 else -1)

    def _rank(self, stride: Size) -> float:
        """Orders strides: a symbolic one by its hint."""
        if isinstance(stride, int):
            return float(stride)
        hint = hint_of(stride.size)
        return float(stride.low if hint is None else hint)

    # ------------------------------------------------------------------------- views

    def _viewed(self, x: fx.Node, d: int, at: Affine) -> tuple[fx.Node, Dim | None]:
        """A dimension read at a position; None if it is one position."""
        value = tensor_of(x)
        have = size_of(self.sizes.of(value.shape[d]))
        if not at.terms:
            if is_one(value.shape[d]):
                return x, ()
            place = constant(at.offset)
            if place is None:
                raise Unsupported(UNKNOWN_PLACE)
            return self.build.method("narrow", x, d, int(place), 1), None
        if any(t.sign < 0 for t in at.terms):
            if any(t.sign > 0 for t in at.terms):
                raise Unsupported(NO_VIEW)
            x = self.build.method("flip", x, d)
            at = Affine(
                linear(-1.0, [(1.0, have), (-1.0, at.offset)]),
                tuple(replace(t, sign=1) for t in at.terms),
            )
        blocks = self._of_blocks(x, d, at)
        if blocks is not None:
            return blocks, at.dim
        step = at.terms[-1].stride
        span: Size = step
        for t in reversed(at.terms):
            assert t.axis.size is not None
            if not self.sizes.are_equal(t.stride, span):
                raise Unsupported(NO_VIEW)
            span = self.sizes.product([span, t.axis.size])
        if step != 1:
            return self._stepped(x, d, at, have, step), at.dim
        length = size_of(span)
        is_first = at.offset.op == "const" and at.offset.value == 0.0
        if is_first and (length is have or self._is_count(x, d, span)):
            return x, at.dim
        return self._narrowed(x, d, at.offset, have, span), at.dim

    def _is_count(self, x: fx.Node, d: int, span: Size) -> bool:
        """Whether both sizes are numbers of rows that data decides, with symbols of their own."""
        size = tensor_of(x).shape[d]
        if isinstance(span, int) or not is_unknown(size):
            return False
        if not all(isinstance(expression(n), sympy.Symbol) for n in (size, span.size)):
            return False  # a part of the rows
        traced = [t.meta["val"].shape[d] for t, node in self.outer.items() if node is x]
        is_traced = any(expression(n) == expression(span.size) for n in traced)
        if not is_traced and not self.build.selections.is_count(span.size, size):
            return False  # another number: a part of the rows
        self.build.count(span.size, x, d)
        return True

    def _of_blocks(self, x: fx.Node, d: int, at: Affine) -> fx.Node | None:
        """A part of each block of a dimension, as ``x.view(batch, length)[:, 1:]`` reads."""
        have, offset = self.sizes.of(tensor_of(x).shape[d]), constant(at.offset)
        strides = [t.stride for t in at.terms]
        sizes = [t.axis.size for t in at.terms]
        if len(strides) != 2 or strides[1] != 1 or offset is None:
            return None
        if not (isinstance(strides[0], int) and isinstance(sizes[1], int)):
            return None
        blocks = self.sizes.quotient(have, strides[0])
        is_whole = blocks is not None and self.sizes.are_equal(blocks, sizes[0] or 1)
        if not is_whole or not 0 <= offset <= strides[0] - sizes[1] or sizes[1] == strides[0]:
            return None
        x = self.build.method("unflatten", x, d, (-1, strides[0]))
        x = self.build.method("narrow", x, d + 1, int(offset), sizes[1])
        return self.build.method("flatten", x, d, d + 1)

    def _narrowed(self, x: fx.Node, d: int, offset: Node, have: Node, span: Size) -> fx.Node:
        rest = linear(0.0, [(1.0, have), (-1.0, offset), (-1.0, size_of(span))])
        after, start = constant(rest), constant(offset)
        ends_inside = self.sizes.is_nonnegative(rest)
        if start is None:
            if not (ends_inside and self.sizes.is_nonnegative(offset)):
                raise Unsupported(UNKNOWN_PLACE)
            begin = self._inserted(offset)
        else:
            begin = int(start)
        before = max(0, -int(start)) if start is not None else 0
        beyond = max(0, -int(after)) if after is not None else 0
        if start is not None and after is None and not (ends_inside or isinstance(span, int)):
            raise Unsupported(UNKNOWN_PLACE)
        if before or beyond:
            rank = len(tensor_of(x).shape)
            pads = [0, 0] * (rank - 1 - d) + [before, beyond]
            x = self.build.call(torch.nn.functional.pad, x, tuple(pads))
            begin = 0 if before else begin
            if after is not None and after - beyond <= 0 and begin == 0:
                return x
        length = self.arranging.inserted_size(span)
        return self.build.method("narrow", x, d, begin, length)

    def _stepped(self, x: fx.Node, d: int, at: Affine, have: Node, step: Size) -> fx.Node:
        count = self.sizes.product([t.axis.size or 0 for t in at.terms])
        if not isinstance(step, int) or not isinstance(count, int):
            raise Unsupported(UNKNOWN_PLACE)
        start, length, size = constant(at.offset), step * (count - 1) + 1, tensor_of(x).shape[d]
        if start is not None and isinstance(size, int) and 0 <= start <= size - length:
            places = slice(int(start), int(start) + length, step)
        else:  # it begins or ends outside of the tensor, or may
            x, places = self._narrowed(x, d, at.offset, have, length), slice(None, None, step)
        return self.build.call(operator.getitem, x, (*(slice(None),) * d, places))

    def _inserted(self, x: Node) -> int | fx.Node:
        """An integer that is made of sizes."""
        number, terms = terms_of(x)
        total: int | fx.Node = int(number)
        for c, t in terms:
            if t.op != "size":
                raise Unsupported(UNKNOWN_PLACE)
            part = self.arranging.inserted_size(t.value)
            if c != 1.0:
                part = self.build.call(operator.mul, part, int(c))
            total = part if total == 0 else self.build.call(operator.add, part, total)
        return total

    # ------------------------------------------------------------------------- selections

    def _selected(
        self,
        x: fx.Node,
        places: list[int],
        index: list[Placed],
        dims: list[Dim],
        is_signed: bool,
    ) -> tuple[fx.Node, list[Dim]]:
        """Dimensions read at positions that tensors hold."""
        others = {a for d, dim in enumerate(dims) if d not in places for a in dim}
        shared = {a for p in index for a in p.axes} & others
        is_one = len(places) == 1 and not is_signed
        if is_one and not shared and len(index[0].dims) == 1:
            (d,), (p,) = places, index
            dims[d] = p.dims[0]
            return self.build.method("index_select", x, d, p.node), dims
        if is_one and shared:
            found = self._gathered(x, places[0], index[0], dims)
            if found is not None:
                return found
        for d, dim in enumerate(dims):  # one position for each index of another dimension
            if d not in places and set(dim) & shared:
                device = tensor_of(x).device
                stop = self.build.size(tensor_of(x).shape[d], [x])
                every = self.build.call(torch.arange, stop, device=device)
                places, index = [*places, d], [*index, Placed(every, (dim,))]
        order = sorted(range(len(places)), key=lambda i: places[i])
        places, index = [places[i] for i in order], [index[i] for i in order]
        tensors, own = self.arranging.aligned(*index)
        first = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
        at = dict(zip(places, tensors, strict=True))
        x = self.build.call(
            operator.getitem, x, tuple(at.get(d, slice(None)) for d in range(len(dims)))
        )
        kept = [(d, dim) for d, dim in enumerate(dims) if d not in places]
        before = [dim for d, dim in kept if d < first]
        after = [dim for d, dim in kept if d >= first]
        return x, [*before, *own, *after]

    def _gathered(
        self, x: fx.Node, d: int, index: Placed, dims: list[Dim]
    ) -> tuple[fx.Node, list[Dim]] | None:
        """Positions of each row of other dimensions, all of which a ``gather`` has."""
        index = self.arranging.squeezed(index)
        own = [dim for dim in index.dims if dim not in dims]
        if len(own) != 1 or any(
            dim and set(dim) & set(index.axes) and dim not in index.dims for dim in dims
        ):
            return None
        wanted = [own[0] if i == d else dim for i, dim in enumerate(dims)]
        at = self.arranging.ordered(index, [a for dim in wanted for a in dim])
        node = self.arranging._with_ones(at, list(wanted))
        if len(tensor_of(node).shape) < len(wanted):
            node = self.build.call(
                operator.getitem, node, (None,) * (len(wanted) - len(tensor_of(node).shape))
            )
        shape = tensor_of(x).shape
        sizes = [
            -1 if i == d or dim in index.dims else self.build.size(shape[i], [x])
            for i, dim in enumerate(wanted)
        ]
        node = self.build.method("expand", node, *sizes)
        return self.build.method("gather", x, d, node), wanted
