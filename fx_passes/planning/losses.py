"""Finds the losses of a region: divergences, other sums over keys, and what is none of these."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from torch_streamkl.fx_passes.capture.region import Region
from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.closed_forms.form import ATTENTION, LINEAR
from torch_streamkl.fx_passes.closed_forms.match import around
from torch_streamkl.fx_passes.closed_forms.row_sites import bindings_of
from torch_streamkl.fx_passes.fx_utils.mutation import is_unused
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, name_of, reached
from torch_streamkl.fx_passes.fx_utils.op_names import LOG_SOFTMAXES, MATMULS, SOFTMAXES
from torch_streamkl.fx_passes.planning.divergence_sites import CALLS, divergence_sites
from torch_streamkl.fx_passes.planning.divergences import (
    Divergence,
    ProductType,
    find_divergences,
    product_types,
)
from torch_streamkl.fx_passes.planning.refusals import Refusals
from torch_streamkl.fx_passes.planning.row_plans import (
    ProgramPlan,
    RowPlanner,
    may_have_programs,
)
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.fx_passes.reading.reader import Reading, read_trace
from torch_streamkl.program.graph import ANY, INT, Node
from torch_streamkl.program.walks import walk

# what a divergence reads that is computed besides a planned operator
DISTRIBUTIONS = MATMULS | SOFTMAXES | LOG_SOFTMAXES | CALLS


@dataclass
class Losses:
    """Holds what was found in a region, before anything is replaced."""

    trace: Trace
    region: Region
    row_programs: bool  # whether sums that are no divergence may become row programs
    reading: Reading = field(init=False)
    sites: list[fx.Node] = field(init=False)  # where two distributions meet
    divergences: list[Divergence] = field(init=False)
    refusals: Refusals = field(init=False)

    def __post_init__(self) -> None:
        self.reading = read_trace(self.trace)
        self.sites = divergence_sites(self.trace, self.reading)
        self.divergences = find_divergences(self.trace, self.reading)
        self.refusals = Refusals(self.trace, self.reading)
        self.row_programs = self.row_programs and may_have_programs(self.trace)

    @property
    def is_empty(self) -> bool:
        return not (self.sites or self.divergences or self.row_programs)

    @cached_property
    def planner(self) -> RowPlanner | None:
        """Returns what plans row programs, None if there are to be none."""
        return RowPlanner(self.trace, self.reading, self.region) if self.row_programs else None

    @cached_property
    def product_types(self) -> dict[frozenset[object], ProductType]:
        return product_types(self.trace, self.reading)

    @property
    def unfused(self) -> list[fx.Node]:
        """Returns the sites that no operator is planned for, and that something reads."""
        handled: set[fx.Node] = set()
        for divergence in self.divergences:
            handled |= ancestors(divergence.inner)
        values = {divergence.inner for divergence in self.divergences}
        sites = [n for n in self.sites if n not in handled and not _is_made_of(n, values)]
        origins = ((n, node_of(self.trace, n)) for n in sites)
        return [n for n, origin in origins if origin is None or not is_unused(origin)]

    def operands(self) -> list[fx.Node]:
        """Returns the tensors of the trace that the divergences' products are made of."""
        found = [
            x
            for divergence in self.divergences
            for call in divergence.calls
            for side in call.sides
            for x in side.operands
        ]
        nodes = (source_name(x) or self.refusals.first_with(x) for x in found)
        return [x for x in nodes if isinstance(x, fx.Node)]

    def delayed(
        self, is_left: Callable[[ProgramPlan], bool]
    ) -> tuple[list[Divergence], list[Divergence]]:
        """Returns divergences that wait for row programs, and those that one computes with others.

        ``is_left`` says which programs are not inserted. What only elements read waits as well.
        """
        if self.planner is None:
            return [], []
        inside = self.planner.levels.read_by_elements(self.region)
        alone = [d for d in self.divergences if _needs_no_tensor(d) or d.inner in inside]
        sharing = [d for d in self._sharing(is_left) if d not in alone]
        return [d for d in self.divergences if d in alone or d in sharing], sharing

    def _sharing(self, is_left: Callable[[ProgramPlan], bool]) -> list[Divergence]:
        """Divergences of LM heads that one row program computes with other sums."""
        heads = [d for d in self.divergences if all(c.operator == LINEAR for c in d.calls)]
        if self.planner is None or not heads:
            return []
        plans = self.planner.sharing({part for d in heads for part in d.parts})
        outputs = [plan.unlabelled for plan in plans if not is_left(plan)]
        return [d for d in heads if any(d.parts < every for every in outputs)]


def _needs_no_tensor(divergence: Divergence) -> bool:
    """Whether a row program needs no tensor of scores where an operator does.

    It does for a mask or bias of ids, a slanted mask, keys that are gathered for each row, or
    other sums over keys that multiply the divergence.
    """
    if bindings_of([around(divergence.matched), *(call.weight for call in divergence.calls)]):
        return True
    dense: list[Node] = []
    for call in divergence.calls:
        if any(_are_gathered(side.product.keys) for side in call.sides):
            return True
        if call.operator == ATTENTION:
            if any(_is_slanted(x) for x in call.masks.tensors):
                return True
            dense += call.masks.tensors
        dense += [bias.value for side in call.sides for bias in side.added]
    return any(_is_hit(x) for x in walk(dense))


SLANTED = {"nonnegative", "linear", "index", "const", "size", "and", "or", "not"}


def _is_slanted(x: Node) -> bool:
    """Whether a condition compares multiples of positions, which no window does."""
    return all(y.op in SLANTED for y in walk([x]))


def _are_gathered(keys: Node) -> bool:
    """Whether keys are read at ids, each of which belongs to one row."""
    return keys.op == "capture" and any(
        at.op == "capture" and len(at.axes) > 1 for at in keys.args
    )


def _is_hit(x: Node) -> bool:
    """Whether a condition asks if a position is an id of a row."""
    if x.op == "reduce" and x.value.kind == ANY:
        return True
    is_position = x.op == "eq" and all(a.dtype == INT for a in x.args)
    return is_position and any(a.op == "index" for a in x.args)


def _is_made_of(node: fx.Node, values: Collection[fx.Node]) -> bool:
    """Whether a node reads distributions only as values of planned operators.

    The logarithm of a Bhattacharyya coefficient is arithmetic on rows and no second loss.
    """
    read = reached([node], lambda n: () if n in values else n.all_input_nodes)
    others = (n for n in read if n not in values and n.op == "call_function")
    return not read.isdisjoint(values) and all(name_of(n) not in DISTRIBUTIONS for n in others)
