"""Defines rewrite(gm): replaces every loss found in a Dynamo graph by a streaming operator.

Stages: capture -> reading -> closed_forms -> planning -> lowering -> passes -> validation, each a
folder; graph_rewriting.py has those of one graph. A graph of DTensors goes through them as one of
whole tensors (dtensors/). The work is done on a copy of the graph, which replaces the original
only if everything succeeds: a program that compiles without the rewrite compiles with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import fx

from torch_streamkl.fx_passes.capture.region import has_seeds
from torch_streamkl.fx_passes.fx_utils.copies import copied
from torch_streamkl.fx_passes.fx_utils.dtensors import has_dtensors
from torch_streamkl.fx_passes.fx_utils.errors import Fatal, Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import users_of_body
from torch_streamkl.fx_passes.graph_rewriting import Given, rewrite_graph
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.planning.readers import NO_READERS, Readers, readers_of_body
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.reporting.unfused import not_fused
from torch_streamkl.fx_passes.validation.options import CheckOptions
from torch_streamkl.fx_passes.validation.refusal import Refused, rewrite_checked

log = logging.getLogger("torch_streamkl.rewrite")
EVERYTHING = RewriteOptions(min_mib=0)  # whatever its size


def rewrite(
    gm: fx.GraphModule,
    options: RewriteOptions = EVERYTHING,
    version: str = "",
    outside: Readers = NO_READERS,
    is_compiled: bool = True,
) -> Report:
    """Rewrites a Dynamo graph module in place, and reports every loss.

    ``version`` is that of the sources, under which passed checks are recorded; none are without.
    ``outside`` is what reads the module's results where it is the body of a checkpoint.
    ``is_compiled`` says whether Inductor compiles what is left: the report depends on it.
    """
    report = Report()
    try:
        for name, child in gm.named_children():
            if not isinstance(child, fx.GraphModule) or _has_nothing_to_find(child):
                continue
            if _is_plain_body(gm, name):
                readers = readers_of_body(gm, name, outside)
                report.extend(rewrite(child, options, version, readers, is_compiled))
            else:
                reason = f"it is in {_owner_of(gm, name)}"
                report.extend(not_fused(reason, child.graph, is_body=True))

        if has_dtensors(gm.graph):  # which row programs do not run on
            options = replace(options, row_programs=False)

        def attempt(source: fx.Graph, refused: Refused) -> tuple[fx.Graph, Report]:
            while True:
                graph = copied(source)
                given = Given(gm, graph, refused, options, outside, is_compiled)
                left, late = rewrite_graph(given)
                if not late:
                    return graph, left
                refused = {**refused, **late}

        graph, found = _checked_with(gm)(gm, attempt, CheckOptions.of(options, version))
        if found.num_fused:
            graph.lint()
            gm.graph = graph
            gm.recompile()
        report.extend(found)
    except Fatal:
        raise
    except Unsupported as reason:
        report.extend(not_fused(str(reason), gm.graph))
    except Exception as error:
        log.warning("the analysis failed and the graph is left as it was", exc_info=True)
        report.failures.append(f"{type(error).__name__}: {error}")
    return report


def _is_plain_body(gm: fx.GraphModule, name: str) -> bool:
    """Whether a body runs as it is: checkpoints do; autograd functions and vmap do not."""
    users = users_of_body(gm, name)
    return (
        bool(users)
        and all("checkpoint" in str(u.target) or "wrap" in str(u.target) for u in users)
        and not any("autograd_function" in str(u.target) for u in users)
    )


def _owner_of(gm: fx.GraphModule, name: str) -> str:
    """The higher-order operator that runs a body."""
    users = users_of_body(gm, name)
    name = str(users[0].target) if users else "another operator"
    return "a custom autograd.Function" if "autograd_function" in name else f"the body of {name}"


def _has_nothing_to_find(body: fx.GraphModule) -> bool:
    """Whether a subgraph cannot hold a loss, such as one that gathers a parameter for FSDP."""
    subgraphs = [x for x in body.children() if isinstance(x, fx.GraphModule)]
    return not has_seeds(body.graph) and all(map(_has_nothing_to_find, subgraphs))


def _checked_with(gm: fx.GraphModule) -> Callable[..., tuple[fx.Graph, Report]]:
    """Chooses how the rewrite of a graph is checked: DTensors as whole tensors, by all ranks."""
    if not has_dtensors(gm.graph):
        return rewrite_checked
    from torch_streamkl.fx_passes.dtensors.rewriting import rewrite_sharded  # needs DTensor

    return rewrite_sharded
