"""The torch.library operators of row programs: schemas, fakes, autograd, FLOP formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_streamkl.launches.devices import require_driver
from torch_streamkl.registration import NAMESPACE, register, register_no_double_backward
from torch_streamkl.rows import blocked, closed, named
from torch_streamkl.rows.problem import RowProblem

_lib = Library(NAMESPACE, "FRAGMENT")

# The tensors are those of `Program.tensor_names`. What comes back are all reductions, the two
# parts of each log-sum-exp, then the Jacobians and maps that the backward reads; outputs are among
# the reductions. Of a divergence they are what named.py says.
_lib.define(
    "row_program(Tensor[] tensors, str program, bool is_differentiated, str impl) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_lib.define(
    "row_program_backward(Tensor[] grads, int[] grad_of, Tensor[] saved, bool[] wanted, "
    "Tensor[] tensors, str program, str impl) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
row_program = torch.ops.torch_streamkl.row_program.default
row_program_backward = torch.ops.torch_streamkl.row_program_backward.default
IMPLEMENTATIONS = ("auto", "triton", "blocked", "reference")
CLOSED = "closed"


def _module(problem: RowProblem, impl: str, is_differentiated: bool) -> Any:
    """What computes a problem; an explicit choice that cannot run is an error.

    A fake call asks, too: results differ.
    """
    if impl == "auto":
        impl = _automatic(problem, is_differentiated)
    if impl == CLOSED:
        return named
    if impl != "triton":
        return blocked
    module, why = _kernels(problem, is_differentiated)
    if why:
        raise NotImplementedError(f"impl='triton' cannot run this program: {why}; use 'blocked'")
    return module


def _ready(problem: RowProblem, impl: str, is_differentiated: bool) -> Any:
    """The same, to be run."""
    module = _module(problem, impl, is_differentiated)
    is_compiled = module is not blocked and module is not named
    if is_compiled and problem.operands[0][0].device.type == "cuda":
        require_driver()
    return module


def _kernels(problem: RowProblem, is_differentiated: bool) -> tuple[Any, str]:
    """The kernels that run a problem, or why there are none.

    Dot products are computed where they are used if nothing needs them in memory.
    """
    from torch_streamkl.rows.triton import blocks as row_blocks
    from torch_streamkl.rows.triton import launches as row_kernels

    if not row_kernels.obstacle(problem, is_differentiated):
        return row_kernels, ""
    return row_blocks, row_blocks.obstacle(problem, is_differentiated)


def _automatic(problem: RowProblem, is_differentiated: bool) -> str:
    """What computes divergences; on a GPU kernels, elsewhere blocks in plain torch."""
    if closed.form_of(problem) is not None:
        return CLOSED
    if problem.operands[0][0].device.type != "cuda":
        return "blocked"
    return "blocked" if _kernels(problem, is_differentiated)[1] else "triton"


def chosen(tensors: Sequence[Tensor], program: str, is_differentiated: bool, impl: str) -> str:
    """The implementation that a call's arguments lead to."""
    if impl != "auto":
        return impl
    return _automatic(RowProblem.of(program, tensors), is_differentiated)


def _forward(
    tensors: Sequence[Tensor], program: str, is_differentiated: bool, impl: str
) -> list[Tensor]:
    problem = RowProblem.of(program, tensors)
    result = _ready(problem, impl, is_differentiated).forward(problem, is_differentiated)
    flat: list[Tensor] = result.flat
    return flat


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
    wanted: Sequence[bool],
    tensors: Sequence[Tensor],
    program: str,
    impl: str,
) -> list[Tensor]:
    problem = RowProblem.of(program, tensors)
    module = _ready(problem, impl, True)
    result = saved if module is named else blocked.Result.of(problem.program, saved)
    given = dict(zip(grad_of, grads, strict=True))
    out = module.backward(problem, result, [given.get(c) for c in problem.program.outputs], wanted)
    return [tensors[0].new_empty(0) if g is None else g for g in out]


def _backward_fake(
    grads: Sequence[Tensor],
    grad_of: Sequence[int],
    saved: Sequence[Tensor],
    wanted: Sequence[bool],
    tensors: Sequence[Tensor],
    program: str,
    impl: str,
) -> list[Tensor]:
    problem = RowProblem.of(program, tensors)  # lengths and a mask come last, without gradients
    given = tensors[: 2 * len(problem.operands) + len(problem.captures)]
    return [
        x.new_empty(x.shape) if need else tensors[0].new_empty(0)
        for x, need in zip(given, wanted, strict=False)
    ]


def _matmul_flops(shapes: Sequence[Any], dot: int) -> int:
    batch, heads, rows, dim = shapes[2 * dot]
    return int(2 * batch * heads * rows * shapes[2 * dot + 1][2] * dim)


def _forward_flops(shapes: Any, program: str, *_: Any, **__: Any) -> int:
    """One matmul for each dot and level; masks are not counted."""
    problem = RowProblem.of(program, shapes).program
    dots = range(len(problem.dot_heads))
    return max(problem.levels) * sum(_matmul_flops(shapes, i) for i in dots)


def _backward_flops(
    _grads: Any, _of: Any, _saved: Any, wanted: Any, shapes: Any, program: str, *_: Any, **__: Any
) -> int:
    """The recomputed dots and one matmul for each gradient."""
    dots = range(len(RowProblem.of(program, shapes).program.dot_heads))
    return sum(_matmul_flops(shapes, i) * (1 + wanted[2 * i] + wanted[2 * i + 1]) for i in dots)


register(_lib, "row_program", _forward, _forward_fake, _forward_flops)
register(_lib, "row_program_backward", _backward, _backward_fake, _backward_flops)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.program = inputs[0], inputs[1]
    ctx.impl = inputs[3]
    ctx.num_tensors = len(tensors)
    ctx.wanted = [x.requires_grad for x in tensors]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, results = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
    given = {c: g for c, g in enumerate(grads) if g is not None}
    needs = ctx.wanted
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
    found = [g if need else None for g, need in zip(out, needs, strict=False)]
    found += [None] * (ctx.num_tensors - len(found))
    return found, None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::row_program", _autograd, setup_context=_setup_context, lib=_lib
)
register_no_double_backward(_lib, "row_program")
