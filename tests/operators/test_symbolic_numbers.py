"""Numbers that torch.compile(dynamic=True) makes symbols: the operators take them as they are."""

from __future__ import annotations

import pytest
import torch

from torch_streamkl import attention_kl, linear_kl


@pytest.mark.parametrize("guard", [0.0, 1e-9])
@pytest.mark.parametrize("op", ["attention_kl", "linear_kl"])
def test_a_number_that_changes_between_calls(op: str, guard: float) -> None:
    torch._dynamo.reset()
    if op == "attention_kl":
        tensors, function = [torch.randn(1, 2, 9, 8) for _ in range(4)], attention_kl
    else:
        shapes = [(9, 8), (31, 8), (9, 12), (31, 12)]
        tensors, function = [torch.randn(shape) for shape in shapes], linear_kl

    def loss(temperature: float, clamp: float) -> torch.Tensor:
        return function(*tensors, temperature=temperature, student_clamp=clamp, reduction="mean")

    compiled = torch.compile(loss, backend="aot_eager", dynamic=True, fullgraph=True)
    for temperature in (1.0, 2.0, 3.5):
        expected = loss(temperature, guard)
        torch.testing.assert_close(compiled(temperature, guard), expected, rtol=1e-6, atol=0)
