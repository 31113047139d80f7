"""Which large tensors remain or leave the compiled code, and what each loss saves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_streamkl
from tests.report.test_report_says import HEADS, explained
from tests.support.allocations import measure
from tests.support.compiling import compile_rewritten
from tests.support.losses import kd
from tests.support.user_losses import USER_LOSSES

QUERIES, KEYS, DIM = 6, 8, 4
WIDTH, VOCAB, TOKENS = 8, 96, 6


def heads():
    return [torch.randn(shape, requires_grad=i < 2) for i, shape in enumerate(HEADS)]


# -------------------------------------------------------------------- what remains of a loss
def by_einsum(q, k):
    return torch.einsum("bhqd,bhkd->bhqk", q, k) / 2


# what stands next to a divergence, and whether the report lists its scores
BESIDE = {
    "the same product": (lambda q, k: (q @ k.mT).sort(-1).values, True),
    "the same product, scaled": (lambda q, k: by_einsum(q, k).sort(-1).values, True),
    "a product of other operands": (lambda q, k: (q.tanh() @ k.mT).sort(-1).values, False),
    # the map stays, for its dropout; the product has a value per query and feature
    "a product with values": (lambda q, k: F.dropout((q @ k.mT).softmax(-1), 0.1) @ k, True),
}


@pytest.mark.parametrize("name", BESIDE)
def test_only_scores_of_its_operands_remain(name):
    other, remains = BESIDE[name]
    inputs = [torch.randn(2, 3, n, DIM) for n in (QUERIES, KEYS, QUERIES, KEYS)]
    report = explained(lambda q, k, r, u: (kd(q @ k.mT, r @ u.mT), other(q, k)), *inputs)
    assert report.num_fused == 1
    assert {x.shape for x in report.remaining} == ({(2, 3, QUERIES, KEYS)} if remains else set())


@pytest.mark.parametrize("of_rows", [torch.log, lambda w: w.softmax(-1)], ids=["log", "softmax"])
def test_weights_of_rows_are_no_scores(of_rows):
    """They meet the divergence after its keys are summed."""

    def loss(q, k, r, u, w):
        rows = F.kl_div((q @ k.mT).log_softmax(-1), (r @ u.mT).softmax(-1), reduction="none")
        return (rows.sum(-1) * of_rows(w.sum(-1))).sum()

    inputs = [torch.randn(2, 3, n, DIM) for n in (QUERIES, KEYS, QUERIES, KEYS)]
    report = explained(loss, *inputs, torch.rand(2, 3, QUERIES, 2))
    assert report.num_fused == 1
    assert not report.remaining and not report.elsewhere, report.details()


def test_low_rank_adapters_of_projections_are_no_logits():
    """Their second layer has far more outputs than inputs, as an LM head has."""
    width, vocab, rank = 32, 512, 4
    down, up, proj = (
        nn.Parameter(torch.randn(*size)) for size in ((rank, width), (width, rank), (width, width))
    )

    def loss(x, w, t, u):
        h = F.linear(x, proj) + F.linear(F.linear(F.dropout(x, 0.0), down), up) * 2.0
        return kd(F.linear(h, w), F.linear(t, u))

    inputs = [torch.randn(n, width, requires_grad=i < 2) for i, n in enumerate((24, vocab) * 2)]
    report = explained(loss, *inputs)
    assert report.num_fused == 1
    assert not report.remaining and not report.elsewhere, report.details()


def test_a_flattened_map_of_one_sample_is_as_large_as_scores():
    def loss(q, k, r, u):
        a, b = ((x @ y.mT).softmax(-1).pow(2).mean(1).flatten(1) for x, y in ((q, k), (r, u)))
        return (F.normalize(a) - F.normalize(b)).pow(2).mean()

    given = USER_LOSSES["gram"]
    report, shapes = measure(loss, given.inputs(), given.large)
    flat = (1, shapes[0][-1] ** 2)
    assert flat in shapes and flat in [x.shape for x in report.elsewhere]


def test_a_loop_s_tensors_are_of_one_iteration():
    scan = pytest.importorskip("torch._higher_order_ops.scan").scan

    def loss(h, w, g, v):
        def body(total, given):
            value = kd(given[0] @ w.T, given[1] @ v.T)
            return total + value, value.clone()

        return scan(body, torch.zeros(()), (h.view(4, 12, -1), g.view(4, 12, -1)))[0]

    report = explained(loss)
    assert len(report.elsewhere) == 4, report
    assert all("one in every iteration of scan" in x.reason for x in report.elsewhere), report


# ---------------------------------------------------------------------- what each loss saves
def test_each_loss_has_what_it_saves():
    """By hand: a product, a log_softmax and a softmax, as far as a loss is the only reader."""

    def losses(h, w, g, v):
        t = g @ v.T
        return kd(h @ w.T, t) + kd(2 * h @ w.T, t) + kd(h[:2] @ w.T, g[:2] @ v.T)

    report = explained(losses, *heads())
    one, few = 4 * 5 * 9, 4 * 2 * 9
    own = 2 * one + one  # two tensors of the student, a softmax of the teacher
    assert sorted((x.bytes_saved, x.num_sharing) for x in report.sites) == [
        (4 * few, 1), (own + one // 2, 2), (own + one // 2, 2),
    ]  # fmt: skip
    assert report.bytes_saved == 2 * own + one + 4 * few
    text = report.details()
    assert "with an equal share of what 2 results read together" in text
    assert text.count("saved     288 B\n") == 1, text


def test_a_write_that_nobody_reads_is_no_saving():
    """Nothing is fused, of which it could be one."""

    def loss(h, w, g, v):
        s, t = h @ w.T, g @ v.T
        unread = (t.softmax(-1) * t).sum(-1)
        value = F.kl_div(t.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
        with torch.no_grad():
            s[:, 0] = -2.0
        unread.zero_()
        return value

    report = explained(loss, *(x.detach().requires_grad_() for x in heads()))
    assert not report.failures and not report.num_fused


# --------------------------------------------------- what is left to code that is not compiled
class Model(nn.Module):
    """A block with an attention map, an MLP and an LM head."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        weights = (x @ x.mT * 0.3).softmax(-1)
        inner = self.up(weights @ x)
        hidden = self.down(inner.relu())
        return self.head(hidden).float(), weights, inner, hidden


