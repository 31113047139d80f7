"""Registers the operators that `linear_kl` calls: schemas, fakes, autograd, autocast, vmap, FLOPs.

- ``linear_kl``: value and cross-entropy per token; the backward recomputes the logits.
- ``linear_kl_sum``: weighted sums over tokens, and their gradients computed in the forward; the
  backward multiplies them by the gradient of the sum.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_streamkl.bounds import check_labels
from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear import token_tiles
from torch_streamkl.linear.problem import (
    OUTPUTS,
    SPEC,
    LinearProblem,
    NeedsGrad,
    RowValues,
    RowWeights,
)
from torch_streamkl.registration import (
    NAMESPACE,
    define,
    fake_gradients,
    mapped_tensors,
    only_needed,
    refuse_mapped,
    refuse_vmap,
    register,
    register_autograd,
    without_none,
)
from torch_streamkl.runtime.devices import gpu_limit, kernel_limit, runs_kernels
from torch_streamkl.stored_gradients import scaled, scaled_gradients

_lib = Library(NAMESPACE, "FRAGMENT")

TENSORS, OPTIONS = SPEC.tensors, SPEC.options
# after everything else: a second, narrow head that is added to a side's logits (`Head`)
ADAPTERS, ADAPTER_NAMES = SPEC.last, SPEC.last_names
NUM_TENSORS, NUM_OPTIONS = len(SPEC.tensor_names), len(SPEC.option_names)
NUM_ADAPTERS = len(ADAPTER_NAMES)
GRADIENTS, ADAPTER_GRADIENTS = (
    ", ".join(f"Tensor {name}_grad" for name in names)
    for names in (SPEC.tensor_names[:6], ADAPTER_NAMES)
)
INPUTS = (0, 1, 2, 3, 4, 5)  # of the tensors, those with a gradient, in the order of `NeedsGrad`

linear_kl = define(
    _lib,
    f"linear_kl({TENSORS}, {OPTIONS}, {ADAPTERS}) -> "
    "(Tensor value, Tensor hard, Tensor statistics)",
)
linear_kl_backward = define(
    _lib,
    f"linear_kl_backward(Tensor? grad, Tensor? hard_grad, Tensor statistics, bool[] needs_grad, "
    f"{TENSORS}, {OPTIONS}, {ADAPTERS}) -> ({GRADIENTS}, {ADAPTER_GRADIENTS})",
)
linear_kl_sum = define(
    _lib,
    f"linear_kl_sum({TENSORS}, Tensor? row_weight=None, Tensor? hard_row_weight=None, "
    f"bool[] needs_grad=[], {OPTIONS}, {ADAPTERS}) -> "
    f"(Tensor total, Tensor value, Tensor hard, {GRADIENTS}, {ADAPTER_GRADIENTS})",
)

IMPLEMENTATIONS = ("auto", "triton", "torch", "reference")


def problem_of(*args: Any, **kwargs: Any) -> tuple[LinearProblem, int, str]:
    """Returns the problem of an operator's flat arguments, its workspace limit (0 is the default)
    and the implementation asked for.
    """
    problem: LinearProblem = SPEC.problem(*args, **kwargs)
    return problem, problem.max_workspace_mib, problem.impl


def row_functions(problem: LinearProblem, impl: str) -> ModuleType:
    """Returns the module that works on rows of logits: Triton's or plain torch."""
    device = problem.student.hidden.device
    if not runs_kernels("linear_kl", impl, device, triton_limit(problem)):
        return linear_rows
    from torch_streamkl.linear.triton import launches as kernels

    module: ModuleType = kernels
    return module


def rows_of(is_compiled: bool, problem: LinearProblem, impl: str) -> ModuleType:
    """Returns `row_functions`, or in a graph of Inductor those of compiled CPU kernels."""
    rows = row_functions(problem, impl)
    on_cpu = problem.student.hidden.device.type == "cpu"
    return token_tiles if is_compiled and on_cpu and rows is linear_rows else rows


