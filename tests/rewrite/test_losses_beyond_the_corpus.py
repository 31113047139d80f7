"""Losses of papers and trainers that no case of the corpus has: what of them streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare
from tests.support.covering import every

TOKENS, VOCAB, WIDTH, TEACHER_WIDTH, TOP = 16, 24, 6, 5, 3
BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 14, 17, 4

Loss = Callable[..., Tensor]


def lm_heads() -> list[Tensor]:
    """Hidden states and LM heads of both sides, labels, and what a teacher's server returned."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    h, w = normal(TOKENS, WIDTH).requires_grad_(), normal(VOCAB, WIDTH).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=make)
    values, ids = normal(TOKENS, VOCAB).log_softmax(-1).topk(TOP, -1)
    return [h, w, normal(TOKENS, TEACHER_WIDTH), normal(VOCAB, TEACHER_WIDTH), labels, ids, values]


def maps() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, n, DIM) for n in (ROWS, KEYS, ROWS, KEYS)]
    found = [torch.randn(shape, generator=make) for shape in shapes]
    return [x.requires_grad_(i < 2) for i, x in enumerate(found)]


# ------------------------------------------------------------ of two distributions over vocabulary
# entries
def skewed_kl(s, t):
    p, q = t.softmax(-1), s.softmax(-1)
    return (p * (p.log() - (0.1 * p + 0.9 * q).log())).sum(-1).mean()


def skewed_reverse_kl(s, t):
    p, q = t.softmax(-1), s.softmax(-1)
    return (q * (q.log() - (0.9 * p + 0.1 * q).log())).sum(-1).mean()


def alpha_beta_of_logarithms(s, t, a=0.6, b=0.3):
    p, q = t.log_softmax(-1), s.log_softmax(-1)
    mixed = a / (a + b) * ((a + b) * p).exp() + b / (a + b) * ((a + b) * q).exp()
    return ((mixed - (a * p + b * q).exp()).sum(-1) / (a * b)).mean()


def alpha_beta_of_powers(s, t, a=0.6, b=0.3):
    p, q = t.softmax(-1), s.softmax(-1)
    mixed = a / (a + b) * p ** (a + b) + b / (a + b) * q ** (a + b)
    return ((mixed - p**a * q**b).sum(-1) / (a * b)).mean()


def renyi(s, t, a=0.7):
    p, q = t.log_softmax(-1), s.log_softmax(-1)
    return (a * p + (1 - a) * q).logsumexp(-1).mean() / (a - 1)


def hellinger(s, t):
    return (t.softmax(-1).sqrt() - s.softmax(-1).sqrt()).square().sum(-1).mean()


def chi_squared(s, t):
    p, q = t.softmax(-1), s.softmax(-1)
    return ((p - q).square() / q).sum(-1).mean()


def total_variation(s, t):
    return 0.5 * (t.softmax(-1) - s.softmax(-1)).abs().sum(-1).mean()


def squared_log_ratio(s, t):
    p, q = t.log_softmax(-1), s.log_softmax(-1)
    return (p.exp() * (p - q).square()).sum(-1).mean()


def acceptance_of_drafts(s, t):
    return -torch.minimum(t.softmax(-1), s.softmax(-1)).sum(-1).log().mean()


def mse_of_probabilities(s, t):
    return F.mse_loss(s.softmax(-1), t.softmax(-1))


def mse_of_logits(s, t):
    return F.mse_loss(s, t)


def cosine(s, t):
    return 1 - F.cosine_similarity(s.softmax(-1), t.softmax(-1), dim=-1).mean()


def standardised_logits(s, t):
    s, t = ((x - x.mean(-1, keepdim=True)) for x in (s, t))
    s, t = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (s, t))
    return F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean") * 4


def entropy_weighted_kl(s, t):
    p, q = t.log_softmax(-1), s.log_softmax(-1)
    entropy = -(p.exp() * p).sum(-1)
    return ((p.exp() * (p - q)).sum(-1) * entropy).mean()


OF_LOGITS: list[Loss] = [
    skewed_kl, skewed_reverse_kl, alpha_beta_of_logarithms, alpha_beta_of_powers, renyi, hellinger,
    chi_squared, total_variation, squared_log_ratio, acceptance_of_drafts, mse_of_probabilities,
    mse_of_logits, cosine, standardised_logits, entropy_weighted_kl,
]  # fmt: skip


# ------------------------------------------------------------ of the student alone
def entropy(s, labels, ids, values):
    q = s.log_softmax(-1)
    return -(q.exp() * q).sum(-1).mean()


def z_loss(s, labels, ids, values):
    return s.logsumexp(-1).square().mean()