def report_of(fn, *args):
    torch._dynamo.utils.counters.clear()  # of graph breaks
    with torch_streamkl.reports() as report:
        compile_rewritten(fn)(*args)
    return report


def test_logits_and_maps_that_leave():
    report = report_of(Model(), torch.randn(2, TOKENS, WIDTH))
    assert [(x.what, x.shape, x.num_bytes) for x in report.outside] == [
        ("logits", (2, TOKENS, VOCAB), 2 * TOKENS * VOCAB * 4),
        ("attention map", (2, TOKENS, TOKENS), 2 * TOKENS * TOKENS * 4),
    ]
    assert all(__file__ in x.location for x in report.outside)


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.1])
def test_hard_labels_that_keep_the_logits(smoothing):
    """Nothing leaves where the loss is compiled."""
    model, teacher = Model(), Model().requires_grad_(False)

    def loss(x, labels):
        logits, wanted = (m(x)[0].flatten(0, 1) for m in (model, teacher))
        soft = kd(logits, wanted)
        if smoothing is None:
            return soft
        return F.cross_entropy(logits, labels, label_smoothing=smoothing) + soft

    labels = torch.randint(0, VOCAB, (2 * TOKENS,))
    report = report_of(loss, torch.randn(2, TOKENS, WIDTH), labels)
    assert report.num_fused == 1 and not report.outside
    assert bool(report.notes) == bool(smoothing) == bool(report.remaining)


def test_the_setting_that_helps_is_named():
    def selected(x, y, weight, rows):
        p, q = (x @ weight.T).log_softmax(-1), (y @ weight.T).log_softmax(-1)
        return F.kl_div(p, q, reduction="none", log_target=True)[rows].sum()

    inputs = [torch.randn(n, WIDTH) for n in (TOKENS, TOKENS, VOCAB)]
    rows = torch.arange(TOKENS) > 2
    report = report_of(selected, *inputs, rows)
    assert report.num_fused == 0
    assert any("torch_streamkl.enable()" in site.hint for site in report.sites), report
    with torch_streamkl.enable():
        assert report_of(selected, *inputs, rows).num_fused == 1


def test_one_graph_has_no_graph_breaks_and_no_quadratic_scalar():
    report = report_of(lambda p, q: kd(p, q) + 1, torch.randn(3, 5), torch.randn(3, 5))
    assert report.num_fused == 0
    assert report.sites[0].hint and "break" not in report.sites[0].hint
    assert report.remaining
    assert all(len(x.shape) > 1 for x in report.remaining), report
