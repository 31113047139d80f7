"""The one table of rules: what an operator overload makes of the values of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

Arguments = dict[str, Any]
Rule = Callable[[Any, fx.Node, Arguments], object]
R = TypeVar("R", bound=Rule)

RULES: dict[object, Rule] = {}


def rule(*overloads: object) -> Callable[[R], R]:
    """Register a method of the analysis as the rule of these overloads.

    An overload has one rule. What is not in the table has no meaning, whatever it is named: a
    foreign ``mine::softmax`` is not torch's.
    """

    def register(method: R) -> R:
        for overload in overloads:
            assert not isinstance(overload, torch._ops.OpOverloadPacket), f"{overload}: which one?"
            assert overload not in RULES, f"{overload} has a rule already"
            RULES[overload] = method
        return method

    return register
