"""Adds to a report what a rewritten graph still materializes, and the graph breaks around it."""

from __future__ import annotations

import logging

from torch import fx

from torch_streamkl.fx_passes.fx_utils.errors import first_line
from torch_streamkl.fx_passes.reporting.comparisons import unfused_comparisons
from torch_streamkl.fx_passes.reporting.graph_breaks import break_after
from torch_streamkl.fx_passes.reporting.large_tensors import (
    OF_AN_INPUT,
    ScoreShapes,
    graphs_of,
    large_tensors,
)
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.reporting.text import shown
from torch_streamkl.fx_passes.reporting.unrecognized import (
    IN_A_BODY,
    VAGUE,
    readers_beside,
    reasons_of,
)

log = logging.getLogger("torch_streamkl.report")


class Scan:
    """Notes the sizes of a graph's scores and logits before the graph is rewritten.

    An error here never stops a compilation: the report then says that it does not know.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.failure = ""
        self.shapes = ScoreShapes()
        try:
            self.shapes = ScoreShapes.of(gm)
        except Exception as error:
            self._failed(error)

    def add_to(self, report: Report, gm: fx.GraphModule) -> None:
        """Adds what was found to a report; ``gm`` is the rewritten graph."""
        report.num_large += len(self.shapes.shapes)
        try:
            ended = break_after(gm)
            if ended is not None:
                report.breaks.append(ended)
                report.outside.clear()  # the code after the break reads them
            at = f"the code after the graph break at {shown(ended.location)}" if ended else None
            report.remaining = [
                x
                for x in report.remaining
                if not (x.cause == OF_AN_INPUT and self.shapes.is_far_smaller(x.shape))
            ]
            for graph in graphs_of(gm):
                report.unfused_comparisons += unfused_comparisons(
                    graph, self.shapes.holds, report.sites
                )
            found = large_tensors(gm, self.shapes, report.remaining, at)
            report.elsewhere += [made for made, _ in found]
            in_graph = [node for _, node in found if node.graph is gm.graph]
            in_bodies = [node for _, node in found if node.graph is not gm.graph]
            # by the analysis, with the operation; or it is a loss, whose reason says more
            known = bool(report.unrecognized or report.sites)
            said = [*report.unrecognized, *(site.reason for site in report.sites)]
            named = [text.split()[0] for text in said if " is applied to " in text]

            def is_said(text: str) -> bool:
                return (known and text.endswith(VAGUE)) or text.split()[0] in named

            report.unrecognized += reasons_of(in_graph, at, is_said)
            report.unrecognized += reasons_of(in_bodies, IN_A_BODY, is_said)
            if report.sites and all(site.fused for site in report.sites):
                names = {x.name for x in report.remaining if not x.cause}
                kept = [node for node in gm.graph.nodes if node.name in names]
                report.unrecognized += readers_beside(kept, at)
        except Exception as error:
            self._failed(error)
        if self.failure:
            report.not_scanned.append(self.failure)

    def _failed(self, error: Exception) -> None:
        log.warning("the large tensors of a graph are not known", exc_info=True)
        self.failure = f"{type(error).__name__}: {first_line(error)}"
