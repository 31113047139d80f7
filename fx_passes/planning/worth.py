"""Decides which losses are too small to fuse, by their closed forms: profitability.py.

It takes the place of that file's functions; the thresholds stay there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch_streamkl.fx_passes.closed_forms.form import LINEAR, ClosedForm, Product
from torch_streamkl.fx_passes.planning import profitability
from torch_streamkl.fx_passes.planning.profitability import (
    ELEMENT,
    MIB,
    least_attention_mib,
    least_mib,
    too_small,
)
from torch_streamkl.program.graph import Axis, Extent, Size
from torch_streamkl.rows.program import Program


def why_left(forms: Sequence[ClosedForm], device: str, given: float | None) -> str:
    """Explains why a loss is skipped; an empty text if it is fused, as with dynamic shapes."""
    mib, least = mib_of_scores(forms), least_mib(device, given)
    if mib is None or mib >= least:
        return ""
    is_head = all(call.operator == LINEAR for form in forms for call in form.calls)
    return too_small(mib, "logits" if is_head else "scores", least, device, given, "losses")


def mib_of_scores(forms: Iterable[ClosedForm]) -> float | None:
    """Returns the size of the scores of all distributions; None where it varies."""
    total = 0.0
    for form in forms:
        sides = {side for call in form.calls for side in call.sides}
        count = num_elements((*form.calls[0].axes.rows, form.calls[0].axes.key))
        if count is None:
            return None
        total += count * len(sides) * ELEMENT / MIB
    return total


def why_attention_is_skipped(axes: Iterable[Axis], device: str, given: float | None) -> str:
    """Explains why attention is skipped, of the axes of its probabilities; "" if it is fused."""
    count, least = num_elements(axes), least_attention_mib(device, given)
    mib = None if count is None else count * ELEMENT / MIB
    if mib is None or mib >= least:
        return ""
    return too_small(mib, "scores", least, device, given, "attention")


def why_program_is_left(products: Iterable[Product], device: str, given: float | None) -> str:
    """Explains why a row program is skipped; an empty text if it is fused.

    Sizes that vary count as they are when the graph is compiled; those that only data decides are
    taken for large.
    """
    least = profitability.LEAST_PROGRAM_MIB.get(device, 0.0) if given is None else given
    mib = 0.0
    for product in products:
        sizes = [_hint(a.size) for a in axes_of(product)]
        if None in sizes:
            return ""
        mib += math.prod(n for n in sizes if n is not None) * ELEMENT / MIB
    if mib >= least:
        return ""
    return too_small(mib, "products", least, device, given, "custom losses")


def why_small(program: Program, products: Iterable[Product]) -> str:
    """Explains why a program saves nothing; a softmax is always worth it.

    Products without one may be layers of a network, compared with others: projected hidden states,
    which are no larger than what they are computed from.
    """
    if program.logsumexps or any(n.op == "exp" for n in program.nodes):
        return ""
    for product in products:
        made = num_elements(axes_of(product))
        operands = [num_elements(x.axes) for x in (product.rows, product.keys)]
        if made is None or any(n is None or made < 2 * n for n in operands):
            return "products that are not larger than what they are computed from"
    return ""


def axes_of(product: Product) -> frozenset[Axis]:
    """Returns the axes that a product has an element for."""
    return (product.rows.axes | product.keys.axes) - set(product.contracted)


def num_elements(axes: Iterable[Axis]) -> int | None:
    """Returns how many elements there are along axes; None where that varies."""
    sizes = [a.size for a in axes]
    known = [n for n in sizes if isinstance(n, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def _hint(size: Size | None) -> int | None:
    """A size as it is now, without a guard."""
    if isinstance(size, Extent):
        hint = size.size.node.hint
        return None if hint is None else int(hint)
    return size
