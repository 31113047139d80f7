"""Walks through expressions and rebuilds them, without recursion: programs may be deep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import TypeVar

from torch_streamkl.program.graph import Node, apply, capture, reduce

T = TypeVar("T")


def walk(roots: Iterable[Node], enter: Callable[[Node], bool] | None = None) -> list[Node]:
    """Returns the nodes that the roots need, arguments before what they are arguments of.

    ``enter`` says of which nodes the arguments are looked at; of all of them by default.
    """
    order: dict[Node, None] = {}
    for root in roots:
        stack: list[Node | None] = [root]
        while stack:
            node = stack.pop()
            if node is None:  # all arguments of what is below are there
                node = stack.pop()
                assert node is not None
            elif node in order:
                continue
            elif node.args and (enter is None or enter(node)):
                stack += node, None, *node.args[::-1]
                continue
            order[node] = None
    return list(order)


def fold(
    root: Node,
    known: MutableMapping[Node, T],
    of: Callable[[Node], T],
    enter: Callable[[Node], bool] | None = None,
) -> T:
    """Returns what is known of an expression, each part of which is looked at once.

    ``of`` finds it when ``known`` has that of the arguments. ``enter`` is that of `walk`.
    """
    for node in walk([root], lambda x: x not in known and (enter is None or enter(x))):
        if node not in known:
            known[node] = of(node)
    return known[root]


def has_op(x: Node, *ops: str) -> bool:
    """Returns whether one of these operations is a part of an expression."""
    return any(y.op in ops for y in walk([x]))


def length_of(root: Node) -> int:
    """Returns how many operations the text of an expression has, which repeats what is shared."""
    found: dict[Node, int] = {}
    for node in walk([root]):
        found[node] = 1 + sum(found[a] for a in node.args)
    return found[root]


def rebuilt(
    roots: Iterable[Node],
    change: Callable[[Node, tuple[Node, ...]], Node],
    enter: Callable[[Node], bool] | None = None,
) -> dict[Node, Node]:
    """Returns what each node becomes, given what its arguments have become."""
    found: dict[Node, Node] = {}
    for node in walk(roots, enter):
        entered = enter is None or enter(node)
        found[node] = change(node, tuple(found[a] for a in node.args) if entered else node.args)
    return found


def rebuilt_root(
    root: Node,
    change: Callable[[Node, tuple[Node, ...]], Node],
    enter: Callable[[Node], bool] | None = None,
) -> Node:
    """Returns what one expression becomes, given what its arguments have become."""
    return rebuilt([root], change, enter)[root]


def with_args(node: Node, args: tuple[Node, ...], build: Callable[..., Node] = apply) -> Node:
    """Returns the same operation on other arguments."""
    if args == node.args:
        return node
    if node.op == "pow":
        return build("pow", args[0], node.value)
    if node.op == "reduce":
        return reduce(node.kind, node.value.axis, args[0], node.value.size)
    if node.op == "capture":
        return capture(node.value, node.dtype, frozenset(), args, node.range)
    return build(node.op, *args)


def replaced(root: Node, change: Callable[[Node], Node | None]) -> Node:
    """Returns an expression with others in place of those for which ``change`` has one."""

    def made_of(x: Node, args: tuple[Node, ...]) -> Node:
        new = change(x)
        return with_args(x, args) if new is None else new

    return rebuilt([root], made_of)[root]
