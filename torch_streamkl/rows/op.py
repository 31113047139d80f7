"""Registers the operators of row programs: schemas, fakes, autograd, FLOP formulas.

- ``row_program`` returns the reductions; its backward computes the dot products again.
- ``row_program_sum``, for LM heads, returns the sum of a loss of the reductions over all rows, and
  its gradients computed in the forward; its backward multiplies them by the gradient of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import Parameter

from torch_streamkl.caches import Bounded
from torch_streamkl.checks import has_batched_gradients
from torch_streamkl.registration import (
    NAMESPACE,
    contiguous,
    define,
    fake_gradients,
    only_needed,
    refuse_vmap,
    register,
    register_autograd,
    without_none,
)
from torch_streamkl.rows import closed, named, torch_impl
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import Program
from torch_streamkl.runtime.devices import matmul_precision, require_driver
from torch_streamkl.runtime.replay import Replay, Tensors
from torch_streamkl.stored_gradients import scaled_gradients

_lib = Library(NAMESPACE, "FRAGMENT")

# The tensors are those of `Program.tensor_names`. What comes back are all reductions, the two
# parts of each log-sum-exp, then the Jacobians and materialized nodes that the
# backward reads; outputs are among the reductions. Of a divergence they are what named.py says.
row_program = define(
    _lib,
    "row_program(Tensor[] tensors, str program, bool is_differentiated, str impl) -> Tensor[]",
)
row_program_backward = define(
    _lib,
    "row_program_backward(Tensor[] grads, int[] grad_of, Tensor[] saved, bool[] needs_grad, "
    "Tensor[] tensors, str program, str impl) -> Tensor[]",
)
# ``loss`` is a `RowLoss`, ``row_tensors`` what it reads, [1, 1, rows or 1] each. The sum, then its
# gradients to operands and captured tensors, then the program's outputs, without gradients.
row_program_sum = define(
    _lib,
    "row_program_sum(Tensor[] tensors, Tensor[] row_tensors, str program, str loss, "
    "bool[] needs_grad, str impl) -> Tensor[]",
)
IMPLEMENTATIONS = ("auto", "triton", "torch", "reference")
CLOSED = "closed"
_calls: Bounded[Callable[..., Tensors]] = Bounded()  # by metadata and options


def _module(problem: RowProblem, impl: str, is_differentiated: bool) -> Any:
    """Chooses the module that computes a problem; an explicit choice that cannot run is an error.

    A fake call asks, too: results differ.
    """
    if impl == "auto":
        impl = _automatic(problem, is_differentiated)
    if impl == CLOSED:
        return named
    if impl != "triton":
        return torch_impl
    module, why = _kernels(problem, is_differentiated)
    if why:
        raise NotImplementedError(f"impl='triton' cannot run this program: {why}; use 'torch'")
    return module


def check_kernels(problem: RowProblem, is_differentiated: bool) -> None:
    """Checks that ``impl="triton"`` runs on a GPU, or in Triton's interpreter."""
    from triton import knobs

    device = problem.like.device
    if device.type != "cuda" and not knobs.runtime.interpret:
        _module(problem, "triton", is_differentiated)  # why it would not on a GPU, either
        raise NotImplementedError(
            f"impl='triton' must have tensors on a GPU, got {device}; use 'torch'"
        )


def _ready(problem: RowProblem, impl: str, is_differentiated: bool) -> Any:
    """Returns the module that computes a problem; raises if its kernels have no driver."""
    module = _module(problem, impl, is_differentiated)
    is_compiled = module is not torch_impl and module is not named
    if is_compiled and problem.is_on_gpu:
        require_driver()
    return module


