"""What the report calls losses, their sides and their inputs, and what each of them saves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_streamkl
from torch_streamkl.fx_passes.reporting.report import Report

HEADS = (5, 4), (9, 4), (5, 3), (9, 3)


def explained(fn: Any, *shapes: tuple[int, ...]) -> Report:
    torch._dynamo.reset()
    inputs = [torch.randn(*shape, requires_grad=i < 2) for i, shape in enumerate(shapes)]
    report = torch_streamkl.explain(fn, *inputs, options={"streamkl.min_mib": 0.0})
    assert report.num_fused == len(report.sites), report
    return report


def said_of(fn: Any, *shapes: tuple[int, ...]) -> str:
    (site,) = explained(fn, *shapes).sites
    return f"{site.kind}: {site.form} | {site.roles}"


def kl(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def test_a_mask_over_the_vocabulary_is_why_a_head_is_attention() -> None:
    mask = torch.arange(9) % 3 == 0

    def masked(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        return kl(*(x.masked_fill(mask, -torch.inf) for x in (h @ w.T, g @ v.T)))

    def sliced(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t = h @ w.T, g @ v.T
        s[..., 7:] = -torch.inf
        t[..., 7:] = -torch.inf
        return kl(s, t)

    def causal(q: Tensor, k: Tensor, r: Tensor, u: Tensor) -> Tensor:
        keep = torch.ones(5, 9, dtype=torch.bool).tril()
        return kl(*(x.masked_fill(~keep, -torch.inf) for x in (q @ k.T, r @ u.T)))

    said = said_of(masked, *HEADS)
    assert said.startswith("attention_kl: forward_kl, masked, as attention with one head, because")
    assert "linear_kl cannot mask the vocabulary other than by x[..., i:j] = -inf" in said
    assert said_of(sliced, *HEADS).startswith("linear_kl: forward_kl")
    assert "one head" not in said_of(causal, *HEADS)


def test_a_single_token_has_no_bias_that_a_head_cannot_add() -> None:
    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        return kl(h @ w.T, g @ v.T)

    assert "bias" not in said_of(loss, (1, 4), (9, 4), (1, 3), (9, 3))


def test_only_attention_has_heads() -> None:
    """A dimension of student or teacher models, or of crops, is none."""

    def mean_of_teachers(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        t = (g @ v.mT).softmax(-1).mean(0)
        return F.kl_div((h @ w.T).log_softmax(-1), t, reduction="batchmean")

    def mean_of_students(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t = (h @ w.T).softmax(-1).mean(0), (g @ v.T).softmax(-1)
        return (t * (t.log() - s.log())).sum(-1).mean()

    def means(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t = (h @ w.mT).softmax(-1).mean(-3), (g @ v.mT).softmax(-1).mean(-3)
        return (t - s).abs().sum(-1).mean()

    heads = (2, 3, 5, 4), (2, 3, 9, 4), (2, 3, 5, 4), (2, 3, 9, 4)
    assert "summed over heads" in said_of(means, *heads)
    of_crops = said_of(means, (3, 5, 4), (9, 4), (3, 5, 4), (9, 4))
    assert "summed over a leading dimension" in of_crops
    for weights in ((9, 4), (3, 9, 4)):
        said = said_of(mean_of_teachers, (5, 4), (9, 4), (3, 5, 4), weights)
        assert "forward_kl, teacher averaged over a leading dimension" in said
    said = said_of(mean_of_students, (3, 5, 4), (9, 4), (5, 4), (9, 4))
    assert "forward_kl, student averaged over a leading dimension" in said  # as it is written
    assert "student: matmul of h and w" in said and "teacher: matmul of g and v" in said


def test_each_loss_has_what_it_saves() -> None:
    """By hand: a product, a log_softmax and a softmax, as far as a loss is the only reader."""

    def losses(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        t = g @ v.T
        return kl(h @ w.T, t) + kl(2 * h @ w.T, t) + kl(h[:2] @ w.T, g[:2] @ v.T)

    report = explained(losses, *HEADS)
    one, few = 4 * 5 * 9, 4 * 2 * 9
    own = 2 * one + one  # two tensors of the student, a softmax of the teacher
    assert sorted((x.bytes_saved, x.num_sharing) for x in report.sites) == [
        (4 * few, 1), (own + one // 2, 2), (own + one // 2, 2),
    ]  # fmt: skip
    assert report.bytes_saved == 2 * own + one + 4 * few
    text = report.details()
    assert "with an equal share of what 2 losses read together" in text
    assert text.count("saved     288 B\n") == 1, text


def test_a_write_that_nobody_reads_is_no_saving() -> None:
    """Nothing is fused, of which it could be one."""

    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t = h @ w.T, g @ v.T
        unread = (t.softmax(-1) * t).sum(-1)
        value = F.kl_div(t.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
        with torch.no_grad():
            s[:, 0] = -2.0
        unread.zero_()
        return value

    torch._dynamo.reset()
    inputs = [torch.randn(*shape, requires_grad=True) for shape in HEADS]
    report = torch_streamkl.explain(loss, *inputs, options={"streamkl.min_mib": 0.0})
    assert not report.failures and not report.num_fused
