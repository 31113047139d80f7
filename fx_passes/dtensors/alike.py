"""Decides which plain values all ranks have alike, so that they may stand next to DTensors.

NOTE [Numbers of a rank]
A rank does with a whole tensor what its own code says: positions may begin at ``rank * n``, and a
factor may be the rank's. The rewritten graph does the same with the rank's shards, which is right
only if all ranks do the same. Of DTensors and their sizes that is so. Everything else is

- compared: constants, by the text of how they are computed, and the operators' arguments;
- refused: plain inputs, random numbers, and numbers that the compiler knows as symbols alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.dtensors import dtensors_in, is_dtensor
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import draws_random
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_call, is_tensor, name_of, reached


class Alike:
    """Knows what the ranks of a user's graph have alike, and lists what they must compare."""

    def __init__(self, user: fx.Graph) -> None:
        self.sizes = {s for n in user.nodes for x in dtensors_in(example(n)) for s in _symbols(x)}
        self.constants: list[str] = []  # how those are computed that stand next to DTensors
        # numbers with which a rank computes on tensors of its own
        self.own = {
            s
            for n in user.nodes
            if any(is_tensor(a) and not is_dtensor(example(a)) for a in n.all_input_nodes)
            for a in _numbers_of(n)
            for s in _symbols(example(a)) - self.sizes
        }

    def add_constant(self, node: fx.Node) -> bool:
        """Lists a plain tensor that ranks compare; returns whether it can be compared."""

        def made_of(n: fx.Node) -> list[fx.Node]:
            return [a for a in n.all_input_nodes if isinstance(example(a), (Tensor, tuple))]

        made = reached([node], made_of)
        if not all(map(self._is_of_no_input, made)):
            return False
        self.constants += [_described(n) for n in node.graph.nodes if n in made]
        return True

    def _is_of_no_input(self, node: fx.Node) -> bool:
        return (
            is_call(node)
            and not draws_random(node)
            and bool(node.all_input_nodes or not is_dtensor(example(node)))
            and all(_symbols(example(a)) <= self.sizes for a in _numbers_of(node))
        )

    def check_numbers(self, node: fx.Node) -> None:
        """Raises Unsupported if a node on DTensors reads a number that may be a rank's own."""
        for number in _numbers_of(node):
            if _symbols(example(number)) & self.own:
                raise Unsupported(
                    f"{number.name} is a number next to plain tensors of DTensors, and nothing "
                    "says that ranks have the same"
                )


def _numbers_of(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if not is_tensor(a)]


def _symbols(value: object) -> set[Any]:
    """Returns the symbols of a number, or of a tensor's sizes."""
    numbers = value.shape if isinstance(value, Tensor) else [value]
    return {s for x in numbers if hasattr(x, "node") for s in x.node.expr.free_symbols}


def _described(node: fx.Node) -> str:
    """Describes a call without its device, of which each rank has its own."""

    def text(x: Any) -> Any:
        if isinstance(x, fx.Node):
            made = example(x)
            return x.name if isinstance(made, (Tensor, tuple)) else str(made)
        return x.type if isinstance(x, torch.device) else x

    arguments = fx.node.map_aggregate((node.args, node.kwargs), text)
    return f"{node.name} {name_of(node)} {arguments}"
