"""Registers the attention operators: schemas, fakes, autograd, autocast, vmap and FLOP formulas.

An operator is functional, and its primitive is one value per query row. Every reduction, row
weight and row mask is ordinary torch code around it. The backward is an operator of its own, and
reads only what the forward took and returned. Kernels are imported inside of the dispatch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_streamkl.attention import query_tiles, torch_impl, values
from torch_streamkl.attention.heuristics import LSE_UNIT, select_implementation
from torch_streamkl.attention.problem import (
    SPEC,
    AttentionProblem,
    Gradients,
    NeedsGrad,
    RowStatistics,
)
from torch_streamkl.checks import is_plain
from torch_streamkl.registration import (
    NAMESPACE,
    contiguous,
    define,
    fake_gradients,
    mapped_tensors,
    only_needed,
    refuse_mapped,
    register,
    register_autograd,
    without_autocast,
    without_none,
)
from torch_streamkl.spec import SIDES

_lib = Library(NAMESPACE, "DEF")

ARGUMENTS = SPEC.schema
NUM_TENSORS = len(SPEC.tensor_names)
BIASES = SPEC.positions("student_bias", "teacher_bias")
NUM_RESULTS = 3  # of attention_kl: values, and statistics of both sides
DIFFERENTIABLE = SPEC.positions(
    "student_q", "student_k", "teacher_q", "teacher_k", "student_sink", "teacher_sink"
)
differentiable = operator.itemgetter(*DIFFERENTIABLE)
_NOT_DIFFERENTIABLE = (
    "student_bias", "teacher_bias", "student_alibi_slopes", "teacher_alibi_slopes", "teacher_lse"
)  # fmt: skip

attention_kl = define(
    _lib,
    f"attention_kl({ARGUMENTS}) -> (Tensor value, Tensor student_stats, Tensor teacher_stats)",
)
attention_kl_backward = define(
    _lib,
    "attention_kl_backward(Tensor grad, Tensor student_stats, Tensor teacher_stats, "
    f"bool[] needs_grad, {ARGUMENTS})"
    " -> (Tensor student_q, Tensor student_k, Tensor teacher_q, Tensor teacher_k)",
)


def problem_of(*args: Any, **kwargs: Any) -> tuple[AttentionProblem, str]:
    """Returns the problem of an operator's flat arguments, and the implementation asked for."""
    problem: AttentionProblem = SPEC.problem(*args, **kwargs)
    return problem, problem.impl


def forward(problem: AttentionProblem, is_compiled: bool = False) -> tuple[Tensor, RowStatistics]:
    """Computes values and statistics, by the implementation that the problem asks for."""
    values.check(problem)
    problem = problem.with_contiguous_vectors()
    found: tuple[Tensor, RowStatistics] = _module_for(is_compiled, problem).forward(problem)
    return found


def backward(
    problem: AttentionProblem,
    stats: RowStatistics,
    grad: Tensor,
    needs_grad: Sequence[bool],
    is_compiled: bool = False,
) -> Gradients:
    """Computes gradients, None for what is not needed."""
    problem = problem.with_contiguous_vectors()
    module = _module_for(is_compiled, problem, backward=True)
    grads: Gradients = module.backward(problem, stats, grad, NeedsGrad(*needs_grad))
    return grads


