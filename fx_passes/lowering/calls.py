"""Inserts a planned loss's operator calls into the user's graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.attention import ops
from torch_streamkl.fx_passes.capture.retrace import outer_node
from torch_streamkl.fx_passes.domain.masks import AxisTensor
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import Bias
from torch_streamkl.fx_passes.domain.values import Rows
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.sizes import is_one, is_unknown, provably_equal
from torch_streamkl.fx_passes.fx_utils.strides import with_strides_of
from torch_streamkl.fx_passes.lowering import lm_head
from torch_streamkl.fx_passes.lowering.empty_rows import rows_with_keys, window_tensor
from torch_streamkl.fx_passes.lowering.operands import (
    canonical,
    materialise,
    placed,
    rows_as_user,
)
from torch_streamkl.fx_passes.planning.dimensions import Geometry
from torch_streamkl.fx_passes.planning.plan import Call, Plan
from torch_streamkl.program.divergences import DIVERGENCES, Functional


def emit(build: Builder, planned: Plan, like: Tensor, outer: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Inserts the calls; the returned node has the value and metadata of ``like``."""
    rows = planned.rows
    total: fx.Node | None = None
    for call in planned.calls:
        term = _emit_call(build, call, outer, rows)
        coefficient = call.coefficient * rows.weight
        if coefficient != 1.0:
            term = build.call(torch.mul, term, coefficient)
        total = term if total is None else build.call(torch.add, total, term)
    assert total is not None
    tensors = [outer_node(o.node, outer) for c in planned.calls for o in _operands(c)]
    total = _broadcast(build, total, rows, tensors)
    if tuple(rows.reduced) == (rows.elements.key_dim,):
        if not rows.keepdim:
            total = build.method("squeeze", total, rows.elements.key_dim)
    else:
        total = build.method("sum", total, dim=tuple(rows.reduced), keepdim=rows.keepdim)
    if rows.divisors:
        total = build.call(torch.div, total, build.product(rows.divisors, tensors))
    value = example(total)
    assert isinstance(value, Tensor)
    if value.dtype != like.dtype:
        total = build.method("to", total, like.dtype)
    result = example(total)
    assert isinstance(result, Tensor)
    # a number of selected rows has a symbol of its own in the rewritten graph
    if len(result.shape) != len(like.shape) or not all(
        provably_equal(a, b) or (is_unknown(a) and is_unknown(b))
        for a, b in zip(result.shape, like.shape, strict=True)
    ):
        raise Unsupported(
            f"the fused value has shape {tuple(result.shape)}, the user's {tuple(like.shape)}"
        )
    return with_strides_of(build, total, like)


def _broadcast(build: Builder, total: fx.Node, rows: Rows, tensors: list[fx.Node]) -> fx.Node:
    """Expands row values to the extents of the user's tensor, which a sum over them counts."""
    value, wanted = example(total), rows.elements.shape
    assert isinstance(value, Tensor)
    smaller = [
        d
        for d, size in enumerate(wanted)
        if d != rows.elements.key_dim and is_one(value.shape[d]) and not is_one(size)
    ]
    if not smaller:
        return total
    sizes = [build.size(s, tensors) if d in smaller else -1 for d, s in enumerate(wanted)]
    return build.method("expand", total, *sizes)


def _operands(call: Call) -> list[Any]:
    return [
        o
        for side in (call.geometry.student, call.geometry.teacher)
        for o in (side.rows, side.keys)
    ]


def _emit_call(
    build: Builder, call: Call, outer: Mapping[fx.Node, fx.Node], rows: Rows
) -> fx.Node:
    shape = call.geometry
    tensors = [outer_node(o.node, outer) for o in _operands(call)]
    if call.is_head:
        value = lm_head.emit(build, shape, call.functional, outer)
        value = rows_as_user(
            build, value, shape, rows.elements.rank, rows.elements.key_dim, tensors
        )
        return _with_factors(build, value, call, outer)
    inputs: dict[str, fx.Node] = {}
    options: dict[str, Any] = {"functional": call.functional.text}
    biases: dict[str, fx.Node] = {}
    dtype = _compute_dtype(call, outer)
    for side, name in enumerate(("teacher", "student")):
        own = (shape.teacher, shape.student)[side]
        form = read(own.distribution.scores)
        inputs[f"{name}_q"] = canonical(
            build,
            own.rows,
            side,
            shape,
            tensors,
            outer,
            is_keys=False,
            dtype=dtype,
            factors=form.factors,
        )
        inputs[f"{name}_k"] = canonical(
            build, own.keys, side, shape, tensors, outer, is_keys=True, dtype=dtype
        )
        options[f"{name}_scale"] = form.scale * form.softcap if form.softcap else form.scale
        if form.softcap:
            options[f"{name}_softcap"] = form.softcap
        bias = add_up_biases(build, form.biases, side, shape, tensors, outer, dtype)
        if bias is not None:
            biases[name] = bias
        removed = _removed_on(build, side, call, tensors, outer)
        if removed is not None:
            bias = removed if bias is None else build.call(torch.add, bias, removed)
        if bias is not None:
            options[f"{name}_bias"] = bias
    if shape.teacher.distribution.averaged:
        options["head_mean"] = True
    options |= _mask_options(build, call, tensors, outer)
    if options["functional"] == Functional.of(DIVERGENCES["forward_kl"]).text:
        del options["functional"]
    order = ("student_q", "student_k", "teacher_q", "teacher_k")
    result = build.call(ops.attention_kl, *(inputs[n] for n in order), **options)
    value = build.call(operator.getitem, result, 0)
    value = _without_empty_rows(
        build, value, call, list(biases.values()), options.get("mask"), tensors, dtype
    )
    for literal in call.mask.row_tensors:
        keep = placed(build, outer_node(literal.node, outer), literal.layout, 1, shape, tensors)
        keep = build.method("squeeze", keep, -1)
        value = build.call(
            torch.where, keep, *((value, 0.0) if literal.positive else (0.0, value))
        )
    value = rows_as_user(build, value, shape, rows.elements.rank, rows.elements.key_dim, tensors)
    return _with_factors(build, value, call, outer)