def _kernels(problem: RowProblem, is_differentiated: bool) -> tuple[Any, str]:
    """Returns the module of kernels that would run a problem, and why it cannot, if so.

    Dot products are computed where they are used if nothing needs them in memory.
    """
    from torch_streamkl.rows.triton import blocks as row_blocks
    from torch_streamkl.rows.triton import launches as row_kernels

    if not row_kernels.why_unsupported(problem, is_differentiated):
        return row_kernels, ""
    return row_blocks, row_blocks.why_unsupported(problem, is_differentiated)


def _automatic(problem: RowProblem, is_differentiated: bool) -> str:
    """Chooses the implementation: kernels on a GPU, elsewhere blocks in plain torch."""
    if closed.form_of(problem) is not None:
        return CLOSED
    if not problem.is_on_gpu:
        return "torch"
    return "torch" if _kernels(problem, is_differentiated)[1] else "triton"


def chosen(tensors: Sequence[Tensor], program: str, is_differentiated: bool, impl: str) -> str:
    """Returns the implementation that a call's arguments lead to."""
    if impl != "auto":
        return impl
    return _automatic(RowProblem.of(program, tensors), is_differentiated)


def chosen_of_sum(
    tensors: Sequence[Tensor],
    row_tensors: Sequence[Tensor],
    program: str,
    loss: str,
    needs_grad: Sequence[bool],
    impl: str,
) -> str:
    """Chooses the implementation of a sum: no divergence kernel if the weights of the values
    depend on the values.
    """
    how = chosen(tensors, program, True, impl)
    if how != CLOSED or RowLoss.of(loss).is_linear:
        return how
    problem = RowProblem.of(program, tensors)
    if not problem.is_on_gpu or _kernels(problem, True)[1]:
        return "torch"
    return "triton"


def has_sum(problem: RowProblem) -> bool:
    """Returns whether a program's rows may be summed with gradients in the forward.

    It is of LM heads: for attention the products that this saves are not what takes the time.
    In float16 gradients might overflow before they are scaled.
    """
    is_whole = problem.batch == 1 and problem.num_rows > 0 and problem.num_keys > 0
    is_of_vocab = problem.is_of_vocab and is_whole and not problem.program.has_blocks
    return is_of_vocab and problem.like.dtype != torch.float16


def _repeated(
    every: Sequence[Tensor],
    options: tuple[Any, ...],
    make: Callable[[], tuple[Callable[..., Tensors], Any]],
) -> Callable[..., Tensors]:
    """Returns the replayed program of tensors like these; ``options`` are all else that it is
    given.

    ``make`` gives it, and the module that runs in it: launches of kernels are recorded.
    """
    precision = matmul_precision()  # tiles of products depend on it
    key = (options, precision, *[(x.shape, x.stride(), x.dtype, x.device, type(x)) for x in every])
    call = _calls.get(key)
    if call is None:
        is_plain = all(type(x) in (Tensor, Parameter) for x in every)
        compute, module = make()
        has_launches = module is not torch_impl and module is not named
        call = _calls[key] = Replay(compute) if is_plain and has_launches else compute
    return call


def _forward(
    tensors: Sequence[Tensor], program: str, is_differentiated: bool, impl: str
) -> list[Tensor]:
    def compute(*tensors: Tensor) -> list[Tensor]:
        problem = RowProblem.of(program, tensors)
        result = _ready(problem, impl, is_differentiated).forward(problem, is_differentiated)
        flat: list[Tensor] = result.flat
        return flat

    def make() -> tuple[Callable[..., Tensors], Any]:
        return compute, _module(RowProblem.of(program, tensors), impl, is_differentiated)

    call = _repeated(tensors, ("forward", program, is_differentiated, impl), make)
    return list(call(*tensors))  # type: ignore[arg-type]  # none of them is None


def _forward_fake(
    tensors: Sequence[Tensor], program: str, is_differentiated: bool, impl: str
) -> list[Tensor]:
    problem = RowProblem.of(program, tensors)
    result = _module(problem, impl, is_differentiated).allocate(problem, is_differentiated)
    flat: list[Tensor] = result.flat
    return flat


