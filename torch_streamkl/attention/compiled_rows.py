"""Defines the row kernel of attention for a CPU: plain torch functions of a [rows, keys] tile.

Inductor compiles them (cpu/compiled.py). They read every input from a dict of tensors, and sizes
and numbers are never literals: one compilation serves every block of a problem and every length. A
tile holds all keys of its rows. So the log-sum-exps are known before the divergence is summed, and
no row state is needed: every divergence, clamped or not, is evaluated as it is written.

`rows_forward` returns values, log-sum-exps and deltas of rows, and gradients if weights are given.
`rows_backward` computes the gradients from these rows.

NOTE [Copies]
The passes over a row need its maximum without infinities, a reciprocal and a logarithm. Each
should be computed once a row. But Inductor writes a short expression of a row into every pass that
reads it, where it is computed again for every vector of keys. A reduction is kept instead. So such
a value is computed as the largest of some equal copies. Their number is the size of an input: if
it were known, Inductor would write a reduction of few elements into the passes, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.cpu.compiled import Inputs
from torch_streamkl.divergences.row_state import without_infinity
from torch_streamkl.program.divergences import Functional

# Of the input "numbers", in this order:
NUMBERS = ("student_scale", "teacher_scale", "student_softcap", "teacher_softcap", "temperature",
           "mask_value", "outside")  # fmt: skip
# a tile of each side: exponentials of `rows_forward`, gradients of `rows_backward`
WORKSPACE = ("student_workspace", "teacher_workspace")
COPIES = 16  # elements of the input "copies", which are 1: one or two vectors


@dataclass(frozen=True)
class RowForm:
    """Identifies a compiled row kernel, with its inputs' dtypes and which inputs there are."""

    functional: str
    softcaps: tuple[bool, bool]  # of the student's and the teacher's scores
    has_temperature: bool
    fills: bool  # keys that are not allowed have a finite score
    student: bool  # gradients to the student's scores are wanted
    teacher: bool


@dataclass
class Scores:
    """Holds scores of one side, masked, and d(score)/d(dot) without scale and temperature."""

    x: Tensor
    slope: Tensor | None
    level: Tensor | None = None  # [rows, 1], of keys that are not allowed, where they are finite


@dataclass
class Softmax:
    """Holds log-probabilities, probabilities and log-sum-exp of one side."""

    log_p: Tensor
    p: Tensor
    lse: Tensor  # [rows, 1], -inf in a row without keys
    log_p_outside: Tensor | None = None  # [rows, 1], of one key outside of the tile
    rest: Tensor | None = None  # [rows, 1], what rounding has taken from the log-sum-exp


