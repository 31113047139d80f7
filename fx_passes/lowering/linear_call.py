"""Inserts a call of `linear_kl`, from its closed form.

It keeps nothing of the size of the logits, and hidden sizes are far beyond what attention kernels
take. The operator rounds logits to the dtype of the product, as the user's linear layer does.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.closed_forms.form import Product, Side
from torch_streamkl.fx_passes.closed_forms.masks import conditions_of
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import tensor_of
from torch_streamkl.fx_passes.lowering.attention_call import (
    DEFAULT,
    NAMES,
    CallTensors,
    side_options,
)
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.program.canonical import all_of, choose
from torch_streamkl.program.graph import Axis, Node, const, index
from torch_streamkl.program.reductions import substitute

STUDENT = "streamkl_student"  # of a call's metadata: the closed form, for passes after it


class HeadTensors(CallTensors):
    """Inserts the tensors of one call on LM heads."""

    def emit(self) -> fx.Node:
        """Inserts the call, and returns its values for each token: batch, heads and rows."""
        inputs: dict[str, fx.Node] = {}
        options: dict[str, Any] = {}
        for name, side in reversed(list(zip(NAMES, self.call.sides, strict=True))):
            dtype = self._dtype(side)
            hidden = self._hidden(side.product, dtype)
            inputs[f"{name}_hidden"] = hidden
            head = inputs[f"{name}_weight"] = self._matrix(side, side.product.keys, dtype)
            options |= self._adapter(name, side, dtype)
            bias = self._bias_of(side, dtype)
            if not self.call.masks.is_empty:
                removed = self._removed_vocab_entries(side, head)
                bias = removed if bias is None else self.build.call(torch.add, bias, removed)
            options |= side_options(name, side, bias)
        if self.call.functional.text != DEFAULT:
            options["functional"] = self.call.functional.text
        order = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
        result = self.build.call(linear_ops.linear_kl, *(inputs[n] for n in order), **options)
        result.meta[STUDENT] = self.call
        return self.build.call(operator.getitem, result, 0)

    def _dtype(self, side: Side) -> torch.dtype:
        """The type of the user's product; without a record of it, that of both operands."""
        operands = side.product.rows, side.product.keys
        found = self.types.get(side.product.names)
        if found is not None and all(x.op == "capture" for x in operands):
            return found.result
        dtypes = [self.writer.value(x).value.dtype for x in operands]
        return torch.promote_types(*dtypes)

    def _hidden(self, product: Product, dtype: torch.dtype) -> fx.Node:
        """Rows as [tokens, hidden_size], times what multiplies all logits of a row."""
        dims = (self.axes.rows, product.contracted)
        x = self.writer.tensor(product.rows, dims, expand=(0,))
        return self.build.cast(self.multiplied(x, product.factors, dims[:1]), dtype)

    def _matrix(self, side: Side, x: Node, dtype: torch.dtype) -> fx.Node:
        """Keys as [vocab_size, hidden_size]: those that this side has."""
        key = self._key(side)
        element = self._of_side(x, side)
        (contracted,) = (a for a in x.axes if a != self.axes.key)
        return self.build.cast(self.writer.tensor(element, ((key,), (contracted,))), dtype)

    def _key(self, side: Side) -> Axis:
        key = self.axes.key
        if side.num_keys is None:
            return key
        size = side.num_keys
        known = int(size.value) if size.op == "const" else size.value
        return Axis(("own", key.name), known)

    def _of_side(self, x: Node, side: Side) -> Node:
        return substitute(x, {self.axes.key: index(self._key(side))})

    def _adapter(self, name: str, side: Side, dtype: torch.dtype) -> dict[str, fx.Node]:
        """A second product that is added to the logits, as of LoRA."""
        if not side.adapters:
            return {}
        (product,) = side.adapters
        hidden = self._hidden(product, dtype)
        if product.weight != side.scale:
            hidden = self.build.call(torch.mul, hidden, product.weight / side.scale)
        narrow = self._matrix(side, product.keys, dtype)
        return {f"{name}_adapter_hidden": hidden, f"{name}_adapter_weight": narrow}

    def _removed_vocab_entries(self, side: Side, head: fx.Node) -> fx.Node:
        """-inf at the vocabulary entries that the mask excludes, as [vocab_size]."""
        keep = all_of(*conditions_of(self.call.masks, self.axes))
        removed = choose(keep, const(0.0), const(-math.inf))
        x = self.writer.tensor(self._of_side(removed, side), ((self._key(side),),))
        return self.build.cast(x, tensor_of(head).dtype)

    def _bias_of(self, side: Side, dtype: torch.dtype) -> fx.Node | None:
        """The sum of the biases, which is added before the scale."""
        total: fx.Node | None = None
        for bias in side.added:
            value = self._of_side(bias.value, side)
            x = self.writer.tensor(value, ((self._key(side),),))
            for factor in bias.factors:  # scalars
                by = self.writer.tensor(factor.value, ())
                x = self.build.call(torch.div if factor.divides else torch.mul, x, by)
            if bias.weight != side.scale:
                x = self.build.call(torch.mul, x, bias.weight / side.scale)
            total = x if total is None else self.build.call(torch.add, total, x)
        if total is None:
            return None
        if not tensor_of(total).dtype.is_floating_point:
            raise Unsupported("a bias that is not a floating-point tensor")
        return self.build.cast(total, dtype)
