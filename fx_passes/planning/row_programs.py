"""Chooses which sums over keys become row programs, and which of them one program computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.elements.algebra import is_block_level, is_row_level
from torch_streamkl.fx_passes.analysis.elements.reading import FormulaInterpreter
from torch_streamkl.fx_passes.capture.region import MATMULS, Region
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.masks import AxisTensor
from torch_streamkl.fx_passes.domain.row_elements import (
    Formula,
    formulas_in,
)
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import autograd_modes
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, example, name_of
from torch_streamkl.fx_passes.planning.candidates import Candidate
from torch_streamkl.fx_passes.planning.profitability import why_program_is_left, why_small
from torch_streamkl.fx_passes.planning.row_plan import RowPlan, plan_program
from torch_streamkl.fx_passes.planning.row_readers import why_kept

SUMS = {
    "sum", "mean", "logsumexp", "kl_div", "mse_loss", "l1_loss", "cross_entropy_loss",
    "linalg_vector_norm",
}  # fmt: skip
WITH_LABELS = {"cross_entropy_loss"}


def may_have_programs(trace: Trace) -> bool:
    """Returns whether there are a product and a sum at all."""
    names = {name_of(n) for n in trace.graph.nodes if n.op == "call_function"}
    return bool(names & MATMULS) and bool(names & SUMS)


def find_programs(
    elements: FormulaInterpreter,
    trace: Trace,
    region: Region,
    handled: set[fx.Node],
) -> list[RowPlan]:
    """Returns the programs of a region that leave none of their products to other code.

    ``handled`` are nodes that other operators compute already.
    """
    plans: list[RowPlan] = []
    users_graph = region.nodes[0].graph
    position = {n: i for i, n in enumerate(users_graph.nodes)}
    for root in find_roots(elements, trace, region):
        if root in handled:
            continue
        try:
            alone = plan_program([root], elements, trace)
        except Unsupported as blocked:
            elements.reasons[root] = str(blocked)
            continue
        for i, plan in enumerate(plans):
            joined = _joined(plan, root, elements, trace, position)
            if joined is not None:
                plans[i] = joined
                break
        else:
            plans.append(alone)
    _merge(plans, elements, trace, position)
    replaced = {o.node for plan in plans for o in plan.outputs}
    fused = (trace.outer[n] for n in handled if n in trace.outer)
    replaced |= {node for node in fused if not node.users}
    found = []
    for plan in plans:
        reason = why_small(plan) or why_kept(plan, elements, trace, region, replaced)
        for output in plan.outputs if reason else ():
            elements.reasons[output.inner] = reason
        if not reason:
            found.append(plan)
    return found


def needs_no_mask(candidate: Candidate, elements: FormulaInterpreter) -> bool:
    """Returns whether a divergence with a dense mask or bias is also a program that reads ids."""
    whole = elements.placed.get(candidate.inner)
    if whole is None or whole.formula.op != "reduce":
        return False
    parts = candidate.plan.rows.elements.parts
    forms = [read(part.scores) for part in parts]
    nodes = {b.tensor.node for f in forms for b in (*f.biases, *f.inner_biases)}
    nodes |= {x.node for f in forms for x in f.mask if isinstance(x, AxisTensor)}
    return any(
        f.op == "columns"
        for node in nodes
        if node in elements.placed
        for f in formulas_in(elements.placed[node].formula)
    )


def sharing_products(
    candidates: Sequence[Candidate],
    elements: FormulaInterpreter,
    trace: Trace,
    region: Region,
    min_mib: float | None,
) -> list[Candidate]:
    """Returns divergences of LM heads that one row program computes with other sums.

    Those read the same products, such as entropies next to a divergence. The program makes each
    product once. A cross-entropy with labels is no such sum: `linear_kl` computes it, too.
    """
    every = [c for c in candidates if all(call.is_head for call in c.plan.calls)]
    roots = {r for r in find_roots(elements, trace, region) if name_of(r) not in WITH_LABELS}
    found = [c for c in every if c.inner in roots]
    if not found or len(roots) < 2:
        return []
    plans = find_programs(elements, trace, region, set())
    return [c for c in found if any(_is_joined(c, plan, roots, min_mib) for plan in plans)]


def _is_joined(
    candidate: Candidate, plan: RowPlan, roots: set[fx.Node], min_mib: float | None
) -> bool:
    outputs = [o.inner for o in plan.outputs]
    value = example(candidate.node)
    assert isinstance(value, Tensor)
    is_whole = candidate.inner in outputs and len(outputs) > 1 and set(outputs) <= roots
    return is_whole and not why_program_is_left(plan, value.device.type, min_mib)


def find_roots(elements: FormulaInterpreter, trace: Trace, region: Region) -> list[fx.Node]:
    """Sums over keys that code outside of the elements reads.

    A sum inside of one of the user's operations, such as a norm, is no value of the graph: the
    first one that is computed from it is.
    """
    inside = set(region.nodes)
    mapped = set(trace.outer.values()) | set(trace.origin.values())
    roots = []
    hidden: set[Formula] = set()
    read = _read_outside(elements, trace, inside, mapped)

    for node, placed in elements.placed.items():
        if not is_row_level(placed, elements.axes) and not is_block_level(placed, elements.axes):
            continue
        inputs = [elements.placed[a].formula for a in node.all_input_nodes if a in elements.placed]
        is_sum = placed.formula.op == "reduce" and placed.formula not in inputs
        if not is_sum and not hidden & set(inputs):
            continue
        if node not in trace.outer:
            hidden.add(placed.formula)
        elif node in read:
            roots.append(node)
    return roots


def _read_outside(
    elements: FormulaInterpreter, trace: Trace, inside: set[fx.Node], mapped: set[fx.Node]
) -> set[fx.Node]:
    """The nodes that other code uses, or uses what is computed from them alone as rows' values."""
    leaves: dict[fx.Node, bool] = {}
    found: set[fx.Node] = set()
    for node in reversed(trace.graph.nodes):
        users = [user for user in node.users if user.op != "output"]
        if (
            (node in trace.outer and _leaves(trace.outer[node], inside, mapped, leaves))
            or any(user not in elements.placed for user in users)
            or any(u in found and is_row_level(elements.placed[u], elements.axes) for u in users)
        ):
            found.add(node)
    return found


