"""The spellings of a divergence that most programs of tests have."""

import torch.nn.functional as F


def kd(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def rows_of_kl(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


def elements_of_kl(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
