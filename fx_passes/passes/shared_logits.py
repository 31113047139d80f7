"""Finds the calls of whose student a cross-entropy has the logits: share_cross_entropy.py.

NOTE [The same logits]
The student of a call is an expression of the call's own axes, `lowering.students.Student`. The
input of a cross-entropy is one of the user's dimensions, which `arrays.met` makes the same axes.
Then both are sums of the same expressions: the coefficients of one are those of the other times
the temperature. A number that is added to all logits changes neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import fx

from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.lowering.students import STUDENT, Student
from torch_streamkl.fx_passes.passes.share_cross_entropy import has_gradient_like, share_each
from torch_streamkl.fx_passes.reading.arrays import Array, NoView, met
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.walks import walk


def share_cross_entropy(
    graph: fx.Graph, trace: Trace, reading: Reading, builder: Callable[[fx.Node], Builder]
) -> list[str]:
    """Replaces cross-entropies of the logits of a `linear_kl` call by the call's second output.

    Returns what the report says of those that keep the logits.
    """

    def logits_of(inner: fx.Node, node: fx.Node) -> Array | None:
        found = reading.arrays.get(inner.args[0])  # type: ignore[arg-type]  # its input, a node
        if not isinstance(found, Array) or len(found.dims) != 2:
            return None
        return found if has_gradient_like(node, found.expr.flows) else None

    def temperature(call: fx.Node, logits: Array) -> float | None:
        student = call.meta.get(STUDENT)
        if student is None or "labels" in call.kwargs:
            return None
        return temperature_of(student, logits)

    return share_each(graph, trace, builder, logits_of, temperature)


def temperature_of(student: Student, logits: Array) -> float | None:
    """Returns the number by which a call divides the logits; None if its logits are others."""
    if any(x.op == "where" for x in walk([logits.expr])):  # of masked logits
        return None
    dims = (student.rows, (student.key,))
    try:
        (ours, theirs), _ = met(Array(student.score, dims, logits.sizes), logits)
    except NoView:
        return None
    terms, wanted = terms_of(ours)[1], {x: c for c, x in terms_of(theirs)[1]}
    if not terms or {x for _, x in terms} != set(wanted):
        return None
    temperature = wanted[terms[0][1]] / terms[0][0]
    if not 0.0 < temperature < math.inf:
        return None
    is_equal = all(math.isclose(wanted[x], c * temperature, rel_tol=1e-12) for c, x in terms)
    return temperature if is_equal else None
