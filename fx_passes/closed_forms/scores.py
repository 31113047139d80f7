"""Makes the arguments of a call from the form of scores, and the scores from the arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch_streamkl.fx_passes.closed_forms.form import (
    Bias,
    Factor,
    Product,
    Side,
    operands_of,
)
from torch_streamkl.fx_passes.closed_forms.score_form import ScoreForm
from torch_streamkl.program.canonical import (
    choose,
    linear,
    nonnegative,
    product,
    scaled,
)
from torch_streamkl.program.functions import (
    function,
)
from torch_streamkl.program.graph import SUM, Axis, Node, const, index
from torch_streamkl.program.reductions import contraction, reduced


def side_of(
    form: ScoreForm, key: Axis, averaged: tuple[Axis, ...] = (), num_keys: Node | None = None
) -> Side:
    """Returns one side of a call, whose scores have a form."""
    product = Product(*operands_of(form.product, key), form.product.value, factors=form.factors)
    cap = form.softcap or 1.0  # what is inside of a tanh is divided by it
    return Side(
        product,
        form.scale * cap,
        form.softcap,
        tuple(replace(b, weight=b.weight * cap) for b in form.inner_biases),
        form.biases,
        tuple(replace(t, weight=t.weight * cap) for t in form.terms),
        averaged,
        num_keys,
    )


def score_of(side: Side, key: Axis) -> Node:
    """Returns the scores of a side, without the masks of the call."""
    inner = [(1.0, _product(side.product, side.scale))]
    inner += [(1.0, _bias(b)) for b in side.inner_biases]
    inner += [(1.0, _product(p, p.weight)) for p in side.adapters]
    score = linear(0.0, inner)
    if side.softcap:
        score = scaled(side.softcap, function("tanh", scaled(1.0 / side.softcap, score)))
    score = linear(0.0, [(1.0, score), *((1.0, _bias(b)) for b in side.biases)])
    if side.num_keys is not None:
        has_key = nonnegative(linear(-1.0, [(1.0, side.num_keys), (-1.0, index(key))]))
        score = choose(has_key, score, const(-math.inf))
    return score


def element_of(x: Product) -> Node:
    """Returns an element of a product, of captured tensors or of what is computed in the graph."""
    operands = x.rows, x.keys
    if all(a.op == "capture" for a in operands):
        return contraction(*operands, x.contracted)
    element = product(*operands)
    for axis in x.contracted:
        element = reduced(SUM, axis, element)
    return element


def _product(x: Product, weight: float) -> Node:
    return scaled(weight, _multiplied(element_of(x), x.factors))


def _bias(x: Bias) -> Node:
    return scaled(x.weight, _multiplied(x.value, x.factors))


def _multiplied(x: Node, factors: Iterable[Factor]) -> Node:
    for factor in factors:
        x = factor.applied(x)
    return x
