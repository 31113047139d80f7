"""Registers the operators that `attention_topk_kl` calls.

``attention_topk`` returns per-row values, and the log-sum-exps from which its backward recomputes
scores.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_streamkl.attention_topk import limits, torch_impl, values
from torch_streamkl.attention_topk.problem import ChosenKeys, NeedsGrad, RowStats
from torch_streamkl.registration import (
    NAMESPACE,
    contiguous,
    define,
    fake_gradients,
    refuse_vmap,
    register,
    register_recomputing,
    without_none,
)
from torch_streamkl.runtime.devices import runs_kernels

_lib = Library(NAMESPACE, "FRAGMENT")
TENSORS = (
    "Tensor student_q, Tensor student_k, Tensor? head_weights, Tensor teacher_q, "
    "Tensor teacher_k, Tensor ids, Tensor? teacher_lse, Tensor? key_ranges"
)
OPTIONS = (
    "float student_scale, float teacher_scale, str impl, bool check_values, bool deterministic"
)
NUM_TENSORS = 8  # of TENSORS
LSE = 6  # teacher_lse among them

attention_topk = define(
    _lib, f"attention_topk({TENSORS}, {OPTIONS}) -> (Tensor value, Tensor stats, Tensor lse)"
)
attention_topk_backward = define(
    _lib,
    f"attention_topk_backward(Tensor grad, Tensor stats, bool[] needs_grad, {TENSORS}, {OPTIONS})"
    " -> (Tensor q_grad, Tensor k_grad, Tensor head_weights_grad)",
)


def problem_of(*args: Any) -> ChosenKeys:
    """Builds the problem of an operator's flat arguments."""
    return ChosenKeys(*args[: NUM_TENSORS + 2])


def _implementation(problem: ChosenKeys, impl: str) -> ModuleType:
    """Returns the module that computes a problem: the kernels' or plain torch."""
    device = problem.student_q.device
    if impl == "auto" and device.type != "cuda":  # also in the interpreter
        return torch_impl
    if not runs_kernels("attention_topk_kl", impl, device, limits.triton_limit(problem)):
        return torch_impl
    from torch_streamkl.attention_topk.triton import launches

    module: ModuleType = launches
    return module


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, (impl, check_values, _) = problem_of(*args), args[NUM_TENSORS + 2 :]
    values.check(problem, check_values)
    stats: RowStats = _implementation(problem, impl).forward(problem)
    return stats.value, stats.student, stats.teacher_lse


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    stats = RowStats.allocate(problem_of(*args))
    return stats.value, stats.student, stats.teacher_lse


def _backward(
    grad: Tensor, stats: Tensor, needs_grad: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    problem, (impl, _, deterministic) = problem_of(*args), args[NUM_TENSORS + 2 :]
    assert problem.teacher_lse is not None
    saved, needs = RowStats(grad, stats, problem.teacher_lse), NeedsGrad(*needs_grad)
    module = _implementation(problem, impl)
    if module is torch_impl:
        found = torch_impl.backward(problem, saved, grad, needs)
    else:
        is_fixed = deterministic or torch.are_deterministic_algorithms_enabled()
        found = module.backward(problem, saved, grad, needs, is_fixed)
    return without_none(found, problem.student_q)


def _backward_fake(
    grad: Tensor, stats: Tensor, needs_grad: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    problem = problem_of(*args)
    given = (problem.student_q, problem.student_k, problem.head_weights)
    return fake_gradients(given, needs_grad, problem.student_q, contiguous)


def _products(given: dict[str, Any]) -> tuple[int, int]:
    """Counts the products of the student's and the teacher's queries with their chosen keys."""
    queries = given["student_q"], given["teacher_q"]
    student, teacher = (int(2 * math.prod(q) * given["ids"][2]) for q in queries)
    return student, teacher


def _forward_flops(given: dict[str, Any]) -> int:
    """Counts the scores; those of the teacher twice if their log-sum-exps are not known."""
    student, teacher = _products(given)
    return student + (2 if given["teacher_lse"] is None else 1) * teacher


def _backward_flops(given: dict[str, Any]) -> int:
    """Counts the recomputed scores, and a product for each gradient of queries and keys."""
    student, teacher = _products(given)
    q, k, weights = given["needs_grad"]
    return student * (1 + (q or weights) + k) + teacher


for _name, _function, _fake, _flops in (
    ("attention_topk", _forward, _forward_fake, _forward_flops),
    ("attention_topk_backward", _backward, _backward_fake, _backward_flops),
):
    register(_lib, _name, _function, _fake, _flops)


def _kept(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> list[Any]:
    """Returns the tensors of the backward, which needs the teacher's log-sum-exps."""
    tensors = list(inputs[:NUM_TENSORS])
    if tensors[LSE] is None:
        tensors[LSE] = output[2]
    return tensors


register_recomputing(_lib, "attention_topk", NUM_TENSORS, slice(1, 2), _kept)
refuse_vmap(
    _lib,
    "attention_topk",
    message=(
        "vmap over attention_topk_kl is not supported; its batch dimension takes more problems"
    ),
)
