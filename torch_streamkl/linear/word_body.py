"""The mathematics of whole rows of two LM heads' logits, as plain torch functions.

As attention/row_body.py for attention: Inductor compiles them, sizes and numbers are inputs. Rows
are tokens, [tokens, words] tiles of logits are overwritten by their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.attention.row_body import (
    Inputs,
    Softmax,
    softcapped,
    softmax,
    sums_of_terms,
    variables_of,
)
from torch_streamkl.divergences.functional import Functional
from torch_streamkl.divergences.row_state import without_infinity

# Of the input "numbers", in this order:
NUMBERS = ("student_scale", "teacher_scale", "student_softcap", "teacher_softcap", "temperature")


@dataclass(frozen=True)
class WordForm:
    """What a compiled body depends on, beside the dtypes of its inputs and which there are."""

    functional: str
    dtype: torch.dtype  # of what is computed
    softcaps: tuple[bool, bool]  # of the student's and the teacher's logits
    has_temperature: bool
    has_labels: bool
    student: bool  # gradients to the student's logits are wanted
    teacher: bool


@dataclass
class Words:
    """y as the hard labels see it, the score, and d(y)/d(logit)."""

    y: Tensor
    score: Tensor
    slope: Tensor


def words_forward(form: WordForm, inputs: Inputs) -> tuple[Tensor, ...]:
    """Value, both log-sum-exps, H, G, the log-sum-exp of the student's y, and what rounding has
    taken from the two first (NOTE [Rounding of log-sum-exps] in linear/problem.py), stacked.

    With "row_weight" wanted gradients replace the logits.
    """
    s, t = (_words(form, inputs, side) for side in (0, 1))
    student, teacher = softmax(s.score), softmax(t.score)
    f, h, g = Functional.of(form.functional).terms("fhg", variables_of(student, teacher))
    value, h_sum, g_sum = (x.sum(-1, keepdim=True) for x in (f, h, g))
    hard = softmax(s.y) if form.has_labels and form.has_temperature else student
    if "row_weight" in inputs and form.student:
        _store_student(form, inputs, h - student.p * h_sum, hard.p, s)
    if "row_weight" in inputs and form.teacher:
        _store_teacher(form, inputs, g - teacher.p * g_sum, t)
    assert student.rest is not None and teacher.rest is not None
    lses = (student.lse, teacher.lse, h_sum, g_sum, hard.lse, student.rest, teacher.rest)
    return (torch.cat((value, *lses), dim=1),)


def words_backward(form: WordForm, inputs: Inputs) -> tuple[Tensor, ...]:
    """Overwrites logits by their gradients, from the "statistics" of `words_forward`."""
    s, t = (_words(form, inputs, side) for side in (0, 1))
    lse_s, lse_t, h_sum, g_sum, lse_y, rest_s, rest_t = inputs["statistics"].split(1, dim=1)
    logs = [
        (x.score - without_infinity(lse)) - rest
        for x, lse, rest in ((s, lse_s, rest_s), (t, lse_t, rest_t))
    ]
    student, teacher = (Softmax(x, x.exp(), x) for x in logs)
    names = "h" * form.student + "g" * form.teacher
    terms = Functional.of(form.functional).terms(names, variables_of(student, teacher))
    h_sum, g_sum = sums_of_terms(form.functional, names, terms, h_sum, g_sum)
    if form.student:
        p = (s.y - lse_y).exp() if form.has_labels and form.has_temperature else student.p
        _store_student(form, inputs, terms[0] - student.p * h_sum, p, s)
    if form.teacher:
        _store_teacher(form, inputs, terms[-1] - teacher.p * g_sum, t)
    return ()


def _number(inputs: Inputs, name: str) -> Tensor:
    return inputs["numbers"][NUMBERS.index(name)]


def _words(form: WordForm, inputs: Inputs, side: int) -> Words:
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
    return Words(y, score, slope)


def _store_student(form: WordForm, inputs: Inputs, d: Tensor, p: Tensor, s: Words) -> None:
    d = _weighted(form, inputs, d)
    if form.has_labels:
        j = torch.arange(p.shape[1], device=p.device)[None, :]
        weight = inputs["hard_weight"]
        d = d + _counted(p - (j == inputs["label"]).to(p.dtype), weight)
    inputs["s"].copy_(d * s.slope)


def _store_teacher(form: WordForm, inputs: Inputs, d: Tensor, t: Words) -> None:
    inputs["t"].copy_(_weighted(form, inputs, d) * t.slope)


def _weighted(form: WordForm, inputs: Inputs, d: Tensor) -> Tensor:
    d = _counted(d, inputs["row_weight"])
    return d / _number(inputs, "temperature") if form.has_temperature else d


def _counted(d: Tensor, weight: Tensor) -> Tensor:
    # a row that does not count adds nothing, even where its own gradient is not finite
    return torch.where(weight == 0, 0.0, d * weight)
