"""Evaluates integer and boolean tensors that depend on sizes only.

Transformers computes the sequence number of every token from `position_ids`, for packed sequences.
If the positions are a plain `arange`, all numbers are zero, and comparing them masks nothing. It
also looks positions up by `arange`. Without this evaluation, either would be an opaque mask of
seqlen_q x seqlen_k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.torch_names import _disable_current_modes
from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.registry import truth_of
from torch_streamkl.fx_passes.reading.types import LARGEST_POSITION
from torch_streamkl.program.canonical import linear
from torch_streamkl.program.graph import INT, const

if TYPE_CHECKING:
    from torch_streamkl.fx_passes.reading.reader import Reader

LIMIT = 2**20  # elements: index vectors, never masks of two sequence dimensions


class Constants:
    """Evaluates the constant nodes of a graph, visited in order."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._tensors: dict[fx.Node, Tensor] = {}

    def meaning(self, node: fx.Node) -> Array | None:
        """Returns a constant whose elements are all equal, or affine in their indices."""
        tensor = self._evaluated(node)
        if tensor is None or tensor.numel() == 0:
            return None
        if float(tensor.double().abs().max()) >= LARGEST_POSITION:  # as numbers they lose digits
            return None
        first = tensor.flatten()[0]
        dims = arrays.leaf_dims(tensor.shape)
        if bool((tensor == first).all()):
            is_bool = tensor.dtype == torch.bool
            value = truth_of(bool(first)) if is_bool else const(float(first), INT)
            return Array(value, dims, self._reader.sizes)
        if tensor.dtype == torch.bool:
            return None
        wide = tensor.long()
        expected, terms = torch.full_like(wide, int(first)), []
        for d, size in enumerate(wide.shape):
            corner = [0] * wide.ndim
            corner[d] = min(1, size - 1)
            step = int(wide[tuple(corner)]) - int(first)
            along = [-1 if i == d else 1 for i in range(wide.ndim)]
            expected = expected + step * torch.arange(size, device="cpu").reshape(along)
            terms.append((float(step), arrays.position(dims[d])))
        if not torch.equal(wide, expected):
            return None
        return Array(linear(float(first), terms), dims, self._reader.sizes)

    def _evaluated(self, node: fx.Node) -> Tensor | None:
        """The value of a node whose inputs are constants."""
        order, seen = list[fx.Node](), set[fx.Node]()
        stack = [node]
        while stack:
            n = stack.pop()
            if n in seen or n in self._tensors:
                continue
            seen.add(n)
            if not self._may_be_constant(n) or len(seen) > 64:
                return None
            order.append(n)
            stack += n.all_input_nodes
        for n in sorted(order):
            found = self._run(n)
            if found is None:
                return None
            self._tensors[n] = found
        return self._tensors[node]

    def _may_be_constant(self, node: fx.Node) -> bool:
        from torch_streamkl.fx_passes.reading.numbering import is_pure

        value = node.meta.get("val")
        return (
            isinstance(value, Tensor)
            and not value.dtype.is_floating_point
            and not value.is_complex()
            and all(isinstance(n, int) for n in value.shape)
            and value.numel() <= LIMIT
            and node.op == "call_function"
            and is_pure(node)
        )

    def _run(self, node: fx.Node) -> Tensor | None:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self._tensors.get(n))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with _disable_current_modes(), torch.no_grad():
            try:
                result = node.target(*args, **kwargs)  # type: ignore[operator]  # an overload
            except Exception:  # an operator that needs what is not here: then it is no constant
                return None
        is_as_recorded = isinstance(result, Tensor) and result.shape == node.meta["val"].shape
        return result if is_as_recorded else None
