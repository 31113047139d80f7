"""The report names the operation of the user's code that blocks, and what is true of it."""

import re

import pytest
import torch
import torch.nn.functional as F

from tests.report.test_report_says import explained
from tests.support.comparing import compare
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes.reporting.operations import OF_NOBODY, OF_PROGRAMS, SPELLINGS


def of_probabilities(compare):
    def loss(h, w, g, v):
        return compare((g @ v.T).softmax(-1), (h @ w.T).softmax(-1)).sum(-1).mean()

    return loss


def normalized(x):
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()


# as users write it, and as the report says
WAYS = {
    "hardtanh": (
        lambda p, q: F.hardtanh(p - q, -0.1, 0.1) ** 2,
        lambda p, q: (p - q).clamp(-0.1, 0.1) ** 2,
    ),
    "relu6": (lambda p, q: F.relu6(p - q), lambda p, q: (p - q).clamp(0, 6)),
    "silu": (lambda p, q: F.silu(p - q), lambda p, q: (p - q) * (p - q).sigmoid()),
    "logit": (
        lambda p, q: (p.logit() - q.logit()) ** 2,
        lambda p, q: (p.log() - (1 - p).log() - (q.log() - (1 - q).log())) ** 2,
    ),
    "dist": (
        lambda p, q: torch.dist(p, q)[None],
        lambda p, q: ((p - q) ** 2).sum().sqrt()[None],
    ),
    "linalg_vecdot": (
        lambda p, q: torch.linalg.vecdot(p, q)[:, None],
        lambda p, q: (p * q).sum(-1, keepdim=True),
    ),
    "binary_cross_entropy": (
        lambda p, q: F.binary_cross_entropy(q, p, reduction="none"),
        lambda p, q: -(p * q.log().clamp(min=-100) + (1 - p) * (1 - q).log().clamp(min=-100)),
    ),
    "layer_norm": (
        lambda p, q: F.layer_norm(p, p.shape[-1:]) * F.layer_norm(q, q.shape[-1:]),
        lambda p, q: normalized(p) * normalized(q),
    ),
    "poisson_nll_loss": (
        lambda p, q: F.poisson_nll_loss(q, p, reduction="none"),
        lambda p, q: q.exp() - p * q,
    ),
}
READ = {
    "min": torch.min,
    "max": torch.max,
    "leaky_relu": lambda p, q: F.leaky_relu(p - q, 0.1),
    "log10": lambda p, q: p * (p.log10() - q.log10()),
    "subtract": lambda p, q: torch.subtract(p, q).square(),
    "absolute": lambda p, q: (p - q).absolute(),
    "negative": lambda p, q: torch.negative(p) * q.log(),
    "addcmul": lambda p, q: torch.addcmul(p, q, q, value=-1) ** 2,
    "addcdiv": lambda p, q: torch.addcdiv(p, q, p + 1, value=-1) ** 2,
    "special_entr": lambda p, q: -torch.special.entr(p) - p * q.log(),
    "smooth_l1_loss": lambda p, q: F.smooth_l1_loss(p, q, beta=0.5, reduction="none"),
    "huber_loss": lambda p, q: F.huber_loss(p, q, delta=0.5, reduction="none"),
    "norm": lambda p, q: (p - q).norm(dim=-1, keepdim=True),
    "linalg_vector_norm": lambda p, q: torch.linalg.vector_norm(p - q, dim=-1, keepdim=True),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_other_spelling_is_the_same_value_and_fuses(name):
    written, spelled = map(of_probabilities, WAYS[name])
    inputs = USER_LOSSES["cosine"].inputs()
    torch.testing.assert_close(spelled(*inputs), written(*inputs))
    fused = explained(spelled)
    assert (fused.num_fused, len(fused.sites)) == (1, 1), fused
    text = str(explained(written))
    assert re.search(rf"\b{name} (at \S+ )?is applied to", text), text
    assert SPELLINGS[name] in text and "write it as the reason says: the same value" in text
    assert OF_NOBODY not in text and "compared by code" not in text


def test_every_spelling_is_tried():
    assert set(SPELLINGS) == {*WAYS, *READ, "vecdot"}


def test_the_other_operations_are_read():
    """By divergences and row programs; their spellings help where code around them is not."""

    def loss(h, w, g, v):
        p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
        return sum(read(p, q).sum(-1).mean() for read in READ.values())

    compare(loss, USER_LOSSES["cosine"].inputs()).check_fused()


APPLIED = {
    "floor": (lambda p, q: p * (10 * q).floor(), OF_PROGRAMS),
    "atan": (lambda p, q: (p - q).atan() ** 2, OF_NOBODY),
    "cosine_embedding_loss": (
        lambda p, q: F.cosine_embedding_loss(p, q, torch.ones(len(p)))[None],
        OF_NOBODY,
    ),
    "min over a dimension": (lambda p, q: p * q.min(-1, keepdim=True).values, ""),
}


@pytest.mark.parametrize("name", APPLIED)
def test_what_is_true_of_an_operation(name):
    compare, clause = APPLIED[name]
    text = str(explained(of_probabilities(compare)))
    assert name in text and clause in text, text
    assert "applied to scores" not in text, "of probabilities"
    programs = "row_program computes sums over keys of your own" in text
    assert programs == (clause == OF_PROGRAMS), text
