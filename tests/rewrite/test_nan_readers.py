"""Code that asks for the NaN or infinity of eager code sees them: the divergence is not fused."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.losses import rows_of_kl as kl_of_logs
from torch_streamkl import explain
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.planning import profitability


def maps():
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 4, generator=make, dtype=torch.float64) for n in (5, 7, 5, 7)]


def causal(scores, fill):
    keep = torch.ones(5, 7, dtype=torch.bool).tril(2)
    return scores.masked_fill(~keep, fill)


def by_probabilities(s, t):
    p = t.softmax(-1)
    return (p * (p.log() - s.softmax(-1).log())).sum(-1)


def clamped(s, t):
    p, q = t.softmax(-1).clamp(min=1e-9), s.softmax(-1).clamp(min=1e-9)
    return (p * (p.log() - q.log())).sum(-1)


def variation(s, t):
    return (t.softmax(-1) - s.softmax(-1)).abs().sum(-1)


def underflowing(s, t):
    return by_probabilities(s * 400, t)


READERS = {
    "nan_to_num": lambda rows: rows.nan_to_num(),
    "nan_to_num of the total": lambda rows: torch.nan_to_num(rows.sum(), nan=3.0),
    "isnan": lambda rows: rows.isnan().sum() + rows.nansum(),
    "isfinite": lambda rows: torch.where(torch.isfinite(rows), rows, 0.0),
    "gt": lambda rows: torch.where(rows > 0.1, rows, 0.0).sum(),
}


def written(rows):
    table = torch.zeros(3, *rows.shape, dtype=rows.dtype)
    table[1] = rows
    return table.nan_to_num()


def in_a_branch(rows):
    return torch.cond(torch.ones(()) > 0, torch.isnan, torch.isinf, (rows,))


# what ranks, rounds or reads bits makes numbers, too
NUMBERS = {
    "written to a part": written,
    "in a checkpoint": lambda rows: checkpoint(torch.nan_to_num, rows, use_reentrant=False),
    "in a branch": in_a_branch,
    "any": lambda rows: (rows * 0).any(),
    "argmax": lambda rows: rows.argmax(-1),
    "sort": lambda rows: torch.cat([rows, torch.ones_like(rows)], -1).sort(-1).values[..., :5],
    "long": lambda rows: rows.long(),
    "bits": lambda rows: rows.view(torch.int64),
    "bucketize": lambda rows: torch.bucketize(rows, torch.tensor([0.0, 9.0], dtype=rows.dtype)),
    "in place": lambda rows: (rows * 1).lt_(1.0),
}
OF_INFINITY = {
    "a quotient": lambda rows: 1 / (1 + rows),
    "a power": lambda rows: (1 + rows) ** -1,
    "a limit": lambda rows: rows.clamp(max=1e4),
    "exp": lambda rows: torch.exp(-rows / 1e3),
    "atan": torch.atan,
}
PASSES_ON = {
    "mean of squares": lambda rows: rows.pow(2).mean(),
    "weights": lambda rows: (rows * torch.ones_like(rows, dtype=torch.int64)).sum() / 3,
    "a mask of its shape": lambda rows: torch.ones(5, dtype=torch.bool).expand_as(rows) * rows,
    "a size": lambda rows: rows.sum() / rows.shape[-1] * torch.arange(rows.shape[0]),
}


def program(rows, read, fill):
    def step(q, k, r, u):
        s, t = q @ k.mT, r @ u.mT
        if fill is not None:
            s, t = causal(s, fill), causal(t, fill)
        return read(rows(s, t))

    return step


def rewritten(rows, read, fill):
    """How many sites are fused, and the reason where none is; the numbers are eager's."""
    step = program(rows, read, fill)
    with backend.collected() as report:
        compiled = compile_rewritten(step, verify="never")
        torch.testing.assert_close(compiled(*maps()), step(*maps()), equal_nan=True)
    return report.num_fused, " ".join(site.reason for site in report.sites)


READ = "reads the divergence, and eager has"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("rows", "fill", "fuses"),
    [
        (kl_of_logs, -math.inf, False),
        (by_probabilities, -1e4, False),
        (by_probabilities, None, False),
        # eager has numbers
        (kl_of_logs, None, True),
        (kl_of_logs, -1e4, True),
        (clamped, None, True),
        (clamped, -1e4, True),
        (variation, None, True),
    ],
    ids=[
        "masked by -inf", "masked by -1e4", "not masked",
        "no mask", "a number as mask", "clamped", "clamped and masked", "no logarithm",
    ],
)  # fmt: skip
def test_fuses_where_eager_has_numbers(rows, fill, fuses, reader):
    num_fused, reason = rewritten(rows, READERS[reader], fill)
    assert num_fused == fuses, reason
    assert fuses or READ in reason


