"""Runs the tests of row programs with those that are made of expressions: a plugin of pytest.

``pytest -p tests.support.new_row_programs tests/rewrite/test_row_program_rewrites.py``
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from torch import fx

from torch_streamkl.fx_passes import pipeline
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.lowering import row_calls
from torch_streamkl.fx_passes.planning import profitability, row_plans
from torch_streamkl.fx_passes.planning.nan_readers import readers_behind
from torch_streamkl.fx_passes.reading.reader import read_trace

PLANNERS: dict[Any, Any] = {}


def _planner(trace: Any, region: Any) -> Any:
    if PLANNERS.get("trace") is not trace:
        PLANNERS["trace"] = trace
        PLANNERS["planner"] = row_plans.RowPlanner(trace, read_trace(trace), region)
    return PLANNERS["planner"]


@dataclasses.dataclass(frozen=True)
class Adapted(row_plans.ProgramPlan):
    planner: Any = None

    @property
    def dots(self) -> list[Any]:
        def node(x: Any) -> Any:
            return SimpleNamespace(node=x.source.name)

        return [SimpleNamespace(lhs=node(p.rows), rhs=node(p.keys)) for p in self.form.products]


def _find(elements: Any, trace: Any, region: Any, handled: Any) -> list[Any]:
    planner = _planner(trace, region)
    found = planner.find(handled)
    elements.reasons.update(planner.reasons)
    return [Adapted(**vars(p), planner=planner) for p in found]


def _left(plan: Any, device: str, given: float | None) -> str:
    least = profitability.LEAST_PROGRAM_MIB.get(device, 0.0) if given is None else given
    mib = row_plans.mib_of(plan)
    if mib is None or mib >= least:
        return ""
    return profitability.too_small(mib, "products", least, device, given, "custom losses")


def _check(plan: Any, outside: Any) -> None:
    found = readers_behind([o.node for o in plan.outputs], outside)
    why = row_plans.why_special(plan, found.special, found.infinite)
    if why:
        raise Unsupported(why)


def _emit(build: Any, plan: Any, outer: Any, written: Any) -> dict[fx.Node, fx.Node]:
    return row_calls.emit(build, plan, plan.planner.reading, outer, written)


def _sharing(candidates: Any, elements: Any, trace: Any, region: Any, min_mib: Any) -> list[Any]:
    every = {c.inner: c for c in candidates if all(call.is_head for call in c.plan.calls)}
    planner = _planner(trace, region)
    if not every:
        return []
    found = []
    for plan in planner.sharing(list(every)):
        device = plan.outputs[0].node.meta["example_value"].device.type
        if not _left(plan, device, min_mib):
            found += [every[o.inner] for o in plan.outputs if o.inner in every]
    return found


pipeline.find_programs = _find
pipeline.sharing_products = _sharing
pipeline.first_of = lambda plan: plan.first
pipeline.why_program_is_left = _left
pipeline.describe_program = row_plans.describe
pipeline.check_readers_of_program = _check
pipeline.emit_program = _emit
pipeline.reads_products = lambda node, plans: (
    plans[0].planner.reads_products(node, plans) if plans else True
)
