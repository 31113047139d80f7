"""Lowers language-model heads, whose keys are one matrix for all rows, to `linear_kl`.

It keeps nothing of the size of the logits, and hidden sizes are far beyond what attention kernels
take. The operator rounds logits to the dtype of the product, as the user's linear layer does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import outer_node
from torch_streamkl.fx_passes.domain.masks import AxisExcept, Mask
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import Bias
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.lowering.operands import canonical, materialise, weight
from torch_streamkl.fx_passes.planning.dimensions import Geometry, SideGeometry
from torch_streamkl.fx_passes.planning.lm_heads import adapter, added_to_logits
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.program.divergences import DIVERGENCES, Functional

STUDENT = "streamkl_student"  # of a call's metadata: its scores and their rows' order
DEFAULT = Functional.of(DIVERGENCES["forward_kl"]).text


def emit(
    build: Builder, geometry: Geometry, functional: Functional, outer: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Inserts the call; returns the value per token, with dimensions batch, heads, rows."""
    inputs: dict[str, fx.Node] = {}
    options: dict[str, Any] = {}
    sides = {"student": (1, geometry.student), "teacher": (0, geometry.teacher)}
    for name, (index, side) in sides.items():
        key = side.distribution.scores
        form = read(key)
        assert key.dtype is not None
        operands = [outer_node(o.node, outer) for o in (side.rows, side.keys)]
        hidden = canonical(
            build,
            side.rows,
            index,
            geometry,
            operands,
            outer,
            is_keys=False,
            dtype=key.dtype,
            factors=form.factors,
        )
        inputs[f"{name}_hidden"] = build.method("flatten", hidden, 0, 2)
        inputs[f"{name}_weight"] = weight(build, side.keys, index, geometry, outer, key.dtype)
        options[f"{name}_scale"] = form.scale * form.softcap if form.softcap else form.scale
        if form.softcap:
            options[f"{name}_softcap"] = form.softcap
        options |= _adapter(build, name, index, geometry, operands, outer)
        bias = _bias(build, added_to_logits(form), side, form.scale, outer)
        if form.mask:
            removed = _removed_vocab_entries(build, form.mask, inputs[f"{name}_weight"])
            bias = removed if bias is None else build.call(torch.add, bias, removed)
        if bias is not None:
            options[f"{name}_bias"] = bias
    if functional.text != DEFAULT:
        options["functional"] = functional.text
    order = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
    result = build.call(linear_ops.linear_kl, *(inputs[n] for n in order), **options)
    tokens = [*geometry.batch, *geometry.heads]
    if geometry.query is not None:
        tokens.append(geometry.query)
    student = geometry.student.distribution
    pieces = [geometry.digits[i].pieces[1] for i in tokens]
    result.meta[STUDENT] = (student.scores, pieces)
    return build.call(operator.getitem, result, 0)


def _adapter(
    build: Builder,
    name: str,
    index: int,
    geometry: Geometry,
    operands: list[fx.Node],
    outer: Mapping[fx.Node, fx.Node],
) -> dict[str, fx.Node]:
    """Returns the operator arguments for a LoRA adapter: a second product that is added to the
    logits.
    """
    side = geometry.side(index)
    found, key = adapter(side), side.distribution.scores
    if found is None:
        return {}
    product, rows, vocab = found
    assert key.dtype is not None
    hidden = canonical(
        build,
        rows,
        index,
        geometry,
        operands,
        outer,
        is_keys=False,
        dtype=key.dtype,
        factors=product.factors,
    )
    hidden = build.method("flatten", hidden, 0, 2)
    scale = read(key).scale
    if product.weight != scale:
        hidden = build.call(torch.mul, hidden, product.weight / scale)
    narrow = weight(build, vocab, index, geometry, outer, key.dtype)
    return {f"{name}_adapter_hidden": hidden, f"{name}_adapter_weight": narrow}


def _removed_vocab_entries(build: Builder, mask: Mask, head: fx.Node) -> fx.Node:
    """Inserts -inf at the vocabulary entries that the mask excludes, as [vocab_size]."""
    matrix = example(head)
    assert isinstance(matrix, Tensor)
    vocab = build.call(torch.arange, build.size(matrix.shape[0], [head]), device=matrix.device)
    total: fx.Node | None = None
    for literal in sorted(mask, key=str):
        assert isinstance(literal, AxisExcept)
        below = build.call(torch.lt, vocab, literal.start)
        keep = build.call(torch.logical_or, below, build.call(torch.ge, vocab, literal.stop))
        total = keep if total is None else build.call(torch.logical_and, total, keep)
    removed = build.call(torch.where, total, 0.0, -math.inf)
    return build.method("to", removed, matrix.dtype)


def _bias(
    build: Builder,
    biases: tuple[Bias, ...],
    side: SideGeometry,
    scale: float,
    outer: Mapping[fx.Node, fx.Node],
) -> fx.Node | None:
    """Sums the biases into one vector, which is added before the scale."""
    total: fx.Node | None = None
    dtype = side.distribution.scores.dtype
    for bias in biases:
        x = materialise(build, bias.tensor, outer)
        value = example(x)
        assert isinstance(value, Tensor)
        if value.dim() != 1:
            x = build.method("flatten", x)
        if bias.weight != scale:
            x = build.call(torch.mul, x, bias.weight / scale)
        total = x if total is None else build.call(torch.add, total, x)
    if total is None:
        return None
    value = example(total)
    assert isinstance(value, Tensor)
    if not value.dtype.is_floating_point:
        raise Unsupported("a bias that is not a floating-point tensor")
    return total if value.dtype == dtype else build.method("to", total, dtype)