@pytest.mark.parametrize("reader", every(2, NUMBERS))
def test_what_makes_numbers_of_nan(reader):
    num_fused, reason = rewritten(kl_of_logs, NUMBERS[reader], -math.inf)
    assert num_fused == 0
    assert f"{READ} NaN" in reason


@pytest.mark.parametrize("reader", OF_INFINITY)
def test_what_makes_numbers_of_infinity(reader):
    num_fused, reason = rewritten(underflowing, OF_INFINITY[reader], None)
    assert num_fused == 0
    assert f"{READ} infinity" in reason
    assert rewritten(kl_of_logs, OF_INFINITY[reader], None)[0] == 1


@pytest.mark.parametrize("passes_on", PASSES_ON)
@pytest.mark.parametrize(("rows", "fill"), [(by_probabilities, None), (kl_of_logs, -math.inf)])
def test_fuses_where_nothing_reads(rows, fill, passes_on):
    step = program(rows, PASSES_ON[passes_on], fill)
    assert explain(step, *maps()).num_fused == 1


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_a_reader_outside_of_the_checkpoint(levels):
    def nested(*given, left=levels):
        if left == 0:
            return program(kl_of_logs, lambda rows: rows, -math.inf)(*given)
        return checkpoint(lambda *x: nested(*x, left=left - 1), *given, use_reentrant=False)

    assert explain(nested, *maps()).num_fused == 1
    report = explain(lambda *given: nested(*given).nan_to_num(), *maps())
    assert report.num_fused == 0
    assert "nan_to_num reads the divergence, and eager has NaN where a key" in str(report)


@pytest.mark.parametrize("learns", [False, True])
def test_a_comparison_inside_of_a_program_reads_nan(learns):
    """Of sums over the rows: it has no gradient, where what it chooses has one."""

    def step(h, w, ht, wt):
        p = (h @ w.T).masked_fill(torch.ones(6, 12, dtype=torch.bool).tril(-1), -1e4).softmax(-1)
        e = (ht @ wt.T).exp()
        r = (p * (p / (e / e.sum(-1, keepdim=True))).log()).sum(-2)
        return torch.where(r > 0.1, r, 0.0).mean()

    shapes = ((6, 5), (12, 5), (6, 3), (12, 3))
    inputs = [torch.randn(*n, dtype=torch.float64) for n in shapes]
    inputs[3].requires_grad_(learns)
    outcome = compare(step, inputs, verify="never").check()
    assert outcome.num_fused == 0


def policy_inputs():
    make = torch.Generator().manual_seed(0)
    drawn = [torch.randn(n, generator=make) for n in ((6, 5), (12, 5), (6,))]
    drawn[:2] = [x.requires_grad_() for x in drawn[:2]]
    return *drawn, torch.randint(12, (6,), generator=make)


ENTROPIES = {
    "logsumexp": lambda z: z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1),  # verl's
    "Categorical": lambda z: torch.distributions.Categorical(logits=z).entropy(),
}


@pytest.mark.parametrize("entropy", ENTROPIES)
def test_a_clipped_ratio_next_to_an_entropy(entropy):
    """What clips the ratio reads the log-probability of the label, and not the entropy."""

    def step(h, w, advantages, labels, entropy=ENTROPIES[entropy]):
        z = h @ w.T
        log_p = z.gather(-1, labels[:, None])[:, 0] - z.logsumexp(-1)
        ratio = (log_p - 0.9 * log_p.detach()).exp()
        clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(clipped + 0.01 * entropy(z)).mean(), (ratio > 1.2).float().mean()

    outcome = compare(step, policy_inputs(), verify="never").check()
    assert outcome.num_fused > 1, outcome.report
    assert not outcome.reasons and not outcome.report.remaining


@pytest.mark.parametrize("least", [{}, {"cpu": 1.0}], ids=["anyway", "by default"])
def test_a_comparison_of_one_sum_keeps_that_sum(least, monkeypatch):
    """And the others of its program, where computing the product twice is not worth it."""
    monkeypatch.setattr(profitability, "LEAST_TWICE_MIB", least)

    def step(h, w, advantages, labels):
        z = h @ w.T
        p_z = (z.softmax(-1) * z).sum(-1)
        return torch.where(z.logsumexp(-1) > 1.0, p_z, advantages).sum()

    outcome = compare(step, policy_inputs(), verify="never").check()
    assert outcome.num_fused == (not least)
    (reason,) = {site.reason for site in outcome.report.sites} - {""}
    assert "gt reads the sum" in reason
