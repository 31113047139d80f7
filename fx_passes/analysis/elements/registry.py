"""Registers the rules that read formulas, by operator overload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from torch_streamkl.fx_passes.analysis.registry import Arguments, registering
from torch_streamkl.fx_passes.domain.row_elements import Placed

Rule = Callable[[Any, fx.Node, Arguments], Placed]

RULES: dict[object, Rule] = {}
rule = registering(RULES)
