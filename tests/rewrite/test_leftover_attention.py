"""Attention left next to a fused KL, with heads that a GPU's fused attention does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare
from tests.support.plants import planted
from torch_streamkl.fx_passes.fx_utils.nodes import name_of
from torch_streamkl.fx_passes.passes import sdpa_fusion

LOWEST = torch.finfo(torch.float32).min
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def step(q: Tensor, k: Tensor, v: Tensor, qt: Tensor, kt: Tensor, keep: Tensor) -> Any:
    """As transformers' BERT: padding is added; what follows reads whole rows of all heads."""
    mask = torch.where(keep[:, None, None, :], 0.0, LOWEST)
    s = (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1)
    p = (qt @ kt.mT * qt.shape[-1] ** -0.5 + mask).softmax(-1)
    kl = (p * (p.clamp_min(1e-12).log() - s.clamp_min(1e-12).log())).sum(-1).mean()
    return kl, (s @ v).transpose(1, 2).flatten(2).tanh()


def inputs(width: int, value_width: int, device: str = "cpu") -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(width)
    widths = (width, width, value_width, 16, 16)
    tensors = [
        torch.randn(2, 3, 40, n, generator=make).to(device).requires_grad_(i < 3)
        for i, n in enumerate(widths)
    ]
    keep = torch.arange(40, device=device) < torch.tensor([[40], [23]], device=device)
    return (*tensors, keep)


@pytest.mark.parametrize("widths", [(26, 26), (26, 32), (8, 7)])
def test_narrow_heads_are_filled_up(
    widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_fusion, "_is_on_gpu", lambda x: True)
    found: list[tuple[int, ...]] = []

    def look(graph: Any) -> None:
        for node in graph.nodes:
            if name_of(node) == name_of_fused:
                found.append(tuple(x.meta["example_value"].shape[-1] for x in node.args[:3]))

    name_of_fused = F.scaled_dot_product_attention.__name__
    with planted(look):
        outcome = compare(step, inputs(*widths), options={"streamkl.min_mib": 0.0})
    outcome.check()
    assert outcome.num_fused == 1, outcome.report
    assert outcome.report.num_remaining == 0, outcome.report
    whole = tuple(-(-n // 4) * 4 for n in (widths[0], *widths))
    assert set(found) == {whole}


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(26, 26), (64, 26)])
def test_on_a_gpu(widths: tuple[int, int]) -> None:
    tensors = inputs(*widths, device="cuda")
    outcome = compare(step, tensors, inner="inductor", options={"streamkl.min_mib": 0.0})
    outcome.check()
    assert outcome.report.num_remaining == 0, outcome.report


def by_labels(sizes: dict[str, int], labels: tuple[str, ...], mask: str = "") -> Any:
    """Attention as einsums that name dimensions: the product, and the maps times the values."""
    scores = f"{labels[0]}, {labels[1]} -> {labels[3]}"
    output = f"{labels[3]}, {labels[2]} -> {labels[4]}"

    def program(q: Tensor, k: Tensor, v: Tensor, qt: Tensor, kt: Tensor) -> Any:
        s, t = (torch.einsum(scores, x, y) * 0.3 for x, y in ((q, k), (qt, kt)))
        if mask:
            keep = torch.ones(sizes["s"], sizes["t"], dtype=torch.bool).tril()
            keep = keep.unsqueeze(labels[3].index("h") - 1) if mask == "between" else keep
            s, t = (x.masked_fill(~keep, -torch.inf) for x in (s, t))
        p = s.softmax(-1)
        kl = F.kl_div(p.log(), t.softmax(-1), reduction="none").sum(-1).mean()
        return kl, torch.einsum(output, p, v).tanh()

    make = torch.Generator().manual_seed(0)
    operands = [labels[0], labels[1], labels[2], labels[0], labels[1]]
    given = [
        torch.randn([sizes[c] for c in text], generator=make).requires_grad_(i < 3)
        for i, text in enumerate(operands)
    ]
    return program, given


SIZES = {"b": 2, "h": 3, "s": 9, "t": 9, "d": 4, "e": 6}


