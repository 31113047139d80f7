"""Reads a node of an FX graph: its name, arguments, recorded value, and place in user code."""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.sizes import hint_of
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_traceable_wrapper_subclass,
)

UNKNOWN = "unknown location"
MEMORY = "streamkl_memory"  # of a node whose recorded value is that of an equal call
_TORCH = str(Path(torch.__file__).parent) + os.sep  # modules, and modes such as a default device
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_OF_TORCH = {"torch", "_operator", "math", "builtins"}
# functions of torch.special by the name of the function of torch that they are
OF_SPECIAL: dict[object, str] = {
    getattr(torch.special, special): plain
    for special, plain in {
        "softmax": "softmax", "log_softmax": "log_softmax", "logsumexp": "logsumexp",
        "xlogy": "xlogy", "expit": "sigmoid", "log1p": "log1p", "expm1": "expm1", "exp2": "exp2",
        "erf": "erf", "erfc": "erfc", "logit": "logit", "round": "round",
    }.items()
}  # fmt: skip
# attributes that are views: torch 2.13 traces getattr, and torch 2.14 an operator
ATTRIBUTES: dict[object, str] = {
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.mT: "mT",
    torch.ops.aten.matrix_H: "H",
    torch.ops.aten.mH: "mH",
}


def name_of(node: fx.Node) -> str:
    """Returns the bare name of a function or method of torch, whatever the overload.

    What is not torch's keeps its namespace or module: an operator ``mine::softmax`` is no softmax.
    """
    return target_name(node.target)


@functools.lru_cache(maxsize=4096)
def target_name(target: Callable[..., Any] | str) -> str:
    """Returns the name of what a node calls."""
    if isinstance(target, str):
        return target
    if target in OF_SPECIAL:
        return OF_SPECIAL[target]
    if target in ATTRIBUTES:
        return "getattr"
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).removeprefix("aten::")
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name).removeprefix("aten::")
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", None)
    return name if module is None or module.partition(".")[0] in _OF_TORCH else f"{module}.{name}"


def said_name(node: fx.Node) -> str:
    """Returns the name for a report: without its module, and of a tensor's attribute its own."""
    if node.target is getattr:
        return str(node.args[1])
    if node.target in ATTRIBUTES:
        return ATTRIBUTES[node.target]
    return name_of(node).split(".")[-1]


def named_arguments(node: fx.Node, operator: object = None) -> dict[str, Any]:
    """Returns arguments of an operation by schema name; defaults are left out.

    ``operator`` has the schema, where another one with the same arguments is called.
    """
    schema: Any = getattr(node.target if operator is None else operator, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Returns an argument of a call, which is given by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def nodes_in(arguments: Any) -> list[fx.Node]:
    """Returns the nodes among arguments, however nested."""
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda n: found.append(n))
    return found


def ancestors(node: fx.Node) -> set[fx.Node]:
    """Returns the node and all that it is computed from."""
    return reached([node], lambda n: n.all_input_nodes)


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the nodes and all that is computed from them."""
    return reached(nodes, lambda n: n.users)


def in_backward(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes of a joint graph that depend on the gradients of its outputs."""
    placeholders = graph.find_nodes(op="placeholder")
    return descendants(n for n in placeholders if "tangents" in str(n.target))


