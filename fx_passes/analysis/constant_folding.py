"""Evaluates integer and boolean tensors that depend on sizes only.

Transformers computes the sequence number of every token from `position_ids`, for packed sequences.
If the positions are a plain `arange`, all numbers are zero, and comparing them masks nothing. It
also looks positions up by `arange`. Without this evaluation, either would be an opaque mask of
seqlen_q x seqlen_k.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.domain.masks import Affine
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.torch_names import _disable_current_modes

LIMIT = 2**20  # elements: index vectors, never masks of two sequence dimensions


class Folding:
    """Evaluates the constant nodes of a graph, visited in order."""

    def __init__(self) -> None:
        self.tensors: dict[fx.Node, Tensor] = {}

    def visit(self, node: fx.Node) -> None:
        """Evaluate a pure node if its inputs are constants."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype.is_floating_point or value.is_complex():
            return
        if not all(isinstance(size, int) for size in value.shape) or value.numel() > LIMIT:
            return
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        if any(n not in self.tensors for n in node.all_input_nodes):
            return
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.tensors[n])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with _disable_current_modes(), torch.no_grad():
            try:
                result = target(*args, **kwargs)
            except Exception:  # an operator that needs what is not here: then it is no constant
                return
        if isinstance(result, Tensor) and result.shape == value.shape:
            self.tensors[node] = result

    def meaning(self, node: fx.Node) -> Number | Affine | None:
        """Returns a constant whose elements are all equal, or affine in their indices."""
        tensor = self.tensors.get(node)
        if tensor is None or tensor.numel() == 0:
            return None
        first = tensor.flatten()[0]
        if bool((tensor == first).all()):
            return Number(float(first))
        if tensor.dtype == torch.bool:
            return None
        wide = tensor.long()
        expected, steps = torch.full_like(wide, int(first)), []
        for d, size in enumerate(wide.shape):
            corner = [0] * wide.ndim
            corner[d] = min(1, size - 1)
            step = int(wide[tuple(corner)]) - int(first)
            steps.append(step)
            along = [-1 if i == d else 1 for i in range(wide.ndim)]
            index = torch.arange(size, device="cpu").reshape(along)
            expected = expected + step * index
        return Affine(tuple(steps), int(first)) if torch.equal(wide, expected) else None
