"""Describes the losses that are not fused or skipped, with reasons and hints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.elements.reading import FormulaInterpreter
from torch_streamkl.fx_passes.analysis.interpreter import ScoreInterpreter
from torch_streamkl.fx_passes.analysis.sites import ELSEWHERE, LEAVES, NOT_MADE, reason_of
from torch_streamkl.fx_passes.capture.preconditions import divergence_like
from torch_streamkl.fx_passes.capture.region import MATMULS
from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import (
    UNKNOWN,
    ancestors,
    example,
    location_of,
    name_of,
)
from torch_streamkl.fx_passes.fx_utils.shape_reads import values_of
from torch_streamkl.fx_passes.planning.candidates import Plans
from torch_streamkl.fx_passes.reporting import data_parallel
from torch_streamkl.fx_passes.reporting.graph_breaks import (
    break_after,
    break_before,
    called_apart,
)
from torch_streamkl.fx_passes.reporting.hints import ADVICE, advice_for, hint_for
from torch_streamkl.fx_passes.reporting.large_tensors import numel
from torch_streamkl.fx_passes.reporting.operations import in_users_terms
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.reporting.text import shown
from torch_streamkl.fx_passes.reporting.unfused_memory import ORDERED
from torch_streamkl.fx_passes.reporting.unrecognized import CHECKPOINT, called


def not_fused(reason: str, graph: fx.Graph, is_body: bool = False) -> Report:
    """Returns sites of a graph that is not analysed.

    ``is_body``: of a higher-order operator's body, whose tensors have the sizes that they say.
    """
    hint = hint_for(reason)
    sites = [
        Site(False, "", "", reason, *location_of(n), hint=hint) for n in divergence_like(graph)
    ]
    return Report(sites, not_analysed=int(bool(sites) and not is_body))


def unfused_sites(
    found: Sequence[fx.Node],
    trace: Trace,
    recognised: ScoreInterpreter,
    plans: Plans,
    of_programs: Mapping[fx.Node, str],
) -> list[Site]:
    """Returns losses without an operator, each with the first operation that is unsupported.

    ``of_programs`` are the nodes that row programs do not take, and why.
    """
    sites: dict[tuple[str, str], Site] = {}
    for node in found:
        reason, blocker = reason_of(node, recognised, plans)
        # what a row program may have: what keeps that?
        if _NO_OPERATION.search(reason) and blocker not in of_programs:
            other = _first_of_programs(node, of_programs)
            if other is not None and other[0].split()[0] not in {reason.split()[0], *ORDERED}:
                reason, blocker = other
        elif _NO_OPERATION.search(reason) and blocker is not None:
            of_program = of_programs[blocker]  # such as ids that may be repeated
            reason = reason if _NO_OPERATION.search(of_program) else of_program
        origin = node_of(trace, node)
        if _UNKNOWN_NUMBER.search(reason) and origin is not None:
            reason = _symbolic_number(origin) or reason
        if origin is not None and _is_shared_by_hand(origin):
            reason = "ranks add up what each computes of its own vocabulary entries (all_reduce)"
        if blocker is not None:
            reason = in_users_terms(reason, blocker, trace)
        reason = _with_place(reason, node, blocker or node, recognised)
        location, code = _place(node, trace)
        elsewhere, line = _place(blocker, trace) if blocker is not None else (location, "")
        sites.setdefault(
            (location, reason),
            Site(
                False,
                "",
                "",
                reason,
                location,
                code,
                hint=hint_for(reason),
                unsupported_at="" if elsewhere == location else elsewhere,
                unsupported_code="" if elsewhere == location else line,
            ),
        )
    return data_parallel.named(sites.values(), [node_of(trace, node) for node in found])


_OUTSIDE = re.compile(r"(not made (?:from scores )?in this graph).*")


TOLD = ORDERED | {"gather", "index", "cross_entropy_loss"}  # by what reads large tensors
_NO_OPERATION = re.compile(
    r"of scores$|of attention or vocabulary probabilities$|vary along the keys|row weights"
    "|averaged over their own rows or keys"
)
_UNKNOWN_NUMBER = re.compile(
    r"number that is not known|exponent is not known|row weights|with a tensor"
    "|neither a tensor nor a number|vary along the keys"
)
_IN_PLACE = re.compile(r"^(\w+[^_]_) of ")


def _first_of_programs(
    site: fx.Node, of_programs: Mapping[fx.Node, str]
) -> tuple[str, fx.Node] | None:
    """The first operation before a site that row programs do not have either, and why."""
    made_of = ancestors(site)
    for node, reason in of_programs.items():
        if node in made_of and not any(a in of_programs for a in node.all_input_nodes):
            written = _IN_PLACE.match(reason)
            return (f"in-place {reason}" if written else reason), node
    # a sum that row programs have, and that something else keeps
    for node, reason in of_programs.items():
        if site in ancestors(node):
            return reason, node
    return None


def reasons_of_programs(elements: FormulaInterpreter | None, trace: Trace) -> list[str]:
    """Returns the operations that keep a graph without any loss from a row program, as
    sentences.

    If there are none, other reasons of sums that compare two products.
    """
    if elements is None:
        return []
    of_programs = elements.reasons
    found: dict[str, None] = {}
    for node, reason in of_programs.items():
        name = name_of(node) if node.op == "call_function" else ""
        if not _NO_OPERATION.search(reason) or name in TOLD:
            continue
        if not any(a in of_programs for a in node.all_input_nodes):
            written = _IN_PLACE.match(reason)
            reason = f"in-place {reason}" if written else in_users_terms(reason, node, trace)
            hint = hint_for(reason)
            sentence = f"{reason} at {shown(_place(node, trace)[0])}"
            found[f"{sentence}. Hint: {hint}" if hint else sentence] = None
    for node, reason in of_programs.items() if not found else ():
        placed, advice = elements.placed.get(node), advice_for(reason)
        if placed is None or len(placed.formula.dots) < 2 or advice in (None, ADVICE[-1]):
            continue
        place = shown(_place(node, trace)[0])
        found[f"a sum at {place} is not fused: {reason}. Hint: {hint_for(reason)}"] = None
    return list(found)


def _symbolic_number(origin: fx.Node) -> str:
    """Finds a Python number of the user's code that is symbolic, if there is one."""
    if any(isinstance(example(node), torch.SymFloat) for node in ancestors(origin)):
        return "a Python number that changes between calls is symbolic in this graph"
    return ""


