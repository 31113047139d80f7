"""What a planned site is called in the report."""

from __future__ import annotations

import math

from torch_streamkl.divergences.functional import DIVERGENCES, Functional, named, render
from torch_streamkl.fx_passes.domain.masks import AxisExcept
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.fx_utils.sizes import is_zero
from torch_streamkl.fx_passes.planning.plan import Call, Plan
from torch_streamkl.fx_passes.planning.row_plan import RowPlan


def describe(planned: Plan) -> tuple[str, str]:
    """Kind and form of a site for the report."""
    forms = []
    for call in planned.calls:
        form = _spoken(_without_condition(call))
        student = read(call.geometry.student.distribution.scores)
        if call.mask.window_left is not None:
            form += ", sliding window"
        elif call.mask.window_right is not None:
            form += ", causal" if is_zero(call.mask.window_right) else ", keys up to a diagonal"
        if any(isinstance(x, AxisExcept) for x in student.mask):
            form += ", words left out"
        if student.products or read(call.geometry.teacher.distribution.scores).products:
            form += ", with an adapter"
        if call.mask.tensors:
            form += ", masked"
        if call.geometry.teacher.distribution.averaged:
            form += ", teacher averaged over heads"
        if call.mask.stricter is not None:
            form += f", over the keys of the {('teacher', 'student')[call.mask.stricter.side]}"
        forms.append(form)
    heads = all(call.is_head for call in planned.calls)
    return "linear_kl" if heads else "attention_kl", "; ".join(forms)


def _without_condition(call: Call) -> Functional:
    """The divergence without the comparison that stands for a mask after the softmax."""
    e = call.functional.expr
    is_conditional = call.mask.stricter is not None and e.op == "where"
    return Functional.of(render(e.args[1])) if is_conditional else call.functional


def _spoken(functional: Functional) -> str:
    """A divergence by its name where it has one, else as the expression that is computed."""
    guarded = functional.guarded
    for name, text in DIVERGENCES.items():
        known = Functional.of(text)
        if known == functional:
            return name
        if guarded is not None and guarded.form == known.bilinear:
            floors = {"teacher": guarded.teacher_floor, "student": guarded.student_floor}
            used = {k: math.exp(v) for k, v in floors.items() if v > -math.inf}
            clamps = [f"{side} clamped at {least:.3g}" for side, least in used.items()]
            return ", ".join([name, *clamps])
    return "js" if functional == named("js") else functional.text


def describe_program(planned: RowPlan) -> str:
    """The form of a row program."""
    products, levels = len(planned.dots), max(planned.program.levels)
    what = "the product" if products == 1 else f"{products} products"
    sizes = sorted({r.size for r in planned.program.reductions if r.size})
    keys = f"blocks of {' and '.join(map(str, sizes))} keys" if sizes else "keys"
    form = f"a sum over {keys} of {what}"
    if planned.groups.is_summed:
        form += ", summed over heads"
    return f"{form}, {levels} passes" if levels > 1 else form
