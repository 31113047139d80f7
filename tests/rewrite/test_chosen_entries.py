"""What a reader found in programs at keys that a top-k names: each stands for its class."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from tests.rewrite.test_row_program_counterexamples import KEYS, OPTIONS, ROWS, judge, tensors
from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.misleading.registry import student
from torch_streamkl.fx_passes import backend


@pytest.mark.parametrize("count", [0, 2])
def test_the_mean_of_no_entry_has_no_gradient(count: int) -> None:
    """It is NaN, and eager code's gradient of it 0."""

    def step(q, k, r, s, w, keep):
        p, t = student(q, k).softmax(-1), student(r, s).softmax(-1)
        ids = t.topk(count, -1).indices
        return (p.gather(-1, ids) - t.gather(-1, ids)).square().mean(-1)

    judge(step, tensors("qk"), int(count > 0))


PAIRS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "entries and keys": lambda p, t, x, y: (x[..., None] - p[..., None, :]).abs().sum((-1, -2)),
    "keys and entries": lambda p, t, x, y: (t[..., None] * x[..., None, :]).exp().sum(-1).sum(-1),
    "keys of both, first": lambda p, t, x, y: (
        (x[..., None] - t[..., None, :]).relu().sum(-1) * y
    ).sum(-1),
    "in a loss": lambda p, t, x, y: torch.nn.functional.l1_loss(
        x[..., None].expand(2, 3, ROWS, 2, KEYS), t[..., None, :].expand(2, 3, ROWS, 2, KEYS)
    ),
    "two keys in a loss": lambda p, t, x, y: torch.nn.functional.mse_loss(
        p[..., None].expand(2, 3, ROWS, KEYS, KEYS), t[..., None, :].expand(2, 3, ROWS, KEYS, KEYS)
    ),
    "two entries": lambda p, t, x, y: (x[..., None] - y[..., None, :]).abs().sum((-1, -2)),
    "two entries in a loss": lambda p, t, x, y: torch.nn.functional.mse_loss(
        x[..., None].expand(2, 3, ROWS, 2, 2), y[..., None, :].expand(2, 3, ROWS, 2, 2)
    ),
}


@pytest.mark.parametrize("name", every(2, PAIRS))
def test_pairs_of_entries_and_keys(name: str) -> None:
    """An entry is not met only by the key that it is."""

    def step(q, k, r, s, w, keep):
        scores = student(r, s)
        ids = scores.topk(2, -1).indices
        p, t = student(q, k).softmax(-1), scores.softmax(-1)
        return PAIRS[name](p, t, p.gather(-1, ids), t.gather(-1, ids))

    judge(step, tensors("qk"), 0)


def of_data(q: Tensor, k: Tensor, r: Tensor, s: Tensor, data: Tensor) -> Tensor:
    ids = data.topk(2, -1).indices
    p, t = student(q, k).softmax(-1), student(r, s).softmax(-1)
    return (p.gather(-1, ids) - t.gather(-1, ids)).square().sum(-1)


@pytest.mark.parametrize(("length", "sites"), [(KEYS - 2, 1), (KEYS, 1), (KEYS + 2, 0)])
def test_ids_of_other_keys(length: int, sites: int) -> None:
    """Of more keys than there are, eager code raises where one is out of range."""
    data = torch.arange(float(length)).flip(0).expand(2, 3, ROWS, length).contiguous()
    judge(of_data, [*tensors("qk")[:4], data], sites)


def test_ids_out_of_range_raise_as_in_eager_code() -> None:
    data = torch.arange(KEYS + 2.0).expand(2, 3, ROWS, KEYS + 2).contiguous()
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.compile(of_data, backend="streamkl", options=OPTIONS)(*tensors("qk")[:4], data)


def test_ids_of_the_largest_rows() -> None:
    """In a row of them one may be there twice, and counts twice."""

    def step(q, k, r, s, w, keep):
        p, t = student(q, k).softmax(-1), student(r, s).softmax(-1)
        ids = t.topk(ROWS, -2).indices
        return (p.gather(-1, ids) - t.gather(-1, ids)).square().sum(-1)

    judge(step, tensors("qk"), 0)


