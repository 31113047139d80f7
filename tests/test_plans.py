"""A plan launches a compiled kernel again only for numbers that Triton compiled into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_streamkl.attention.hopper import head_mean_launches as hopper
from torch_streamkl.attention.problem import AttentionProblem, RowStatistics, Side
from torch_streamkl.attention.torch_impl import NeedsGrad
from torch_streamkl.attention.triton import head_mean_launches as portable
from torch_streamkl.attention.triton import plans
from torch_streamkl.divergences.functional import named
from torch_streamkl.launches.launch import TritonLaunch


def _specializations(kernel: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton compiles into a kernel of its integers."""
    free = set(kernel.do_not_specialize)
    names = kernel.arg_names
    numbers = []

    def add(x: Any) -> None:
        if isinstance(x, tuple):
            for y in x:
                add(y)
        elif isinstance(x, int) and not isinstance(x, bool):
            numbers.append((x == 1, x % 16 == 0))

    for name, x in zip(names, arguments, strict=False):
        if name not in free:
            add(x)
    return tuple(numbers)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing runs; a kernel that is launched again has to be the one for these numbers."""

    def launch(
        kernel: Any, grid: Any, arguments: Any, constants: Any, options: Any, known: Any
    ) -> Any:
        numbers = _specializations(kernel, arguments)
        if known is not None:
            assert known == (kernel.__name__, numbers), kernel.__name__
        return kernel.__name__, numbers

    monkeypatch.setattr(plans, "launch", launch)
    monkeypatch.setattr(plans, "_aligned", lambda tensors: True)
    monkeypatch.setattr(hopper, "descriptor", lambda *args: None)
    # as on a GPU, where 36 rows are one block of the portable kernels
    tiles = TritonLaunch(64, 128, 4, 1)
    monkeypatch.setattr(plans, "triton_launch", lambda problem, kernel: tiles)
    plans.clear_plans()
    yield
    plans.clear_plans()


def _problem(num_queries: int) -> AttentionProblem:
    def tensor(heads: int, rows: int) -> Tensor:
        return torch.zeros(1, heads, rows, 64, dtype=torch.bfloat16)

    sides = (Side(tensor(heads, num_queries), tensor(heads, 144), 0.125) for heads in (3, 9))
    return AttentionProblem(*sides, named("tv"), window_right=0, head_mean=True)


@pytest.mark.parametrize("num_queries", [36, 100])
@pytest.mark.usefixtures("launches")
def test_both_kinds_of_kernels_of_one_plan(num_queries: int) -> None:
    problem = _problem(num_queries)
    grad = torch.ones(1, 3, num_queries)
    everything = NeedsGrad(True, True, True, True)
    for _ in range(2):
        for module in (portable, hopper):
            _, stats = module.forward(problem)
            assert isinstance(stats, RowStatistics)
            module.backward(problem, stats, grad, everything)
