"""Programs as trees: what they are made of, and the Python that they say.

A node is one operation. A node that is used twice is a variable; an operation that is written
twice is two equal nodes. Where gradient is switched off is part of a node, so that it can happen
at any edge.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.misleading import operators  # noqa: F401  # operators of somebody else

OPERATION, ALL_BELOW = "operation", "all below"  # what of a node runs in no_grad
MAX_INLINE = 72  # longer expressions get a name
LEAF = re.compile(r"\b(q|k|v|qt|kt|h|w|ht|wt|c|ls|tau|b|sink|hs|rw|kw|keep|rows|y|z)\b(?!=)")


@dataclass(frozen=True, eq=False)
class Node:
    """One operation: ``code`` has {0}, {1} for its arguments, and names leaves itself."""

    kind: str
    code: str
    args: tuple[Node, ...] = ()
    no_grad: str = ""
    then: str = ""  # a statement after it, with {self} for what the node is named

    def walk(self) -> Iterator[Node]:
        """The nodes below, each once, arguments first."""
        seen: set[int] = set()

        def visit(node: Node) -> Iterator[Node]:
            if id(node) not in seen:
                seen.add(id(node))
                for a in node.args:
                    yield from visit(a)
                yield node

        return visit(self)

    def replaced(self, old: Node, new: Node) -> Node:
        """The same tree with one node in place of another; what is shared stays shared."""
        known: dict[int, Node] = {id(old): new}

        def visit(node: Node) -> Node:
            if id(node) not in known:
                args = tuple(visit(a) for a in node.args)
                same = all(a is b for a, b in zip(args, node.args, strict=True))
                known[id(node)] = (
                    node if same else Node(node.kind, node.code, args, node.no_grad, node.then)
                )
            return known[id(node)]

        return visit(self)


def node_of(kind: str, code: str, *args: Node) -> Node:
    return Node(kind, code, args)


@dataclass(frozen=True)
class Program:
    """A tree whose last node is what is returned, and the tensors that it runs on."""

    tree: Node
    shapes: dict[str, tuple[int, ...]]  # of all leaves that there are
    trained: frozenset[str]
    dynamic: bool = False
    dtype: torch.dtype = torch.float64
    loop: str = ""  # what a for loop over parts of the operands iterates, "" without one
    cloned: frozenset[str] = field(default_factory=frozenset)  # leaves that are modified in place

    @property
    def leaves(self) -> list[str]:
        text = self.loop + " ".join(n.code + " " + n.then for n in self.tree.walk())
        return [name for name in self.shapes if re.search(rf"\b{name}\b(?!=)", text)]

    def source(self) -> str:
        writer = _Writer(self.tree, "    " * (2 if self.loop else 1))
        result = writer.value(self.tree)
        lines = [f"def program({', '.join(self.leaves)}):"]
        lines += [f"    {name} = {name}.clone()" for name in self.leaves if name in self.cloned]
        if self.loop:
            lines += ["    total = 0", f"    {self.loop}:", *writer.lines]
            lines += [f"        total = total + {result}", "    return total"]
        else:
            lines += [*writer.lines, f"    return {result}"]
        return "\n".join(lines) + "\n"

    def function(self) -> Callable[..., Any]:
        source = self.source()
        name = f"<program {abs(hash(source)):x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace: dict[str, Any] = {"torch": torch, "F": F, "inf": float("inf")}
        exec(compile(source, name, "exec"), namespace)
        result: Callable[..., Any] = namespace["program"]
        return result

    def inputs(self) -> list[Tensor]:
        return [self._input(name) for name in self.leaves]

    def _input(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        shape = self.shapes[name]
        if name == "y":
            return torch.randint(0, self.shapes["w"][0], shape, generator=generator)
        if name in ("keep", "rows"):
            return torch.rand(shape, generator=generator) > 0.3
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = 0.5 + x.abs() if name in ("ls", "tau", "rw", "hs") else x
        return x.to(self.dtype).requires_grad_(name in self.trained)

    def describe(self) -> str:
        shapes = ", ".join(f"{name} {list(self.shapes[name])}" for name in self.leaves)
        trained = " ".join(name for name in self.leaves if name in self.trained) or "nothing"
        dynamic = ", dynamic" if self.dynamic else ""
        return f"{self.source()}# {shapes}; trained: {trained}; {self.dtype}{dynamic}"


class _Writer:
    """Statements that compute a node, one for each that has a name."""

    def __init__(self, tree: Node, indent: str) -> None:
        self.lines: list[str] = []
        self.indent = indent
        self.names: dict[int, str] = {}
        self.uses: dict[int, int] = {}
        for node in tree.walk():
            for i, a in enumerate(node.args):
                self.uses[id(a)] = self.uses.get(id(a), 0) + node.code.count(f"{{{i}}}")

    def value(self, node: Node) -> str:
        if id(node) in self.names:
            return self.names[id(node)]
        if node.no_grad == ALL_BELOW:
            self.lines.append(f"{self.indent}with torch.no_grad():")
            self.indent += "    "
            text = node.code.format(*map(self.value, node.args))
            self._assign(node, text)
            self.indent = self.indent[:-4]
            return self.names[id(node)]
        text = node.code.format(*map(self.value, node.args))
        if node.no_grad == OPERATION:
            self.lines.append(f"{self.indent}with torch.no_grad():")
            self.indent += "    "
            self._assign(node, text)
            self.indent = self.indent[:-4]
            return self.names[id(node)]
        named = self.uses.get(id(node), 0) > 1 and not re.fullmatch(r"\w+", text)
        if named or node.then or len(text) > MAX_INLINE:
            self._assign(node, text)
            return self.names[id(node)]
        return text

    def _assign(self, node: Node, text: str) -> None:
        name = f"{node.kind[0]}{len(self.names)}"
        self.names[id(node)] = name
        self.lines.append(f"{self.indent}{name} = {text}")
        if node.then:
            self.lines.append(f"{self.indent}{node.then.format(self=name)}")
