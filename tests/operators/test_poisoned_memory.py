"""What is allocated holds NaN, and so does what lies between rows: nobody may read either.

Features of the portable kernels run so in test_attention_triton_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.test_shard_kernels import problem, sharded
from tests.support.interpreter import INTERPRETED, inside, outside, quiet
from tests.support.poison import padded, poisoned_memory
from tests.support.problems import CASES, build
from tests.support.row_cases import CASES as CASES_OF_ROWS
from tests.support.row_cases import Sizes, cast, example, value_and_gradients
from tests.support.tolerances import check_call
from torch_streamkl import linear_kl
from torch_streamkl.attention import torch_scores
from torch_streamkl.attention.problem import RowStatistics
from torch_streamkl.distributed import shard_rows

pytestmark = quiet


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def test_allocations_are_poisoned() -> None:
    from torch_streamkl.attention.ops import problem_of

    x = torch.randn(1, 1, 4, 8)
    value, stats = RowStatistics.allocate(problem_of(x, x, x, x)[0])
    for made in (value, stats.student, stats.teacher, x.new_empty(3), torch.empty_like(x)):
        assert made.isnan().all()


@outside
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_scores, "STREAMING_BLOCK_ELEMENTS", 96)
    monkeypatch.setattr(torch_scores, "STREAMING_MAX_KEYS", 16)
    call = build(padded(CASES[name]))
    check_call(call, "torch")


@pytest.mark.parametrize("divergence", ["forward_kl", "js"])
@pytest.mark.parametrize("strategy", ["forward", "recompute"])
def test_linear(strategy: str, divergence: str) -> None:
    impl = "triton" if INTERPRETED else "torch"
    shapes = ((5, 8), (21, 8), (5, 12), (21, 12))
    tensors = [torch.randn(s).requires_grad_() for s in shapes]
    labels = torch.tensor([0, -100, 3, 20, -100])
    found = []
    for how in (impl, "reference"):
        value = linear_kl(
            *tensors, labels=labels, divergence=divergence, reduction="mean",
            strategy=strategy, impl=how,
        )  # fmt: skip
        found.append([value, *torch.autograd.grad(value, tensors)])
    for x, y in zip(*found, strict=True):
        assert not x.isnan().any()
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


ROWS = ("weighted_keys", "indexer", "top_k_with_ghost", "cached_top_k")


@pytest.mark.parametrize("name", ROWS)
def test_row_programs(name: str) -> None:
    """In tiles and by maps of a block of rows; operands have NaN between their rows."""
    impl = "triton" if INTERPRETED else "torch"
    case = CASES_OF_ROWS[name](Sizes(1, 2, 17, 35, 5))
    case = cast(case, torch.float32 if INTERPRETED else torch.float64)
    for key, x in case.tensors.items():
        if isinstance(x, tuple) and x[0].is_floating_point():
            case.tensors[key] = tuple(spread(t) for t in x)
    truth = value_and_gradients(case.naive, cast(case, torch.float64))
    for got, exact in zip(value_and_gradients(example(name, impl), case), truth, strict=True):
        assert not got.isnan().any()
        torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=1e-3)


def spread(x: Tensor) -> Tensor:
    """The same numbers with a row of NaN after each."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x.detach()
    return wide[..., : x.shape[-1]].requires_grad_(x.requires_grad)


@pytest.mark.parametrize("divergence", ["forward_kl", "js"])
def test_shards_of_words(divergence: str) -> None:
    """States and sums of ranks, one of which has no vocabulary entries."""
    from torch_streamkl.linear.triton import shards as shard_kernels

    whole = problem(divergence, labels=torch.tensor([3, -100, 149, 0, 60]))
    torch.manual_seed(1)
    out, gradients = sharded(whole, shard_kernels if INTERPRETED else shard_rows, [0, 40, 150])
    assert not any(x.isnan().any() for x in (out.value, out.hard, out.statistics[:4]))
    assert not any(x.isnan().any() for pair in gradients for x in pair)


@inside
def test_split_keys_write_every_share() -> None:
    """One query, many keys: states and sums of shares are memory that nobody clears."""
    call = build(replace(CASES["split_keys_two_pass"], seqlen_q=1, seqlen_k=700))
    check_call(call, "triton")


@outside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["forward", "recompute"])
def test_logits_of_an_odd_vocabulary(strategy: str, dtype: torch.dtype) -> None:
    """Rows of logits are padded, and a CPU's matrix units read the padding."""
    shapes = ((136, 24), (301, 24), (136, 40), (301, 40))
    tensors = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
    linear_kl(*tensors, reduction="mean", strategy=strategy).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)
