"""Reads attention: the sum over keys of their probabilities times values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.closed_forms.axes import axes_of, ordered_rows
from torch_streamkl.fx_passes.closed_forms.form import (
    ATTENTION,
    Axes,
    Call,
    Masks,
    NoForm,
    Product,
    Side,
    is_softmax,
)
from torch_streamkl.fx_passes.closed_forms.masks import masks_of
from torch_streamkl.fx_passes.closed_forms.score_form import ScoreForm, has_product, read
from torch_streamkl.fx_passes.closed_forms.scores import side_of
from torch_streamkl.program.canonical import product
from torch_streamkl.program.divergences import named
from torch_streamkl.program.graph import ONE, SUM, Axis, Node
from torch_streamkl.program.reductions import opened
from torch_streamkl.program.walks import has_op

Dims = Sequence[tuple[Axis, ...]]


@dataclass(frozen=True)
class Weighted:
    """Holds a sum over keys of probabilities times values, before its scores are read.

    ``width`` are the axes of the values alone, one dimension of the result.
    """

    score: Node
    values: Node
    key: Axis
    width: tuple[Axis, ...]

    @property
    def axes(self) -> frozenset[Axis]:
        """Returns the axes of the probabilities."""
        return self.score.axes


@dataclass(frozen=True)
class Attention:
    """Represents attention as arguments of an operator."""

    form: ScoreForm
    side: Side
    axes: Axes
    masks: Masks
    values: Node
    width: tuple[Axis, ...]

    @property
    def call(self) -> Call:
        """Returns a call of `attention_kl` with these probabilities on both sides.

        Its queries, keys, masks and biases are those of attention.
        """
        functional = named("forward_kl")
        return Call(ATTENTION, functional, self.side, self.side, self.axes, self.masks, ONE)


def weighted_sum(x: Node, dims: Dims) -> Weighted | None:
    """Returns the probabilities and values of an expression that is a sum of both over keys."""
    if x.kind != SUM:
        return None
    key = Axis(("keys of attention",), x.value.axis.size)  # equal masks of layers are one
    body = opened(x, key)
    factors = body.args if body.op == "product" else ()
    probabilities = [f for f in factors if is_softmax(_unrounded(f), key)]
    if len(probabilities) != 1:
        return None
    score = _unrounded(probabilities[0]).args[0].args[0]
    values = product(*(f for f in factors if f is not probabilities[0]))
    if key not in values.axes or not has_product(score, key):
        return None
    if has_op(values, "log_softmax"):
        return None
    of_values = [tuple(a for a in own if a not in score.axes) for own in dims]
    own = [(d, axes) for d, axes in enumerate(of_values) if set(axes) & values.axes]
    if len(own) != 1 or own[0][1] != dims[own[0][0]]:
        return None  # the probabilities are broadcast along a dimension of the values
    return Weighted(score, values, key, own[0][1])


def attention_of(x: Weighted, dims: Dims) -> Attention:
    """Returns attention as an operator has it; raises NoForm where none has."""
    form = read(x.score, x.key)
    if form.terms:
        raise NoForm("scores are a sum of products, but of no LM head with a single adapter")
    side = side_of(form, x.key)
    of_values = Side(Product(side.product.rows, x.values, form.product.value))
    rows = ordered_rows(x.axes - {x.key}, [a for own in dims for a in own])
    axes = axes_of((side, of_values), (form.mask,), rows, x.key)
    return Attention(form, side, axes, masks_of(form.mask, axes), x.values, x.width)


def _unrounded(x: Node) -> Node:
    """Probabilities before a cast: fused attention rounds them as well."""
    return x.args[0] if x.op == "round" else x
