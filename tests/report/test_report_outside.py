"""The report finds what is left to code that is not compiled, and says what would help."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torch_streamkl
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.reporting.report import Report

WIDTH, VOCAB, TOKENS = 8, 96, 6


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


class Model(nn.Module):
    """A block with an attention map, an MLP and an LM head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights = (x @ x.mT * 0.3).softmax(-1)
        inner = self.up(weights @ x)
        hidden = self.down(inner.relu())
        return self.head(hidden).float(), weights, inner, hidden


def report_of(fn: object, *args: Tensor) -> Report:
    with backend.collected() as report:
        compiled = torch.compile(fn, backend="streamkl", options={"streamkl.inner": "eager"})
        compiled(*args)
    return report


def test_logits_and_maps_that_leave() -> None:
    report = report_of(Model(), torch.randn(2, TOKENS, WIDTH))
    assert [(x.what, x.shape, x.num_bytes) for x in report.outside] == [
        ("logits", (2, TOKENS, VOCAB), 2 * TOKENS * VOCAB * 4),
        ("attention map", (2, TOKENS, TOKENS), 2 * TOKENS * TOKENS * 4),
    ]
    assert all(__file__ in x.location for x in report.outside)
    text = report.details()
    assert "compile what computes the loss, such as compute_loss" in text
    assert f"logits [2 x {TOKENS} x {VOCAB}], 4.5 KiB tests" in text


def test_nothing_leaves_where_the_loss_is_compiled() -> None:
    model, teacher = Model(), Model().requires_grad_(False)

    def loss(x: Tensor) -> Tensor:
        return F.kl_div(model(x)[0].log_softmax(-1), teacher(x)[0].softmax(-1), reduction="sum")

    report = report_of(loss, torch.randn(2, TOKENS, WIDTH))
    assert report.num_fused == 1
    assert not report.outside


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_hard_labels_that_keep_the_logits(smoothing: float) -> None:
    model, teacher = Model(), Model().requires_grad_(False)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        logits = model(x)[0].flatten(0, 1)
        wanted = teacher(x)[0].flatten(0, 1)
        hard = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        return hard + F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")

    labels = torch.randint(0, VOCAB, (2 * TOKENS,))
    report = report_of(loss, torch.randn(2, TOKENS, WIDTH), labels)
    assert report.num_fused == 1
    assert bool(report.notes) == bool(smoothing) == bool(report.remaining)
    assert ("label smoothing" in report.details()) == bool(smoothing)


def selected(x: Tensor, y: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    p, q = (x @ weight.T).log_softmax(-1), (y @ weight.T).log_softmax(-1)
    kl = F.kl_div(p, q, reduction="none", log_target=True)
    return kl[rows].sum()


def test_the_setting_that_helps_is_named() -> None:
    inputs = [torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH), torch.randn(VOCAB, WIDTH)]
    rows = torch.arange(TOKENS) > 2
    report = report_of(selected, *inputs, rows)
    assert report.num_fused == 0
    assert any("torch_streamkl.enable()" in site.hint for site in report.sites), report
    torch._dynamo.reset()
    with torch_streamkl.enable():
        assert report_of(selected, *inputs, rows).num_fused == 1


def from_outside(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="sum")


def test_one_graph_has_no_graph_breaks() -> None:
    report = report_of(from_outside, torch.randn(3, 5), torch.randn(3, 5))
    assert report.num_fused == 0
    assert report.sites[0].hint
    assert "break" not in report.sites[0].hint


def test_no_scalar_is_quadratic() -> None:
    def loss(p: Tensor, q: Tensor) -> Tensor:
        return from_outside(p, q) + 1

    report = report_of(loss, torch.randn(3, 5), torch.randn(3, 5))
    assert report.remaining
    assert all(len(x.shape) > 1 for x in report.remaining), report