def _run_forward(is_compiled: bool, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    value, stats = forward(problem_of(*args, **kwargs)[0], is_compiled)
    return value, stats.student, stats.teacher


def _module_for(is_compiled: bool, problem: AttentionProblem, backward: bool = False) -> Any:
    """Chooses the module that computes a problem; graphs that Inductor compiles get its CPU
    kernels.
    """
    implementation = select_implementation(problem, problem.impl, backward)
    on_query_tiles = is_compiled and implementation == "torch"
    return query_tiles if on_query_tiles else _module(implementation)


@functools.cache
def _module(implementation: str) -> Any:
    """Imports the module with an implementation's forward and backward when first used."""
    if implementation == "hopper":
        from torch_streamkl.attention.hopper import launches as hopper

        return hopper
    if implementation == "triton":
        from torch_streamkl.attention.triton import launches as portable

        return portable
    return torch_impl


def _run_backward(
    is_compiled: bool,
    grad: Tensor,
    student_stats: Tensor,
    teacher_stats: Tensor,
    needs_grad: list[bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    given = (grad, student_stats, teacher_stats, needs_grad)
    return without_none(_needs_grads(is_compiled, *given, *args, **kwargs), args[0])


def _needs_grads(
    is_compiled: bool,
    grad: Tensor,
    student_stats: Tensor,
    teacher_stats: Tensor,
    needs_grad: list[bool],
    *args: Any,
    **kwargs: Any,
) -> Gradients:
    """Reads the output mask: what `run_backward` returns, None for what is not needed."""
    stats = RowStatistics(student_stats, teacher_stats)
    return backward(problem_of(*args, **kwargs)[0], stats, grad, needs_grad, is_compiled)


# as they are, and in graphs that Inductor compiles
run_forward, run_compiled_forward = (functools.partial(_run_forward, x) for x in (False, True))
run_backward, run_compiled_backward = (functools.partial(_run_backward, x) for x in (False, True))
needs_grads, compiled_gradients = (functools.partial(_needs_grads, x) for x in (False, True))


def allocated(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates uninitialised values and statistics, as the fake implementation returns them."""
    problem, _ = problem_of(*args, **kwargs)
    value, stats = RowStatistics.allocate(problem)
    return value, stats.student, stats.teacher


def backward_fake(
    grad: Tensor,
    student_stats: Tensor,
    teacher_stats: Tensor,
    needs_grad: list[bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Returns empty gradients: what a fake call returns."""
    return fake_gradients(args[:4], needs_grad, args[0], contiguous)


def _matmul_flops(given: dict[str, Any], side: str) -> int:
    batch, heads, seqlen_q, head_dim = given[f"{side}_q"]
    flops: int = 2 * batch * heads * seqlen_q * given[f"{side}_k"][2] * head_dim
    return flops


def forward_flops(given: dict[str, Any]) -> int:
    """Counts two score matmuls; masks are not counted, as for scaled_dot_product_attention."""
    return sum(_matmul_flops(given, side) for side in SIDES)


def backward_flops(given: dict[str, Any]) -> int:
    """Counts the two score matmuls, and one for each gradient."""
    each = [_matmul_flops(given, side) for side in SIDES for _ in "qk"]
    of_gradients = (f for f, need in zip(each, given["needs_grad"], strict=True) if need)
    return forward_flops(given) + sum(of_gradients)


register(_lib, "attention_kl", run_forward, allocated, forward_flops, run_compiled_forward)
register(
    _lib,
    "attention_kl_backward",
    run_backward,
    backward_fake,
    backward_flops,
    run_compiled_backward,
)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, student_stats, teacher_stats = output
    ctx.mark_non_differentiable(student_stats, teacher_stats)
    ctx.save_for_backward(student_stats, teacher_stats, *inputs[:NUM_TENSORS])
    ctx.options = inputs[NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    # the dispatcher drops trailing arguments that have their default value
    needs = (*ctx.needs_input_grad, *(False,) * NUM_TENSORS)
    for name in _NOT_DIFFERENTIABLE:
        if needs[SPEC.index[name]]:
            raise NotImplementedError(
                f"{name} gets no gradient: detach it, or keep the scores in plain torch code"
            )
    given = gradients(grad, differentiable(needs), ctx.saved_tensors, ctx.options)
    grads: list[Tensor | None] = [None] * (NUM_TENSORS + len(ctx.options))
    for index, value in zip(DIFFERENTIABLE, given, strict=True):
        grads[index] = value
    return tuple(grads)


def gradients(
    grad: Tensor | None,
    needs: tuple[bool, ...],
    saved: tuple[Any, ...],
    options: tuple[Any, ...],
    implementation: Callable[..., Sequence[Tensor | None]] | None = None,
) -> list[Tensor | None]:
    """Computes gradients to the `differentiable` of the tensor arguments.

    ``saved`` is the two statistics and all tensor arguments. If nothing watches operators,
    ``implementation(wanted, grad, *saved)`` computes those of q and k, with these options.
    """
    grads: list[Tensor | None] = [None] * len(DIFFERENTIABLE)
    if grad is None:
        return grads
    student_stats, teacher_stats, *tensors = saved
    needs_grad = needs[:4]
    if any(needs_grad):
        # with gradients enabled (create_graph) the operator must be seen, to refuse a second one
        is_direct = not torch.is_grad_enabled() and is_plain((grad, *tensors))
        if is_direct and not grad.is_meta:
            call = implementation or functools.partial(_with_options, options)
            grads[:4] = without_autocast(call, needs_grad, grad, *saved)
        else:
            given = (grad, student_stats, teacher_stats, list(needs_grad), *tensors, *options)
            grads[:4] = only_needed(attention_kl_backward(*given), needs_grad)
    for index, stats in ((4, student_stats), (5, teacher_stats)):
        if needs[index]:
            unit = LSE_UNIT[select_implementation(*problem_of(*tensors, *options))]
            sink = differentiable(tensors)[index]
            grads[index] = _sink_gradient(grad, stats, unit, sink)
    return grads


def _with_options(
    options: tuple[Any, ...], needs_grad: tuple[bool, ...], grad: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    student_stats, teacher_stats, *tensors = saved
    return needs_grads(grad, student_stats, teacher_stats, list(needs_grad), *tensors, *options)


def _sink_gradient(grad: Tensor, stats: Tensor, lse_unit: float, sink: Tensor) -> Tensor:
    # dlogP_j / dsink = -exp(sink - lse) for every key j; the sum over j of df/dlogP_j is stored
    lse, delta = stats.unbind(0)
    grad = grad.repeat_interleave(lse.shape[1] // grad.shape[1], dim=1)
    # without any key and with a sink of -inf the log-sum-exp is -inf, too
    lse = torch.where(lse == -math.inf, 0.0, lse * lse_unit)
    row_sum = torch.exp(sink.to(lse.dtype)[:, None] - lse)
    # a row that does not count adds nothing, even where its own gradient is not finite
    share = torch.where(grad == 0, 0.0, grad * delta * row_sum)
    return -share.sum((0, 2)).to(sink.dtype)


register_autograd(_lib, "attention_kl", _autograd, _setup_context)


_UNBATCHED = (
    "student_alibi_slopes", "teacher_alibi_slopes", "student_sink", "teacher_sink",
    "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


def _vmap(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Folds the mapped dimension into the batch."""
    tensors = list(args)
    q, dim = args[0], in_dims[0]
    batch = q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]
    for index, name, x, dim in mapped_tensors(SPEC.tensor_names, in_dims, args):
        if name in _UNBATCHED:
            refuse_mapped(name, dim, "q, k, masks or biases")
            continue
        x = x.movedim(dim, 0) if dim is not None else x.unsqueeze(0)
        if dim is None and x.shape[1] == 1 and index >= 4:
            tensors[index] = x[0]
            continue
        tensors[index] = x.expand(info.batch_size, batch, *x.shape[2:]).flatten(0, 1)
    value, student_stats, teacher_stats = attention_kl(*tensors)
    size = (info.batch_size, batch)
    outputs = (
        value.unflatten(0, size),
        student_stats.unflatten(1, size),
        teacher_stats.unflatten(1, size),
    )
    return outputs, (0, 1, 1)


torch.library.register_vmap(f"{NAMESPACE}::attention_kl", _vmap, lib=_lib)
