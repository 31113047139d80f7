"""The two spellings of a divergence that most programs of tests have."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def kd(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def rows_of_kl(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
