"""Computes a cross-entropy with labels in the operator call of the distillation loss.

Most trainers add the two. An unfused cross-entropy keeps the student's logits alive, which
`linear_kl` avoids. With ``labels`` the operator returns the cross-entropy per token as well.

NOTE [The same logits]
The student of a call is an expression of the call's own axes. The input of a cross-entropy is one
of the user's dimensions, which `arrays.met` makes the same axes. Then both are sums of the same
expressions: the coefficients of one are those of the other times the temperature. A number that is
added to all logits changes neither loss.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.closed_forms.form import Call
from torch_streamkl.fx_passes.closed_forms.scores import score_of
from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder
from torch_streamkl.fx_passes.fx_utils.dtensors import PLACED
from torch_streamkl.fx_passes.fx_utils.mutation import autograd_modes, is_in_place, written_memory
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    argument,
    example,
    is_call,
    is_tensor,
    location_of,
    memory_of,
    name_of,
    named_arguments,
    needs_gradient,
    reached,
    tensor_of,
)
from torch_streamkl.fx_passes.lowering.linear_call import STUDENT
from torch_streamkl.fx_passes.lowering.sites import SITE
from torch_streamkl.fx_passes.reading.arrays import Array, NoView, met
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.walks import has_op

MEAN, SUM = 1, 2
# their results have the types of their operands, under autocast as without
NEVER_CAST = {
    "add", "sub", "mul", "div", "truediv", "neg", "to", "float", "double", "detach", "view",
    "reshape", "squeeze", "unsqueeze",
}  # fmt: skip


def share_cross_entropy(
    graph: fx.Graph, trace: Trace, reading: Reading, builder: MakeBuilder
) -> list[str]:
    """Replaces cross-entropies of the logits of a `linear_kl` call by the call's second output.

    Returns what the report says of those that keep the logits.
    """
    notes: list[str] = []
    for inner in trace.graph.nodes:
        if inner.op != "call_function" or name_of(inner) != "cross_entropy_loss":
            continue
        node = trace.outer.get(inner)
        if node is None or node._erased:
            continue
        logits = reading.arrays.get(inner.args[0])
        if not isinstance(logits, Array) or len(logits.dims) != 2:
            continue
        if not _grad_flows_like(node, logits):
            continue
        for call in [n for n in graph.nodes if n.target is linear_ops.linear_kl]:
            temperature = _temperature(call, logits)
            if temperature is None:
                continue
            reason = _why_kept(call, node, inner)
            place = None if reason else _place(graph, call, node)
            if place is not None:
                _share(call, node, inner, temperature, builder(place))
                break
            said = reason or "it or what reads it cannot be moved to the divergence"
            notes.append(_note(node, said))
            if reason:
                break
    return notes


def _why_kept(call: fx.Node, node: fx.Node, inner: fx.Node) -> str:
    """Explains why a divergence's call does not compute a cross-entropy of its logits."""
    if not _is_plain(inner, node):
        return "it has class weights, label smoothing or soft labels"
    if _may_differ(call, _labels(node)):
        return (
            "its labels are a plain tensor next to DTensors, and nothing says that ranks have the "
            "same"
        )
    if _teacher_learns(call) and not _reaches_gradients(call):
        return "the divergence has no gradient, and its teacher would get zeros of it"
    return ""


def _note(node: fx.Node, reason: str) -> str:
    return f"the cross-entropy at {location_of(node)[0]} keeps the student's logits: {reason}"


def _teacher_learns(call: fx.Node) -> bool:
    """Whether a tensor of the teacher needs a gradient."""
    named = [x for name, x in call.kwargs.items() if name.startswith("teacher")]
    return any(map(needs_gradient, (*call.args[2:4], *named)))


def _reaches_gradients(call: fx.Node) -> bool:
    """Whether the divergence reaches what the graph returns with a gradient."""

    def following(node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if not is_tensor(u) or needs_gradient(u)]

    return any(n.op == "output" for n in reached([call], following))


def _may_differ(call: fx.Node, labels: fx.Node) -> bool:
    """Whether ranks shard the vocabulary of a call and may have labels of their own."""
    shared = any(PLACED in n.meta for a in call.all_input_nodes for n in ancestors(a))
    return shared and PLACED not in labels.meta


def _is_plain(inner: fx.Node, node: fx.Node) -> bool:
    """Labels as integers, no class weights, no smoothing."""
    arguments = named_arguments(inner)
    target = arguments["target"].meta["val"]
    return (
        not target.is_floating_point()
        and target.dim() == 1
        and arguments.get("weight") is None
        and not arguments.get("label_smoothing", 0.0)
        and isinstance(_labels(node), fx.Node)
        and isinstance(arguments.get("ignore_index", -100), int)
    )


def _grad_flows_like(node: fx.Node, logits: Array) -> bool:
    """Whether the cross-entropy has the gradient of its logits: it may be under no_grad."""
    value = example(node)
    return isinstance(value, Tensor) and value.requires_grad == logits.expr.flows


def _labels(node: fx.Node) -> Any:
    return argument(node, 1, "target")


