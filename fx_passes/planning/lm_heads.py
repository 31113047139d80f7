"""Decides which pairs of scores are LM heads: their keys are one matrix for all rows."""

from __future__ import annotations

import math

from torch_streamkl.fx_passes.domain.layout import Piece, axes_of
from torch_streamkl.fx_passes.domain.masks import AxisCondition, AxisExcept
from torch_streamkl.fx_passes.domain.score_form import ScoreForm, read
from torch_streamkl.fx_passes.domain.scores import Bias, Product
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.fx_utils.sizes import product
from torch_streamkl.fx_passes.planning.dimensions import (
    ROW_ONLY,
    Geometry,
    SideGeometry,
    is_split_of,
)


def is_lm_head(geometry: Geometry) -> bool:
    """Returns whether both sides are hidden states times one matrix, without masks."""
    return all(_is_head(side) for side in (geometry.teacher, geometry.student))


def limit_of_linear_kl(geometry: Geometry) -> str:
    """Says what `linear_kl` cannot do for a pair of logits; empty for other scores than logits."""
    sides = (geometry.teacher, geometry.student)
    if not all(_has_vocabulary(side) for side in sides):
        return ""
    if any(side.distribution.averaged for side in sides):
        return "average distributions"
    if any(set(side.kinds) != {ROW_ONLY} for side in sides):
        return "compare one row with several others"
    forms = [(read(side.distribution.scores), side.distribution.axis) for side in sides]
    if any(isinstance(x, AxisCondition) for form, _ in forms for x in form.mask):
        return ""  # causal, or a window: attention
    if not all(_excludes_vocab_entries(form, axis) for form, axis in forms):
        return "mask the vocabulary other than by x[..., i:j] = -inf"
    return "add this bias"


def _has_vocabulary(side: SideGeometry) -> bool:
    """Whether the keys are a matrix of its own, as the weight of an LM head."""
    return side.keys.node.meta["val"].dim() == 2 and {
        axis for axis in axes_of(side.keys.layout) if axis >= 0
    } == {side.distribution.axis}


def _is_head(side: SideGeometry) -> bool:
    form, axis = read(side.distribution.scores), side.distribution.axis
    contracted = {p.axis for dim in side.keys.layout for p in dim if p.axis < 0}
    on_keys = {axis for axis in axes_of(side.keys.layout) if axis >= 0}
    added = added_to_logits(form)
    return (
        set(side.kinds) == {ROW_ONLY}
        and on_keys == {axis}
        and len(contracted) == 1
        and _excludes_vocab_entries(form, axis)
        and not side.distribution.averaged
        and all(_is_per_vocab_entry(x, side) and not x.factors for x in added)
        and not (form.softcap and form.biases)
        and len(form.products) <= 1
    )


def _is_per_vocab_entry(bias: Bias, side: SideGeometry) -> bool:
    """Whether a bias has a value for each vocabulary entry of the matrix, in the order of the
    vocabulary entries.
    """
    axis = side.distribution.axis
    pieces = [p for dim in bias.tensor.layout for p in dim]
    vocab = [p.size for dim in side.keys.layout for p in dim if p.axis == axis]
    return axes_of(bias.tensor.layout) == {axis} and is_split_of(
        pieces, Piece(axis, product(vocab))
    )


def adapter(side: SideGeometry) -> tuple[Product, TensorRef, TensorRef] | None:
    """Returns the second product of a side's logits, and its operands with the rows and with the
    vocabulary entries.
    """
    for added in read(side.distribution.scores).products:
        is_rhs = side.distribution.axis in axes_of(added.rhs.layout)
        pair = (added.lhs, added.rhs) if is_rhs else (added.rhs, added.lhs)
        return added, *pair
    return None


def added_to_logits(form: ScoreForm) -> tuple[Bias, ...]:
    """Returns the tensors added to the logits; the operator adds before a softcap, never after."""
    return form.inner_biases + form.biases


def _excludes_vocab_entries(form: ScoreForm, axis: int) -> bool:
    """No mask, or vocabulary entries that have no probability: a bias of -inf, which a softcap
    would limit.
    """
    if not form.mask:
        return True
    only_vocab = all(isinstance(x, AxisExcept) and x.axis == axis for x in form.mask)
    return only_vocab and form.fill == -math.inf and not form.softcap and form.scale > 0