def rows_forward(form: RowForm, inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns the value, both log-sum-exps and both deltas of every row, stacked.

    Overwrites the needed gradients: the gradient of ``row_weight * value`` to the dot products
    replaces these ("s" and "t").
    """
    allowed = _allowed(inputs)
    s, t = (_scores(form, inputs, side, allowed) for side in (0, 1))
    outside = _number(inputs, "outside") if form.fills else None
    student, teacher = (
        softmax(x.x, inputs.get(f"{name}_sink"), x.level, outside, inputs["copies"], inputs[e])
        for name, x, e in zip(("student", "teacher"), (s, t), WORKSPACE, strict=True)
    )
    functional = Functional.of(form.functional)
    f, h, g = functional.terms("fhg", variables_of(student, teacher))
    if allowed is not None and not form.fills:
        f, h, g = (torch.where(allowed, x, 0.0) for x in (f, h, g))
    sums = [x.sum(-1, keepdim=True) for x in (f, h, g)]
    if form.fills:
        sums = _with_keys_outside(functional, inputs, student, teacher, sums)
    value, student_delta, teacher_delta = sums
    weight = inputs.get("row_weight")
    if weight is not None and form.student:
        d = _gradient(inputs, 0, h, student.p * student_delta, s.slope, weight, form, allowed)
        inputs["s"].copy_(d)
    if weight is not None and form.teacher:
        d = _gradient(inputs, 1, g, teacher.p * teacher_delta, t.slope, weight, form, allowed)
        inputs["t"].copy_(d)
    rows = (value, student.lse, student_delta, teacher.lse, teacher_delta)
    return (torch.cat(rows, dim=1),)


def rows_backward(form: RowForm, inputs: Inputs) -> tuple[Tensor, ...]:
    """Writes gradients to the dot products into tiles for them, from the "statistics" of
    `rows_forward`.

    In place of the dot products, Inductor cannot compile some forms of biased scores.
    """
    allowed = _allowed(inputs)
    s, t = (_scores(form, inputs, side, allowed) for side in (0, 1))
    lse_s, student_delta, lse_t, teacher_delta = inputs["statistics"].split(1, dim=1)
    logs = [x.x - without_infinity(lse) for x, lse in ((s, lse_s), (t, lse_t))]
    student, teacher = (Softmax(x, x.exp(), x) for x in logs)
    names = "h" * form.student + "g" * form.teacher
    terms = Functional.of(form.functional).terms(names, variables_of(student, teacher))
    if not form.fills:
        student_delta, teacher_delta = sums_of_terms(
            form.functional, names, terms, student_delta, teacher_delta, allowed
        )
    weight = inputs["row_weight"]
    if form.student:
        d = _gradient(
            inputs, 0, terms[0], student.p * student_delta, s.slope, weight, form, allowed
        )
        inputs[WORKSPACE[0]].copy_(d)
    if form.teacher:
        d = _gradient(
            inputs, 1, terms[-1], teacher.p * teacher_delta, t.slope, weight, form, allowed
        )
        inputs[WORKSPACE[1]].copy_(d)
    return ()


def sums_of_terms(
    functional: str,
    names: str,
    terms: list[Tensor],
    student_delta: Tensor,
    teacher_delta: Tensor,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns both deltas of these terms, which may differ from those of the forward.

    A term that jumps where two probabilities are equal, or at a clamp, may fall on the other side
    here, because the forward rounds probabilities differently.
    """
    if not Functional.of(functional).has_kinks:
        return student_delta, teacher_delta
    kept = [x if allowed is None else torch.where(allowed, x, 0.0) for x in terms]
    sums = dict(zip(names, (x.sum(-1, keepdim=True) for x in kept), strict=True))
    return sums.get("h", student_delta), sums.get("g", teacher_delta)


def variables_of(student: Softmax, teacher: Softmax) -> dict[str, Tensor]:
    """Returns the variables of a functional, by name."""
    return {"P": teacher.p, "S": student.p, "logP": teacher.log_p, "logS": student.log_p}


def _number(inputs: Inputs, name: str) -> Tensor:
    return inputs["numbers"][NUMBERS.index(name)]


def _allowed(inputs: Inputs) -> Tensor | None:
    """Returns keys that take part, [rows or 1, keys], or None for all; masks are 1 at those."""
    allowed = inputs["mask"] > 0 if "mask" in inputs else None
    j = torch.arange(inputs["s"].shape[1], dtype=torch.int32, device=inputs["s"].device)[None, :]
    for name, compare in (("first", torch.ge), ("stop", torch.lt)):
        if name in inputs:
            within = compare(j, inputs[name])
            allowed = within if allowed is None else allowed & within
    return allowed


def _scores(form: RowForm, inputs: Inputs, side: int, allowed: Tensor | None) -> Scores:
    dots, name = inputs["st"[side]], ("student", "teacher")[side]
    x, slope = dots * _number(inputs, f"{name}_scale"), None
    if form.softcaps[side]:
        x, slope = softcapped(x, _number(inputs, f"{name}_softcap"))
    bias = inputs.get(f"{name}_bias")
    if bias is not None:
        x = x + bias.to(x.dtype)
    slopes = inputs.get(f"{name}_alibi")
    if slopes is not None:
        j = torch.arange(x.shape[1], device=x.device)[None, :].to(x.dtype)
        x = x - slopes * (inputs["position"] - j).abs()
    if form.has_temperature:
        x = x / _number(inputs, "temperature")
    if allowed is None and not form.fills:
        return Scores(x, slope)
    if allowed is not None and not form.fills:
        return Scores(torch.where(allowed, x, -math.inf), slope)
    level = _number(inputs, "mask_value").expand(x.shape[0], 1)
    if f"{name}_sink" not in inputs:
        # A softmax ignores a constant, and a row of such keys only may as well have the level 0:
        # mask_value may be too large to carry the logarithm of their number.
        level = torch.where(_has_key(allowed, x), level, 0.0)
    return Scores(x if allowed is None else torch.where(allowed, x, level), slope, level)


def softcapped(x: Tensor, cap: Tensor) -> tuple[Tensor, Tensor]:
    """Computes ``cap * tanh(x / cap)``, and its derivative."""
    capped = torch.tanh(x / cap)
    return capped * cap, 1.0 - capped * capped


def _has_key(allowed: Tensor | None, x: Tensor) -> Tensor:
    if allowed is None:
        return torch.ones_like(x[:, :1], dtype=torch.bool)
    return (allowed.to(x.dtype).amax(-1, keepdim=True) > 0).expand(x.shape[0], 1)


def copied(x: Tensor, copies: Tensor | None) -> Tensor:
    """Copies a column to several equal ones, [rows, COPIES]: see NOTE [Copies]."""
    return x if copies is None else x * copies


def column(x: Tensor) -> Tensor:
    """Returns one of several equal columns, [rows, 1]."""
    return x.amax(-1, keepdim=True)


def softmax(
    x: Tensor,
    sink: Tensor | None = None,
    level: Tensor | None = None,
    outside: Tensor | None = None,
    copies: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Softmax:
    """Normalises scores. A sink adds a logit to the denominator; masked keys have one fill value.

    If there is a ``workspace``, exponentials are kept in it.
    """
    peak = x.amax(-1, keepdim=True)
    if level is not None and outside is not None:
        peak = torch.maximum(peak, torch.where(outside > 0, level, -math.inf))
    if sink is not None:
        peak = torch.maximum(peak, sink)
    bases = copied(without_infinity(peak), copies)
    base = column(bases)
    shifted = x - base
    e = shifted.exp() if workspace is None else workspace.copy_(shifted.exp())
    row_sum = e.sum(-1, keepdim=True)
    if level is not None and outside is not None:
        row_sum = row_sum + outside * (level - base).exp()
    if sink is not None:
        row_sum = row_sum + (sink - base).exp()
    row_sums = copied(row_sum, copies)
    is_empty = row_sums == 0
    log_normalizers = torch.where(is_empty, 0.0, row_sums.log())
    sums = bases + log_normalizers
    lse = column(torch.where(is_empty, -math.inf, sums))
    rest = column((bases - sums) + log_normalizers)
    log_normalizer = column(log_normalizers)
    # a probability as a quotient: the exponential of a difference would be another pass of them
    p = e * column(torch.where(is_empty, 0.0, 1.0 / row_sums))
    log_p_outside = None if level is None else level - base - log_normalizer
    return Softmax(shifted - log_normalizer, p, lse, log_p_outside, rest)


def _with_keys_outside(
    functional: Functional, inputs: Inputs, student: Softmax, teacher: Softmax, sums: list[Tensor]
) -> list[Tensor]:
    """Adds the keys that no row of the tile may see to sums: they all have one score."""
    outside = _number(inputs, "outside")
    assert student.log_p_outside is not None and teacher.log_p_outside is not None
    copies = inputs["copies"]
    s, t = (copied(x, copies) for x in (student.log_p_outside, teacher.log_p_outside))
    terms = functional.terms("fhg", {"P": t.exp(), "S": s.exp(), "logP": t, "logS": s})
    return [
        column(copied(total, copies) + torch.where(outside > 0, outside * term, 0.0))
        for total, term in zip(sums, terms, strict=True)
    ]


def _gradient(
    inputs: Inputs,
    side: int,
    term: Tensor,
    share: Tensor,
    slope: Tensor | None,
    weight: Tensor,
    form: RowForm,
    allowed: Tensor | None,
) -> Tensor:
    """Computes (term - probability * delta), times d(score)/d(dot product)."""
    factor = weight * _number(inputs, ("student_scale", "teacher_scale")[side])
    if form.has_temperature:
        factor = factor / _number(inputs, "temperature")
    d = (term - share) * factor
    if slope is not None:
        d = d * slope
    # a row that does not count adds nothing, even where its own gradient is not finite
    d = torch.where(weight == 0, 0.0, d)
    return d if allowed is None else torch.where(allowed, d, 0.0)
