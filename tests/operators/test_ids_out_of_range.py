"""Labels and ids out of range: what raises in eager code raises when it is fused, or shared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.compiling import compile_rewritten
from tests.support.gpus import on_a_gpu
from tests.support.losses import kd as kl
from torch_streamkl import linear_kl
from torch_streamkl.fx_passes.backend import collected
from torch_streamkl.linear import ops

TOKENS, DIM, VOCAB = 5, 8, 12
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


BIAS = torch.linspace(-1.0, 1.0, VOCAB)


def p_of(s: Tensor, y: Tensor) -> Tensor:
    return s.softmax(-1).gather(1, y[:, None])


FUSED: dict[str, Loss] = {
    "gather": lambda s, t, y: -s.log_softmax(-1).gather(1, y[:, None]).mean(),
    "gather of both sides": lambda s, t, y: (p_of(s, y) - p_of(t, y)).square().sum(),
    "take_along_dim": lambda s, t, y: torch.take_along_dim(s.softmax(-1), y[:, None], 1).sum(),
    "advanced indexing": lambda s, t, y: -s.log_softmax(-1)[torch.arange(TOKENS), y].mean(),
    "nll_loss": lambda s, t, y: F.nll_loss(s.log_softmax(-1), y),
    "one_hot": lambda s, t, y: -(F.one_hot(y, VOCAB) * s.log_softmax(-1)).sum(-1).mean(),
    "scatter": lambda s, t, y: (
        torch.zeros_like(t).scatter(1, y[:, None], 1.0) * (s.log_softmax(-1) - t.log_softmax(-1))
    ).sum(),
    "scatter into a mask": lambda s, t, y: (
        (t.softmax(-1) * s.log_softmax(-1))
        .masked_fill(torch.zeros_like(t, dtype=torch.bool).scatter(1, y[:, None], True), 0.0)
        .sum()
    ),
    "cross_entropy": lambda s, t, y: kl(s, t) + F.cross_entropy(s, y),
    "cross_entropy, a sum": lambda s, t, y: kl(s, t) + F.cross_entropy(s, y, reduction="sum"),
    "cross_entropy, ignore_index": lambda s, t, y: (
        kl(s, t) + F.cross_entropy(s, y, ignore_index=3, reduction="none").sum()
    ),
    "nll_loss next to": lambda s, t, y: kl(s, t) + F.nll_loss(s.log_softmax(-1), y),
    "cross_entropy and z-loss, with a bias": lambda s, t, y: (
        kl(s + BIAS, t) + (s + BIAS).logsumexp(-1).square().mean() + F.cross_entropy(s + BIAS, y)
    ),
    "index_select of rows": lambda s, t, y: kl(s.index_select(0, y), t.index_select(0, y)),
    "rows by position": lambda s, t, y: kl(s[y], t[y]),
}
BAD = (-1, -100, VOCAB)


@pytest.mark.parametrize("name", FUSED)
def test_eager_errors_stay(name: str) -> None:
    loss = FUSED[name]
    h, w, ht, wt = (torch.randn(n, DIM) for n in (TOKENS, VOCAB, TOKENS, VOCAB))
    h.requires_grad_(name in ("gather", "cross_entropy"))

    def step(h: Tensor, y: Tensor) -> Tensor:
        return loss(h @ w.T, ht @ wt.T, y)

    inner = "aot_eager" if h.requires_grad else "eager"
    compiled = compile_rewritten(step, inner=inner)
    good = torch.tensor([0, 3, 2, 4, 1])
    with collected() as report:
        torch.testing.assert_close(compiled(h, good), step(h, good))
    assert report.num_fused or name in ("take_along_dim", "advanced indexing", "nll_loss"), report
    for label in BAD:
        y = good.index_fill(0, torch.tensor(2), label)
        try:
            want = step(h, y)
        except (RuntimeError, IndexError) as error:
            says = str(label) if str(label) in str(error) else ""
            with pytest.raises(type(error), match=says):
                compiled(h, y)
        else:  # ignored, or counted from the end
            torch.testing.assert_close(compiled(h, y), want)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("label", BAD)
def test_labels_of_linear_kl(impl: str, label: int) -> None:
    h, w = torch.randn(TOKENS, DIM, requires_grad=True), torch.randn(VOCAB, DIM)
    labels = torch.tensor([0, 3, label, 4, 1], dtype=torch.int32)
    for reduction in ("none", "mean"):
        with pytest.raises(IndexError, match=str(label)):
            linear_kl(h, w, h.detach(), w, labels=labels, ignore_index=3, impl=impl,
                      hard_weight=1.0, reduction=reduction)  # fmt: skip
    with pytest.raises(IndexError, match=rf"labels must be in \[0, 12\).* got {label}"):
        ops.linear_kl(h, w, h, w, labels=labels, ignore_index=3)


@on_a_gpu
@pytest.mark.parametrize("what", ["labels", "gather"])
def test_a_gpu_asserts(what: str) -> None:
    """In a process of its own, whose context is of no use afterwards."""
    program = f"""
import torch, torch_streamkl
from tests.operators.test_ids_out_of_range import FUSED
h, w = torch.randn(256, 64, device="cuda"), torch.randn(512, 64, device="cuda")
y = torch.full((256,), 512, device="cuda")
if {what!r} == "labels":
    torch_streamkl.linear_kl(h, w, h, w, labels=y, hard_weight=1.0)
else:
    options = {{"streamkl.min_mib": 0, "streamkl.inner": "eager"}}
    loss = lambda h, y: FUSED["gather"](h @ w.T, h @ w.T, y)
    torch.compile(loss, backend="streamkl", options=options)(h, y)
try:
    torch.cuda.synchronize()
except Exception:
    print("asserted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "asserted" in done.stdout, done.stderr


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_gradients_if_all_labels_are_ignored(inner: str) -> None:
    """A sum over no labels divided by their number is NaN, and adds nothing to the gradient."""

    def loss(h: Tensor, w: Tensor, t: Tensor, y: Tensor) -> Tensor:
        s = h @ w.T
        hard = F.cross_entropy(s, y, reduction="sum") / (y != -100).sum()
        return kl(s, t @ w.detach().T) + hard

    h, w, t = (torch.randn(n, DIM, dtype=torch.float64) for n in (TOKENS, VOCAB, TOKENS))
    inputs = [h.requires_grad_(), w.requires_grad_(), t, torch.full((TOKENS,), -100)]
    with collected() as report:
        value = compile_rewritten(loss, inner=inner, verify="never")(*inputs)
    assert report.num_fused == 1, str(report)
    eager = loss(*inputs)
    assert value.isnan()
    assert eager.isnan()
    for found, truth in zip(
        *(torch.autograd.grad(x, inputs[:2]) for x in (value, eager)), strict=True
    ):
        torch.testing.assert_close(found, truth)
