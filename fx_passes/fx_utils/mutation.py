"""Finds the nodes that write to tensors, draw random numbers, or have another effect."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import (
    argument,
    descendants,
    example,
    has_gradient,
    is_call,
    memory_of,
    name_of,
    nodes_in,
    reached,
    storage_of,
    subgraphs_of,
    target_name,
)

Memory = Mapping[int | None, Sequence[fx.Node]]  # the nodes of a graph by the memory they have


def is_in_place(node: fx.Node) -> bool:
    """Returns whether a node writes to one of its arguments."""
    return bool(written_by(node))


def has_effect(node: fx.Node) -> bool:
    """Returns whether a node may do more than return a value: write, draw random numbers,
    check.
    """
    if not is_call(node):
        return True
    return draws_random(node) or is_in_place(node) or node.is_impure()


def is_unused(node: fx.Node) -> bool:
    """Returns whether neither a result nor an effect of the graph depends on a node."""
    return not any(map(has_effect, descendants([node])))


RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_")
# by their whole name, with or without a `_`: `normal` is a part of `normalize`
RANDOM_NAMES = frozenset({
    "normal", "log_normal", "uniform", "exponential", "poisson", "binomial", "cauchy", "geometric",
    "rrelu", "rrelu_with_noise", "_standard_gamma", "_sample_dirichlet",
})  # fmt: skip


def draws_random(node: fx.Node) -> bool:
    """Returns whether a node draws random numbers."""
    name = name_of(node)
    if name == "dropout":
        return argument(node, 1, "p") != 0.0 and argument(node, 2, "training") is not False
    return name.removesuffix("_") in RANDOM_NAMES or any(part in name for part in RANDOM)


def written_by(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that a node writes to."""
    if not is_call(node):
        return []
    if _only_reads(node):
        return []
    name = name_of(node)
    if isinstance(node.target, torch._ops.HigherOrderOperator) and _has_body_that_writes(node):
        return node.all_input_nodes
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        found = [*_written_arguments(node, node.target), *_hidden_writes(node, name)]
        return list(dict.fromkeys(nodes_in(found)))
    if "mutation" in name:  # a Triton kernel of the user's
        return node.all_input_nodes
    written: list[object] = [node.kwargs.get("out"), *_hidden_writes(node, name)]
    packet = _packet_of(node.target, name)
    if packet is not None:
        written += _written_arguments(node, packet)
    first_is_written = _is_named_in_place(node.target, name) or _asks_for_in_place(node)
    if first_is_written:
        # torch._foreach_addcdiv_ and the fused optimizers write to lists: which, their schema says
        lists = packet is None and name.startswith(("_foreach", "_fused"))
        written += node.args if lists else node.args[:1]
    return list(dict.fromkeys(nodes_in(written)))


def by_storage(graph: fx.Graph) -> Memory:
    """Returns the nodes of a graph by their memory, as it is now."""
    found: dict[int | None, list[fx.Node]] = {}
    for node in graph.nodes:
        found.setdefault(storage_of(node), []).append(node)
    return found


def written_memory(node: fx.Node) -> set[int | None]:
    """Returns the memory that a node writes to, as far as it can be compared."""
    return memory_of(written_by(node))


def written_storages(graph: fx.Graph) -> set[int | None]:
    """Returns the memory that any node of a graph writes to."""
    return set().union(*map(written_memory, graph.nodes))


def _has_body_that_writes(node: fx.Node) -> bool:
    """Whether a graph that an operator runs, such as a checkpoint, writes to its inputs."""
    for body in subgraphs_of(node):
        inputs = {storage_of(n) for n in body.graph.nodes if n.op in ("placeholder", "get_attr")}
        if any(storage_of(x) in inputs for n in body.graph.nodes for x in written_by(n)):
            return True
    return False


RECORDS, NO_GRAD, INFERENCE = "grad", "no_grad", "inference"


