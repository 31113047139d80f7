"""Computes row programs that are divergences by the operators of `attention_kl` and `linear_kl`.

Results are the program's three reductions, by number. The operators' own statistics, in their
shapes and units, replace the log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_streamkl.attention import ops as attention_ops
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.rows import losses, tile
from torch_streamkl.rows.closed import ClosedForm, form_of
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem

OPERANDS_OF_VOCAB = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")


@dataclass
class Values:
    """Holds the operator's results."""

    flat: list[Tensor]


def _form(problem: RowProblem) -> ClosedForm:
    form = form_of(problem)
    assert form is not None
    return form


def _arguments(problem: RowProblem, form: ClosedForm) -> dict[str, Any]:
    student, teacher = (problem.operands[s.dot] for s in (form.student, form.teacher))
    common = {
        "functional": form.functional,
        "student_scale": form.student.scale,
        "teacher_scale": form.teacher.scale,
    }
    if problem.is_of_vocab:
        operands = (x.select(0, 0).select(0, 0) for x in (*student, *teacher))
        return common | dict(zip(OPERANDS_OF_VOCAB, operands, strict=True))
    names = ("student_q", "student_k", "teacher_q", "teacher_k")
    keys = problem.program.keys
    masks = {
        "mask": problem.mask,
        "key_lengths": problem.lengths,
        "window_left": keys.left,
        "window_right": keys.right,
    }
    return common | masks | dict(zip(names, (*student, *teacher), strict=True))


def _values(
    problem: RowProblem, form: ClosedForm, value: Tensor, first: Tensor, second: Tensor
) -> Values:
    """Orders the operator's results by the number of their reduction."""
    if problem.is_of_vocab:
        value, first, second = value.view(1, 1, -1), second, first
    places = {form.student.normaliser: first, form.teacher.normaliser: second}
    return Values([places.get(number, value) for number in range(3)])


def allocate(problem: RowProblem, is_differentiated: bool) -> Values:
    """Allocates results, uninitialised."""
    form = _form(problem)
    ops = linear_ops if problem.is_of_vocab else attention_ops
    return _values(problem, form, *ops.allocated(**_arguments(problem, form)))


def forward(problem: RowProblem, is_differentiated: bool) -> Values:
    """Computes a program's reductions by the operator of its divergence."""
    form = _form(problem)
    ops = linear_ops if problem.is_of_vocab else attention_ops
    return _values(problem, form, *ops.run_forward(**_arguments(problem, form)))


def backward(
    problem: RowProblem,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Returns gradients to the operands, 0 to those of a side that is detached.

    And to tensors that the program has and does not read.
    """
    form = _form(problem)
    (grad,) = grads
    rest = zip(needs_grad[4:], problem.captures, strict=False)
    out: list[Tensor | None] = [None] * 4
    out += [x.new_zeros(x.shape) if is_needed else None for is_needed, x in rest]
    places = [(s, i) for s in (form.student, form.teacher) for i in (0, 1)]
    flags = []
    for s, i in places:
        is_needed = needs_grad[2 * s.dot + i]
        flags.append(is_needed and not s.is_detached and grad is not None)
        if is_needed and not flags[-1]:
            x = problem.operands[s.dot][i]
            out[2 * s.dot + i] = x.new_zeros(x.shape)
    if grad is not None and any(flags):
        found = _gradients(problem, form, saved, grad, flags)
        for (s, i), flag, gradient in zip(places, flags, found, strict=False):
            if flag:
                assert gradient is not None
                out[2 * s.dot + i] = gradient.view(problem.operands[s.dot][i].shape)
    return out


def loss_and_gradients(
    problem: RowProblem, loss: RowLoss, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
) -> losses.LossResult:
    """Computes what each row adds to a loss that is linear in the divergence of LM heads, and
    gradients.
    """
    form, at = _form(problem), tile.whole(problem)
    (output,) = problem.program.outputs
    nothing = {output: problem.like.new_empty(0)}
    weight = losses.gradients(problem, loss, nothing, tensors, at)[output].reshape(-1)
    places = [(s, i) for s in (form.student, form.teacher) for i in (0, 1)]
    flags = [needs_grad[2 * s.dot + i] and not s.is_detached for s, i in places]
    arguments = _arguments(problem, form)
    tensors_of = [arguments.pop(name) for name in OPERANDS_OF_VOCAB] + [None] * 3
    every = linear_ops.run_sum(
        *tensors_of, row_weight=weight, needs_grad=[*flags, False, False], **arguments
    )
    out: list[Tensor | None] = [
        x.new_zeros(x.shape) if need else None
        for x, need in zip(problem.differentiable, needs_grad, strict=False)
    ]
    for (s, i), flag, gradient in zip(places, flags, every[3:], strict=False):
        if flag:
            n = 2 * s.dot + i
            out[n] = gradient.view(problem.operands[s.dot][i].shape)
    return losses.result_of(problem, loss, {output: every[1].view(1, 1, -1)}, tensors, out)


def _gradients(
    problem: RowProblem,
    form: ClosedForm,
    saved: Sequence[Tensor],
    grad: Tensor,
    flags: list[bool],
) -> Sequence[Tensor | None]:
    """Returns gradients to the operands of the student, then of the teacher."""
    arguments = _arguments(problem, form)
    student = saved[form.student.normaliser]
    if problem.is_of_vocab:
        rows = grad.reshape(-1)
        return linear_ops.run_backward(rows, None, student, [*flags, False, False], **arguments)
    teacher = saved[form.teacher.normaliser]
    return attention_ops.needs_grads(grad, student, teacher, flags, **arguments)
