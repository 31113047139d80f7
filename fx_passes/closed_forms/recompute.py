"""Makes the program again from the arguments of its calls alone.

This is the reference for the matcher: the value of what it matched has to be that of the program.
It uses nothing of the program but what an emitter reads, and the meaning of the operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch_streamkl.fx_passes.closed_forms.form import (
    STUDENT,
    Bias,
    Call,
    ClosedForm,
    Factor,
    Product,
    Side,
)
from torch_streamkl.fx_passes.closed_forms.masks import conditions_of
from torch_streamkl.program.canonical import (
    all_of,
    choose,
    linear,
    log_softmax,
    nonnegative,
    product,
    scaled,
)
from torch_streamkl.program.functions import (
    exponential,
    function,
    logarithm,
    quotient,
)
from torch_streamkl.program.graph import SUM, Axis, Node, const, index, size_of
from torch_streamkl.program.identities import LOG_P, LOG_S
from torch_streamkl.program.reductions import canonical, contraction, reduced, remade
from torch_streamkl.program.walks import rebuilt


def recompute(form: ClosedForm) -> Node:
    """Returns the expression that the operators compute with the arguments of a closed form."""
    return linear(0.0, [(1.0, product(call.weight, _rows(call))) for call in form.calls])


def _rows(call: Call) -> Node:
    """The operator's value of each row: at keys that are removed it adds nothing."""
    key = call.axes.key
    masks = conditions_of(call.masks, call.axes)
    fill = -math.inf if call.masks.fill is None else call.masks.fill
    logs = []
    for number, side in enumerate(call.sides):
        score = score_of(side, key)
        if call.stricter is not None and call.stricter.side == number:
            extra = conditions_of(call.stricter.masks, call.axes)
            score = choose(all_of(*extra), score, const(-math.inf))
        score = choose(all_of(*masks), score, const(fill))
        logs.append(_log_probabilities(score, side, key))
    elements = _formula(call.functional.expr, logs[0], logs[STUDENT])
    if call.masks.fill is None:
        elements = choose(all_of(*masks), elements, const(0.0))
    return reduced(SUM, key, elements)


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
        x = quotient(x, factor.value) if factor.divides else product(x, factor.value)
    return x


def _log_probabilities(score: Node, side: Side, key: Axis) -> Node:
    log = log_softmax(score, key)
    if not side.averaged:
        return log
    total, count = exponential(log), const(1.0)
    for axis in side.averaged:
        assert axis.size is not None
        total = reduced(SUM, axis, total)
        count = product(count, size_of(axis.size))
    return logarithm(quotient(total, count))


def _formula(expr: Node, log_p: Node, log_s: Node) -> Node:
    """A divergence of log-probabilities."""
    logs, whole = {LOG_P: log_p, LOG_S: log_s}, canonical(expr)
    return rebuilt([whole], lambda x, args: logs.get(x) or remade(x, args))[whole]
