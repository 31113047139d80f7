"""A mask that is added as a tensor: what -inf makes of a divergence is what eager code makes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare

# of keys without probability each is 0 in eager code, as 0 log 0 is in `xlogy` and `kl_div`
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "half of the target": lambda p, s: F.kl_div((s + 1e-9).log(), 0.5 * p, reduction="sum"),
    "square of the target": lambda p, s: F.kl_div((s + 1e-9).log(), p**2, reduction="sum"),
    "product": lambda p, s: torch.xlogy(p * s, p * s).sum(),
    "plain": lambda p, s: F.kl_div((s + 1e-9).log(), p, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_head", [False, True])
def test_minus_infinity_in_a_bias_of_both_sides(name: str, is_head: bool) -> None:
    make = torch.Generator().manual_seed(0)
    lead = () if is_head else (2, 3)
    q, k, r, s = (torch.randn(*lead, n, 4, generator=make) for n in (5, 7, 5, 7))
    bias = torch.zeros(7) if is_head else torch.zeros(2, 1, 1, 7)
    bias[..., 3:5] = -math.inf

    def step(q: Tensor, k: Tensor, r: Tensor, s: Tensor, bias: Tensor) -> Tensor:
        teacher, student = (r @ s.mT + bias).softmax(-1), (q @ k.mT + bias).softmax(-1)
        return LOSSES[name](teacher, student)

    given = [q.requires_grad_(), k.requires_grad_(), r, s, bias]
    options = {"streamkl.min_mib": 0.0, "streamkl.verify": "never"}
    outcome = compare(step, given, options=options).check()
    assert outcome.num_fused == 1, outcome.report