def _backward(
    grads: Sequence[Tensor],
    grad_of: Sequence[int],
    saved: Sequence[Tensor],
    needs_grad: Sequence[bool],
    tensors: Sequence[Tensor],
    program: str,
    impl: str,
) -> list[Tensor]:
    def compute(*every: Tensor) -> Tensors:
        own, grads, saved = every[:count], every[count : count + len(grad_of)], every[first:]
        problem = RowProblem.of(program, own)
        module = _ready(problem, impl, True)
        result = saved if module is named else torch_impl.Result.of(problem.program, saved)
        given = dict(zip(grad_of, grads, strict=True))
        ordered = [given.get(c) for c in problem.program.outputs]
        found: Tensors = module.backward(problem, result, ordered, needs_grad)
        return found

    count, first = len(tensors), len(tensors) + len(grad_of)
    every = (*tensors, *grads, *saved)

    def make() -> tuple[Callable[..., Tensors], Any]:
        return compute, _module(RowProblem.of(program, tensors), impl, True)

    out = _repeated(every, ("backward", program, *grad_of, *needs_grad, impl), make)(*every)
    return list(without_none(out, tensors[0]))


def _backward_fake(
    grads: Sequence[Tensor],
    grad_of: Sequence[int],
    saved: Sequence[Tensor],
    needs_grad: Sequence[bool],
    tensors: Sequence[Tensor],
    program: str,
    impl: str,
) -> list[Tensor]:
    given = RowProblem.of(program, tensors).differentiable
    return list(fake_gradients(given, needs_grad, tensors[0], contiguous))


def _sum(
    tensors: Sequence[Tensor],
    row_tensors: Sequence[Tensor],
    program: str,
    loss: str,
    needs_grad: Sequence[bool],
    impl: str,
) -> list[Tensor]:
    def make() -> tuple[Callable[..., Tensors], Any]:
        problem = RowProblem.of(program, tensors)
        how = chosen_of_sum(tensors, row_tensors, program, loss, needs_grad, impl)
        module = run = named if how == CLOSED else _module(problem, how, True)
        if module is not named and module is not torch_impl:  # LM heads
            from torch_streamkl.rows.triton import blocks as row_blocks

            run = row_blocks

        def compute(*every: Tensor) -> Tensors:
            own, of_rows = RowProblem.of(program, every[:count]), every[count:]
            if how != CLOSED:
                _ready(own, how, True)
            found = run.loss_and_gradients(own, RowLoss.of(loss), of_rows, needs_grad)
            return [found.values.sum(), *found.grads, *found.outputs]

        return compute, module

    count = len(tensors)
    every = (*tensors, *row_tensors)
    call = _repeated(every, ("sum", program, loss, *needs_grad, impl), make)
    return list(without_none(call(*every), tensors[0]))


def _sum_fake(
    tensors: Sequence[Tensor],
    row_tensors: Sequence[Tensor],
    program: str,
    loss: str,
    needs_grad: Sequence[bool],
    impl: str,
) -> list[Tensor]:
    problem = RowProblem.of(program, tensors)
    total = tensors[0].new_empty((), dtype=problem.compute_dtype)
    reductions = problem.program.reductions
    returned = [reductions[c] for c in problem.program.outputs]
    values = [
        total.new_empty(problem.value_shape(r.head, 0), dtype=problem.dtype_of(r.kind))
        for r in returned
    ]
    return [total, *_backward_fake((), (), (), needs_grad, tensors, program, impl), *values]


def _matmul_flops(given: dict[str, Any]) -> tuple[Program, list[int]]:
    """Counts the FLOPs of each dot product."""
    problem = RowProblem.of(given["program"], given["tensors"])
    return problem.program, [int(2 * math.prod(q) * k[2]) for q, k in problem.operands]


def _forward_flops(given: dict[str, Any]) -> int:
    """Counts one matmul for each dot product and pass; masks are not counted."""
    program, dots = _matmul_flops(given)
    return max(program.levels) * sum(dots)


