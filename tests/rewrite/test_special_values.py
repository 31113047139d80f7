"""What eager code has of infinite scores, and an operator has not, keeps a loss as it is."""

import math

import pytest
import torch

from tests.rewrite.test_row_program_counterexamples import tensors
from tests.support.comparing import compare
from tests.support.losses import rows_of_kl as kl_of_logs


@pytest.mark.parametrize("reads", [True, False])
def test_a_value_per_row_is_added_before_the_softmax(reads):
    """A softmax ignores it: the normal form has none. Where it is -inf, eager has NaN."""

    def program(q, k, qt, kt, row):
        rows = kl_of_logs(q @ k.mT + row, qt @ kt.mT)
        return rows.isnan().sum() + rows.nansum() if reads else rows.sum()

    row = torch.tensor([0.0, 0.0, -math.inf, 0.0, 0.0], dtype=torch.float64)[:, None]
    if not reads:
        row = row.clamp(min=-3.0)
    outcome = compare(program, [*tensors("")[:4], row], verify="never").check()
    assert outcome.num_fused == (not reads), outcome.report
    assert not reads or "eager code has NaN" in str(outcome.report)


REPLACED = {
    "infinity": torch.nan_to_num,
    "NaN": lambda x: torch.nan_to_num(x, nan=1.0),
    "by hand": lambda x: torch.where(x.isinf(), 0.0, x),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_bias_hides_keys_whose_values_the_loss_replaces(name, is_shared):
    """Of the student alone: eager has infinity where the teacher has a key that it lacks."""

    def program(q, k, qt, kt, bias):
        p = (qt @ kt.mT + bias if is_shared else qt @ kt.mT).softmax(-1)
        return REPLACED[name](p * (p.log() - (q @ k.mT + bias).log_softmax(-1))).sum()

    bias = torch.zeros(5, 7, dtype=torch.float64)
    bias[:, 2:4] = -math.inf
    outcome = compare(program, [*tensors("")[:4], bias], verify="never").check()
    assert outcome.num_fused == (is_shared and name != "NaN"), outcome.report