def test_given_entries_that_are_padded_have_no_part_in_the_divergence() -> None:
    """A padded entry has the probability 0: 0 log 0 is 0 in `kl_div`, and a number comes first."""
    make = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 4, generator=make, dtype=torch.float64) for n in (6, 11))
    logs = torch.rand(6, 3, generator=make, dtype=torch.float64).log()
    ids = torch.stack([torch.randperm(11, generator=make)[:3] for _ in range(6)])
    kept = logs >= -0.5
    assert kept.any() and not kept.all()

    def step(h: Tensor) -> Tensor:
        p = logs.masked_fill(logs < -0.5, -math.inf).exp()
        return F.kl_div((h @ w.mT).log_softmax(-1).gather(-1, ids), p, reduction="sum")

    torch._dynamo.reset()
    options = {"streamkl.inner": "eager", "streamkl.min_mib": 0.0, "streamkl.verify": "never"}
    with backend.collected() as report:
        found = torch.compile(step, backend="streamkl", options=options)(h.requires_grad_())
    assert report.num_fused == 1, report
    own = (h @ w.mT).log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(found, (logs.exp() * (logs - own))[kept].sum())


@pytest.mark.parametrize("fill", [None, -1e4])
def test_logarithms_of_probabilities_at_labels(fill: float | None) -> None:
    """Where a mask makes one 0, eager code has -inf, and a score minus the log-sum-exp -1e4."""

    def step(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        s = h @ w.mT
        if fill is not None:
            s = s.masked_fill(torch.arange(6)[:, None] == torch.arange(11), fill)
        return s.softmax(-1).log().gather(-1, labels[:, None]).sum()

    h, w = (torch.randn(n, 4, dtype=torch.float64) for n in (6, 11))
    inputs = [h, w, torch.tensor([3, 1, 10, 3, 0, 2])]
    outcome = compare(step, inputs, options={"streamkl.verify": "never"}).check()
    assert outcome.num_fused == (fill is None), outcome.report
    assert outcome.compiled.outputs[0].isneginf().equal(outcome.eager.outputs[0].isneginf())


@pytest.mark.parametrize("tokens", [11, 6])
def test_labels_of_as_many_tokens_as_vocabulary_entries(tokens: int) -> None:
    """The sum over keys that finds a label is inside of one over as many tokens."""

    def step(h: Tensor, w: Tensor, t: Tensor, u: Tensor, labels: Tensor) -> Tensor:
        s = h @ w.mT
        loss = F.cross_entropy(s + (torch.arange(11) == 0), labels, reduction="sum")
        return loss + ((t @ u.mT).softmax(-1) * s).sum()

    sizes = (tokens, 11, tokens, 11)
    inputs = [torch.randn(n, 4, dtype=torch.float64) for n in sizes]
    labels = torch.arange(tokens).flip(0) % 11
    options = {"streamkl.verify": "never"}
    outcome = compare(step, [*inputs, labels], options=options, largest_score=8.0).check()
    assert outcome.num_fused, outcome.report


def test_labels_of_logits_that_the_divergence_masks() -> None:
    """The cross-entropy is of all entries, where those of the divergence lack one."""

    def step(h: Tensor, w: Tensor, t: Tensor, u: Tensor, labels: Tensor) -> Tensor:
        s, absent = h @ w.mT, torch.arange(11) == 1
        p, q = (x.masked_fill(absent, -math.inf).softmax(-1) for x in (s, t @ u.mT))
        return F.cross_entropy(s, labels) + (p * q).sum()

    inputs = [torch.randn(n, 4, dtype=torch.float64) for n in (6, 11, 6, 11)]
    labels = torch.tensor([1, 0, 3, 1, 7, 10])
    options = {"streamkl.verify": "never"}
    outcome = compare(step, [*inputs, labels], options=options, largest_score=8.0).check()
    assert outcome.num_fused and outcome.compiled.outputs[0].isfinite(), outcome.report
