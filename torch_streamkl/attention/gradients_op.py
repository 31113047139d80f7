"""Registers the operator that computes `attention_kl` together with gradients of a weighted sum.

It returns the values and the gradients of their weighted sum. Each product is then computed once,
while separate forward and backward passes compute the scores twice. The rewrite puts it into a
graph whose backward it knows (fx_passes/gradients_in_forward.py). It has no autograd of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import Library

from torch_streamkl.attention import ops, query_tiles, torch_impl
from torch_streamkl.attention.problem import AttentionProblem, Gradients, NeedsGrad, RowStatistics
from torch_streamkl.registration import (
    NAMESPACE,
    define,
    fake_gradients,
    register,
    without_none,
)

Compute = Callable[
    [AttentionProblem, Tensor | None, NeedsGrad], tuple[Tensor, RowStatistics, Gradients]
]
_lib = Library(NAMESPACE, "FRAGMENT")
attention_kl_with_gradients = define(
    _lib,
    f"attention_kl_with_gradients(Tensor? row_weight, bool[] needs_grad, {ops.ARGUMENTS})"
    " -> (Tensor value, Tensor student_stats, Tensor teacher_stats, Tensor student_q, "
    "Tensor student_k, Tensor teacher_q, Tensor teacher_k)",
)


def _run(
    compute: Compute, row_weight: Tensor | None, needs_grad: list[bool], *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    problem, _ = ops.problem_of(*args, **kwargs)
    if row_weight is not None:
        row_weight = row_weight.expand(problem.student.q.shape[:3])
    value, stats, grads = compute(problem, row_weight, NeedsGrad(*needs_grad))
    return value, stats.student, stats.teacher, *without_none(grads, value)


def _fake(
    row_weight: Tensor | None, needs_grad: list[bool], *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    problem, _ = ops.problem_of(*args, **kwargs)
    value, stats = RowStatistics.allocate(problem)

    def in_compute_dtype(x: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=problem.compute_dtype)

    inputs = problem.queries_and_keys
    grads = fake_gradients(inputs, needs_grad, value, in_compute_dtype)
    return value, stats.student, stats.teacher, *grads


_PLAIN, _COMPILED = (
    functools.partial(_run, module.forward_with_gradients) for module in (torch_impl, query_tiles)
)
register(_lib, "attention_kl_with_gradients", _PLAIN, _fake, ops.backward_flops, _COMPILED)