def _without_empty_rows(
    build: Builder,
    value: fx.Node,
    call: Call,
    biases: Sequence[fx.Node],
    mask: fx.Node | None,
    tensors: list[fx.Node],
    dtype: torch.dtype,
) -> fx.Node:
    """Stops the gradient of rows that a dense additive mask leaves empty: eager's are uniform
    there.
    """
    shape = call.geometry
    result = example(value)
    if not biases or not (isinstance(result, Tensor) and result.requires_grad):
        return value
    keep = window_tensor(build, shape, call.mask.window_left, call.mask.window_right, tensors)
    if mask is not None:
        keep = mask if keep is None else build.call(torch.logical_and, keep, mask)
    averaged = bool(shape.teacher.distribution.averaged)
    alive: fx.Node | None = None
    for bias in dict.fromkeys(biases):
        rows = rows_with_keys(build, bias, keep, dtype, all_heads=averaged)
        alive = rows if alive is None else build.call(torch.logical_and, alive, rows)
    assert alive is not None
    alive = build.method("squeeze", alive, -1)
    return build.call(torch.where, alive, value, build.method("detach", value))


def _compute_dtype(call: Call, outer: Mapping[fx.Node, fx.Node]) -> torch.dtype:
    """Returns the narrowest dtype that represents all operands exactly."""
    dtypes = []
    for operand in _operands(call):
        value = example(outer_node(operand.node, outer))
        assert isinstance(value, Tensor)
        dtypes.append(value.dtype)
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    if not widest.is_floating_point:
        raise Unsupported(f"scores of {widest} operands")
    return widest


def add_up_biases(
    build: Builder,
    biases: Sequence[Bias],
    side: int,
    shape: Geometry,
    tensors: Sequence[fx.Node],
    outer: Mapping[fx.Node, fx.Node],
    dtype: torch.dtype,
) -> fx.Node | None:
    """Adds the additive tensors of a side's scores to one that broadcasts to the operator's
    scores.

    ``dtype`` is that of the scores: a narrower tensor is scaled after it was added to them.
    """
    total: fx.Node | None = None
    for bias in biases:
        if bias.tensor.grad or any(factor.tensor.grad for factor in bias.factors):
            raise Unsupported("a bias that is added to the scores needs a gradient")
        node = materialise(build, bias.tensor, outer)
        x = placed(build, node, bias.tensor.layout, side, shape, tensors)
        value = example(x)
        assert isinstance(value, Tensor)
        if value.dtype != torch.promote_types(value.dtype, dtype) and bias.is_scaled:
            x = build.method("to", x, dtype)
        if bias.weight != 1.0:
            x = build.call(torch.mul, x, bias.weight)
        for factor in bias.factors:
            by = materialise(build, factor.tensor, outer)
            x = build.call(torch.div if factor.divides else torch.mul, x, by)
        total = x if total is None else build.call(torch.add, total, x)
    return total


def _mask_options(
    build: Builder, call: Call, tensors: Sequence[fx.Node], outer: Mapping[fx.Node, fx.Node]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    mask = call.mask
    if mask.window_left is not None:
        options["window_left"] = build.size(mask.window_left, tensors)
    if mask.window_right is not None:
        options["window_right"] = build.size(mask.window_right, tensors)
    total = _conjunction(build, mask.tensors, 1, call, tensors, outer)
    if total is not None:
        options["mask"] = total
    if mask.fill is not None:
        options["mask_value"] = mask.fill
    return options


def _conjunction(
    build: Builder,
    literals: Sequence[AxisTensor],
    side: int,
    call: Call,
    tensors: Sequence[fx.Node],
    outer: Mapping[fx.Node, fx.Node],
) -> fx.Node | None:
    """Combines the mask tensors of a side into one boolean tensor, True for allowed keys."""
    total: fx.Node | None = None
    for literal in literals:
        node = outer_node(literal.node, outer)
        x = placed(build, node, literal.layout, side, call.geometry, tensors)
        if not literal.positive:
            x = build.call(torch.logical_not, x)
        total = x if total is None else build.call(torch.logical_and, total, x)
    return total


def _removed_on(
    build: Builder,
    side: int,
    call: Call,
    tensors: list[fx.Node],
    outer: Mapping[fx.Node, fx.Node],
) -> fx.Node | None:
    """Builds a bias of -inf at the keys that this side lacks and the other side has."""
    stricter = call.mask.stricter
    if stricter is None or stricter.side != side:
        return None
    keep = _conjunction(build, stricter.tensors, side, call, tensors, outer)
    left, right = stricter.window_left, stricter.window_right
    band = window_tensor(build, call.geometry, left, right, tensors)
    if band is not None:
        band = build.call(operator.getitem, band, (None, None))
        keep = band if keep is None else build.call(torch.logical_and, keep, band)
    assert keep is not None
    return build.call(torch.where, keep, 0.0, -math.inf)


def _with_factors(
    build: Builder, value: fx.Node, call: Call, outer: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Applies row weights and row masks as the user's code does."""
    for factor in call.factors:
        node = materialise(build, factor.tensor, outer)
        if factor.selects:
            arguments = (value, 0.0) if factor.keeps else (0.0, value)
            value = build.call(torch.where, node, *arguments)
        elif factor.divides:
            value = build.call(torch.div, value, node)
        else:
            value = build.call(torch.mul, value, node)
    return value
