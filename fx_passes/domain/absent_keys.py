"""Replaces masked keys in expressions over probabilities: -inf as scores, 0 as probabilities."""

from __future__ import annotations

import math

from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import ScoreKey
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    conditions_in,
    mentions,
    of_one_distribution,
)
from torch_streamkl.fx_passes.fx_utils.torch_names import unset_fake_temporarily
from torch_streamkl.program.divergences import evaluate
from torch_streamkl.program.graph import Node
from torch_streamkl.program.operations import exact


def may_be_infinite(key: ScoreKey) -> bool:
    """Returns whether some scores may be -inf; a tensor that is added may hold anything."""
    form = read(key)
    is_removed = bool(form.mask) and form.fill == -math.inf
    return is_removed or form.padded is not None or bool(form.biases or form.inner_biases)


def drops_absent_keys(x: Elements) -> bool:
    """Returns whether keys that all distributions lack contribute 0: fused, 0 * -inf is 0."""
    first, *others = (read(part.scores) for part in x.parts)
    absent_by = (first.mask, first.biases, first.inner_biases)
    alike = all((k.mask, k.biases, k.inner_biases) == absent_by for k in others)
    e = x.single()
    if e is None or first.padded is not None or not alike or not is_of_probabilities(e):
        return False
    return at_absent_key(e) == 0.0


def at_absent_key(e: Node) -> float:
    """Evaluates an expression at probability 0 and logarithm -inf; 0 * -inf counts as 0."""
    absent = {"P": 0.0, "logP": -math.inf}
    tensors = {name: exact(v) for name, v in absent.items()}
    with unset_fake_temporarily():
        return float(evaluate(of_one_distribution(e), tensors))


def is_of_probabilities(e: Node) -> bool:
    """Returns whether an expression has only probabilities and their logarithms."""
    return not mentions(e, "lse") and not conditions_in(e)