def _backward_flops(given: dict[str, Any]) -> int:
    """Counts the dots, which a backward recomputes, and one matmul for each gradient."""
    needs = given["needs_grad"]
    dots = enumerate(_matmul_flops(given)[1])
    return sum(flops * (1 + needs[2 * i] + needs[2 * i + 1]) for i, flops in dots)


register(_lib, "row_program", _forward, _forward_fake, _forward_flops)
register(_lib, "row_program_backward", _backward, _backward_fake, _backward_flops)
register(_lib, "row_program_sum", _sum, _sum_fake, _backward_flops)


def _batched_backward(backward: Any) -> Callable[..., list[Tensor]]:
    """Computes several gradients one by one in a compiled graph (``is_grads_batched=True``).

    Those are tensors of torch's older vmap, which makes no rule of its own for lists of tensors.
    """

    def run(grads: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        # of one that is not batched, a view with a dimension of size 1
        every = [torch._remove_batch_dim(g, level, 1, 0) for g in grads]
        count = max(g.shape[0] for g in every)
        each = [backward([g[i % len(g)] for g in every], *rest) for i in range(count)]
        return [torch._add_batch_dim(torch.stack(x), 0, level) for x in zip(*each, strict=True)]

    return run


for _name in ("row_program_backward", "_row_program_backward"):
    _operator = getattr(torch.ops.torch_streamkl, _name).default
    _lib.impl(_name, _batched_backward(_operator), "Batched")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.program = inputs[0], inputs[1]
    ctx.impl = inputs[3]
    ctx.num_tensors = len(tensors)
    ctx.needs_grad = [x.requires_grad for x in tensors]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if has_batched_gradients():
        raise NotImplementedError(
            "row_program takes one gradient at a time, not is_grads_batched=True"
        )
    saved = ctx.saved_tensors
    tensors, results = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
    given = {c: g for c, g in enumerate(grads) if g is not None}
    needs = ctx.needs_grad
    if not given or not any(needs):
        return [None] * ctx.num_tensors, None, None, None
    out = row_program_backward(
        list(given.values()),
        list(given),
        list(results),
        needs,
        list(tensors),
        ctx.program,
        ctx.impl,
    )
    found = only_needed(out, needs)
    found += [None] * (ctx.num_tensors - len(found))
    return found, None, None, None


register_autograd(_lib, "row_program", _autograd, _setup_context)


def first_value(program: str, results: Sequence[Any]) -> int:
    """Returns where the program's outputs begin among the results of `row_program_sum`."""
    return len(results) - len(Program.of(program).outputs)


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.num_inputs = len(inputs[0]), len(inputs[1])
    ctx.needs_grad = list(inputs[4])
    ctx.is_needed = [x.requires_grad for x in inputs[0]]
    ctx.save_for_backward(*output[1 : first_value(inputs[2], output)])
    ctx.set_materialize_grads(False)


def _sum_autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if any(need and not had for need, had in zip(ctx.is_needed, ctx.needs_grad, strict=False)):
        raise RuntimeError(
            f"row_program_sum was called with needs_grad={ctx.needs_grad}, but its inputs need "
            "gradients: "
            f"{ctx.is_needed}"
        )
    num_tensors, num_row_tensors = ctx.num_inputs
    found: list[Tensor | None] = [None] * num_tensors
    grad = grads[0]
    if grad is not None:
        each = scaled_gradients(ctx.saved_tensors, grad, ctx.is_needed)
        found[: len(each)] = each
    return found, [None] * num_row_tensors, None, None, None, None


register_autograd(_lib, "row_program_sum", _sum_autograd, _setup_sum)
refuse_vmap(
    _lib,
    "row_program",
    "row_program_sum",
    message=(
        "vmap over row_program is not supported; its tensors have dimensions of batch and heads"
    ),
)
