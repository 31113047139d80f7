"""Defines the row kernel of two LM heads' logits, as plain torch functions that Inductor compiles.

It is to LM heads what attention/compiled_rows.py is to attention: sizes and numbers are inputs.
Rows are tokens, and gradients overwrite the [tokens, vocab] tiles of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.attention.compiled_rows import (
    Softmax,
    softcapped,
    softmax,
    sums_of_terms,
    variables_of,
)
from torch_streamkl.cpu.compiled import Inputs
from torch_streamkl.divergences.row_state import without_infinity
from torch_streamkl.program.divergences import Functional

# Of the input "numbers", in this order:
NUMBERS = ("student_scale", "teacher_scale", "student_softcap", "teacher_softcap", "temperature")


@dataclass(frozen=True)
class VocabForm:
    """Identifies a compiled row kernel, with its inputs' dtypes and which inputs there are."""

    functional: str
    dtype: torch.dtype  # of what is computed
    softcaps: tuple[bool, bool]  # of the student's and the teacher's logits
    has_temperature: bool
    has_labels: bool
    student: bool  # gradients to the student's logits are wanted
    teacher: bool


@dataclass
class VocabTile:
    """Holds y as the labels see it, the score, and d(y)/d(logit)."""

    y: Tensor
    score: Tensor
    slope: Tensor


def vocab_forward(form: VocabForm, inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns the value, both log-sum-exps, both deltas, and the log-sum-exp of the student's y.

    It stacks them with the rounding errors of the first two log-sum-exps (NOTE [Rounding of
    log-sum-exps] in linear/problem.py).
    """
    s, t = (_vocab(form, inputs, side) for side in (0, 1))
    student, teacher = softmax(s.score), softmax(t.score)
    f, h, g = Functional.of(form.functional).terms("fhg", variables_of(student, teacher))
    value, student_delta, teacher_delta = (x.sum(-1, keepdim=True) for x in (f, h, g))
    hard = softmax(s.y) if form.has_labels and form.has_temperature else student
    if "row_weight" in inputs and form.student:
        _store_student(form, inputs, h - student.p * student_delta, hard.p, s)
    if "row_weight" in inputs and form.teacher:
        _store_teacher(form, inputs, g - teacher.p * teacher_delta, t)
    assert student.rest is not None and teacher.rest is not None
    lses = (
        student.lse,
        teacher.lse,
        student_delta,
        teacher_delta,
        hard.lse,
        student.rest,
        teacher.rest,
    )
    return (torch.cat((value, *lses), dim=1),)


def vocab_backward(form: VocabForm, inputs: Inputs) -> tuple[Tensor, ...]:
    """Overwrites logits by their gradients, from the "statistics" of `vocab_forward`."""
    s, t = (_vocab(form, inputs, side) for side in (0, 1))
    lse_s, lse_t, student_delta, teacher_delta, lse_y, rest_s, rest_t = inputs["statistics"].split(
        1, dim=1
    )
    logs = [
        (x.score - without_infinity(lse)) - rest
        for x, lse, rest in ((s, lse_s, rest_s), (t, lse_t, rest_t))
    ]
    student, teacher = (Softmax(x, x.exp(), x) for x in logs)
    names = "h" * form.student + "g" * form.teacher
    terms = Functional.of(form.functional).terms(names, variables_of(student, teacher))
    student_delta, teacher_delta = sums_of_terms(
        form.functional, names, terms, student_delta, teacher_delta
    )
    if form.student:
        p = (s.y - lse_y).exp() if form.has_labels and form.has_temperature else student.p
        _store_student(form, inputs, terms[0] - student.p * student_delta, p, s)
    if form.teacher:
        _store_teacher(form, inputs, terms[-1] - teacher.p * teacher_delta, t)
    return ()


def _number(inputs: Inputs, name: str) -> Tensor:
    return inputs["numbers"][NUMBERS.index(name)]


def _vocab(form: VocabForm, inputs: Inputs, side: int) -> VocabTile:
    name = ("student", "teacher")[side]
    y, slope = inputs["st"[side]].to(form.dtype), _number(inputs, f"{name}_scale")
    bias = inputs.get(f"{name}_bias")
    if bias is not None:
        y = y + bias.to(form.dtype)
    y = y * slope
    if form.softcaps[side]:
        y, derivative = softcapped(y, _number(inputs, f"{name}_softcap"))
        slope = slope * derivative
    score = y / _number(inputs, "temperature") if form.has_temperature else y
    return VocabTile(y, score, slope)


def _store_student(form: VocabForm, inputs: Inputs, d: Tensor, p: Tensor, s: VocabTile) -> None:
    d = _weighted(form, inputs, d)
    if form.has_labels:
        j = torch.arange(p.shape[1], device=p.device)[None, :]
        weight = inputs["hard_weight"]
        d = d + _counted(p - (j == inputs["label"]).to(p.dtype), weight)
    inputs["s"].copy_(d * s.slope)


def _store_teacher(form: VocabForm, inputs: Inputs, d: Tensor, t: VocabTile) -> None:
    inputs["t"].copy_(_weighted(form, inputs, d) * t.slope)


def _weighted(form: VocabForm, inputs: Inputs, d: Tensor) -> Tensor:
    d = _counted(d, inputs["row_weight"])
    return d / _number(inputs, "temperature") if form.has_temperature else d


def _counted(d: Tensor, weight: Tensor) -> Tensor:
    # a row that does not count adds nothing, even where its own gradient is not finite
    return torch.where(weight == 0, 0.0, d * weight)
