"""What eager code has of infinite scores, and an operator has not, keeps a loss as it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.rewrite.test_nan_readers import kl_of_logs, maps
from tests.support.comparing import compare

OPTIONS = {"streamkl.verify": "never"}


@pytest.mark.parametrize("reads", [True, False])
def test_a_value_per_row_is_added_before_the_softmax(reads: bool) -> None:
    """A softmax ignores it: the normal form has none. Where it is -inf, eager has NaN."""

    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, row: Tensor) -> Tensor:
        rows = kl_of_logs(q @ k.mT + row, qt @ kt.mT)
        return rows.isnan().sum() + rows.nansum() if reads else rows.sum()

    row = torch.tensor([0.0, 0.0, -math.inf, 0.0, 0.0], dtype=torch.float64)[:, None]
    if not reads:
        row = row.clamp(min=-3.0)
    outcome = compare(program, [*maps(), row], options=OPTIONS).check()
    assert outcome.num_fused == (not reads), outcome.report
    assert not reads or "eager code has NaN" in str(outcome.report)


REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "infinity": torch.nan_to_num,
    "NaN": lambda x: torch.nan_to_num(x, nan=1.0),
    "by hand": lambda x: torch.where(x.isinf(), 0.0, x),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_bias_hides_keys_whose_values_the_loss_replaces(name: str, is_shared: bool) -> None:
    """Of the student alone: eager has infinity where the teacher has a key that it lacks."""

    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, bias: Tensor) -> Tensor:
        p = (qt @ kt.mT + bias if is_shared else qt @ kt.mT).softmax(-1)
        return REPLACED[name](p * (p.log() - (q @ k.mT + bias).log_softmax(-1))).sum()

    bias = torch.zeros(5, 7, dtype=torch.float64)
    bias[:, 2:4] = -math.inf
    outcome = compare(program, [*maps(), bias], options=OPTIONS).check()
    assert outcome.num_fused == (is_shared and name != "NaN"), outcome.report
