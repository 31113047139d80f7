"""Computes the rows of linear/rows.py in compiled graphs on a CPU: a few rows at a time.

Both sides must have the same vocabulary entries. Otherwise, and if Inductor cannot compile,
linear/rows.py computes the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_streamkl.cpu import compiled
from torch_streamkl.cpu.compiled import Described
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.compiled_rows import VocabForm, vocab_backward, vocab_forward
from torch_streamkl.linear.problem import (
    NO_WEIGHTS,
    NOTHING,
    LinearProblem,
    NeedsGrad,
    RowValues,
    RowWeights,
)
from torch_streamkl.runtime.workspace import ranges

BLOCK_ELEMENTS = 2**18  # logits of one side: with exponentials four tiles, in the cores' caches


def values(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    out: RowValues,
    weights: RowWeights = NO_WEIGHTS,
    needs_grad: NeedsGrad = NOTHING,
) -> None:
    """Computes values, statistics and gradients as the function of linear/rows.py."""
    if not _forward(problem, student, teacher, out, weights, needs_grad):
        linear_rows.values(problem, student, teacher, out, weights, needs_grad)


def gradient(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    rows: RowValues,
    weights: RowWeights,
    needs_grad: NeedsGrad,
) -> None:
    """Overwrites logits by their gradients; the teacher's only if it needs one."""
    form, numbers = _form(problem, needs_grad), _numbers(problem)
    for part, s, t in _parts(problem, student, teacher):
        inputs = _inputs(problem.of_tokens(part), s, t, numbers) | _weights(problem, weights, part)
        inputs["statistics"] = (rows.statistics[:, part].t(), "r7")
        run = compiled.find(vocab_backward, form, inputs) if is_even(problem) else None
        if run is None:
            linear_rows.gradient(problem, student, teacher, rows, weights, needs_grad)
            return
        run(_contiguous(inputs))


def _forward(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    out: RowValues,
    weights: RowWeights,
    needs_grad: NeedsGrad,
) -> bool:
    """Computes the forward, or returns False and changes nothing."""
    if not is_even(problem):
        return False
    label_y = None
    if problem.labels is not None:  # before gradients replace the logits
        label_y = linear_rows.label_scores(problem, student, problem.compute_dtype)
    form, numbers = _form(problem, needs_grad), _numbers(problem)
    for part, s, t in _parts(problem, student, teacher):
        inputs = _inputs(problem.of_tokens(part), s, t, numbers)
        if needs_grad.any:
            inputs |= _weights(problem, weights, part)
        run = compiled.find(vocab_forward, form, inputs)
        if run is None:
            return False
        (found,) = run(_contiguous(inputs))
        out.value[part] = found[:, 0]
        out.statistics[:, part] = found[:, 1:].t()
    if label_y is not None:
        out.hard.copy_(linear_rows.hard_values(problem, label_y, out.hard_lse))
    else:
        out.hard_lse.zero_()
    return True


def is_even(problem: LinearProblem) -> bool:
    """Whether compiled rows can compute it: both sides have the same vocabulary entries."""
    return problem.student.vocab_size == problem.teacher.vocab_size > 0


def _parts(
    problem: LinearProblem, student: Tensor, teacher: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    threads = torch.get_num_threads()
    step = max(BLOCK_ELEMENTS // student.shape[1], 4 * threads)
    for part in ranges(problem.num_tokens, step - step % threads):
        yield part, student[part], teacher[part]


def _form(problem: LinearProblem, needs_grad: NeedsGrad) -> VocabForm:
    return VocabForm(
        functional=problem.functional.text,
        dtype=problem.compute_dtype,
        softcaps=(bool(problem.student.softcap), bool(problem.teacher.softcap)),
        has_temperature=problem.temperature != 1.0,
        has_labels=problem.labels is not None,
        student=needs_grad.student,
        teacher=needs_grad.teacher,
    )


def _numbers(problem: LinearProblem) -> Tensor:
    student, teacher = problem.heads
    values = (student.scale, teacher.scale, student.softcap, teacher.softcap, problem.temperature)
    return torch.tensor(values, dtype=problem.compute_dtype, device="cpu")


def _inputs(
    problem: LinearProblem, student: Tensor, teacher: Tensor, numbers: Tensor
) -> Described:
    inputs: Described = {"s": (student, "rp"), "t": (teacher, "rp"), "numbers": (numbers, "n")}
    for name, head in (("student", problem.student), ("teacher", problem.teacher)):
        if head.bias is not None:
            inputs[f"{name}_bias"] = (head.bias[None, :], "1k")
    if problem.labels is not None:
        labels = problem.labels.long() - problem.vocab_start
        inputs["label"] = (labels[:, None], "r1")
    return inputs


def _weights(problem: LinearProblem, weights: RowWeights, part: slice) -> Described:
    """Returns factors of the rows' gradients, 0 for rows that do not count."""
    zero = torch.zeros(problem.num_tokens, dtype=problem.compute_dtype, device="cpu")
    value = zero if weights.value is None else weights.value
    inputs: Described = {"row_weight": (value[part, None], "r1")}
    if problem.labels is not None:
        hard = zero if weights.hard is None else weights.hard
        hard = torch.where(problem.is_labelled(), hard, 0.0)
        inputs["hard_weight"] = (hard[part, None], "r1")
    return inputs


def _contiguous(inputs: Described) -> list[Tensor]:
    return [x if spec == "rp" else x.contiguous() for x, spec in inputs.values()]
