"""Names a planned loss for the report."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import fx

from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.domain.layout import axes_of
from torch_streamkl.fx_passes.domain.masks import AxisExcept
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import ScoreKey, Scores
from torch_streamkl.fx_passes.domain.values import Distribution
from torch_streamkl.fx_passes.fx_utils.nodes import is_view, location_of, name_of
from torch_streamkl.fx_passes.fx_utils.sizes import is_zero
from torch_streamkl.fx_passes.fx_utils.user_names import user_name
from torch_streamkl.fx_passes.planning.dimensions import SideGeometry
from torch_streamkl.fx_passes.planning.lm_heads import limit_of_linear_kl
from torch_streamkl.fx_passes.planning.plan import Call, Plan
from torch_streamkl.fx_passes.planning.row_plan import RowPlan
from torch_streamkl.fx_passes.reporting.spoken import (
    has_exp_of_probability,
    has_log_of_log,
    is_swapped,
    spoken,
)
from torch_streamkl.fx_passes.reporting.text import shown
from torch_streamkl.program.divergences import Functional, render
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S
from torch_streamkl.program.walks import replaced

BOTH_TRAINED = ", student and teacher both need a gradient"
SWAPPED = (
    "kl_div expects log-probabilities as its input and gets probabilities: "
    "F.kl_div(input.log(), target)"
)
LOG_TARGET = (
    "NaN: it takes the logarithm of log-probabilities; kl_div expects probabilities as its "
    "target, or log_target=True"
)
NO_LOG_TARGET = (
    "it takes the exponential of probabilities; kl_div with log_target=True expects "
    "log-probabilities as its target"
)


def describe(planned: Plan) -> tuple[str, str]:
    """Returns the kind and form of a site for the report."""
    heads = all(call.is_head for call in planned.calls)
    return "linear_kl" if heads else "attention_kl", "; ".join(map(_form, planned.calls))


def _form(call: Call) -> str:
    functional = _without_condition(call)
    form = spoken(_with_swapped_sides(functional) if _is_swapped(call) else functional)
    sides = {name: x.distribution for name, x in _sides(call).items()}
    scores = {name: read(x.scores) for name, x in sides.items()}
    if call.mask.window_left is not None:
        form += ", sliding window"
    elif call.mask.window_right is not None:
        form += ", causal" if is_zero(call.mask.window_right) else ", keys up to a diagonal"
    if any(isinstance(x, AxisExcept) for x in scores["student"].mask):
        form += ", entries left out"
    if any(x.products for x in scores.values()):
        form += ", of a sum of two products"
    if call.mask.tensors:
        form += ", masked"
    for name, side in _sides(call).items():
        if side.distribution.averaged:
            form += f", {name} averaged over {_averaged_dimension(call, side)}"
    if call.mask.stricter is not None:
        names = list(sides)
        if _is_swapped(call):
            names.reverse()
        form += f", over the keys of the {names[1 - call.mask.stricter.side]}"
    if all(side.requires_grad for side in sides.values()):
        form += BOTH_TRAINED
    limit = "" if call.is_head else limit_of_linear_kl(call.geometry)
    if limit:
        form += f", as attention with one head, because linear_kl cannot {limit}"
    return form


def _sides(call: Call) -> dict[str, SideGeometry]:
    """Returns both sides by the names of the user's program: a student is trained.

    The operator's teacher is the side that is averaged over heads, trained or not.
    """
    student, teacher = call.geometry.student, call.geometry.teacher
    if _is_swapped(call):
        student, teacher = teacher, student
    return {"student": student, "teacher": teacher}


def _is_swapped(call: Call) -> bool:
    teacher = call.geometry.teacher.distribution
    return teacher.requires_grad and not call.geometry.student.distribution.requires_grad


def _with_swapped_sides(functional: Functional) -> Functional:
    other = {P: S, S: P, LOG_P: LOG_S, LOG_S: LOG_P}
    return Functional.of(render(replaced(functional.expr, other.get)))


def _averaged_dimension(call: Call, side: SideGeometry) -> str:
    """Names the dimension "heads" only if keys vary with it, and no side is an LM head."""
    axes = {p.axis for p in side.distribution.averaged}
    ranks = [x.keys.node.meta["val"].dim() for x in _sides(call).values()]
    are_heads = axes & set(axes_of(side.keys.layout)) and min(ranks) > 2
    return "heads" if are_heads else "a leading dimension"


def roles_of(planned: Plan, trace: Trace, values: Mapping[fx.Node, object]) -> str:
    """Says which scores are the student's and which the teacher's, and which need a gradient."""
    said: dict[str, None] = {}
    for call in planned.calls:
        sides = _sides(call).items()
        roles = (_role(name, x.distribution, trace, values) for name, x in sides)
        said["; ".join(roles)] = None
    return " and ".join(said)


def _role(
    name: str, distribution: Distribution, trace: Trace, values: Mapping[fx.Node, object]
) -> str:
    needs = "needs a gradient" if distribution.requires_grad else "needs no gradient"
    made = _product(distribution.scores, trace, values)
    return f"{name}: {made}, {needs}" if made else f"{name} {needs}"


def _product(key: ScoreKey, trace: Trace, values: Mapping[fx.Node, object]) -> str:
    """The user's operation that makes these scores of their two operands."""
    for node in trace.graph.nodes:
        found = values.get(node)
        if isinstance(found, Scores) and (found.key.lhs, found.key.rhs) == (key.lhs, key.rhs):
            origin = node_of(trace, node)
            if origin is not None:
                operands = " and ".join(_operand(a) for a in origin.all_input_nodes[:2])
                place = shown(location_of(origin)[0])
                return f"{name_of(origin).split('.')[-1]} of {operands} ({place})"
    return ""


