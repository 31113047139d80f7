"""Holds a match against the program that it came from: recomputed from its arguments alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.support.evaluate_program import evaluate
from torch_streamkl.fx_passes.closed_forms.form import ClosedForm
from torch_streamkl.fx_passes.closed_forms.recompute import recompute


def difference(
    form: ClosedForm, values: Mapping[Any, Tensor], sizes: Mapping[Any, int] | None = None
) -> float:
    """Returns the largest error of the recomputed rows, relative to the largest row."""
    order = sorted(form.site.axes, key=repr)
    expected = evaluate(form.site, values, sizes, order)
    found = evaluate(recompute(form), values, sizes, order)
    both = torch.isfinite(expected)  # a row without keys has NaN where it is written naively
    gap = (expected - found)[both].abs()
    if not gap.numel():
        return 0.0
    return float(gap.max() / expected[both].abs().max().clamp_min(1e-30))


def recomputed_alike(
    form: ClosedForm, values: Mapping[Any, Tensor], sizes: Mapping[Any, int] | None = None
) -> None:
    """Asserts that a match means what the program does."""
    assert difference(form, values, sizes) < 1e-9
