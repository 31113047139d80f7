"""Reads the largest probability of a row as that of its largest score."""

from __future__ import annotations

from collections.abc import Sequence

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.program.canonical import subtracted
from torch_streamkl.program.functions import exponential
from torch_streamkl.program.graph import LOGSUMEXP, MAX, Node, apply
from torch_streamkl.program.reductions import reduced, remade
from torch_streamkl.program.walks import rebuilt


def with_largest_scores(roots: Sequence[Node]) -> list[Node]:
    """Returns roots in which a maximum of probabilities is ``exp(max(scores) - lse(scores))``.

    A kernel's maximum ignores NaN, but the log-sum-exp next to it does not. That one is rounded,
    and no probability is above 1: the square root of what it leaves of 1 would be NaN. Raises
    NoForm for a maximum of something else.
    """

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if x.op == "reduce" and x.value.kind == MAX:
            return _largest(x, x.args[0])
        return remade(x, args)

    made = rebuilt(roots, change, lambda x: x.op != "reduce")
    return [made[x] for x in roots]


def _largest(maximum: Node, body: Node) -> Node:
    axis = maximum.value.axis
    if body.op == "exp":
        return exponential(_largest(maximum, body.args[0]))
    if body.op != "log_softmax" or body.value != axis:
        raise NoForm("a maximum over the keys leaves the elements", maximum)
    scores = body.args[0]
    logarithm = subtracted(reduced(MAX, axis, scores), reduced(LOGSUMEXP, axis, scores))
    return apply("clamp_max", logarithm, 0.0)
