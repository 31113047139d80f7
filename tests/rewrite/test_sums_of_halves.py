"""Two sums over keys that are added are one divergence, where nothing else reads one of them."""

import math

import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.losses import kd
from tests.support.table import Table


def logits(h, w, g, v):
    return h @ w.T, g @ v.T


def log_target(mixture, x):
    return F.kl_div(mixture, x, reduction="batchmean", log_target=True)


def halves(s, t):
    t, s = t.log_softmax(-1), s.log_softmax(-1)
    mixture = torch.logaddexp(t, s) - math.log(2)
    return log_target(mixture, t), log_target(mixture, s)


JS = [("linear_kl", "js, beta=0.5")]
SUMS = Table(
    "h w g v", {"s t": logits, "a b": lambda h, w, g, v: halves(h @ w.T, g @ v.T)}, sites=JS
)
TOTALS = {
    "halved after": lambda a, b: 0.5 * (a + b),
    "halved before": lambda a, b: 0.5 * a + 0.5 * b,
    "divided": lambda a, b: a / 2 + b / 2,
    "by their mean": lambda a, b: (a + b) / 2,
}


@SUMS.each(TOTALS)
def halves_of_js_are_one_call(total, a, b):
    return total(a, b)


@SUMS(sites=[("linear_kl", "jeffreys")])
def both_directions_are_one_call(s, t):
    return kd(s, t) + kd(t, s)


@SUMS(sites=2)
def a_half_that_is_read_alone_is_computed_alone(a, b):
    return 0.5 * (a + b), a.detach()


@SUMS(sites=2)
def a_half_that_another_loss_multiplies_is_computed_alone(a, b):
    return a + b + a * b


@SUMS(sites=2)
def losses_of_two_layers_stay_two(h, w, g, v):
    return kd(h @ w.T, g @ v.T) + kd((h * 2) @ w.T, (g * 2) @ v.T)


@SUMS(sites={"row_program"})
def halves_beside_entropies_of_their_rows_share_a_program(s, t):
    a, b = halves(s, t)
    logs = s.log_softmax(-1)
    return 0.5 * (a + b), -(logs.exp() * logs).sum(-1).detach()


@SUMS.parametrized()
def test_sites(row):
    shapes = (6, 4), (11, 4), (6, 5), (11, 5)
    inputs = [torch.randn(x).requires_grad_(i < 2) for i, x in enumerate(shapes)]
    report = compare(row.program, inputs).check().report
    if isinstance(row.sites, list):
        assert [(site.kind, site.form) for site in report.sites] == row.sites
    elif isinstance(row.sites, set):
        assert {site.kind for site in report.sites} == row.sites
    else:
        assert report.num_fused == row.sites
        assert "js" not in {site.form for site in report.sites}