def _operand(node: fx.Node) -> str:
    """The name of an argument or parameter, or of the operation that makes an operand."""
    while node.op != "placeholder" and node.all_input_nodes and is_view(node):
        node = node.all_input_nodes[0]
    if node.op != "placeholder":
        return name_of(node).split(".")[-1]
    if _VIEW_OF_OUTER.fullmatch(node.name):
        return "a view"
    return user_name(node)


# such as w.T, which a checkpointed function takes from the code around it
_VIEW_OF_OUTER = re.compile(r"(?:getattr|transpose|permute|view|reshape|t)(?:_\d+)?")


def warning_of(planned: Plan) -> str:
    """Warns of a fused loss that is probably not what was meant."""
    found = [_without_condition(call) for call in planned.calls]
    if any(map(is_swapped, found)):
        return SWAPPED
    if any(has_log_of_log(f.expr) for f in found):
        return LOG_TARGET
    return NO_LOG_TARGET if any(map(has_exp_of_probability, found)) else ""


def _without_condition(call: Call) -> Functional:
    """Removes the comparison that stands for a mask after the softmax from a divergence."""
    e = call.functional.expr
    is_conditional = call.mask.stricter is not None and e.op == "where"
    return Functional.of(render(e.args[1])) if is_conditional else call.functional


def describe_program(planned: RowPlan) -> str:
    """Returns the form of a row program."""
    products, levels = len(planned.dots), max(planned.program.levels)
    what = "the product" if products == 1 else f"{products} products"
    sizes = sorted({r.size for r in planned.program.reductions if r.size})
    keys = f"blocks of {' and '.join(map(str, sizes))} keys" if sizes else "keys"
    form = f"a sum over {keys} of {what}"
    if planned.groups.is_summed:
        are_heads = any(_has_heads(planned, i) for i in range(products))
        form += ", summed over heads" if are_heads else ", summed over a leading dimension"
    return f"{form}, {levels} passes" if levels > 1 else form


def _has_heads(planned: RowPlan, i: int) -> bool:
    """Whether both operands of a product vary along its heads: those of an LM head do not."""
    dot, heads = planned.dots[i], set(planned.groups.heads[i])
    operands = (planned.elements.operand_axes(dot, side) for side in ("lhs", "rhs"))
    return all(heads & set(axes) for axes in operands)
