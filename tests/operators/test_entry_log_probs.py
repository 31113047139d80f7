"""entry_log_probs: log-probabilities at given ids, against whole logits in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.topk import chunks
from torch_streamkl.topk.log_probs import entry_log_probs, entry_log_probs_with_gradients

SCALE = 1.7


def problem(
    dtype: torch.dtype, num_tokens: int = 7, vocab: int = 11, k: int = 3, size: float = 1.0
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden states and weight, ids of which one stands twice, and weights of the entries."""
    make = torch.Generator().manual_seed(num_tokens + vocab + k)
    h, w = (
        torch.randn(n, 5, generator=make, dtype=torch.float64) * size for n in (num_tokens, vocab)
    )
    ids = torch.randint(vocab, (num_tokens, k), generator=make)
    ids[::2, -1] = ids[::2, 0]
    weight = torch.randn(num_tokens, k, generator=make, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (h, w)], ids, weight


def naive(h: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return (SCALE * (h.double() @ w.double().mT)).log_softmax(-1).gather(-1, ids)


def assert_is_naive(
    tensors: list[Tensor], ids: Tensor, weight: Tensor, atol: float = 1e-12
) -> None:
    """Values and gradients, of the backward and of the forward."""
    expected = naive(*tensors, ids)
    grads = torch.autograd.grad((expected * weight).sum(), tensors)
    found, statistics = entry_log_probs(*tensors, ids, SCALE)
    assert not statistics.requires_grad
    detached = [x.detach() for x in tensors]
    values, _, *stored = entry_log_probs_with_gradients(weight, [True] * 2, *detached, ids, SCALE)
    given_tensors = [found, *torch.autograd.grad(found, tensors, weight.to(found.dtype))]
    for each in (given_tensors, [values, *stored]):
        for x, y in zip(each, (expected, *grads), strict=True):
            bound = atol * (1.0 + float(y.detach().abs().max())) if y.numel() else 0.0
            torch.testing.assert_close(x.double(), y.double(), rtol=0.0, atol=bound)


@given(
    st.integers(1, 9), st.integers(1, 30), st.integers(1, 12), st.sampled_from([0.1, 1.0, 30.0])
)
def test_values_and_gradients(num_tokens: int, vocab: int, k: int, size: float) -> None:
    assert_is_naive(*problem(torch.float64, num_tokens, vocab, k, size))


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03), (torch.float16, 4e-3)]
)
def test_narrow_types(dtype: torch.dtype, atol: float) -> None:
    assert_is_naive(*problem(dtype, num_tokens=20, vocab=50), atol)


@pytest.mark.parametrize("most", [2, 34])
def test_chunks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens; with more than `max_sums`, gradients are computed from the values."""
    monkeypatch.setattr(linear_chunks, "TOKEN_MULTIPLE", {"cpu": 1})
    monkeypatch.setattr(linear_chunks, "VOCAB_MULTIPLE", 4)
    for name in ("workspace_of", "workspace_for_sums"):
        monkeypatch.setattr(chunks, name, lambda *_: 3 * 64 * 8)
    monkeypatch.setattr(chunks, "max_sums", lambda _: most)
    assert_is_naive(*problem(torch.float64, num_tokens=20))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_one_gradient(needs: tuple[bool, bool]) -> None:
    (h, w), ids, weight = problem(torch.float64)
    tensors = [x.detach().requires_grad_(need) for x, need in zip((h, w), needs, strict=True)]
    trained = [x for x in tensors if x.requires_grad]
    found = torch.autograd.grad((entry_log_probs(*tensors, ids, SCALE)[0] * weight).sum(), trained)
    expected = torch.autograd.grad((naive(*tensors, ids) * weight).sum(), trained)
    torch.testing.assert_close(found, expected)
    detached = (h.detach(), w.detach())
    *_, dh, dw = entry_log_probs_with_gradients(weight, list(needs), *detached, ids, SCALE)
    assert (dh.numel() > 0, dw.numel() > 0) == needs


def test_no_probability_is_above_1() -> None:
    h, w = torch.randn(64, 64), torch.randn(32, 64)
    ids = (h @ w.mT).topk(4).indices
    log_probs, _ = entry_log_probs(h, w, ids, 3.0)
    assert (log_probs <= 0).all()


def test_strided_inputs_and_narrow_ids() -> None:
    h, w = torch.randn(5, 4).double().T, torch.randn(11, 10).double()[:, ::2]
    ids = torch.tensor([[0, 3], [10, 0], [7, 7], [1, 2]])
    assert_is_naive([h.requires_grad_(), w.requires_grad_()], ids, torch.randn(4, 2).double())
    found = entry_log_probs(h, w, ids.int(), SCALE)[0]
    torch.testing.assert_close(found, naive(h, w, ids))


def test_rows_that_are_not_finite() -> None:
    """As eager code has them: NaN in their row only."""
    (h, w), ids, weight = problem(torch.float64)
    with torch.no_grad():
        h[1, 0], h[2, 0] = math.inf, math.nan
    expected, found = naive(h, w, ids), entry_log_probs(h, w, ids, SCALE)[0]
    torch.testing.assert_close(found, expected, equal_nan=True)
    (grad,) = torch.autograd.grad((found * weight).sum(), h)
    assert grad.isfinite().all(-1).tolist() == [i not in (1, 2) for i in range(7)]


def test_no_tokens() -> None:
    w = torch.randn(11, 5, requires_grad=True)
    ids = torch.zeros(0, 3, dtype=torch.long)
    found, _ = entry_log_probs(torch.randn(0, 5), w, ids, 1.0)
    assert found.shape == (0, 3)
    (grad,) = torch.autograd.grad(found.sum(), w)
    assert grad.shape == w.shape and not grad.any()


def test_registration() -> None:
    (h, w), ids, _ = problem(torch.float32)
    torch.library.opcheck(entry_log_probs, (h, w, ids, SCALE))
    given_tensors = (None, [True, True], h.detach(), w.detach(), ids, SCALE)
    torch.library.opcheck(entry_log_probs_with_gradients, given_tensors)
