"""Finds who else reads a row program's products, and whether its sums are read as numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from torch_streamkl.fx_passes.analysis.elements.reading import FormulaInterpreter
from torch_streamkl.fx_passes.capture.region import MATMULS, Region
from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import is_in_place
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, name_of
from torch_streamkl.fx_passes.fx_utils.shape_reads import read_for_metadata
from torch_streamkl.fx_passes.planning.nan_readers import Readers, readers_behind
from torch_streamkl.fx_passes.planning.row_plan import RowPlan
from torch_streamkl.fx_passes.planning.special_elements import (
    is_as_special,
    is_never_infinite,
)


def reads_products(node: fx.Node, plans: Sequence[RowPlan]) -> bool:
    """Returns whether a node reads products of programs other than by the programs' results."""
    products = {plan.elements.products[dot] for plan in plans for dot in plan.dots}
    results = {o.inner for plan in plans for o in plan.outputs}
    behind: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in behind and current not in results:
            behind.add(current)
            stack += current.all_input_nodes
    is_of_results = bool(ancestors(node) & results)
    return bool(behind & products) or not is_of_results


def check_readers_of_program(plan: RowPlan, outside: Readers) -> None:
    """Raises Unsupported if code after the sums makes numbers of NaN and infinity."""
    found = readers_behind([o.node for o in plan.outputs], outside)
    names = found.special
    if not names and not is_never_infinite(plan.program, plan.sums):
        names = found.infinite
    if names and not is_as_special(plan.program, plan.sums):
        name = min(names)
        raise Unsupported(
            f"{name} reads the sum, and eager has NaN or infinity where it has a value"
        )


def why_kept(
    plan: RowPlan, elements: FormulaInterpreter, trace: Trace, region: Region, gone: set[fx.Node]
) -> str:
    """Explains why fusing would recompute: other code also needs all products of a program.

    ``gone`` are nodes of the user's graph that operators take the place of. That attention reads
    its map as well is usual: the map of the loss is another one.
    """
    inside, gone = set(region.nodes), set(gone)
    for node in reversed(region.nodes):
        is_unread = all(
            user in gone or name_of(user) in MATMULS or read_for_metadata(user) is node
            for user in node.users
        )
        if is_unread and (node.users or is_in_place(node)):
            gone.add(node)
    kept = ""
    for dot in plan.dots:
        made = node_of(trace, elements.products[dot])
        if made is None or made in gone:
            return ""
        while made not in gone:
            readers = [u for u in made.users if u not in gone]
            following = next((u for u in readers if u in inside), None)
            if following is None:
                kept = name_of(made) if not readers else "code outside of the loss"
                break
            made = following
    return f"the scores are also read by {kept}"