def _with_place(reason: str, site: fx.Node, blocker: fx.Node, recognised: ScoreInterpreter) -> str:
    """The reason, with where that is made which is not made in the graph, or written to."""
    origin = node_of(recognised.trace, site)
    if "modified in place" in reason:
        return _with_write(reason, site, recognised)
    if reason == LEAVES and origin is not None:
        return f"{reason}: {_where_graph_ends(origin.graph)}"
    if origin is None or not _OUTSIDE.search(reason):
        return reason
    ended = break_before(origin)
    if ended is not None:
        said = f"a graph break at {shown(ended.location)} lies between"
        apart = called_apart(origin)
        if apart:
            said = f"Dynamo compiles {apart}() apart from its caller, because it has the graph "
            said += f"break at {shown(ended.location)} in it"
        said += f": {ended.code}" if ended.code else ""
    elif not _reads_input(origin):
        source = _source(blocker, recognised)
        if source is None:
            return reason.replace(ELSEWHERE, NOT_MADE)
        name, at = called(source), shown(location_of(source)[0])
        before = values_of(source) - {source}
        is_known = name in (CHECKPOINT, "register_hook")
        if not is_known and any(name_of(a) in MATMULS for a in before if _is_call(a)):
            return (
                f"{name} at {at} is applied to a product in a way that the rewrite does not read"
            )
        said = f"it comes from {name} at {at}, which is no matrix product"
        if name == CHECKPOINT:
            said = f"it is a result of the checkpoint at {at}, which the loss is not in"
    elif _is_body(origin.graph):
        said = "it is an input of the checkpoint that the loss is in"
    else:
        said = "it is an input of the compiled function"
    return _OUTSIDE.sub(lambda found: f"{found[1]}: {said}", reason, count=1)


def _where_graph_ends(graph: fx.Graph) -> str:
    owner = graph.owning_module
    ended = break_after(owner) if owner is not None else None
    if ended is None:
        return "it is an output"
    return f"a graph break at {shown(ended.location)} ends it" + (
        f": {ended.code}" if ended.code else ""
    )