def _leaves(
    node: fx.Node, inside: set[fx.Node], mapped: set[fx.Node], known: dict[fx.Node, bool]
) -> bool:
    """Whether code that is not analysed uses a node of the user's graph.

    What is inside and no node of the trace returns its input: its users count.
    """
    if node not in known:
        stack, same = [node], {node}
        known[node] = False
        while stack and not known[node]:
            for user in stack.pop().users:
                if user not in inside:
                    known[node] = True
                elif user not in mapped and user not in same:
                    same.add(user)
                    stack.append(user)
    return known[node]


def _joined(
    plan: RowPlan,
    root: fx.Node,
    elements: FormulaInterpreter,
    trace: Trace,
    position: Mapping[fx.Node, int],
) -> RowPlan | None:
    """One program with another sum, where all that it reads is there before the first sum."""
    nodes = [*(o.node for o in plan.outputs), trace.outer[root]]
    first = min(position[n] for n in nodes)
    formula = elements.placed[root].formula
    if not formula.dots & set(plan.dots):
        return None
    # A tensor that only some of the results depend on would get zeros from the others, not None.
    # A result without any gradient, such as a metric, is detached
    if formula.grad_flows and plan.grad_flows and formula.grad_flows != plan.grad_flows:
        return None
    # the call stands at the first of them, and has gradients if those are recorded there
    learned = [
        trace.outer[n]
        for n in (*(o.inner for o in plan.outputs), root)
        if elements.placed[n].formula.grad_flows
    ]
    modes = autograd_modes(nodes[0].graph.nodes)
    at_first = modes[min(nodes, key=lambda n: position[n])]
    if any(modes[n] != at_first for n in learned):
        return None
    every = [formula, *(elements.placed[o.inner].formula for o in plan.outputs)]
    inside = (f for whole in every for f in formulas_in(whole))
    leaves = [f for f in inside if f.op in ("dot", "capture", "columns")]
    read = [
        n
        for f in leaves
        for n in ([f.data.lhs.node, f.data.rhs.node] if f.op == "dot" else [f.data[0]])
    ]
    # where they stand in the user's graph: leaves of a trace all stand before it
    if any(n not in trace.outer or position[trace.outer[n]] > first for n in read):
        return None
    results = {*(o.inner for o in plan.outputs), root}
    if any(results & ancestors(n) for n in read):
        return None
    try:
        return plan_program([*(o.inner for o in plan.outputs), root], elements, trace)
    except Unsupported:
        return None


def _merge(
    plans: list[RowPlan],
    elements: FormulaInterpreter,
    trace: Trace,
    position: Mapping[fx.Node, int],
) -> None:
    """Joins programs that a later sum has connected: it reads products of both."""
    pairs = [(i, j) for i in range(len(plans)) for j in range(len(plans)) if i != j]
    for i, j in pairs:
        joined: RowPlan | None = plans[i]
        for output in plans[j].outputs:
            if joined is not None:
                joined = _joined(joined, output.inner, elements, trace, position)
        if joined is not None:
            plans[i] = joined
            del plans[j]
            _merge(plans, elements, trace, position)
            return


def first_of(plan: RowPlan) -> fx.Node:
    """Returns the user's node before which a program must be inserted."""
    nodes = {o.node for o in plan.outputs}
    return next(n for n in plan.outputs[0].node.graph.nodes if n in nodes)
