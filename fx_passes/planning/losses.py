"""Says which divergences of a region wait for row programs, or are a part of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch_streamkl.fx_passes.capture.region import Region
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.closed_forms.earliest import Divergence, ProductType
from torch_streamkl.fx_passes.closed_forms.form import ATTENTION, LINEAR
from torch_streamkl.fx_passes.closed_forms.match import around
from torch_streamkl.fx_passes.closed_forms.row_sites import bindings_of
from torch_streamkl.fx_passes.planning.row_plan import ProgramPlan
from torch_streamkl.fx_passes.planning.row_plans import RowPlanner
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.graph import ANY, INT, Node
from torch_streamkl.program.walks import walk


@dataclass(frozen=True)
class Losses:
    """Holds what was found in a region, before anything is replaced."""

    trace: Trace
    region: Region
    reading: Reading
    divergences: list[Divergence]
    product_types: Mapping[frozenset[object], ProductType]
    planner: RowPlanner | None  # plans row programs; None if there are to be none

    @property
    def is_empty(self) -> bool:
        return not self.divergences and self.planner is None

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
    if x.kind == ANY:
        return True
    is_position = x.op == "eq" and all(a.dtype == INT for a in x.args)
    return is_position and any(a.op == "index" for a in x.args)