@pytest.mark.parametrize(
    ("labels", "mask"),
    [
        (("bhsd", "bhtd", "bhte", "bhst", "bhse"), "plain"),
        (("bshd", "bthd", "bthe", "bhst", "bshe"), "plain"),
        (("bshd", "bthd", "bthe", "bsht", "bshe"), "between"),
        (("bshd", "bthd", "bthe", "bsht", "bhse"), "between"),
        (("bshd", "btd", "bte", "bsht", "bshe"), "between"),
        (("bshd", "btd", "bthe", "bhst", "bshe"), "plain"),
        (("shd", "thd", "the", "hst", "seh"), ""),
        (("bshd", "btd", "te", "bsht", "bshe"), ""),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_einsums(labels: tuple[str, ...], mask: str, dynamic: bool) -> None:
    program, given = by_labels(SIZES, labels, mask)
    options = {"streamkl.min_mib": 0.0}
    outcome = compare(program, given, options=options, dynamic=dynamic).check()
    if not dynamic:
        assert outcome.num_fused == 1, outcome.report
        assert outcome.report.num_remaining == 0, outcome.report


@pytest.mark.parametrize(
    ("labels", "sizes"),
    [
        (("bshd", "bthd", "bthe", "bhst", "bhe"), {}),  # rows are summed
        (("bhsd", "bhtd", "bhte", "bhst", "bhte"), {}),  # keys are kept, rows summed
        (("bhsd", "bhtd", "hte", "bhst", "hse"), {}),  # a batch is summed
        (("bhsd", "bhtd", "bht", "bhst", "bhs"), {}),  # no dimension of the values' own
        (("bhsd", "bhtd", "bhtef", "bhst", "bhsef"), {"f": 2}),  # two of them
        (("hsd", "htd", "bhte", "hst", "bhse"), {}),  # the maps are broadcast
        (("bshd", "bthd", "bsthe", "bsht", "bshe"), {}),  # values of each query
        (("bhsd", "bhtd", "bhte", "bhst", "bhse"), {"b": 1, "t": 1}),
    ],
)
def test_einsums_that_are_no_attention_keep_their_value(
    labels: tuple[str, ...], sizes: dict[str, int]
) -> None:
    program, given = by_labels({**SIZES, **sizes}, labels)
    compare(program, given, options={"streamkl.min_mib": 0.0}).check()


def test_values_of_one_key_that_einsum_takes_for_all() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, qt: Tensor, kt: Tensor, keep: Tensor) -> Any:
        s, t = q @ k.mT, qt @ kt.mT
        kl = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")
        return kl, torch.einsum("bhqk,bhkd->bqhd", s.softmax(-1), v[:, :, :1])

    outcome = compare(step, inputs(8, 8), options={"streamkl.min_mib": 0.0})
    outcome.check()
    assert outcome.num_fused == 1, outcome.report
    assert not outcome.report.failures


def test_equal_masks_of_which_one_is_gone() -> None:
    """The attention's mask has the meaning of the divergence's, whose nodes are removed first."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        hidden = torch.ones(5, 7, dtype=torch.bool).triu(3)
        first = q @ k.mT + torch.zeros(5, 7).masked_fill(hidden, -1e4)
        second = q.flatten(0, 1) @ k.flatten(0, 1).mT
        second = second.unflatten(0, (1, 1)) + torch.zeros(5, 7).masked_fill(hidden, -1e4)
        return first.softmax(-1).square().sum(-1), second.softmax(-1) @ v

    tensors = tuple(torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (5, 7, 7))
    report = compare(step, tensors).report
    assert report.num_fused
    assert not report.failures


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fused_product_with_features_that_are_a_softmax(dynamic: bool) -> None:
    """Its product is attention, too, but nothing of it is left to rewrite."""

    def loss(h: Tensor, a: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
        features = (a @ h.mT).softmax(0).mT
        log_s, p = (features @ w.mT).log_softmax(-1), (ht @ wt.mT).softmax(-1)
        return (p * (p.log() - log_s)).sum(-1)

    make = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (4, 4), (11, 4), (6, 3), (11, 3))
    tensors = [torch.randn(s, generator=make).requires_grad_() for s in shapes]
    assert compare(loss, tensors, dynamic=dynamic).check().num_fused