def _temperature(call: fx.Node, logits: Array) -> float | None:
    """Returns the number by which the call divides the logits; None if its logits are others."""
    if "labels" in call.kwargs or has_op(logits.expr, "where"):
        return None  # logits that are masked are no tensor of the call
    form: Call = call.meta[STUDENT]
    if not form.masks.is_empty or form.stricter is not None:
        return None  # nor are those that the call masks
    score = Array(
        score_of(form.student, form.axes.key), (form.axes.rows, (form.axes.key,)), logits.sizes
    )
    try:
        (ours, theirs), _ = met(score, logits)
    except NoView:
        return None
    terms, wanted = terms_of(ours)[1], {x: c for c, x in terms_of(theirs)[1]}
    if not terms or {x for _, x in terms} != set(wanted):
        return None
    temperature = wanted[terms[0][1]] / terms[0][0]
    if not 0.0 < temperature < math.inf:
        return None
    alike = all(math.isclose(wanted[x], c * temperature, rel_tol=1e-12) for c, x in terms)
    return temperature if alike else None


def _place(graph: fx.Graph, call: fx.Node, node: fx.Node) -> fx.Node | None:
    """Finds a node before which both outputs can be computed, and moves readers after it."""
    order = list(graph.nodes)
    position = {n: i for i, n in enumerate(order)}
    earlier, later = sorted((call, node), key=position.__getitem__)
    between = order[position[earlier] + 1 : position[later]]
    moved = {earlier}
    for n in between:
        if moved & set(n.all_input_nodes):
            moved.add(n)
    reads = memory_of(a for n in (later, *moved) for a in n.all_input_nodes)
    if any(reads & written_memory(n) for n in between):
        return None  # the two read it at different times
    if position[_labels(node)] < position[call] < position[node]:
        return call  # the readers of both are after it
    moved.discard(earlier)
    movable = all(_is_pure(n) for n in moved) and not moved & set(later.all_input_nodes)
    if not movable or not _computes_alike(order, [earlier, *moved], later):
        return None
    place = later
    for n in (n for n in between if n in moved):
        place.append(n)
        place = n
    return later


def _is_pure(node: fx.Node) -> bool:
    """Whether a node is arithmetic on tensors, without side effects."""
    value = example(node)
    return (
        is_call(node)
        and isinstance(value, Tensor)
        and not is_in_place(node)
        and not isinstance(node.target, torch._ops.HigherOrderOperator)
    )


def _computes_alike(order: Sequence[fx.Node], nodes: Sequence[fx.Node], place: fx.Node) -> bool:
    """Whether autograd and autocast have the same modes at ``place`` and at the nodes.

    The first one is the divergence or the cross-entropy: autocast does not reach into the operator
    that computes both.
    """
    modes = _modes(order)
    first, *others = nodes
    records, autocast = modes[place]
    return modes[first][0] == records and all(
        modes[n][0] == records and (modes[n][1] == autocast or name_of(n) in NEVER_CAST)
        for n in others
    )


Modes = tuple[str, dict[object, tuple[object, ...]]]


def _modes(order: Sequence[fx.Node]) -> dict[fx.Node, Modes]:
    """Returns the autograd mode and the innermost autocast of each device type, at each node."""
    autograd = autograd_modes(order)
    entered: list[fx.Node] = []
    modes: dict[fx.Node, Modes] = {}
    for node in order:
        modes[node] = autograd[node], {x.args[0]: tuple(x.args[1:]) for x in entered}
        name = name_of(node)
        if name == "_enter_autocast":
            entered.append(node)
        elif name == "_exit_autocast":
            entered.pop()
    return modes


def _share(
    call: fx.Node, node: fx.Node, inner: fx.Node, temperature: float, build: Builder
) -> None:
    arguments = named_arguments(inner)
    labels, ignored = _labels(node), arguments.get("ignore_index", -100)
    options: Mapping[str, Any] = {
        **call.kwargs,
        "labels": labels,
        "ignore_index": ignored,
        "temperature": temperature,
    }
    for side in ("student", "teacher"):
        # with a softcap the temperature divides the cap, which the operator does itself
        name = f"{side}_softcap" if f"{side}_softcap" in options else f"{side}_scale"
        options = {**options, name: options.get(name, 1.0) * temperature}
        if name.endswith("softcap"):
            scale = f"{side}_scale"
            options = {**options, scale: options.get(scale, 1.0) * temperature}
    result = build.call(linear_ops.linear_kl, *call.args, **options)
    result.meta |= {name: call.meta[name] for name in (STUDENT, SITE)}
    value = build.call(operator.getitem, result, 0)
    hard = build.call(operator.getitem, result, 1)
    reduction = arguments.get("reduction", MEAN)
    if reduction in (MEAN, SUM):
        hard = build.method("sum", hard)
    if reduction == MEAN:
        counted = build.method("sum", build.call(torch.ne, labels, ignored))
        mean = build.call(torch.div, hard, build.method("clamp_min", counted, 1))
        # a mean of no token is NaN and has a gradient of 0
        hard = build.call(torch.where, build.call(torch.gt, counted, 0), mean, math.nan)
    hard = build.cast(hard, tensor_of(node).dtype)
    for old in list(call.users):
        old.replace_all_uses_with(value)
        old.graph.erase_node(old)
    node.replace_all_uses_with(hard)
    node.graph.erase_node(node)
    call.graph.erase_node(call)
