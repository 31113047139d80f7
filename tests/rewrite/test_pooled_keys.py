"""Maps summed over blocks of keys become row programs; what only looks like it stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare
from tests.support.covering import every
from tests.support.named_inputs import given
from torch_streamkl.fx_passes.explain import explain
from torch_streamkl.rows import torch_impl

BATCH, HEADS, ROWS, KEYS, DIM, SIZE = 2, 4, 7, 24, 4, 6
BLOCKS = KEYS // SIZE


def inputs(
    gradient: str = "all", dtype: torch.dtype = torch.float32, spread: float = 1.0
) -> list[Tensor]:
    """Queries and keys of both sides, not contiguous, scores of blocks and weights of keys."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    pairs = [
        (normal(BATCH, n, HEADS, DIM) * spread).to(dtype).transpose(1, 2)
        for n in (ROWS, KEYS, ROWS, KEYS)
    ]
    scores = normal(BATCH, ROWS, BLOCKS).to(dtype)
    weight = (normal(KEYS).abs() + 0.5).to(dtype)
    every = [*pairs, scores, weight]
    chosen = {"student": pairs[:2], "teacher": pairs[2:], "scores": [scores], "all": every}
    for x in chosen[gradient]:
        x.requires_grad_()
    return every


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.5).softmax(-1)


of_maps = given("sq sk tq tk b w", {"p": lambda sq, sk: (probabilities(sq, sk),)})


def masked(q: Tensor, k: Tensor, low: float = -torch.inf) -> Tensor:
    s = q @ k.mT * 0.5
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    return s.masked_fill(~keep, low).softmax(-1)


@of_maps
def mse_of_blocks(sq, sk, tq, tk):
    p, r = (
        probabilities(q, k).view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1)
        for q, k in ((sq, sk), (tq, tk))
    )
    return F.mse_loss(p, r)


@of_maps
def scores_of_blocks(tq, tk, b):
    """The indexer that chooses blocks of keys."""
    p = masked(tq, tk).sum(1).reshape(BATCH, ROWS, BLOCKS, SIZE).sum(-1)
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-6)
    return (p * ((p + 1e-6).log() - b.log_softmax(-1))).sum(-1).mean()


@of_maps
def groups_of_heads(tq, tk, b):
    p = masked(tq, tk, -1e4).view(BATCH, 2, HEADS // 2, ROWS, KEYS).sum(2)
    return (p.unflatten(-1, (BLOCKS, SIZE)).sum(-1) * b.exp()[:, None]).sum()


@of_maps
def means_of_blocks(p, b):
    p = p.unflatten(3, (-1, SIZE)).mean(-1, keepdim=True)
    return (p.squeeze(-1) * b[:, None]).square().sum(-1)


@of_maps
def heads_and_keys_at_once(p, b):
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE)
    return (p.sum((1, 4)) * b).sum(-1).mean() + (p.mean((1, -1)) ** 2).sum()


@of_maps
def heads_last(p, b):
    """Blocks and heads in another order than the operator's."""
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE).permute(3, 0, 2, 4, 1)
    return p.sum(3).square().mean((-1, -2)) * b.detach().mean()


@of_maps
def weighted_before(p, tq, tk, w):
    """A second level below the blocks."""
    p = p * w
    p = p / (p.sum(-1, keepdim=True) + 1e-6)
    q = probabilities(tq, tk)
    return ((p - q) ** 2).view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1).sqrt().mean()


@of_maps
def of_two_sizes(p):
    wide = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1)
    narrow = p.view(BATCH, HEADS, ROWS, 2 * BLOCKS, SIZE // 2).sum(-1)
    return (wide**3).sum() + (narrow**2).sum()


def beside_a_divergence(sq, sk, tq, tk, b, w):
    p = probabilities(tq, tk)
    rows = (w * p * (sq @ sk.mT * 0.5).log_softmax(-1)).sum(-1)
    return rows.mean() + (p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1) ** 2).mean()


@of_maps
def pooled_without_a_gradient(tq, tk, b):
    with torch.no_grad():
        p = probabilities(tq, tk).view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1)
    return (p.mean(1) * b).sum()


@of_maps
def written_to(p):
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1)
    p[..., 0] = 0.0
    return p.square().sum(), p


@of_maps
def keys_first(sq, sk):
    p = (sk @ sq.mT * 0.5).softmax(-2)
    return p.view(BATCH, HEADS, BLOCKS, SIZE, ROWS).sum(-2).square().sum()


@of_maps
def a_tensor_of_blocks_meets_the_map(p, b):
    """It is a factor of each block's sum."""
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE)
    return (p * b[:, None, :, :, None]).sum(-1).square().sum()


FORMS: list[Callable[..., Any]] = [
    mse_of_blocks,
    scores_of_blocks,
    groups_of_heads,
    means_of_blocks,
    heads_and_keys_at_once,
    heads_last,
    keys_first,
    weighted_before,
    of_two_sizes,
    pooled_without_a_gradient,
    written_to,
    a_tensor_of_blocks_meets_the_map,
]


