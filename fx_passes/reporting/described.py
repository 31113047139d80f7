"""Names a matched loss for the report: its operator, form, sides and probable mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import fx

from torch_streamkl.fx_passes.capture.retrace import node_of
from torch_streamkl.fx_passes.closed_forms.axes import ROW_ONLY, kind_of
from torch_streamkl.fx_passes.closed_forms.form import LINEAR, Call, Product, Side, Stricter
from torch_streamkl.fx_passes.closed_forms.scores import element_of
from torch_streamkl.fx_passes.fx_utils.nodes import is_view, location_of, name_of
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.fx_utils.user_names import user_name
from torch_streamkl.fx_passes.reporting.refusals import Refusals
from torch_streamkl.fx_passes.reporting.spoken import (
    has_exp_of_probability,
    has_log_of_log,
    is_swapped,
    spoken,
)
from torch_streamkl.fx_passes.reporting.text import shown
from torch_streamkl.program.divergences import Functional, render
from torch_streamkl.program.graph import Node, constant
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S
from torch_streamkl.program.walks import replaced

BOTH_TRAINED = ", both sides need a gradient"
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
STUDENT_NAME, TEACHER_NAME = "student", "teacher"
# where both sides are trained, or none is: nothing in the program says which is the teacher
FIRST_NAME, SECOND_NAME = "P", "Q"
_REVERSED = re.compile(r"(?:skewed )?reverse|sum of S\b")
_NEUTRAL = (
    (r"\bskewed (?:forward|reverse)_kl, ", "skewed "),
    (r"\bforward_kl\b", "KL(P || S)"),
    (r"\breverse_kl\b", "KL(S || P)"),
    (r"^cross_entropy\b", "cross_entropy -P*logS"),
    (r"^reverse cross_entropy\b", "cross_entropy -S*logP"),
    (r"\bteacher clamped", "P clamped"),
    (r"\bstudent clamped", "S clamped"),
    (r"\b(log)?S\b", r"\1Q"),
)


def describe(calls: Sequence[Call]) -> tuple[str, str]:
    """Returns the kind and form of a site for the report."""
    heads = all(call.operator == LINEAR for call in calls)
    return "linear_kl" if heads else "attention_kl", "; ".join(map(_form, calls))


def _form(call: Call) -> str:
    functional = _without_condition(call)
    form = spoken(_with_swapped_sides(functional) if _is_swapped(call) else functional)
    if _is_neutral(call):
        for pattern, text in _NEUTRAL:
            form = re.sub(pattern, text, form)
    sides, masks = _sides(call), call.masks
    if masks.window_left is not None:
        form += ", sliding window"
    elif masks.window_right is not None:
        form += ", causal" if constant(masks.window_right) == 0.0 else ", keys up to a diagonal"
    if masks.vocab:
        form += ", entries left out"
    if any(side.adapters for side in sides.values()):
        form += ", of a sum of two products"
    if masks.tensors or masks.segments or masks.lengths is not None:
        form += ", masked"
    for name, side in sides.items():
        if side.averaged:
            form += f", {name} averaged over {_averaged_dimension(call)}"
    if call.stricter is not None:
        form += f", over the keys of the {_name_of_stricter(call, call.stricter)}"
    if all(side.requires_grad for side in sides.values()):
        form += BOTH_TRAINED
    limit = "" if call.operator == LINEAR else limit_of_linear_kl(call)
    if limit:
        form += f", as attention with one head, because linear_kl cannot {limit}"
    return form


def _sides(call: Call) -> dict[str, Side]:
    """Returns both sides by the names of the user's program: a student is trained.

    The operator's teacher is the side that is averaged over heads, trained or not. Where both
    sides are trained, or none is, they are the P and Q of the formula.
    """
    student, teacher = call.student, call.teacher
    if _is_swapped(call):
        student, teacher = teacher, student
    if _is_neutral(call):
        return {FIRST_NAME: teacher, SECOND_NAME: student}
    return {STUDENT_NAME: student, TEACHER_NAME: teacher}


def _is_swapped(call: Call) -> bool:
    if _is_neutral(call):  # KL(P || Q), and not KL(Q || P)
        return bool(_REVERSED.match(spoken(_without_condition(call))))
    return call.teacher.requires_grad


def _is_neutral(call: Call) -> bool:
    return call.teacher.requires_grad == call.student.requires_grad


def _with_swapped_sides(functional: Functional) -> Functional:
    other = {P: S, S: P, LOG_P: LOG_S, LOG_S: LOG_P}
    return Functional.of(render(replaced(functional.expr, other.get)))


def _name_of_stricter(call: Call, stricter: Stricter) -> str:
    side = call.sides[stricter.side]
    return next(name for name, x in _sides(call).items() if x is side)


def _averaged_dimension(call: Call) -> str:
    """Names the dimension "heads" only if no side is an LM head."""
    ranks = [len(x.product.keys.args) for x in call.sides]
    return "heads" if min(ranks) > 2 else "a leading dimension"


def _without_condition(call: Call) -> Functional:
    """Removes the comparison that stands for a mask after the softmax from a divergence."""
    if call.stricter is None:
        return call.functional
    kept = replaced(call.functional.expr, lambda x: x.args[1] if _is_condition(x) else None)
    return Functional.of(render(kept))


def _is_condition(x: Node) -> bool:
    """Whether an expression is ``where(logP > a number, ..., 0)``."""
    return (
        x.op == "where"
        and x.args[0].op == "gt"
        and x.args[0].args[0] in (LOG_P, LOG_S)
        and constant(x.args[0].args[1]) is not None
        and constant(x.args[2]) == 0.0
    )


# ------------------------------------------------------------------------ limits of linear_kl


def limit_of_linear_kl(call: Call) -> str:
    """Says what `linear_kl` cannot do for a pair of logits; empty for other scores than logits."""
    if not all(_has_vocabulary(side, call) for side in call.sides):
        return ""
    if any(side.averaged for side in call.sides):
        return "average distributions"
    rows = call.axes.rows
    if not rows:
        return ""  # one token, whose dimension has no axis
    if any(len(side.adapters) > 1 for side in call.sides):
        return "add more than two products"
    if any(kind_of(side, a) != ROW_ONLY for side in call.sides for a in rows):
        return "compare one row with several others"
    masks = call.masks
    if masks.window_left is not None or masks.window_right is not None:
        return ""  # causal, or a window: attention
    if not masks.is_empty:
        return "mask the vocabulary other than by x[..., i:j] = -inf"
    return "add this bias"


def _has_vocabulary(side: Side, call: Call) -> bool:
    """Whether the keys are a matrix of its own, as the weight of an LM head."""
    keys = side.product.keys
    return len(keys.args) == 2 and keys.axes - set(side.product.contracted) == {call.axes.key}


# ------------------------------------------------------------------------ sides


def roles_of(calls: Sequence[Call], refusals: Refusals) -> str:
    """Says which scores are the student's and which the teacher's, and which need a gradient."""
    said: dict[str, None] = {}
    for call in calls:
        roles = (_role(name, side, refusals) for name, side in _sides(call).items())
        said["; ".join(roles)] = None
    return " and ".join(said)


def _role(name: str, side: Side, refusals: Refusals) -> str:
    needs = "needs a gradient" if side.requires_grad else "needs no gradient"
    made = _product(side.product, refusals)
    return f"{name}: {made}, {needs}" if made else f"{name} {needs}"


def _product(x: Product, refusals: Refusals) -> str:
    """The user's operation that makes these scores of their two operands."""
    node = refusals.first_with(element_of(x))
    if node is None or name_of(node) not in MATMULS:
        node = next(_with_sources((x.rows, x.keys), refusals), None)
    origin = node_of(refusals.trace, node) if node is not None else None
    if origin is None:
        return ""
    operands = " and ".join(_operand(a) for a in origin.all_input_nodes[:2])
    place = shown(location_of(origin)[0])
    return f"{name_of(origin).split('.')[-1]} of {operands} ({place})"


def _with_sources(elements: Sequence[Node], refusals: Refusals) -> Iterator[fx.Node]:
    """Yields nodes with a product of the same tensors, of which the scores are a part."""
    wanted = {e.value for e in elements}
    for node in refusals.trace.graph.nodes:
        if name_of(node) not in MATMULS:
            continue
        for found in refusals.levels.products_of(node):
            if {a.value for a in found.args} == wanted:
                yield node


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
_VIEW_OF_OUTER = re.compile(r"(?:getattr|numpy_t|mt|transpose|permute|view|reshape|t)(?:_\d+)?")


def warning_of(calls: Sequence[Call]) -> str:
    """Warns of a fused loss that is probably not what was meant."""
    found = [_without_condition(call) for call in calls]
    if any(map(is_swapped, found)):
        return SWAPPED
    if any(has_log_of_log(f.expr) for f in found):
        return LOG_TARGET
    return NO_LOG_TARGET if any(map(has_exp_of_probability, found)) else ""
