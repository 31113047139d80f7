"""Losses of papers and trainers that no case of the corpus has: what of them streams."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.named_inputs import given

TOKENS, VOCAB, WIDTH, TEACHER_WIDTH, TOP = 16, 24, 6, 5, 3


def lm_heads():
    """Hidden states and LM heads of both sides, labels, and what a teacher's server returned."""
    shapes = ((TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS, TEACHER_WIDTH), (VOCAB, TEACHER_WIDTH))
    heads = [torch.randn(shape, requires_grad=i < 2) for i, shape in enumerate(shapes)]
    values, ids = torch.randn(TOKENS, VOCAB).log_softmax(-1).topk(TOP, -1)
    return [*heads, torch.randint(0, VOCAB, (TOKENS,)), ids, values]


of_logits = given("h w g v labels ids values", {
    "s": lambda h, w: (h @ w.T,),
    "logs": lambda h, w: ((h @ w.T).log_softmax(-1),),
    "p q": lambda h, w, g, v: ((g @ v.T).softmax(-1), (h @ w.T).softmax(-1)),
    "log_p log_q": lambda h, w, g, v: ((g @ v.T).log_softmax(-1), (h @ w.T).log_softmax(-1)),
    "logits": lambda h, w, g, v: ((h @ w.T, g @ v.T),),
})  # fmt: skip


# --------------------------------------------- of two distributions over vocabulary entries
def alpha_beta_of_logarithms(log_p, log_q, *, a=0.6, b=0.3):
    mixed = a / (a + b) * ((a + b) * log_p).exp() + b / (a + b) * ((a + b) * log_q).exp()
    return ((mixed - (a * log_p + b * log_q).exp()).sum(-1) / (a * b)).mean()


def alpha_beta_of_powers(p, q, *, a=0.6, b=0.3):
    mixed = a / (a + b) * p ** (a + b) + b / (a + b) * q ** (a + b)
    return ((mixed - p**a * q**b).sum(-1) / (a * b)).mean()


def entropy_weighted_kl(log_p, log_q):
    p = log_p.exp()
    return ((p * (log_p - log_q)).sum(-1) * -(p * log_p).sum(-1)).mean()


def temperature_by_entropies(logits):
    """Tokens of which the teacher is uncertain are softened: of log-softmaxes, exact in eager."""
    s, t = logits
    with torch.no_grad():
        log_p = t.log_softmax(-1)
        heat = 1 - (log_p.exp() * log_p).sum(-1, keepdim=True)
    rows = F.kl_div((s / heat).log_softmax(-1), (t / heat).softmax(-1), reduction="none").sum(-1)
    return (rows * heat.squeeze(-1) ** 2).mean()


# ------------------------------------------------------------------- of the student alone
def policy_gradient(logs, labels, values):
    """GRPO with k3 and an entropy bonus."""
    chosen = logs.gather(-1, labels[:, None]).squeeze(-1)
    ratio = (chosen - chosen.detach()).exp()
    old = values[:, 0]
    k3 = (old - chosen).exp() - (old - chosen) - 1
    return (-ratio * old + 0.04 * k3 + 0.01 * (logs.exp() * logs).sum(-1)).mean()


def label_smoothing_by_hand(logs, labels):
    return -(0.9 * logs.gather(-1, labels[:, None]).squeeze(-1) + 0.1 * logs.mean(-1)).mean()


OF_LOGITS = {
    "cosine": lambda p, q: 1 - F.cosine_similarity(q, p, dim=-1).mean(),
    "alpha-beta of logarithms": alpha_beta_of_logarithms,
    "alpha-beta of powers": alpha_beta_of_powers,
    "Renyi": lambda log_p, log_q: (0.7 * log_p + 0.3 * log_q).logsumexp(-1).mean() / -0.3,
    "Hellinger": lambda p, q: (p.sqrt() - q.sqrt()).square().sum(-1).mean(),
    "chi-squared": lambda p, q: ((p - q).square() / q).sum(-1).mean(),
    "squared log-ratio": lambda log_p, log_q: (
        log_p.exp() * (log_p - log_q).square()
    ).sum(-1).mean(),
    "acceptance": lambda p, q: -torch.minimum(p, q).sum(-1).log().mean(),
    "MSE of logits": lambda logits: F.mse_loss(*logits),
    "skewed KL": lambda p, q: (p * (p.log() - (0.1 * p + 0.9 * q).log())).sum(-1).mean(),
    "entropy-weighted KL": entropy_weighted_kl,
    "temperature by entropies": temperature_by_entropies,
}  # fmt: skip
OF_STUDENTS = {
    "entropy": lambda logs: -(logs.exp() * logs).sum(-1).mean(),
    "z-loss": lambda s: s.logsumexp(-1).square().mean(),
    "policy gradient": policy_gradient,
    "label smoothing by hand": label_smoothing_by_hand,
}


@pytest.mark.parametrize("name", [*every(2, OF_LOGITS), *OF_STUDENTS])
def test_of_logits(name):
    compare(of_logits((OF_LOGITS | OF_STUDENTS)[name]), lm_heads()).check_fused()


def certain_tokens(log_p, log_q, weighted):
    """SE-KD and EDSD: a divergence of the tokens whose entropy a quantile separates."""
    with torch.no_grad():
        entropies = -(log_p.exp() * log_p).sum(-1)
        keep = (entropies <= torch.quantile(entropies, 0.7)).int().unsqueeze(-1)
    return -weighted(keep, log_p.exp(), log_q).sum(-1).mean()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Dynamo asks for the data of quantile")
@pytest.mark.parametrize(
    "weighted", [lambda a, b, c: a * (b * c), lambda a, b, c: a * b * c], ids=["whole", "factor"]
)
def test_a_condition_on_what_stays_is_outside_of_the_sum(weighted):
    """The entropies stay, for their quantile; wherever the mask stands, the divergence fuses."""
    program = of_logits(lambda log_p, log_q: certain_tokens(log_p, log_q, weighted))
    outcome = compare(program, lm_heads()).check()
    assert outcome.kinds == {"linear_kl"}, str(outcome.report)
    assert not outcome.reasons


def sinkhorn(p, q):
    cost = (-torch.cdist(p, q)).exp()
    for dim in (-1, -2, -1, -2):
        cost = cost / cost.sum(dim, keepdim=True)
    return cost.diagonal().sum()


def test_sums_over_two_axes_stay():
    assert compare(of_logits(sinkhorn), lm_heads()).check().num_fused == 0


def test_several_entries_of_a_cached_teacher():
    """Each is a product of its own, so that an id may stand twice."""

    @of_logits
    def program(logs, ids, values):
        return (values.exp() * (values - logs.gather(-1, ids))).sum(-1).mean()

    given = lm_heads()
    given[5][:, 1] = given[5][:, 0]
    compare(program, given).check_fused()