def reached(
    nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """Returns the nodes and all that ``following`` leads to from them, in linear time."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += following(node)
    return found


def nearest(node: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yields the node and all that ``following`` leads to from it, the nearest first."""
    queue, seen = deque([node]), {node}
    while queue:
        current = queue.popleft()
        yield current
        for other in following(current):
            if other not in seen:
                seen.add(other)
                queue.append(other)


def nearest_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the node and what it is computed from, the nearest first."""
    return nearest(node, lambda n: n.all_input_nodes)


def nearest_users(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the node and what is computed from it, the nearest first."""
    return nearest(node, lambda n: n.users)


def following(node: fx.Node, end: fx.Node | None = None) -> Iterator[fx.Node]:
    """Yields the nodes of a graph after one, up to another; each may be erased meanwhile."""
    current = node.next
    while current is not end and current.op != "root":
        found, current = current, current.next
        yield found


def users_of_body(owner: fx.GraphModule, name: str) -> list[fx.Node]:
    """Returns the higher-order operators that run a body."""
    found = (n for n in owner.graph.nodes if n.op == "get_attr" and n.target == name)
    return [user for node in found for user in node.users]


def subgraphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graphs that a higher-order operator runs."""
    owner = node.graph.owning_module
    named = [
        getattr(owner, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"
    ]
    return [body for body in named if isinstance(body, fx.GraphModule)]


def example(node: fx.Node) -> object:
    """Returns the fake value that Dynamo, or a trace, recorded for a node."""
    return node.meta.get("example_value", node.meta.get("val"))


def held_by(owner: object, leaf: fx.Node) -> object:
    """Returns what an attribute is of a module, None if the module does not have it."""
    for part in str(leaf.target).split("."):
        owner = getattr(owner, part, None)
    return owner


def is_parameter(leaf: fx.Node) -> bool:
    """Returns whether a node reads a parameter of an exported program.

    Dynamo has inputs for those.
    """
    if leaf.op != "get_attr" or not isinstance(example(leaf), Tensor):
        return False
    return isinstance(held_by(leaf.graph.owning_module, leaf), torch.nn.Parameter)


def is_call(node: fx.Node) -> bool:
    """Returns whether a node calls a function or a method."""
    return node.op in ("call_function", "call_method")


def is_tensor(node: fx.Node) -> bool:
    """Returns whether a node's value is a tensor."""
    return isinstance(example(node), Tensor)


def tensor_of(node: Any) -> Tensor:
    """Returns what is recorded of a node that is a tensor."""
    value = example(node)
    assert isinstance(value, Tensor)
    return value


def tensors_read(node: fx.Node) -> list[Tensor]:
    """Returns what is recorded of the inputs of a node that are tensors, in their order."""
    return [x for x in map(example, node.all_input_nodes) if isinstance(x, Tensor)]


def needs_gradient(x: object) -> bool:
    """Returns whether an argument is a node with a tensor that has a gradient."""
    value = example(x) if isinstance(x, fx.Node) else None
    return isinstance(value, Tensor) and value.requires_grad


def has_gradient(value: object) -> bool:
    """Returns whether a tensor has a gradient, or one of several that an operation returns."""
    if isinstance(value, (tuple, list)):
        return any(map(has_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


def run(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Runs what a node calls on values of its inputs."""
    given: Any = fx.map_arg((node.args, node.kwargs), value_of)
    args, kwargs = given
    if callable(node.target):
        return node.target(*args, **kwargs)
    return getattr(args[0], node.target)(*args[1:], **kwargs)


def storage_of(node: fx.Node) -> int | None:
    """Returns the identity of a tensor's memory; views share it.

    None where there is none to compare.
    """
    value = example(node)
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return None
    return _memory(node, value)


def _memory(node: fx.Node, value: Tensor) -> int:
    found: int | None = node.meta.get(MEMORY)
    return address_of(value) if found is None else found


def memory_of(nodes: Iterable[fx.Node]) -> set[int | None]:
    """Returns the memory of tensors, as far as it can be compared."""
    return {storage_of(x) for x in nodes} - {None}


def address_of(value: Tensor) -> int:
    """Returns what tells the memory of a tensor from that of others, as torch has it."""
    while is_functorch_wrapped_tensor(value):  # has none of its own
        value = get_unwrapped(value)
    return value.untyped_storage()._cdata


def in_torch(file: str) -> bool:
    """Returns whether a file is torch's own code, not the user's."""
    return file.startswith(_TORCH)


def location_of(node: fx.Node) -> tuple[str, str]:
    """Returns file:line, and its text, of the innermost frame of the user's code after a node."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return UNKNOWN, ""
    frames = list(FRAME.finditer(trace))
    outside = [f for f in frames if not in_torch(f[1])] or frames
    if not outside:
        return UNKNOWN, ""
    frame = outside[-1]
    rest = trace[frame.end() :].lstrip("\n").splitlines()
    return f"{frame[1]}:{frame[2]}", rest[0].strip() if rest else ""


def is_view(node: fx.Node) -> bool:
    """Returns whether a node's value shares memory with an input of it."""
    value = example(node)
    if not isinstance(value, Tensor):
        return False
    storage = _memory(node, value)
    return any(
        isinstance(x := example(a), Tensor) and _memory(a, x) == storage
        for a in node.all_input_nodes
    )


def num_bytes(node: fx.Node) -> int:
    """Counts the bytes of a node's value, by hints of symbolic sizes."""
    value = example(node)
    if not isinstance(value, Tensor):
        return 0
    return (hint_of(value.numel()) or 0) * value.element_size()
