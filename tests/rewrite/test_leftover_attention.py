"""Attention left next to a fused KL, with heads that a GPU's fused attention does not take."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.gpus import on_a_gpu
from tests.support.losses import kd
from tests.support.plants import planted
from torch_streamkl.fx_passes.fx_utils.nodes import name_of
from torch_streamkl.fx_passes.passes import sdpa_fusion

LOWEST = torch.finfo(torch.float32).min


def judged(program, inputs, fused=1, remaining=0, **options):
    outcome = compare(program, inputs, **options).check()
    report = outcome.report
    assert fused is None or outcome.num_fused == fused, report
    assert remaining is None or report.num_remaining == remaining, report
    assert not report.failures


def step(q, k, v, qt, kt, keep):
    """As transformers' BERT: padding is added; what follows reads whole rows of all heads."""
    mask = torch.where(keep[:, None, None, :], 0.0, LOWEST)
    s = (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1)
    p = (qt @ kt.mT * qt.shape[-1] ** -0.5 + mask).softmax(-1)
    kl = (p * (p.clamp_min(1e-12).log() - s.clamp_min(1e-12).log())).sum(-1).mean()
    return kl, (s @ v).transpose(1, 2).flatten(2).tanh()


def inputs(width, value_width, device="cpu"):
    make = torch.Generator().manual_seed(width)
    widths = (width, width, value_width, 16, 16)
    tensors = [torch.randn(2, 3, 40, n, generator=make).to(device) for n in widths]
    keep = torch.arange(40, device=device) < torch.tensor([[40], [23]], device=device)
    return [*(x.requires_grad_(i < 3) for i, x in enumerate(tensors)), keep]


@pytest.mark.parametrize("widths", [(26, 26), (26, 32), (8, 7)])
def test_narrow_heads_are_filled_up(widths, monkeypatch):
    monkeypatch.setattr(sdpa_fusion, "_is_on_gpu", lambda x: True)
    found = []

    def look(graph):
        for node in graph.nodes:
            if name_of(node) == F.scaled_dot_product_attention.__name__:
                found.append(tuple(x.meta["example_value"].shape[-1] for x in node.args[:3]))

    with planted(look):
        judged(step, inputs(*widths))
    assert set(found) == {tuple(-(-n // 4) * 4 for n in (widths[0], *widths))}


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(26, 26), (64, 26)])
def test_on_a_gpu(widths):
    judged(step, inputs(*widths, device="cuda"), None, inner="inductor")


SIZES = {"b": 2, "h": 3, "s": 9, "t": 9, "d": 4, "e": 6}


def causal():
    return torch.ones(9, 9, dtype=torch.bool).tril()


def between():
    return causal()[:, None]


def by_labels(labels, mask=None, **sizes):
    """Attention as einsums that name dimensions: the product, and the maps times the values."""
    q, k, v, scores, output = labels.split()
    sizes = {**SIZES, **sizes}

    def program(*given):
        s, t = (torch.einsum(f"{q},{k}->{scores}", *x) * 0.3 for x in (given[:2], given[3:]))
        if mask is not None:
            s, t = (x.masked_fill(~mask(), -torch.inf) for x in (s, t))
        p = s.softmax(-1)
        kl = F.kl_div(p.log(), t.softmax(-1), reduction="none").sum(-1).mean()
        return kl, torch.einsum(f"{scores},{v}->{output}", p, given[2]).tanh()

    shapes = [[sizes[c] for c in text] for text in (q, k, v, q, k)]
    return program, [torch.randn(n).requires_grad_(i < 3) for i, n in enumerate(shapes)]


EINSUMS = [
    ("bhsd bhtd bhte bhst bhse", causal),
    ("bshd bthd bthe bhst bshe", causal),
    ("bshd bthd bthe bsht bshe", between),
    ("bshd bthd bthe bsht bhse", between),
    ("bshd btd bte bsht bshe", between),
    ("bshd btd bthe bhst bshe", causal),
    ("shd thd the hst seh", None),
    ("bshd btd te bsht bshe", None),
]
ROWS = [  # with sizes that vary the first is quick
    pytest.param(*row, dynamic, marks=[pytest.mark.slow] if dynamic and i else [])
    for i, row in enumerate(EINSUMS)
    for dynamic in (False, True)
]


@pytest.mark.parametrize(("labels", "mask", "dynamic"), ROWS)
def test_einsums(labels, mask, dynamic):
    promised = (None, None) if dynamic else (1, 0)
    judged(*by_labels(labels, mask), *promised, dynamic=dynamic)


@pytest.mark.parametrize(
    ("labels", "sizes"),
    [
        ("bshd bthd bthe bhst bhe", {}),  # rows are summed
        ("bhsd bhtd bhte bhst bhte", {}),  # keys are kept, rows summed
        ("bhsd bhtd hte bhst hse", {}),  # a batch is summed
        ("bhsd bhtd bht bhst bhs", {}),  # no dimension of the values' own
        ("bhsd bhtd bhtef bhst bhsef", {"f": 2}),  # two of them
        ("hsd htd bhte hst bhse", {}),  # the maps are broadcast
        ("bshd bthd bsthe bsht bshe", {}),  # values of each query
        ("bhsd bhtd bhte bhst bhse", {"b": 1, "t": 1}),
    ],
)
def test_einsums_that_are_no_attention_keep_their_value(labels, sizes):
    judged(*by_labels(labels, **sizes), None, None)


def values_of_one_key_that_einsum_takes_for_all(q, k, v, qt, kt, keep):
    s = q @ k.mT
    return kd(s, qt @ kt.mT), torch.einsum("bhqk,bhkd->bqhd", s.softmax(-1), v[:, :, :1])


def equal_masks_of_which_one_is_gone(q, k, v, qt, kt, keep):
    """The attention's mask has the meaning of the divergence's, whose nodes are removed first."""
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(3)
    first = q @ k.mT + torch.zeros(40, 40).masked_fill(hidden, -1e4)
    second = (q.flatten(0, 1) @ k.flatten(0, 1).mT).unflatten(0, (2, 3))
    second = second + torch.zeros(40, 40).masked_fill(hidden, -1e4)
    return first.softmax(-1).square().sum(-1), second.softmax(-1) @ v


@pytest.mark.parametrize(
    "program",
    [values_of_one_key_that_einsum_takes_for_all, equal_masks_of_which_one_is_gone],
)
def test_attention_of_other_forms(program):
    judged(program, inputs(8, 8), 1, None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fused_product_with_features_that_are_a_softmax(dynamic):
    """Its product is attention, too, but nothing of it is left to rewrite."""

    def loss(h, a, w, ht, wt):
        return kd((a @ h.mT).softmax(0).mT @ w.mT, ht @ wt.mT)

    shapes = ((6, 4), (4, 4), (11, 4), (6, 3), (11, 3))
    judged(loss, [torch.randn(s).requires_grad_() for s in shapes], 1, None, dynamic=dynamic)