def triton_limit(problem: LinearProblem) -> str | None:
    """Explains why the Triton kernels cannot run a problem; None if they can."""
    return rows_limit(problem.student.hidden.device, problem.compute_dtype)


def rows_limit(device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """Explains why kernels that read rows of logits cannot run; None if they can."""
    limit = kernel_limit(device, compute_dtype)
    return gpu_limit(device) if limit is None and device.type == "cuda" else limit


def _forward(is_compiled: bool, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, workspace, impl = problem_of(*args, **kwargs)
    check_labels(problem.labels, problem.student.vocab_size, problem.ignore_index)
    out = linear_chunks.forward(problem, workspace, rows_of(is_compiled, problem, impl))
    return out.value, out.hard, out.statistics


def allocated(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns uninitialised results of linear_kl: what a fake call returns."""
    out = RowValues.allocate(problem_of(*args, **kwargs)[0])
    return out.value, out.hard, out.statistics


def _backward(
    is_compiled: bool,
    grad: Tensor | None,
    hard_grad: Tensor | None,
    statistics: Tensor,
    needs_grad: list[bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    problem, workspace, impl = problem_of(*args, **kwargs)
    weights = RowWeights(
        *(None if g is None else g.to(problem.compute_dtype) for g in (grad, hard_grad))
    )
    nothing = statistics.new_empty(0)
    grads = linear_chunks.backward(
        problem,
        RowValues(nothing, nothing, statistics),
        without_ignored(problem, weights),
        NeedsGrad(*needs_grad),
        workspace,
        rows_of(is_compiled, problem, impl),
    )
    return without_none(grads, problem.student.hidden)


def gradient_fakes(problem: LinearProblem, needs_grad: list[bool]) -> tuple[Tensor, ...]:
    """Returns empty gradients: what a fake call returns."""
    inputs = [getattr(getattr(problem, side), part) for side, part in OUTPUTS]
    return fake_gradients(inputs, needs_grad, problem.student.hidden)


def _backward_fake(
    grad: Tensor | None,
    hard_grad: Tensor | None,
    statistics: Tensor,
    needs_grad: list[bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    return gradient_fakes(problem_of(*args, **kwargs)[0], needs_grad)


def sum_arguments(
    *args: Any,
    row_weight: Tensor | None = None,
    hard_row_weight: Tensor | None = None,
    needs_grad: Any = (),
    **kwargs: Any,
) -> tuple[tuple[LinearProblem, int, str], Tensor | None, Tensor | None, list[bool]]:
    """Splits the arguments of `linear_kl_sum` into problem, weights and output mask."""
    rest = args[NUM_TENSORS:]
    first = [row_weight, hard_row_weight, needs_grad]
    first[: len(rest[:3])] = rest[:3]
    problem = problem_of(
        *args[:NUM_TENSORS], *(None,) * (NUM_TENSORS - len(args)), *rest[3:], **kwargs
    )
    return problem, first[0], first[1], list(first[2])


def _sum(is_compiled: bool, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    (problem, workspace, impl), row_weight, hard_row_weight, needs_grad = sum_arguments(
        *args, **kwargs
    )
    check_labels(problem.labels, problem.student.vocab_size, problem.ignore_index)
    weights = weights_of(problem, row_weight, hard_row_weight)
    rows, grads = linear_chunks.forward_with_gradients(
        problem,
        without_ignored(problem, weights),
        NeedsGrad(*needs_grad),
        workspace,
        rows_of(is_compiled, problem, impl),
    )
    return sum_results(problem, rows, weights, grads)


def weights_of(
    problem: LinearProblem, row_weight: Tensor | None, hard_row_weight: Tensor | None
) -> RowWeights:
    """Returns the factors of the rows of a sum: 1 where there are none."""
    dtype = problem.compute_dtype
    ones = problem.student.hidden.new_ones(problem.num_tokens, dtype=dtype)
    value, hard = (ones if x is None else x.to(dtype) for x in (row_weight, hard_row_weight))
    return RowWeights(value, None if problem.labels is None else hard)


def without_ignored(problem: LinearProblem, weights: RowWeights) -> RowWeights:
    """Returns factors for gradients: that of an ignored label is 0, even if it is infinite.

    ``cross_entropy(reduction="sum") / num_labels`` has the factor 1/0 if all labels are ignored.
    """
    if weights.hard is None or problem.labels is None:
        return weights
    return replace(weights, hard=torch.where(problem.is_labelled(), weights.hard, 0.0))


def sum_results(
    problem: LinearProblem, rows: RowValues, weights: RowWeights, grads: Any
) -> tuple[Tensor, ...]:
    """Returns the results of the operators of sums."""
    assert weights.value is not None
    total = weighted_sum(rows.value, weights.value)
    if weights.hard is not None:
        total = total + weighted_sum(rows.hard, weights.hard)
    return total, rows.value, rows.hard, *without_none(grads, problem.student.hidden)


def weighted_sum(value: Tensor, weight: Tensor) -> Tensor:
    """Sums values times weights."""
    # a row that does not count may be infinite
    return torch.where(weight == 0, 0.0, value * weight).sum()


def _sum_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    (problem, _, _), _, _, needs_grad = sum_arguments(*args, **kwargs)
    rows = RowValues.allocate(problem)
    return rows.value.new_empty(()), rows.value, rows.hard, *gradient_fakes(problem, needs_grad)


def flops_of(given: dict[str, Any]) -> int:
    """Counts the logits matmuls, and one matmul for each gradient to one of their operands."""
    flops = {}
    for side, part in OUTPUTS:
        kind = part.removesuffix("hidden").removesuffix("weight")
        pair: list[Any] = [given.get(f"{side}_{kind}{name}") for name in ("hidden", "weight")]
        if part == "bias" or None in pair:
            flops[side, part] = 0
        else:
            (num_tokens, hidden_size), (vocab_size, _) = pair
            flops[side, part] = 2 * num_tokens * hidden_size * vocab_size
    logits = sum(each for (_, part), each in flops.items() if part.endswith("hidden"))
    of_gradients = zip(flops.values(), given.get("needs_grad", ()), strict=False)
    return logits + sum(each for each, need in of_gradients if need)


run_forward, run_backward, run_sum = (
    functools.partial(x, False) for x in (_forward, _backward, _sum)
)
for _name, _implementation, _fake in (
    ("linear_kl", _forward, allocated),
    ("linear_kl_backward", _backward, _backward_fake),
    ("linear_kl_sum", _sum, _sum_fake),
):
    _plain, _compiled = (functools.partial(_implementation, x) for x in (False, True))
    register(_lib, _name, _plain, _fake, flops_of, _compiled)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    ctx.mark_non_differentiable(output[2])
    adapters = inputs[NUM_TENSORS + NUM_OPTIONS :]
    adapters += (None,) * (NUM_ADAPTERS - len(adapters))
    tensors = (*inputs[:NUM_TENSORS], *(None,) * (NUM_TENSORS - len(inputs)))
    ctx.save_for_backward(output[2], *tensors, *adapters)
    ctx.options = inputs[NUM_TENSORS : NUM_TENSORS + NUM_OPTIONS]
    ctx.num_inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad: Tensor | None, hard_grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    positions = (*INPUTS, *adapter_positions(NUM_TENSORS + NUM_OPTIONS, ctx.num_inputs))
    # the dispatcher drops trailing arguments that have their default value
    needs = (*ctx.needs_input_grad, *(False,) * (ctx.num_inputs + NUM_TENSORS))
    needs_grad = needs_grad_of([needs[i] for i in positions], grad)
    statistics, *tensors = ctx.saved_tensors
    if tensors[6] is None:
        hard_grad = None
    given: list[Tensor | None] = [None] * ctx.num_inputs
    if not any(needs_grad) or (grad is None and hard_grad is None):
        return tuple(given)
    adapters = dict(zip(ADAPTER_NAMES, tensors[NUM_TENSORS:], strict=True))
    grads = linear_kl_backward(
        grad,
        hard_grad,
        statistics,
        needs_grad,
        *tensors[:NUM_TENSORS],
        *ctx.options,
        **adapters,
    )
    for index, gradient in zip(positions, only_needed(grads, needs_grad), strict=False):
        given[index] = gradient
    return tuple(given)


def needs_grad_of(needs: list[bool], grad: Tensor | None) -> list[bool]:
    """Returns the output mask. Cross-entropies alone give the teacher None, not zeros."""
    if grad is not None:
        return needs
    names = [field.name for field in fields(NeedsGrad)]
    return [x and name.startswith("student") for x, name in zip(needs, names, strict=False)]


def adapter_positions(first: int, num_inputs: int) -> range:
    """Returns the positions of the adapters among a call's inputs."""
    return range(first, max(first, min(first + NUM_ADAPTERS, num_inputs)))


def setup_sum_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Saves for backward what `sum_autograd` reads."""
    _total, value, hard, *grads = output
    ctx.mark_non_differentiable(value, hard, *grads)
    ctx.needs_grad = list(inputs[NUM_TENSORS + 2])
    ctx.num_inputs = len(inputs)
    ctx.save_for_backward(value, hard, *grads)
    ctx.weight_dtypes = tuple(
        None if w is None else w.dtype for w in inputs[NUM_TENSORS : NUM_TENSORS + 2]
    )
    ctx.set_materialize_grads(False)


def sum_autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """Multiplies the stored gradients by the gradient of the sum."""
    # the dispatcher drops trailing arguments that have their default value
    needs = (*ctx.needs_input_grad, *(False,) * (ctx.num_inputs + NUM_TENSORS))
    positions = (*INPUTS, *adapter_positions(NUM_TENSORS + 3 + NUM_OPTIONS, ctx.num_inputs))
    needs_grad = (*ctx.needs_grad, *(False,) * len(positions))
    for index, is_needed in zip(positions, needs_grad, strict=False):
        if needs[index] and not is_needed:
            raise RuntimeError(
                f"linear_kl_sum was called with needs_grad={ctx.needs_grad}, but input {index} "
                "requires a "
                "gradient; needs_grad says which of student_hidden, student_weight, "
                "teacher_hidden, "
                "teacher_weight, student_bias, teacher_bias and those of the adapters get one"
            )
    if grad is None:
        return (None,) * ctx.num_inputs
    value, hard, *stored = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * ctx.num_inputs
    each = scaled_gradients(stored, grad, [needs[index] for index in positions])
    for index, gradient in zip(positions, each, strict=False):
        grads[index] = gradient
    for index, rows, dtype in zip(
        (NUM_TENSORS, NUM_TENSORS + 1), (value, hard), ctx.weight_dtypes, strict=True
    ):
        if needs[index]:
            grads[index] = scaled(rows, grad, False).to(dtype)
    return tuple(grads)


register_autograd(_lib, "linear_kl", _autograd, _setup_context)
register_autograd(_lib, "linear_kl_sum", sum_autograd, setup_sum_context)


def _vmap(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Folds the mapped dimension into the tokens."""
    tensors = list(args)
    for index, name, x, dim in mapped_tensors(SPEC.names, in_dims, args):
        if name.endswith(("weight", "bias")):
            refuse_mapped(name, dim, "hidden states and labels")
            continue
        x = x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
        tensors[index] = x.flatten(0, 1)
    value, hard, statistics = linear_kl(*tensors)
    hard = (
        hard.unflatten(0, (info.batch_size, -1))
        if hard.numel()
        else hard.new_empty((info.batch_size, 0))
    )
    return (
        value.unflatten(0, (info.batch_size, -1)),
        hard,
        statistics.unflatten(1, (info.batch_size, -1)),
    ), (0, 0, 1)


torch.library.register_vmap(f"{NAMESPACE}::linear_kl", _vmap, lib=_lib)
refuse_vmap(
    _lib,
    "linear_kl_sum",
    message=(
        "vmap over a reduced linear_kl is not supported; use reduction='none' and reduce its rows"
    ),
)
