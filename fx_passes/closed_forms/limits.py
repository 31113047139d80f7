"""Says what the operators do not compute, of calls whose meaning is known.

Each limit is a reason for the user. What a kernel does not run, of what its operator computes, is
said by the `*_limit` functions of torch_streamkl.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch_streamkl.fx_passes.closed_forms.axes import ABSENT, ROW_ONLY, kind_of
from torch_streamkl.fx_passes.closed_forms.form import (
    LINEAR,
    NO_ENTRIES,
    Axes,
    Bias,
    Call,
    Masks,
    NoForm,
    Product,
    Side,
    is_of_products,
)
from torch_streamkl.program.graph import Axis
from torch_streamkl.program.shifts import is_small

SCALED = "scores are scaled by what is computed from scores"


def is_lm_head(sides: Sequence[Side], axes: Axes, masks: Masks, removes: bool) -> bool:
    """Returns whether both sides are hidden states times one matrix, without masks but those of
    vocabulary entries. ``removes`` says whether these are removed, not filled with a number.
    """
    only_vocab = masks.is_empty or (replace(masks, vocab=()).is_empty and removes)
    return only_vocab and all(_is_head(side, axes, not masks.is_empty) for side in sides)


def _is_head(side: Side, axes: Axes, is_masked: bool) -> bool:
    return (
        bool(axes.rows)
        and all(kind_of(side, a) in (ROW_ONLY, ABSENT) for a in axes.rows)
        and any(kind_of(side, a) == ROW_ONLY for a in axes.rows)
        and _is_one_matrix(side.product, axes)
        and not side.averaged
        and all(_is_per_vocab_entry(x, axes.key) for x in side.added)
        and not (side.softcap and side.biases)
        and len(side.adapters) <= 1
        and all(_is_one_matrix(x, axes) for x in side.adapters)
        and not (is_masked and (side.softcap or side.scale <= 0.0))
    )


def _is_one_matrix(product: Product, axes: Axes) -> bool:
    """Whether all rows are multiplied with the same keys, by one dimension of both."""
    on_keys = product.keys.axes - set(product.contracted)
    return on_keys == {axes.key} and len(product.contracted) == 1


def _is_per_vocab_entry(bias: Bias, key: Axis) -> bool:
    return bias.value.axes == {key} and not any(x.value.axes for x in bias.factors)


def check_call(call: Call) -> None:
    """Raises NoForm with the limit of an operator that a call exceeds."""
    if any(a.size == 0 for a in (*call.axes.rows, call.axes.key)):
        raise NoForm(NO_ENTRIES)
    if call.student.averaged:
        raise NoForm("the probabilities of both sides are averaged over heads")
    for side in call.sides:
        _check_factors(side)
    if call.operator == LINEAR:
        return
    for side in call.sides:
        _check_side(side, call.axes.key)
        if side.num_keys is not None:
            raise NoForm("scores are padded to another number of keys")
    _check_masks(call)
    _check_hidden_rows(call)
    if math.isnan(call.functional.absent) and call.functional.closed_form is None:
        # a key that -inf is added to: operators multiply its 0 with its logarithm
        if any(side.biases for side in call.sides):
            raise NoForm("of a key without probability the divergence and a bias would make NaN")


def _check_hidden_rows(call: Call) -> None:
    """Raises NoForm if a tensor that is added may hide all keys of a row on one side alone.

    The backward of such a row is not that of eager code: lowering/empty_rows.py. If both sides
    have the tensor, both are uniform there, and the gradient is 0.
    """
    large = [
        {b.value for b in side.biases if b.factors or not is_small(b.weight, b.value)}
        for side in call.sides
    ]
    if large[0] != large[1]:
        raise NoForm(
            "a tensor is added to the scores of one side alone: it may hide all keys of a row"
        )


def _check_side(side: Side, key: Axis) -> None:
    if side.inner_biases:
        raise NoForm("a tensor is added to attention scores before a tanh")
    if side.adapters:
        raise NoForm("scores are a sum of products, but of no LM head with a single adapter")
    for factor in side.product.factors:
        if key in factor.value.axes:
            raise NoForm("scores are multiplied by a tensor with a value for each key")
    for bias in side.biases:
        if any(x.flows for x in (bias.value, *(f.value for f in bias.factors))):
            raise NoForm("a bias that is added to the scores needs a gradient")
        if is_of_products(bias.value):
            raise NoForm("a tensor that is computed from scores is added to scores")


def _check_factors(side: Side) -> None:
    for product in (side.product, *side.adapters):
        for factor in product.factors:
            if is_of_products(factor.value):
                raise NoForm(SCALED, factor.value)


def _check_masks(call: Call) -> None:
    masks = [call.masks, *([call.stricter.masks] if call.stricter else [])]
    averaged = set(call.teacher.averaged)
    for each in masks:
        for condition in (*each.tensors, *each.segments, *each.rows):
            if condition.axes & averaged:
                raise NoForm("a mask that differs between averaged heads", condition)
