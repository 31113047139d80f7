"""entry_logits: logits at given ids, which may stand twice, against whole logits in float64."""

from __future__ import annotations

import pytest
import torch

from torch_streamkl.topk.logits import entry_logits

IDS = torch.tensor([[0, 3, 3], [10, 0, 10], [7, 7, 7], [1, 2, 3]])


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_value_and_gradients(needs: tuple[bool, bool]) -> None:
    hidden, weight = torch.randn(4, 5).double(), torch.randn(11, 5).double()
    given = [x.requires_grad_(need) for x, need in zip((hidden, weight), needs, strict=True)]
    found = entry_logits(*given, IDS)
    expected = (hidden @ weight.T).gather(1, IDS)
    torch.testing.assert_close(found, expected)
    trained = [x for x in given if x.requires_grad]
    grad = torch.randn(4, 3).double()
    for x, y in zip(
        torch.autograd.grad(found, trained, grad),
        torch.autograd.grad(expected, trained, grad),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strided_inputs_and_other_ids(dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(5, 4).to(dtype).T, torch.randn(11, 10).to(dtype)[:, ::2]
    found = entry_logits(hidden, weight, IDS.int())
    assert found.dtype == dtype
    expected = (hidden.double() @ weight.double().T).gather(1, IDS)
    bound = 6 * torch.finfo(dtype).eps * (hidden.double().abs() @ weight.double().abs().T)
    assert ((found.double() - expected).abs() <= bound.gather(1, IDS)).all()


def test_no_tokens_and_no_entries() -> None:
    weight = torch.randn(11, 5, requires_grad=True)
    for hidden, ids in ((torch.randn(0, 5), IDS[:0]), (torch.randn(4, 5), IDS[:, :0])):
        found = entry_logits(hidden, weight, ids)
        assert found.shape == ids.shape
        (grad,) = torch.autograd.grad(found.sum(), weight)
        assert grad.shape == weight.shape and not grad.any()
