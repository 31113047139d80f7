"""Smaller programs that fail as a failing one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.fuzz.tree import Node, Program

MAX_TRIES = 300


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest program that one change at a time leads to, every one of which fails."""
    tries = 0
    while True:
        for smaller in _smaller(program):
            tries += 1
            if tries > MAX_TRIES:
                return program
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    tree = program.tree
    if program.loop:
        yield replace(program, loop="")
    nodes = [*tree.walk()][::-1]
    for node in nodes:
        for argument in node.args:
            yield _with_tree(program, node, argument)
    for node in nodes:
        if node.then:
            yield _with_tree(program, node, replace_node(node, then=""))
        if node.no_grad:
            yield _with_tree(program, node, replace_node(node, no_grad=""))
    for node in nodes:  # the same operation once instead of twice
        for other in nodes:
            if node is not other and node.args and _same(node, other):
                yield _with_tree(program, node, other)
    for name in program.leaves:
        if name in program.trained:
            yield replace(program, trained=program.trained - {name})
    if program.dynamic:
        yield replace(program, dynamic=False)
    if program.dtype is not torch.float64:
        yield replace(program, dtype=torch.float64)
    if program.cloned:
        yield replace(program, cloned=frozenset())


def replace_node(node: Node, **changes: str) -> Node:
    fields = {"no_grad": node.no_grad, "then": node.then, **changes}
    return Node(node.kind, node.code, node.args, **fields)


def _with_tree(program: Program, old: Node, new: Node) -> Program:
    return replace(program, tree=new if old is program.tree else program.tree.replaced(old, new))


def _same(a: Node, b: Node) -> bool:
    if a is b:
        return True
    if (a.code, a.no_grad, a.then, len(a.args)) != (b.code, b.no_grad, b.then, len(b.args)):
        return False
    return all(_same(x, y) for x, y in zip(a.args, b.args, strict=True))
