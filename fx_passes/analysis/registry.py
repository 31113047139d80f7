"""Registers rules by operator overload: a rule computes a result's value from its inputs'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

Arguments = dict[str, Any]
Rule = Callable[[Any, fx.Node, Arguments], object]
R = TypeVar("R", bound=Rule)

RULES: dict[object, Rule] = {}


def registering(table: dict[object, Any]) -> Callable[..., Callable[[R], R]]:
    """Creates a table's ``rule(*overloads)``, which registers a function as the rule of overloads.

    An overload has one rule. An operation that is not in the table has no meaning, whatever its
    name is: a foreign ``mine::softmax`` is not torch's.
    """

    def rule(*overloads: object) -> Callable[[R], R]:
        def register(function: R) -> R:
            for overload in overloads:
                is_packet = isinstance(overload, torch._ops.OpOverloadPacket)
                assert not is_packet, f"{overload}: which one?"
                assert overload not in table, f"{overload} has a rule already"
                table[overload] = function
            return function

        return register

    return rule


rule = registering(RULES)
