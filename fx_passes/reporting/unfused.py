"""Describes the losses that are not fused, with reasons, places and hints."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.closed_forms.repeated_ids import SINGLE_ENTRIES
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    location_of,
    name_of,
    nearest_inputs,
    nearest_users,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS, ORDERED
from torch_streamkl.fx_passes.fx_utils.sizes import numel
from torch_streamkl.fx_passes.lowering.writer import INSIDE
from torch_streamkl.fx_passes.reading.reader import TOO_LARGE, Reading
from torch_streamkl.fx_passes.reporting import data_parallel
from torch_streamkl.fx_passes.reporting.hints import ADVICE, advice_for, hint_for
from torch_streamkl.fx_passes.reporting.node_sets import those_after, those_before, union
from torch_streamkl.fx_passes.reporting.operations import in_users_terms
from torch_streamkl.fx_passes.reporting.places import is_shared_by_hand, place_of, with_place
from torch_streamkl.fx_passes.reporting.reasons import NO_OPERATOR, UNSUMMED, reason_of
from torch_streamkl.fx_passes.reporting.refusals import MASKED_ENTRIES, Refusals, selects_entries
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.reporting.score_levels import Level
from torch_streamkl.fx_passes.reporting.text import shown, shown_in, with_hint


def not_fused(reason: str, graph: fx.Graph, is_body: bool = False) -> Report:
    """Returns sites of a graph that is not analysed.

    ``is_body``: of a higher-order operator's body, whose tensors have the sizes that they say.
    """
    hint = hint_for(reason)
    sites = [
        Site(False, "", "", reason, *location_of(n), hint=hint) for n in _divergence_like(graph)
    ]
    return Report(sites, not_analysed=int(bool(sites) and not is_body))


def _divergence_like(graph: fx.Graph) -> list[fx.Node]:
    """The calls to show for a graph that was not analysed: losses, or else log-softmaxes."""
    calls = [n for n in graph.nodes if n.op.startswith("call")]
    losses = [n for n in calls if name_of(n) == "kl_div"]
    logs = [n for n in calls if name_of(n) in ("log_softmax", "logsumexp")]
    return losses or (logs if any(name_of(n) == "softmax" for n in calls) else [])


def with_readers(
    sites: Iterable[Site], of_programs: Mapping[fx.Node, str], trace: Trace
) -> list[Site]:
    """Says of losses that are sums of one operation which of its sums row programs do not take."""
    reasons = {place_of(n, trace)[0]: reason for n, reason in of_programs.items()}
    found = []
    for site in sites:
        reason = reasons.get(site.location, "") if site.reason == INSIDE else ""
        if _is_known(reason):
            site = replace(site, reason=reason, hint=hint_for(reason))
        found.append(site)
    return found


def too_large(reading: Reading) -> list[str]:
    """Returns a note on the first operation whose expression is beyond the limits of reading."""
    first = next((n for n, reason in reading.reasons.items() if reason == TOO_LARGE), None)
    if first is None:
        return []
    place = shown(location_of(first)[0])
    return [f"{name_of(first)} at {place} makes {TOO_LARGE}: what reads it is not fused"]


def unfused_sites(
    found: Sequence[fx.Node], refusals: Refusals, of_programs: Mapping[fx.Node, str]
) -> list[Site]:
    """Returns losses without an operator, each with the first operation that is unsupported.

    ``of_programs`` are the nodes that row programs do not take, and why.
    """
    trace = refusals.trace
    nearby = _OfPrograms(trace.graph, of_programs)
    sites: dict[tuple[str, str], Site] = {}
    for node in found:
        refused = reason_of(node, refusals)
        reason, blocker = refused.reason, refused.node
        # what a row program may have: what keeps that?
        is_open = reason in (UNSUMMED, NO_OPERATOR) or _NO_OPERATION.search(reason)
        if is_open and blocker not in of_programs:
            other = nearby.of_site(node)
            if other is not None and other[0] in _VAGUE:
                other = None
            if other is not None and other[0].split()[0] == reason.split()[0]:
                reason = reason if _NO_OPERATION.search(other[0]) else other[0]
            elif other is not None and other[0].split()[0] not in ORDERED:
                reason, blocker = other
        elif _NO_OPERATION.search(reason) and blocker is not None:
            of_program = of_programs[blocker]  # such as ids that may be repeated
            reason = reason if _NO_OPERATION.search(of_program) else of_program
        elif (other := nearby.of_loss(node)) is not None:
            # operators have limits that row programs have not: what keeps those says more
            if _is_known(other[0]) and (_UNDERFLOW.search(other[0]) or not _is_known(reason)):
                reason, blocker = other
        origin = node_of(trace, node)
        if _UNKNOWN_NUMBER.search(reason) and origin is not None:
            reason = _symbolic_number(origin) or reason
        if origin is not None and is_shared_by_hand(origin):
            reason = "ranks add up what each computes of its own vocabulary entries (all_reduce)"
        masked = _mask_of(node) if _BY_MASK.search(reason) else None
        if masked is not None:
            reason, blocker = MASKED_ENTRIES, masked
        if blocker is not None and _BY_IDS.search(reason):
            reason = refusals.of_another_product(blocker) or reason
        if blocker is not None and _is_product_of_probabilities(blocker, refusals):
            reason = OF_PROBABILITIES
        if blocker is not None:
            reason = in_users_terms(reason, blocker, trace)
        reason = with_place(reason, node, blocker or node, refusals)
        location, code = place_of(node, trace)
        elsewhere, line = place_of(blocker, trace) if blocker is not None else (location, "")
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
                is_loss=trace.is_learned(origin),
                unsupported_at="" if elsewhere == location else elsewhere,
                unsupported_code="" if elsewhere == location else line,
            ),
        )
    return data_parallel.named(sites.values(), [node_of(trace, node) for node in found])


OURS = "torch_streamkl::"  # operators that the user's code calls
TOLD = ORDERED | {"gather", "index", "cross_entropy_loss"}  # by what reads large tensors
_NO_OPERATION = re.compile(
    "of scores$|of attention or vocabulary probabilities$|vary along the keys"
)
_VAGUE = {  # next to an operation's name
    "sums over different rows", "a sum of what is not made from scores",
    "the sum is not over an axis of one operand of the matmul",
}  # fmt: skip
_UNKNOWN_NUMBER = re.compile(
    "exponent is not known|neither a tensor nor a number|vary along the keys"
)
_IN_PLACE = re.compile(r"^(\w+[^_]_) of ")
OF_PROBABILITIES = "a matrix product of probabilities"
_BY_MASK = re.compile(rf"^{SINGLE_ENTRIES}|dimension that both operands of the scores have")
_BY_IDS = re.compile(rf"^{SINGLE_ENTRIES}|^(?:gather|index|index_select|embedding) of ")
_UNDERFLOW = re.compile("may underflow|next to its log-softmax")


def _is_product_of_probabilities(node: fx.Node, refusals: Refusals) -> bool:
    """Whether a node is a map of probabilities times a tensor, and as large as the map."""
    if name_of(node) not in MATMULS:
        return False
    maps = [a for a in node.all_input_nodes if refusals.levels.of(a) is Level.PROBABILITIES]
    made = numel(tensor_of(node))
    return bool(maps) and all(2 * made >= numel(tensor_of(a)) for a in maps)


def _is_of_probabilities_alone(node: fx.Node, refusals: Refusals) -> bool:
    """Whether a node is a product of maps of probabilities, as in an attention rollout."""
    levels = [refusals.levels.of(a) for a in node.all_input_nodes]
    return name_of(node) in MATMULS and all(x is Level.PROBABILITIES for x in levels)


def _mask_of(site: fx.Node) -> fx.Node | None:
    """What a mask selects of single entries, before or after a site."""
    every = (*nearest_inputs(site), *nearest_users(site))
    return next((n for n in every if selects_entries(n)), None)


def _is_known(reason: str) -> bool:
    """Whether there is more to say than which losses fuse."""
    return advice_for(reason) not in (None, ADVICE[-1])


Found = tuple[str, fx.Node] | None  # a reason, and the node that it is of


class _OfPrograms:
    """Finds the nodes that row programs do not take next to a site: the first of them, and why.

    Sets of them are the bits of a number: `node_sets`.
    """

    def __init__(self, graph: fx.Graph, of_programs: Mapping[fx.Node, str]) -> None:
        self.reasons, self.nodes = of_programs, list(of_programs)
        own = {node: 1 << i for i, node in enumerate(of_programs)}
        first = (n for n in own if not any(a in own for a in n.all_input_nodes))
        self.first = union(own[n] for n in first)
        self.before, self.after = those_before(graph, own), those_after(graph, own)
        # before what is computed of a node, too; the output reads every value
        every = {n: bits for n, bits in self.before.items() if n.op != "output"}
        self.beside = those_after(graph, every)

    def of_site(self, site: fx.Node) -> Found:
        """Returns the first operation before a site, or a sum after it that something keeps."""
        before = self.before[site] & self.first
        found = self._first_in(before or self.after[site])
        written = _IN_PLACE.match(found[0]) if found is not None and before else None
        return (f"in-place {found[0]}", found[1]) if found is not None and written else found

    def of_loss(self, site: fx.Node) -> Found:
        """Returns what `of_site` does, or what is next to a site, such as a mask of its scores."""
        return self.of_site(site) or self._first_in(self.beside[site])

    def _first_in(self, nodes: int) -> Found:
        if not nodes:
            return None
        node = self.nodes[(nodes & -nodes).bit_length() - 1]
        return self.reasons[node], node


def reasons_of_programs(
    refusals: Refusals, of_programs: Mapping[fx.Node, str], compared: Collection[fx.Node]
) -> list[str]:
    """Returns the operations that keep a graph without any loss from a row program, as
    sentences.

    If there are none, other reasons of sums that compare two products, which ``compared`` are. Who
    reads a softmax that is multiplied by another one says more than its sum does.
    """
    trace = refusals.trace
    found: dict[str, None] = {}
    for node, reason in of_programs.items():
        name = name_of(node) if node.op == "call_function" else ""
        if not _NO_OPERATION.search(reason) or name in TOLD or OURS in name:
            continue
        if not any(a in of_programs for a in node.all_input_nodes):
            written = _IN_PLACE.match(reason)
            reason = f"in-place {reason}" if written else in_users_terms(reason, node, trace)
            sentence = f"{reason} at {shown(place_of(node, trace)[0])}"
            found[with_hint(sentence, hint_for(reason))] = None
    for node, reason in of_programs.items() if not found else ():
        if node not in compared or not _is_known(reason):
            continue
        if any(_is_of_probabilities_alone(user, refusals) for user in node.users):
            continue
        place = shown(place_of(node, trace)[0])
        sentence = f"a sum at {place} is not fused: {shown_in(reason)}"
        found[with_hint(sentence, hint_for(reason))] = None
    return list(found)


def _symbolic_number(origin: fx.Node) -> str:
    """Finds a Python number of the user's code that is symbolic, if there is one."""
    if any(isinstance(example(node), torch.SymFloat) for node in ancestors(origin)):
        return "a Python number that changes between calls is symbolic in this graph"
    return ""
