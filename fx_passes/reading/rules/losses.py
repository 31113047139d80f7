"""Reads torch's loss functions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_streamkl.bounds import LABELS
from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, added, number_of, rule
from torch_streamkl.fx_passes.reading.rules.reductions import (
    averaged,
    count_of,
    log_softmax_of,
    norm_of,
    over,
)
from torch_streamkl.fx_passes.reading.rules.selections import gathered
from torch_streamkl.program.canonical import (
    choose,
    compare,
    linear,
    negation,
    product,
    scaled,
    subtracted,
)
from torch_streamkl.program.functions import exponential, function, logarithm, quotient
from torch_streamkl.program.graph import INT, SUM, Node, const
from torch_streamkl.program.reductions import detached

aten = torch.ops.aten
NONE, MEAN, TOTAL = range(3)
WEIGHTS = ("pos_weight", "weight")  # of a binary cross-entropy


def _of_pair(call: Call, make: Callable[..., Node], *others: Array) -> Array:
    """What a loss makes of each pair of values, and the reduction with which it ends."""
    values = call.pointwise(make, *call.arrays("self", "target"), *others)
    reduction = call.known("reduction", MEAN)
    every = range(len(values.dims))
    if reduction == NONE:
        return values
    return averaged(values, every) if reduction == MEAN else over(SUM, values, every)


@rule(aten.kl_div.default)
def kl_div(call: Call) -> Array:
    """Reads ``target * (log target - input)``, 0 where the target is."""

    def values(x: Node, t: Node) -> Node:
        if call.get("log_target"):
            return product(exponential(t), subtracted(t, x))
        return linear(0.0, [(1.0, product(t, logarithm(t))), (-1.0, product(t, x))])

    return _of_pair(call, values)


@rule(aten.mse_loss.default)
def mse_loss(call: Call) -> Array:
    """Reads squared differences."""

    def squares(x: Node, y: Node) -> Node:
        difference = added(x, y, -1.0)
        return product(difference, difference)

    return _of_pair(call, squares)


@rule(aten.l1_loss.default)
def l1_loss(call: Call) -> Array:
    """Reads absolute differences."""
    return _of_pair(call, lambda x, y: function("abs", added(x, y, -1.0)))


@rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(call: Call) -> Array:
    """Reads ``(1 - target) * input + softplus(-input)``, with weights of either class and of all.

    Torch has no gradient to a weight, and raises where one is needed.
    """

    def values(x: Node, t: Node, positive: Node, weight: Node) -> Node:
        rest = product(subtracted(const(1.0), t), x)
        factor = linear(1.0, [(1.0, product(t, subtracted(positive, const(1.0))))])
        found = [(1.0, rest), (1.0, product(factor, function("softplus", scaled(-1.0, x))))]
        return product(linear(0.0, found), weight)

    weights = (call.array(n) if call.has(n) else call.made(const(1.0)) for n in WEIGHTS)
    return _of_pair(call, values, *(x.map(number_of) for x in weights))


@rule(aten.smooth_l1_loss.default, aten.huber_loss.default)
def huber_loss(call: Call) -> Array:
    """Reads a square near 0, and a distance further away."""
    is_huber = call.node.target == aten.huber_loss.default
    beta = float(call.known("delta" if is_huber else "beta", 1.0))
    if beta <= 0.0:
        raise NoRule("a loss with a bound of 0")

    def values(x: Node, y: Node) -> Node:
        distance = function("abs", added(x, y, -1.0))
        near = scaled(0.5 / beta, product(distance, distance))
        far = linear(-0.5 * beta, [(1.0, distance)])
        found = choose(compare("lt", distance, const(beta)), near, far)
        return scaled(beta, found) if is_huber else found

    return _of_pair(call, values)


@rule(aten.cosine_similarity.default)
def cosine_similarity(call: Call) -> Array:
    """Norms are bounded from below without a gradient: it flows as if they were not."""
    x, y = (x.map(number_of) for x in call.arrays("x1", "x2"))
    exprs, dims = arrays.met(x, y)
    d = call.known("dim", 1) % len(dims)
    eps = const(float(call.known("eps", 1e-8)))
    units = []
    for e in exprs:
        whole = call.made(e, dims)
        norm = norm_of(whole, 2.0, [d], True)
        missing = detached(subtracted(function("clamp_min", norm.expr, eps), norm.expr))
        bounded = norm.map(lambda n, m=missing: linear(0.0, [(1.0, n), (1.0, m)]))  # type: ignore[misc]
        units.append(call.pointwise(quotient, whole, bounded))
    return over(SUM, call.pointwise(product, *units), [d])


# ------------------------------------------------------------------------ of classes


@rule(aten.cross_entropy_loss.default)
def cross_entropy(call: Call) -> Array:
    """Reads a cross-entropy with labels or probabilities."""
    x = call.array("self")
    d = 1 if len(x.dims) > 1 else 0
    logs = log_softmax_of(x, d)
    dtype = call.dtype_of("target")
    assert dtype is not None
    smoothing = float(call.known("label_smoothing", 0.0))
    if dtype.is_floating_point:
        return _of_probabilities(call, logs, d, smoothing)
    return _of_labels(call, logs, d, smoothing)


def _along_classes(call: Call, x: Array, d: int) -> Array:
    """Class weights as a tensor that meets the logits."""
    weight = call.array("weight")
    dims = [weight.dims[0] if i == d else () for i in range(len(x.dims))]
    return call.made(weight.expr, dims)


def _of_probabilities(call: Call, logs: Array, d: int, smoothing: float) -> Array:
    target = call.array("target")
    if smoothing:
        share = quotient(const(smoothing), count_of(logs, [d]))
        target = target.map(lambda t: linear(0.0, [(1.0 - smoothing, t), (1.0, share)]))
    values = call.pointwise(lambda t, e: scaled(-1.0, product(t, e)), target, logs)
    if call.has("weight"):
        values = call.pointwise(product, values, _along_classes(call, values, d))
    reduction = call.known("reduction", MEAN)
    if reduction == NONE:
        return over(SUM, values, [d])
    every = list(range(len(values.dims)))
    total = over(SUM, values, every)
    if reduction == TOTAL:
        return total
    count = count_of(values, [i for i in every if i != d])
    return total.map(lambda e: quotient(e, count))


@rule(aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default)
def nll_loss(call: Call) -> Array:
    """Reads the negative log-probabilities of labels."""
    x = call.array("self")
    return _of_labels(call, x, 1 if len(x.dims) > 1 else 0, 0.0)


def _of_labels(call: Call, logs: Array, d: int, smoothing: float) -> Array:
    labels = call.array("target")
    ignored = const(call.known("ignore_index", -100), INT)
    call.reads_at(labels.expr, f"{LABELS} {int(ignored.value)}", d, logs.size(d))
    kept = labels.map(lambda e: negation(compare("eq", e, ignored)))
    counted = kept.map(number_of)
    if call.has("weight"):
        inside = call.pointwise(lambda k, e: choose(k, e, const(0, INT)), kept, labels)
        weights = gathered(call, call.array("weight"), 0, inside)
        counted = call.pointwise(lambda k, w: choose(k, w, const(0.0)), kept, weights)
    dims = (*labels.dims[:d], (), *labels.dims[d:])
    at_label = _at(call, logs, d, call.made(labels.expr, dims))
    losses = call.pointwise(
        lambda k, w, e: choose(k, scaled(-1.0, product(w, e)), const(0.0)),
        kept, counted, at_label,
    )  # fmt: skip
    found = _counted(call, losses, counted)
    if not smoothing:
        return found
    weighted = logs
    if call.has("weight"):
        weighted = call.pointwise(product, logs, _along_classes(call, logs, d))
    spread = over(SUM, weighted, [d])
    spread = call.pointwise(lambda k, e: choose(k, scaled(-1.0, e), const(0.0)), kept, spread)
    other = _counted(call, spread, counted)
    share = quotient(const(smoothing), count_of(logs, [d]))
    return call.pointwise(
        lambda a, b: linear(0.0, [(1.0 - smoothing, a), (1.0, product(share, b))]), found, other
    )


def _at(call: Call, x: Array, d: int, labels: Array) -> Array:
    """The entries of a dimension at labels, which has none in the result."""
    found = gathered(call, x, d, labels)
    return call.made(found.expr, (*found.dims[:d], *found.dims[d + 1 :]))


def _counted(call: Call, losses: Array, counted: Array) -> Array:
    reduction = call.known("reduction", MEAN)
    if reduction == NONE:
        return losses
    every = range(len(losses.dims))
    total = over(SUM, losses, every)
    if reduction == TOTAL:
        return total
    return call.pointwise(quotient, total, over(SUM, counted, every))
