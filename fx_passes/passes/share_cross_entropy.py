"""Computes a cross-entropy with labels in the operator call of the distillation loss.

Most trainers add the two. An unfused cross-entropy keeps the student's logits alive, which
`linear_kl` avoids. With ``labels`` the operator returns the cross-entropy per token as well.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.interpreter import ScoreInterpreter
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain.scores import (
    Masking,
    Scale,
    Scores,
    leading_scale,
    nearly_equal,
)
from torch_streamkl.fx_passes.domain.tensor_ref import grad_flows
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.dtensors import PLACED
from torch_streamkl.fx_passes.fx_utils.mutation import autograd_modes, is_in_place, written_by
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    location_of,
    name_of,
    named_arguments,
    storage_of,
)
from torch_streamkl.fx_passes.lowering.lm_head import STUDENT
from torch_streamkl.fx_passes.reporting.execution import SITE
from torch_streamkl.linear import ops as linear_ops

MEAN, SUM = 1, 2
# their results have the types of their operands, under autocast as without
NEVER_CAST = {
    "add", "sub", "mul", "div", "truediv", "neg", "to", "float", "double", "detach", "view",
    "reshape", "squeeze", "unsqueeze",
}  # fmt: skip


def share_cross_entropy(
    graph: fx.Graph,
    trace: Trace,
    recognised: ScoreInterpreter,
    builder: Callable[[fx.Node], Builder],
) -> list[str]:
    """Replaces cross-entropies of the logits of a `linear_kl` call by the call's second output.

    Returns what the report says of those that keep the logits.
    """

    def logits_of(inner: fx.Node, node: fx.Node) -> Scores | None:
        found = recognised.values.get(inner.args[0])
        if not isinstance(found, Scores) or len(found.layout) != 2:
            return None
        return found if has_gradient_like(node, grad_flows(found)) else None

    return share_each(graph, trace, builder, logits_of, _temperature)


def share_each(
    graph: fx.Graph,
    trace: Trace,
    builder: Callable[[fx.Node], Builder],
    logits_of: Callable[[fx.Node, fx.Node], Any],
    temperature_of: Callable[[fx.Node, Any], float | None],
) -> list[str]:
    """Replaces the cross-entropies of whose logits a call knows the temperature.

    ``logits_of`` has the logits of a cross-entropy, in the trace and in the user's graph.
    """
    notes: list[str] = []
    for inner in trace.graph.nodes:
        if inner.op != "call_function" or name_of(inner) != "cross_entropy_loss":
            continue
        node = trace.outer.get(inner)
        if node is None or node._erased:
            continue
        logits = logits_of(inner, node)
        if logits is None:
            continue
        for call in [n for n in graph.nodes if n.target is linear_ops.linear_kl]:
            temperature = temperature_of(call, logits)
            if temperature is None:
                continue
            if not _is_plain(inner, node):
                notes.append(
                    _note(
                        node,
                        "it has class weights, label smoothing or soft labels",
                    )
                )
                break
            if _may_differ(call, _labels(node)):
                notes.append(
                    _note(
                        node,
                        "its labels are a plain tensor next to DTensors, and nothing says that "
                        "ranks have the same",
                    )
                )
                break
            if _teacher_learns(call) and not _reaches_gradients(call):
                notes.append(
                    _note(
                        node,
                        "the divergence has no gradient, and its teacher would get zeros of it",
                    )
                )
                break
            place = _place(graph, call, node)
            if place is not None:
                _share(call, node, inner, temperature, builder(place))
                break
            notes.append(_note(node, "it or what reads it cannot be moved to the divergence"))
    return notes


def _note(node: fx.Node, reason: str) -> str:
    return f"the cross-entropy at {location_of(node)[0]} keeps the student's logits: {reason}"


def _teacher_learns(call: fx.Node) -> bool:
    """Whether a tensor of the teacher needs a gradient."""
    named = [x for name, x in call.kwargs.items() if name.startswith("teacher")]
    return any(isinstance(x, fx.Node) and _needs_gradient(x) for x in (*call.args[2:4], *named))


def _reaches_gradients(call: fx.Node) -> bool:
    """Whether the divergence reaches what the graph returns with a gradient."""
    stack, seen = [call], {call}
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if user not in seen and (user.target is operator.getitem or _needs_gradient(user)):
                seen.add(user)
                stack.append(user)
    return False


def _needs_gradient(node: fx.Node) -> bool:
    value = example(node)
    return not isinstance(value, Tensor) or value.requires_grad


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


def has_gradient_like(node: fx.Node, flows: bool) -> bool:
    """Returns whether a cross-entropy has the gradient of its logits: it may be under no_grad."""
    value = example(node)
    return isinstance(value, Tensor) and value.requires_grad == flows


def _labels(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("target")


def _temperature(call: fx.Node, logits: Scores) -> float | None:
    """Returns the number by which the call divides the logits; None if its logits are others."""
    key, pieces = call.meta[STUDENT]
    if "labels" in call.kwargs:
        return None
    rows, vocab = logits.layout
    if lay.merged(tuple(pieces)) != lay.merged(rows) or len(vocab) != 1:
        return None
    if vocab[0].axis not in {p.axis for d in key.rhs.layout + key.lhs.layout for p in d}:
        return None
    ours, theirs = key, logits.key.split_shift()[0]
    if any(isinstance(step, Masking) for step in theirs.steps):
        return None
    temperature = leading_scale(theirs.steps) / leading_scale(ours.steps)
    if not 0.0 < temperature < math.inf:
        return None
    theirs = theirs.then(Scale(1.0 / temperature))
    alike = replace(theirs, steps=ours.steps) == ours and nearly_equal(theirs.steps, ours.steps)
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
    reads = {storage_of(a) for n in (later, *moved) for a in n.all_input_nodes} - {None}
    if any(storage_of(target) in reads for n in between for target in written_by(n)):
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
        node.op in ("call_function", "call_method")
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
    like = example(node)
    made = example(hard)
    assert isinstance(like, Tensor)
    assert isinstance(made, Tensor)
    if made.dtype != like.dtype:
        hard = build.method("to", hard, like.dtype)
    for old in list(call.users):
        old.replace_all_uses_with(value)
        old.graph.erase_node(old)
    node.replace_all_uses_with(hard)
    node.graph.erase_node(node)
    call.graph.erase_node(call)