def policy_gradient(s, labels, ids, values):
    """GRPO with k3 and an entropy bonus."""
    q = s.log_softmax(-1)
    chosen = q.gather(-1, labels[:, None]).squeeze(-1)
    ratio = (chosen - chosen.detach()).exp()
    old = values[:, 0]
    k3 = (old - chosen).exp() - (old - chosen) - 1
    return (-ratio * old + 0.04 * k3 + 0.01 * (q.exp() * q).sum(-1)).mean()


def log_probability_of_labels(s, labels, ids, values):
    q = s.log_softmax(-1)
    return -q.gather(-1, labels[:, None]).squeeze(-1).mean() + 1e-3 * (q.exp() * q).sum()


def label_smoothing_by_hand(s, labels, ids, values):
    q = s.log_softmax(-1)
    return -(0.9 * q.gather(-1, labels[:, None]).squeeze(-1) + 0.1 * q.mean(-1)).mean()


OF_STUDENTS: list[Loss] = [
    entropy, z_loss, policy_gradient, log_probability_of_labels, label_smoothing_by_hand,
]  # fmt: skip


# ------------------------------------------------------------ of attention maps
def tinybert(sq, sk, tq, tk):
    s, t = (q @ k.mT / DIM**0.5 for q, k in ((sq, sk), (tq, tk)))
    s, t = (torch.where(x <= -1e2, torch.zeros_like(x), x) for x in (s, t))
    return F.mse_loss(s, t)


def mse_of_maps(sq, sk, tq, tk):
    return F.mse_loss((sq @ sk.mT).softmax(-1), (tq @ tk.mT).softmax(-1))


def cosine_of_maps(sq, sk, tq, tk):
    s, t = (sq @ sk.mT).softmax(-1), (tq @ tk.mT).softmax(-1)
    return (1 - F.cosine_similarity(s, t, dim=-1)).mean()


def maps_of_averaged_heads(sq, sk, tq, tk):
    s, t = (q.mul(0.5).matmul(k.mT).softmax(-1).mean(1) for q, k in ((sq, sk), (tq, tk)))
    return (t * ((t + 1e-8).log() - (s + 1e-8).log())).sum(-1).mean()


OF_MAPS: list[Loss] = [tinybert, mse_of_maps, cosine_of_maps, maps_of_averaged_heads]


# ------------------------------------------------------------ what has another shape
def cached_top_words(s, labels, ids, values):
    q = s.log_softmax(-1).gather(-1, ids)
    return (values.exp() * (values - q)).sum(-1).mean()


def universal_logit_distance(s, t):
    p, q = t.softmax(-1).sort(-1).values, s.softmax(-1).sort(-1).values
    return (p - q).abs().sum(-1).mean()


def sinkhorn(s, t):
    p, q = t.softmax(-1), s.softmax(-1)
    cost = (-torch.cdist(p, q)).exp()
    for _ in range(3):
        cost = cost / cost.sum(-1, keepdim=True)
        cost = cost / cost.sum(-2, keepdim=True)
    return cost.diagonal().sum()


def fused_completely(program: Loss, given: list[Tensor]) -> None:
    outcome = compare(program, given).check()
    report = outcome.report
    assert outcome.num_fused and outcome.num_fused == len(report.sites), str(report)
    assert report.num_remaining == 0, str(report)


@pytest.mark.parametrize("loss", every(2, OF_LOGITS), ids=lambda f: f.__name__)
def test_of_logits(loss: Loss) -> None:
    def program(h, w, ht, wt, *_):
        return loss(h @ w.T, ht @ wt.T)

    fused_completely(program, lm_heads())


@pytest.mark.parametrize("loss", OF_STUDENTS, ids=lambda f: f.__name__)
def test_of_the_student_alone(loss: Loss) -> None:
    def program(h, w, ht, wt, labels, ids, values):
        return loss(h @ w.T, labels, ids, values)

    fused_completely(program, lm_heads())


@pytest.mark.parametrize("loss", OF_MAPS, ids=lambda f: f.__name__)
def test_of_maps(loss: Loss) -> None:
    fused_completely(loss, maps())


@pytest.mark.parametrize("loss", [universal_logit_distance, sinkhorn], ids=lambda f: f.__name__)
def test_sorts_and_sums_over_two_axes_stay(loss: Loss) -> None:
    def program(h, w, ht, wt, *_):
        return loss(h @ w.T, ht @ wt.T)

    outcome = compare(program, lm_heads()).check()
    assert outcome.num_fused == 0


def test_several_entries_of_a_cached_teacher() -> None:
    """Each is a product of its own, so that an id may stand twice."""

    def program(h, w, ht, wt, labels, ids, values):
        return cached_top_words(h @ w.T, labels, ids, values)

    given = lm_heads()
    fused_completely(program, given)
    given[5] = given[5].clone()
    given[5][:, 1] = given[5][:, 0]
    fused_completely(program, given)