def autograd_modes(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Returns the autograd mode in which each node of a graph is computed."""
    modes, entered = {}, list[str]()
    mode = RECORDS
    for node in nodes:
        modes[node] = mode
        name = name_of(node)
        if name == "_set_grad_enabled":
            if mode != INFERENCE:  # in which nothing is recorded all the same
                mode = NO_GRAD if node.args[0] is False else RECORDS
        elif name == "_enter_inference_mode":
            entered.append(mode)
            mode = INFERENCE if node.args[0] else RECORDS
        elif name == "_exit_inference_mode":
            mode = entered.pop()
    return modes


def under_no_grad(graph: fx.Graph) -> set[fx.Node]:
    """Returns the operations that autograd does not record.

    A cast to the type that a tensor has is none: it returns the tensor, with its gradient. So do
    ``+x``, ``torch.atleast_2d(x)``, and others.
    """
    modes = autograd_modes(graph.nodes)
    found = {n for n, mode in modes.items() if mode != RECORDS and n.op.startswith("call")}
    return {n for n in found if is_in_place(n) or not _returns_its_input(n)}


def nodes_with_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose gradient a result of the graph needs, or what is written in place.

    What is detached before it reaches one is not among them, although it has a gradient itself.
    """
    ends = (n for n in graph.nodes if n.op == "output" or is_in_place(n))
    read = (a for n in ends for a in (n, *n.all_input_nodes) if has_gradient(example(a)))
    return reached(read, lambda n: [a for a in n.all_input_nodes if has_gradient(example(a))])


def _returns_its_input(node: fx.Node) -> bool:
    """Whether a result is one of the arguments itself, the same object: no view has a gradient."""
    value = example(node)
    sources = node.all_input_nodes
    if node.target is operator.getitem and isinstance(example(sources[0]), (tuple, list)):
        sources = sources[0].all_input_nodes  # of what returns several tensors
    return isinstance(value, Tensor) and any(example(x) is value for x in sources)


def _only_reads(node: fx.Node) -> bool:
    """Whether what a node calls, and that nothing asks it to write, says that it does not.

    Most nodes are asked often, and do not write.
    """
    places = _may_be_written(node.target)
    args, kwargs = node.args, node.kwargs
    if places is None or kwargs.get("out") is not None or kwargs.get("inplace") is True:
        return False
    for a in args:
        if a is True:
            return False
    return not places or not any(i < len(args) or name in kwargs for i, name in places)


@functools.lru_cache(maxsize=4096)
def _may_be_written(target: Any) -> tuple[tuple[int, str], ...] | None:
    """Places and names of arguments that are written where they are given; None if more may be."""
    name = target_name(target)
    if (
        isinstance(target, torch._ops.HigherOrderOperator)
        or "mutation" in name
        or name in _HIDDEN_WRITES
        or _is_named_in_place(target, name)
    ):
        return None
    is_operator = isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    packet = target if is_operator else _packet_of(target, name)
    return () if packet is None else _marked_as_written(packet)


def _is_named_in_place(target: Any, name: str) -> bool:
    """Whether a name says that a call works in place: ``x.add_()``, ``F.relu_(x)``, but not
    ``operator.and_``.
    """
    if name in ("setitem", "__setitem__", "setattr", *_IN_PLACE_METHODS):
        return True
    if target in _IN_PLACE_OPERATORS:
        return True
    from_operator = getattr(target, "__module__", None) == operator.and_.__module__
    return name.endswith("_") and not name.endswith("__") and not from_operator


def _packet_of(target: Any, name: str) -> torch._ops.OpOverloadPacket | None:
    """Returns the ATen operator of a tensor method, or of a torch function written in C."""
    if isinstance(target, str) or inspect.isbuiltin(target):
        packet = getattr(torch.ops.aten, name, None)
        return packet if isinstance(packet, torch._ops.OpOverloadPacket) else None
    return None


def _hidden_writes(node: fx.Node, name: str) -> list[object]:
    """Arguments that an operation writes to although neither its name nor its schema says so.

    Batch and instance normalisation count as writing to running statistics also where they only
    read them.
    """
    arguments = _HIDDEN_WRITES.get(name)
    if arguments is None:
        return []
    asks = arguments.asked_by
    names = _parameters(node)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if asks is not None and given.get(asks) is None:
        return []
    return [given.get(x) for x in arguments.written]


def _parameters(node: fx.Node) -> list[str]:
    """Returns the argument names of an operation in order."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return [x.name for x in target._schema.arguments]
    if not inspect.isbuiltin(target) and callable(target):
        try:
            return list(inspect.signature(target).parameters)
        except (TypeError, ValueError):
            pass
    packet = getattr(torch.ops.aten, name_of(node), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    overload = getattr(packet, packet.overloads()[0])
    return [x.name for x in overload._schema.arguments]


def _written_arguments(
    node: fx.Node, target: torch._ops.OpOverload | torch._ops.OpOverloadPacket
) -> list[object]:
    """Arguments that the schema (of any overload) marks as written."""
    return [
        node.args[index] if index < len(node.args) else node.kwargs.get(name)
        for index, name in _marked_as_written(target)
    ]


@functools.cache
def _marked_as_written(
    target: torch._ops.OpOverload | torch._ops.OpOverloadPacket,
) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that a schema marks: asked of every node, often."""
    overloads: list[Any] = [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    return tuple(
        dict.fromkeys(
            (_BY_NAME_ALONE if argument.kwarg_only else index, argument.name)
            for overload in overloads
            if not _is_sort_of_lists(overload)
            for index, argument in enumerate(overload._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    )


# a place behind all: the second tensor of ``max(a, b)`` is not the ``out`` of another overload
_BY_NAME_ALONE = sys.maxsize


def _is_sort_of_lists(overload: torch._ops.OpOverload) -> bool:
    """Whether an overload is TorchScript's ``list.sort()``, beside the one of tensors."""
    schema = overload._schema
    return schema.name == "aten::sort" and "List" in str(schema.arguments[0].type)


def _asks_for_in_place(node: fx.Node) -> bool:
    """Whether a call asks for in-place work: ``F.relu(x, True)``, ``dropout(inplace=True)``."""
    if node.kwargs.get("inplace", False) is True:
        return True
    if not callable(node.target) or not any(a is True for a in node.args):
        return False
    try:
        parameters = list(inspect.signature(node.target).parameters)
    except (TypeError, ValueError):
        return False
    index = parameters.index("inplace") if "inplace" in parameters else len(node.args)
    return index < len(node.args) and node.args[index] is True


@dataclass(frozen=True)
class HiddenWrite:
    """Names the arguments that are written if the argument ``asked_by`` is given."""

    written: tuple[str, ...]
    asked_by: str | None = None


_STATISTICS = HiddenWrite(("running_mean", "running_var"))
_HIDDEN_WRITES = {
    "embedding": HiddenWrite(("weight",), "max_norm"),
    "embedding_bag": HiddenWrite(("weight",), "max_norm"),
    "batch_norm": _STATISTICS,
    "instance_norm": _STATISTICS,
    "native_batch_norm": _STATISTICS,
    "cudnn_batch_norm": _STATISTICS,
    "miopen_batch_norm": _STATISTICS,
    "batch_norm_gather_stats": _STATISTICS,
    "batch_norm_gather_stats_with_counts": _STATISTICS,
    "batch_norm_update_stats": _STATISTICS,
}
_OF_PYTHON = (
    *("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor"),
    *("matmul", "mod", "lshift", "rshift"),
)
_IN_PLACE_METHODS = {f"__i{name}__" for name in _OF_PYTHON}
_IN_PLACE_OPERATORS = {getattr(operator, f"i{name}") for name in _OF_PYTHON}
