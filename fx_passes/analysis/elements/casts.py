"""Reads casts and detached values."""

from __future__ import annotations

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.conditions import check_comparison
from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import rule
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.domain.row_elements import Placed
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported

aten = torch.ops.aten
CASTS = (
    aten.to.device, aten.to.dtype, aten.to.other, aten._to_copy.default, aten.type_as.default,
)  # fmt: skip


@rule(aten.detach.default)
def _detach(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.without_gradient(self.operand(a["self"]))


@rule(*CASTS)
def _cast(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    if node.meta["val"].device != a["self"].meta["val"].device:
        raise Unsupported("scores are moved to another device")
    made = node.meta["val"].dtype
    if x.formula.is_bool and made.is_floating_point:
        return self.combined("float", x)
    if not x.formula.is_bool and made == torch.bool:
        check_comparison([x])
        return self.combined("ne", x, self.operand(0.0))
    return x