def pooled(program: Any, given: list[Any], **options: Any) -> Outcome:
    """Compare, and require that no map of rows and keys is left."""
    outcome = compare(program, given, **options).check()
    assert {site.kind for site in outcome.report.sites if site.fused} == {"row_program"}
    assert outcome.num_fused == len(outcome.report.sites), str(outcome.report)
    assert f"{ROWS} x {KEYS}]" not in outcome.report.details(), str(outcome.report)
    return outcome


@pytest.mark.parametrize("gradient", ["student", "scores", "all"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_forms(form: Any, gradient: str) -> None:
    pooled(form, inputs(gradient))


@pytest.mark.parametrize("form", every(3, FORMS, 0), ids=lambda f: f.__name__)
def test_without_gradient(form: Any) -> None:
    pooled(form, inputs(), training=False)


@pytest.mark.parametrize("form", every(3, FORMS, 1), ids=lambda f: f.__name__)
def test_through_aot_autograd(form: Any) -> None:
    pooled(form, inputs(), inner="aot_eager")


@pytest.mark.parametrize("form", every(3, FORMS, 2), ids=lambda f: f.__name__)
def test_with_sizes_that_vary(form: Any) -> None:
    assert not compare(form, inputs(), dynamic=True).check().report.failures


@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_narrow_types(form: Any, dtype: torch.dtype) -> None:
    compare(form, inputs("all", dtype)).check()


@pytest.mark.parametrize("form", every(3, FORMS, 0), ids=lambda f: f.__name__)
def test_large_scores(form: Any) -> None:
    pooled(form, inputs("all", spread=4.0), largest_score=100.0)


def test_sums_of_one_map_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = torch_impl.forward
    monkeypatch.setattr(torch_impl, "forward", lambda *args: calls.append(args) or forward(*args))
    options = {"streamkl.inner": "eager", "streamkl.verify": "never"}
    torch._dynamo.reset()
    torch.compile(of_two_sizes, backend="streamkl", options=options)(*inputs())
    assert len(calls) == 1


def test_the_report_says_what_runs() -> None:
    report = explain(mse_of_blocks, *inputs()).details()
    assert f"row_program: a sum over blocks of {SIZE} keys of the product" in report
    assert "in plain torch, by blocks of rows and keys: bounded memory, no kernels" in report


# ------------------------------------------------------------ not fused
@of_maps
def axes_that_mix(p):
    return p.reshape(BATCH, HEADS, BLOCKS, ROWS, SIZE).sum(-1).square().sum()


@of_maps
def every_fourth_key(p):
    return p.view(BATCH, HEADS, ROWS, SIZE, BLOCKS).sum(-2).square().sum()


@of_maps
def sizes_that_do_not_divide(p):
    p = F.pad(p, (0, 1))
    return p.view(BATCH, HEADS, ROWS, 5, 5).sum(-1).square().sum()


@of_maps
def a_dropout_between(p, b):
    p = F.dropout(p, 0.0 if b is None else 1.0)
    return p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1).square().sum()


@of_maps
def the_split_map_is_read(p):
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE)
    return p.sum(-1).square().sum(), p


@of_maps
def the_split_map_is_written(p):
    p = p.clone().view(BATCH, HEADS, ROWS, BLOCKS, SIZE)
    p[..., 0] = 0.0
    return p.sum(-1).square().sum()


@of_maps
def some_blocks_before_the_sum(p):
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE)[..., 1:, :]
    return p.sum(-1).square().sum()


@of_maps
def some_keys_of_each_block(p):
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE)[..., 1:]
    return p.sum(-1).square().sum()


@of_maps
def largest_of_blocks(p):
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE)
    return (p.amax(-1) + p.detach().sum(-1)).square().sum()


@of_maps
def softmax_inside_of_blocks(p):
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE)
    return (p.softmax(-1) * p).sum(-1).square().sum()


@of_maps
def blocks_come_back_to_keys(p):
    """A gradient flows into the sums from elements that are summed again."""
    share = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1)
    share = share.repeat_interleave(SIZE, -1)
    return (p * (p / (share + 1e-3)).log1p()).sum(-1).mean()


@of_maps
def blocks_meet_their_keys(p):
    p = p.view(BATCH, HEADS, ROWS, BLOCKS, SIZE)
    return ((p / (p.sum(-1, keepdim=True) + 1e-3)) ** 2).sum(-1).sum()


@of_maps
def nan_is_asked_for(sq, sk):
    p = masked(sq, sk).view(BATCH, HEADS, ROWS, BLOCKS, SIZE).sum(-1)
    return p.nan_to_num(3.0).square().sum()


LEFT_ALONE: list[Callable[..., Any]] = [
    axes_that_mix,
    every_fourth_key,
    sizes_that_do_not_divide,
    a_dropout_between,
    the_split_map_is_read,
    the_split_map_is_written,
    some_blocks_before_the_sum,
    some_keys_of_each_block,
    largest_of_blocks,
    softmax_inside_of_blocks,
    blocks_come_back_to_keys,
    blocks_meet_their_keys,
    nan_is_asked_for,
]


@pytest.mark.parametrize("program", LEFT_ALONE, ids=lambda f: f.__name__)
def test_is_left_alone(program: Any) -> None:
    outcome = compare(program, inputs()).check()
    assert outcome.num_fused == 0, str(outcome.report)
