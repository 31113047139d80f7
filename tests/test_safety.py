"""A program that compiles without the rewrite compiles with it, and gives the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tests.support.hard_programs import EXACT, PROGRAMS, Program, make_inputs
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.report import Report


def _run(fn: object) -> list[object]:
    """All results, inputs as they are afterwards, and gradients of the floating results."""
    leaves = make_inputs()
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
    results, _ = tree_flatten(fn(*inputs))  # type: ignore[operator]
    tensors = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    weights = [torch.linspace(0.5, 1.5, max(x.numel(), 1)).double()[: x.numel()] for x in tensors]
    weights = [w.reshape(x.shape) for w, x in zip(weights, tensors, strict=True)]
    grads = torch.autograd.grad(tensors, wanted, weights, allow_unused=True) if tensors else []
    plain = [x.detach() if isinstance(x, Tensor) else x for x in results]
    return [*plain, *(x.detach() for x in inputs), *grads]


def _compiled(given: Program) -> tuple[list[object], list[Report]]:
    torch._dynamo.reset()
    reports: list[Report] = []
    backend.REPORTS.append(reports.append)
    try:
        options = {"options": {"streamkl.inner": "aot_eager"}, **given.compile_options}
        return _run(torch.compile(given.fn, backend="streamkl", **options)), reports
    finally:
        backend.REPORTS.remove(reports.append)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    given = PROGRAMS[name]
    results, reports = _compiled(given)
    expected = _run(given.fn)
    assert not any(r.failures for r in reports)
    assert len(results) == len(expected)
    for i, (a, b) in enumerate(zip(expected, results, strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            assert a is b is None or a == b, f"result {i}"
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"result {i}"
        scale = float(a.abs().max()) + 1 if a.numel() else 1.0
        assert float((a - b).abs().max()) <= EXACT * scale, f"result {i}"
    assert sum(r.num_fused for r in reports) == given.num_fused, [str(r) for r in reports]
    assert given.num_graphs in (None, len(reports))
