"""Inserts a call of `attention_kl`, from its closed form."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torch_streamkl.attention import ops
from torch_streamkl.fx_passes.closed_forms.earliest import ProductType
from torch_streamkl.fx_passes.closed_forms.form import STUDENT, Bias, Call, Factor, Masks, Side
from torch_streamkl.fx_passes.closed_forms.masks import conditions_of
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import needs_gradient, tensor_of
from torch_streamkl.fx_passes.lowering.empty_rows import rows_with_keys
from torch_streamkl.fx_passes.lowering.writer import Writer
from torch_streamkl.fx_passes.reading.arrays import Dim
from torch_streamkl.program.canonical import all_of, choose, product
from torch_streamkl.program.divergences import named
from torch_streamkl.program.graph import Node, const

DEFAULT = named("forward_kl").text
PARTLY = "a mask varies along some of the dimensions that are flattened into one"
NAMES = ("teacher", "student")
Types = Mapping[frozenset[object], ProductType]  # by the names of products' operands


class CallTensors:
    """Inserts the tensors of one call."""

    def __init__(self, writer: Writer, call: Call, types: Types) -> None:
        self.writer, self.build, self.call, self.types = writer, writer.build, call, types
        self.axes = call.axes

    def emit(self) -> fx.Node:
        """Inserts the call, and returns its values as [batch, heads, rows]."""
        call, build = self.call, self.build
        inputs, dtype = self._operands()
        options: dict[str, Any] = {"functional": call.functional.text}
        biases: list[fx.Node] = []
        for number, side in enumerate(call.sides):
            name = NAMES[number]
            bias = self.bias(side.biases, dtype)
            biases += [bias] if bias is not None else []
            removed = self._removed(number)
            if removed is not None:
                bias = removed if bias is None else build.call(torch.add, bias, removed)
            options |= side_options(name, side, bias)
        if call.head_mean:
            options["head_mean"] = True
        options |= self._mask_options(call.masks)
        if options["functional"] == DEFAULT:
            del options["functional"]
        order = ("student_q", "student_k", "teacher_q", "teacher_k")
        result = build.call(ops.attention_kl, *(inputs[n] for n in order), **options)
        value = build.call(operator.getitem, result, 0)
        value = self._without_empty_rows(value, biases, options.get("mask"), dtype)
        if call.masks.rows:
            keep = self._tensor(all_of(*call.masks.rows), self.axes.scores[:3])
            value = build.call(torch.where, keep, value, 0.0)
        return value

    # ------------------------------------------------------------------------- operands

    def _operands(self) -> tuple[dict[str, fx.Node], torch.dtype]:
        made: dict[str, fx.Node] = {}
        for name, side in zip(NAMES, self.call.sides, strict=True):
            made[f"{name}_q"], made[f"{name}_k"] = self.queries(side), self.keys(side)
        dtype = widest_of([*(tensor_of(x).dtype for x in made.values()), *self._widened()])
        for name, side in zip(NAMES, self.call.sides, strict=True):
            made[f"{name}_q"] = self.multiplied(
                made[f"{name}_q"], side.product.factors, self.axes.scores[:3]
            )
        return {name: self.build.cast(x, dtype) for name, x in made.items()}, dtype

    def _widened(self) -> Iterator[torch.dtype]:
        """The types of the user's operands, which may be wider than those of captured tensors."""
        for side in self.call.sides:
            found = self.types.get(side.product.names)
            if found is not None:
                yield found.operands

    def queries(self, side: Side) -> fx.Node:
        """Returns queries as [batch, heads, rows, head_dim]."""
        axes, x = self.axes, side.product.rows
        if axes.query and axes.query not in x.axes:
            raise Unsupported("the queries of one side do not vary along the query dimension")
        dims = (axes.batch, axes.heads + side.averaged, axes.queries, side.product.contracted)
        return self.writer.tensor(x, dims, expand=(0, 1, 2))

    def keys(self, side: Side) -> fx.Node:
        """Returns keys, without the last axes of heads that share them: head h has h // group."""
        heads = self.axes.heads + side.averaged
        return self.of_keys(side.product.keys, heads, side.product.contracted)

    def of_keys(self, x: Node, heads: Dim, width: Dim) -> fx.Node:
        """Returns a tensor with a vector for each key."""
        while heads and heads[-1] not in x.axes:
            heads = heads[:-1]
        dims = (self.axes.batch, heads, (self.axes.key,), width)
        return self.writer.tensor(x, dims, expand=(0, 1))

    def multiplied(self, x: fx.Node, factors: Sequence[Factor], rows: Sequence[Dim]) -> fx.Node:
        """Returns queries times what multiplies all scores of a row, with the rows' dimensions."""
        dtype = tensor_of(x).dtype
        for factor in factors:
            by: Any = self.writer.value(factor.value).node  # may have a reason of its own
            if not factor.value.axes <= set(self.axes.rows):
                raise Unsupported("a tensor that multiplies the scores varies along the keys")
            if factor.value.axes:
                by = self.writer.tensor(factor.value, (*rows, ()))
            x = self.build.call(torch.div if factor.divides else torch.mul, x, by)
            x = self.build.cast(x, dtype)
        return x

    # ------------------------------------------------------------------------- masks and biases

    def _tensor(self, x: Node, dims: Sequence[Dim], least: torch.dtype | None = None) -> fx.Node:
        return self.writer.tensor(x, dims, partly=PARTLY, least=least)

    def bias(self, biases: Sequence[Bias], dtype: torch.dtype) -> fx.Node | None:
        """Returns the sum of a side's additive tensors, which broadcasts to the scores.

        ``dtype`` is that of the scores: a narrower tensor is scaled after it was added to them.
        """
        total: fx.Node | None = None
        for bias in biases:
            value, least = bias.value, None
            for factor in bias.factors:
                value = factor.applied(value)
            if bias.weight != 1.0 or bias.factors:
                value, least = product(const(bias.weight), value), dtype
            x = self._tensor(value, self.axes.scores, least)
            total = x if total is None else self.build.call(torch.add, total, x)
        return total

    def _removed(self, number: int) -> fx.Node | None:
        """A bias of -inf at the keys that this side lacks and the other side has."""
        stricter = self.call.stricter
        if stricter is None or stricter.side != number:
            return None
        keep = all_of(*conditions_of(stricter.masks, self.axes))
        return self._tensor(choose(keep, const(0.0), const(-math.inf)), self.axes.scores)

    def _mask_options(self, masks: Masks) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if masks.window_left is not None:
            options["window_left"] = self.writer.size(masks.window_left)
        if masks.window_right is not None:
            options["window_right"] = self.writer.size(masks.window_right)
        dense = replace(masks.dense, rows=())
        if not dense.is_empty:
            keep = all_of(*conditions_of(dense, self.axes))
            options["mask"] = self._tensor(keep, self.axes.scores)
        if masks.fill is not None:
            options["mask_value"] = masks.fill
        return options

    def _without_empty_rows(
        self,
        value: fx.Node,
        biases: Sequence[fx.Node],
        mask: fx.Node | None,
        dtype: torch.dtype,
    ) -> fx.Node:
        """Stops the gradient of rows that a dense additive mask leaves empty: eager's are uniform
        there.
        """
        build, call = self.build, self.call
        if not biases or not needs_gradient(value):
            return value
        window = Masks(call.masks.window_left, call.masks.window_right)
        keep = mask
        if not window.is_empty:
            band = all_of(*conditions_of(window, self.axes))
            inside = self._tensor(band, self.axes.scores)
            keep = inside if keep is None else build.call(torch.logical_and, inside, keep)
        alive: fx.Node | None = None
        for bias in dict.fromkeys(biases):
            rows = rows_with_keys(build, bias, keep, dtype, all_heads=call.head_mean)
            alive = rows if alive is None else build.call(torch.logical_and, alive, rows)
        assert alive is not None
        alive = build.method("squeeze", alive, -1)
        return build.call(torch.where, alive, value, build.method("detach", value))


def side_options(name: str, side: Side, bias: fx.Node | None) -> dict[str, Any]:
    """Returns the arguments of one side that any operator has."""
    options: dict[str, Any] = {f"{name}_scale": side.scale}
    if side.softcap:
        options[f"{name}_softcap"] = side.softcap
    if bias is not None:
        options[f"{name}_bias"] = bias
    return options


def widest_of(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the narrowest type that represents all operands exactly."""
    widest = functools.reduce(torch.promote_types, dtypes)
    if not widest.is_floating_point or widest.itemsize == 1:
        raise Unsupported(f"scores of {widest} operands")
    return widest


assert NAMES.index("student") == STUDENT