def _with_write(reason: str, site: fx.Node, recognised: ScoreInterpreter) -> str:
    """The reason, with the last write to what a site is made of."""
    made_of = ancestors(site)
    for node in reversed(recognised.trace.graph.nodes):
        if node.op == "call_function" and any(x in made_of for x in written_by(node)):
            place, code = _place(node, recognised.trace)
            return f"{reason}: {name_of(node)} at {shown(place)}" + (f": {code}" if code else "")
    origin = node_of(recognised.trace, site)
    made_of = ancestors(origin) if origin is not None else set()
    for node in reversed(origin.graph.nodes) if origin is not None else ():
        if any(x in made_of for x in written_by(node)):  # through a view of it
            place, code = location_of(node)
            return f"{reason}: {name_of(node)} at {shown(place)}" + (f": {code}" if code else "")
    return reason


def _reads_input(site: fx.Node) -> bool:
    """Whether a tensor as large as what a site compares is an input of its graph."""
    values = [example(a) for a in (site, *site.all_input_nodes)]
    sizes = [numel(x) for x in values if isinstance(x, Tensor)]
    stack, seen, least = [site], {site}, max(sizes, default=0)
    while stack:
        for a in stack.pop().all_input_nodes:
            value = example(a)
            if a in seen or name_of(a) in MATMULS:
                continue
            is_large = isinstance(value, Tensor) and numel(value) >= least
            if a.op == "placeholder" and is_large:
                return True
            seen.add(a)
            stack.append(a)
    return False


def _source(site: fx.Node, recognised: ScoreInterpreter) -> fx.Node | None:
    """The user's operation that makes what a site compares and that the analysis does not know.

    It is as large as what the site compares. None where an input of the graph is.
    """
    trace = recognised.trace
    made_of = ancestors(site) - {site}
    least = max((numel(a.meta["val"]) for a in site.all_input_nodes if _is_tensor(a)), default=0)
    large = [
        n
        for n in trace.graph.nodes
        if n in made_of and _is_tensor(n) and numel(n.meta["val"]) >= least
    ]
    for node in _near(site):
        outer = node_of(trace, node) if node.op == "placeholder" and node in large else None
        if outer is not None and outer.op != "placeholder":
            return outer.all_input_nodes[0] if name_of(outer) == "getitem" else outer
    for node in large:
        if node.op == "call_function" and recognised.values.get(node) is None:
            if all(
                recognised.values.get(a) is not None for a in node.all_input_nodes if a in large
            ):
                return node_of(trace, node)
    return None


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _near(site: fx.Node) -> Iterator[fx.Node]:
    """Yields what a node is computed from, the nearest first."""
    queue, seen = [site], {site}
    while queue:
        node = queue.pop(0)
        yield node
        new = [a for a in node.all_input_nodes if a not in seen]
        seen.update(new)
        queue += new


def _is_body(graph: fx.Graph) -> bool:
    """Whether a higher-order operator runs the graph: Dynamo marks the inputs of all others."""
    inputs = graph.find_nodes(op="placeholder")
    owner = graph.owning_module
    is_marked = any("grapharg" in n.meta for n in inputs)
    return owner is not None and bool(inputs) and not is_marked and _is_of_dynamo(graph)


def _is_of_dynamo(graph: fx.Graph) -> bool:
    return any("example_value" in n.meta for n in graph.nodes)


def _is_shared_by_hand(site: fx.Node) -> bool:
    """Whether a collective adds up parts of the softmaxes between a site and its matmuls."""
    stack, seen = [site], {site}
    while stack:
        node = stack.pop()
        written = node.users if node is not site else ()  # dist.all_reduce works in place
        if any(_holds_reduction(n) for n in (node, *written)):
            return True
        if name_of(node) in MATMULS:
            continue
        stack += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return False


def _holds_reduction(node: fx.Node) -> bool:
    if "all_reduce" in name_of(node):
        return True
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    subgraphs = [getattr(node.graph.owning_module, str(a.target), None)
              for a in node.all_input_nodes if a.op == "get_attr"]  # fmt: skip
    return any(
        "all_reduce" in name_of(n)
        for body in subgraphs
        if isinstance(body, fx.GraphModule)
        for n in body.graph.nodes
    )


def _place(node: fx.Node, trace: Trace) -> tuple[str, str]:
    """Returns location and code of a node of the trace."""
    origin = node_of(trace, node)
    return location_of(origin) if origin is not None else (UNKNOWN, "")
