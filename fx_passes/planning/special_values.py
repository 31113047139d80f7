"""Finds losses of which eager code has NaN or infinity where an operator has a number.

Eager code has NaN if a masked key has the probability 0 and the logarithm -inf, and infinity if a
probability is 0 by underflow. An operator gives the limit. Code that makes numbers of these
(readers.py) must see what eager has, after the loss and in it.

NOTE [What an expression does not say]
The normal form is that of real numbers: what cancels, as a value per row that is added to scores
before a softmax, is not in it. So `Scores` looks at the nodes of the trace, too: all that are
computed between the products and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from torch_streamkl.fx_passes.closed_forms.form import (
    ClosedForm,
    NoForm,
    is_of_products,
    sources_in,
)
from torch_streamkl.fx_passes.closed_forms.heads import Variables
from torch_streamkl.fx_passes.closed_forms.row_facts import LOGARITHMS
from torch_streamkl.fx_passes.closed_forms.score_form import ScoreForm, read
from torch_streamkl.fx_passes.closed_forms.worlds import World, has_infinite_bias, value_at
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, name_of, named_arguments, reached
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.planning.readers import NO_READERS, Readers, readers_behind
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.graph import Axis, Node
from torch_streamkl.program.shifts import HIDES
from torch_streamkl.program.walks import has_op, walk

ASKS = {"nan_to_num", "isnan", "isinf", "isfinite"}  # they tell what is infinite or NaN


@dataclass(frozen=True)
class Scores:
    """Holds what a loss is computed from: the sums over keys that are matched, and its nodes."""

    inner: fx.Node
    sites: tuple[ClosedForm, ...]
    reading: Reading

    @cached_property
    def forms(self) -> list[ScoreForm]:
        """The scores of each softmax that is summed."""
        return [form for site in self.sites for form in forms_of(site)]

    @cached_property
    def nodes(self) -> set[fx.Node]:
        """Returns the nodes between the products and the loss."""
        return reached([self.inner], lambda n: [] if _is_product(n) else n.all_input_nodes)

    def logarithms(self) -> Iterator[tuple[Node, float]]:
        """Expressions of probabilities whose logarithm is taken, and where that is -inf."""
        for node in ancestors(self.inner):
            place, lowest = LOGARITHMS.get(node.target, (0, None))  # type: ignore[call-overload]
            if lowest is None or len(node.args) <= place:
                continue
            x = self.reading.expression(node.args[place])
            if x is not None and is_of_keys(x):
                yield x, lowest

    @cached_property
    def may_underflow(self) -> bool:
        """Whether a logarithm is -inf where a probability underflows."""
        return any(x.range[0] <= lowest for x, lowest in self.logarithms())

    @cached_property
    def may_be_infinite(self) -> bool:
        """Whether some scores may be -inf; a tensor that is added may hold anything."""
        return any(map(may_be_infinite, self.forms)) or self.has_lost_rows

    @cached_property
    def drops_absent_keys(self) -> bool:
        """Whether keys that all distributions lack contribute 0: fused, 0 * -inf is 0."""
        every = [(x.mask, x.biases, x.inner_biases) for x in self.forms]
        if any(x != every[0] for x in every):
            return False
        return all(call.functional.absent == 0.0 for site in self.sites for call in site.calls)

    @cached_property
    def has_lost_rows(self) -> bool:
        """Whether a tensor is added to scores that the loss is no function of any more.

        It is a value per row, which a softmax ignores unless it is infinite.
        """
        whole = self.reading.expression(self.inner)
        left = set(sources_in(whole)) if whole is not None else set()
        return any(set(sources_in(t)) - left for n in self.nodes for t in self._added(n))

    def _added(self, node: fx.Node) -> list[Node]:
        """What is added to scores and may be infinite."""
        x = self.reading.expression(node)
        if x is None or x.op != "linear":
            return []
        terms = {t: is_of_products(t) for _, t in terms_of(x)[1]}
        if not any(is_made and _is_score(t) for t, is_made in terms.items()):
            return []
        return [t for t, is_made in terms.items() if not is_made and not t.is_finite]


def check_nan_readers(node: fx.Node, loss: Scores, outside: Readers = NO_READERS) -> None:
    """Raises Unsupported if code after ``node`` would see another number than in eager code."""
    found = readers_behind([node], outside)
    if found.special and loss.may_be_infinite:
        name = min(found.special)
        why = "NaN where a key is masked (0 times the logarithm of 0) or a row has no key"
    elif (found.special or found.infinite) and loss.may_underflow:
        name = min(found.special or found.infinite)
        why = "infinity where a probability underflows (the logarithm of 0)"
    else:
        return
    raise Unsupported(f"{name} reads the divergence, and eager has {why}")


def check_masked_logarithms(loss: Scores) -> None:
    """Raises Unsupported if the logarithm of a probability that a finite mask makes 0 counts."""
    if loss.drops_absent_keys or all(form.mask or form.biases for form in loss.forms):
        return
    for x, lowest in loss.logarithms():
        axes = softmax_axes(x)
        hides = any(map(_may_hide_keys, _forms_in([x], axes)))
        if hides and not at_absent_keys(x, axes) > lowest:
            raise Unsupported(
                "the logarithm of probabilities that a mask of one side alone makes 0, which is "
                "infinite in eager code"
            )


def check_replaced(loss: Scores) -> None:
    """Raises Unsupported if the loss itself replaces what is infinite or NaN in eager code alone.

    The matcher has decided which keys a mask removes; what a tensor removes is not known.
    """
    by_mask = loss.drops_absent_keys or not loss.may_be_infinite
    by_tensor = loss.drops_absent_keys or not any(map(has_infinite_bias, loss.forms))
    for node in loss.nodes:
        what = loss.reading.observers.get(node)
        x = loss.reading.expression(next(iter(node.args), None))
        if what not in ASKS or x is None or not (is_of_keys(x) or is_of_products(x)):
            continue
        if what == "nan_to_num" and named_arguments(node).get("nan") not in (None, 0.0):
            raise Unsupported("values after the softmax that are NaN are replaced")
        if not (by_mask if what == "nan_to_num" else by_tensor):
            raise Unsupported("values after the softmax that are infinite are replaced")


def check_promoted(loss: Scores) -> None:
    """Raises Unsupported if a tensor of float64 makes scores float64: with digits next to -1e4."""
    for node in loss.nodes:
        x = loss.reading.expression(node)
        if _dtype(node) != torch.float64 or x is None or not (is_of_products(x) and _is_score(x)):
            continue
        others = [(a in loss.reading.reads_products, _dtype(a)) for a in node.all_input_nodes]
        made = {dtype for is_made, dtype in others if is_made}
        if made and torch.float64 not in made and (False, torch.float64) in others:
            raise Unsupported("scores become float64 after their matmul")


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


# ------------------------------------------------------------------------ expressions


def forms_of(site: ClosedForm) -> list[ScoreForm]:
    """Returns the scores of the softmaxes in a sum over keys."""
    return list(_forms_in(site.site.args, {site.site.value.axis}))


def _forms_in(exprs: Iterable[Node], axes: set[Axis]) -> Iterator[ScoreForm]:
    for x in walk(exprs):
        if x.op == "log_softmax" and x.value in axes:
            try:
                yield read(x.args[0], x.value)
            except NoForm:
                continue  # scores of no operator: those of attention before the loss


def softmax_axes(x: Node) -> set[Axis]:
    """Returns the axes of an expression along which a softmax in it is taken."""
    return {y.value for y in walk([x]) if y.op == "log_softmax"} & x.axes


def is_of_keys(x: Node) -> bool:
    """Returns whether an expression has a value for each key, made of what may underflow."""
    return bool(softmax_axes(x)) or any(
        y.op == "exp" and y.axes <= x.axes and is_of_products(y) for y in walk([x])
    )


def may_be_infinite(form: ScoreForm) -> bool:
    """Returns whether some scores may be -inf; a tensor that is added may hold anything."""
    is_removed = bool(form.mask) and form.fill == -math.inf
    return is_removed or has_infinite_bias(form)


def _may_hide_keys(form: ScoreForm) -> bool:
    """Whether a finite number stands in place of scores, or a tensor like a mask is added."""
    return (bool(form.mask) and HIDES <= abs(form.fill) < math.inf) or any(
        not bias.value.flows and len(bias.value.axes) > 1 for bias in form.biases
    )


def at_absent_keys(x: Node, axes: set[Axis]) -> float:
    """Evaluates an expression where probabilities are 0; NaN if it is no function of them."""
    if len(axes) != 1:
        return math.nan
    (key,) = axes
    variables = Variables(key)
    try:
        expr = variables.of(x)
    except NoForm:
        return math.nan
    logs = dict.fromkeys(range(len(variables.parts)), -math.inf)
    found = value_at(expr, World(key, logs=logs))
    return math.nan if found is None else found


def _is_score(x: Node) -> bool:
    """Whether an expression is made of a product, and of no softmax, exponential or sum of it."""
    return not has_op(x, "log_softmax", "exp", "reduce")


def _is_product(node: fx.Node) -> bool:
    return node.op == "call_function" and name_of(node) in MATMULS


def special_reason(name: str) -> str:
    """Returns the reason why an operation that makes numbers of NaN keeps a sum as it is."""
    return f"{name} reads the sum, and eager has NaN or infinity where it has a value"
