"""Describes row programs in a report."""

from __future__ import annotations

from torch_streamkl.fx_passes.planning.row_plan import ProgramPlan, RowOutput
from torch_streamkl.program.graph import ARGMAX, BLOCK_SUM, LOGSUMEXP, MAX, SUM

MAXIMA = {ARGMAX: "the place of a maximum", MAX: "a maximum"}
# what a result is called whose program returns such values, the first that there is
REDUCTIONS = {SUM: "a sum", BLOCK_SUM: "a sum", **MAXIMA, LOGSUMEXP: "a log-sum-exp"}


def operator_of(plan: ProgramPlan, output: RowOutput) -> str:
    """Returns the operator that computes a result; one of rows comes before those of entries."""
    if _kinds_of(plan, output):
        return "row_program"
    return "entry_log_probs" if plan.form.chosen else "entry_logits"


def describe_program(plan: ProgramPlan, output: RowOutput) -> str:
    """Returns the form of one result of a row program."""
    form, products = plan.form, len(plan.form.products)
    if form.program is None or not _kinds_of(plan, output):
        return "of a product at given ids"
    levels = max(form.program.levels)
    what = "the product" if products == 1 else f"{products} products"
    sizes = sorted({r.size for r in form.program.reductions if r.size})
    keys = f"blocks of {' and '.join(map(str, sizes))} keys" if sizes else "keys"
    text = f"{_reduction_of(plan, output)} over {keys} of {what}"
    if form.axes.is_summed:
        are_heads = any(
            set(heads) & p.rows.axes and set(heads) & p.keys.axes
            for p, heads in zip(form.products, form.axes.heads, strict=True)
        )
        text += ", summed over heads" if are_heads else ", summed over a leading dimension"
    text += f", {levels} passes" if levels > 1 else ""
    is_beside = any(c.scale is not None for c in form.chosen)
    return f"{text}, and entry_log_probs" if is_beside else text


def is_maximum(plan: ProgramPlan, output: RowOutput) -> bool:
    """Returns whether a result is a maximum or its place, which no gradient flows through."""
    return _reduction_of(plan, output) in MAXIMA.values()


def _reduction_of(plan: ProgramPlan, output: RowOutput) -> str:
    """Names what a result is over the keys."""
    kinds = _kinds_of(plan, output)
    return next((name for kind, name in REDUCTIONS.items() if kind in kinds), "a sum")


def _kinds_of(plan: ProgramPlan, output: RowOutput) -> set[str]:
    return plan.form.kinds_of_root(plan.outputs.index(output))
