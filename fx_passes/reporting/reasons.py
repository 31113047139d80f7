"""Explains why a loss is not fused: the nearest unsupported operation, and why it is."""

from __future__ import annotations

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.region import compared_by_hand
from torch_streamkl.fx_passes.capture.retrace import node_of
from torch_streamkl.fx_passes.closed_forms.heads import SELECTED_KEYS
from torch_streamkl.fx_passes.fx_utils.nodes import (
    name_of,
    named_arguments,
    nearest_inputs,
    nearest_users,
)
from torch_streamkl.fx_passes.fx_utils.op_names import LOG_SOFTMAXES, MATMULS, SOFTMAXES
from torch_streamkl.fx_passes.fx_utils.sizes import numel
from torch_streamkl.fx_passes.reporting.divergence_sites import CALLS
from torch_streamkl.fx_passes.reporting.refusals import (
    ELSEWHERE,
    NO_PRODUCT,
    NOT_IN_GRAPH,
    NOT_MADE,
    PADS,
    Refusal,
    Refusals,
)
from torch_streamkl.fx_passes.reporting.score_levels import Level

ONE_SIDE = "the scores or probabilities of one side are not made"
UNSUMMED = f"{ONE_SIDE} in this graph, or not summed in it"
AS_PRODUCT = "the sum over the keys is written as a matrix product"
LEAVES = "the divergence leaves the graph before it is summed over the keys"
NO_OPERATOR = "no fused operator computes the sum over the keys"
VARIES = "weights that vary along the keys"  # also what an unknown operation made of scores
OTHER_ROWS = "teacher and student do not share a dimension of query rows"
_FROM_BEFORE = (NO_PRODUCT, NOT_IN_GRAPH, SELECTED_KEYS)  # what was before says more


def reason_of(site: fx.Node, refusals: Refusals) -> Refusal:
    """Explains why a loss is not fused: the nearest unsupported operation, and why it is."""
    for node in (site, *site.users):
        if any(x.op == "placeholder" for x in compared_by_hand(node)):
            return Refusal(f"{ONE_SIDE} in this graph")
    for node in nearest_users(site):
        found = refusals.of(node)
        if found is None:
            continue
        is_vague = VARIES in found.reason or found.reason.endswith("part of the sum")
        if found.reason in _FROM_BEFORE or is_vague:
            found = refusals.before(node) or _elsewhere(site, refusals) or found
        if found.reason == OTHER_ROWS and name_of(node) in MATMULS:
            return Refusal(AS_PRODUCT, node)
        return _of_padding(node, refusals) or found if "masked differ" in found.reason else found
    return refusals.before(site) or _elsewhere(site, refusals) or _unsummed(site, refusals)


def _elsewhere(site: fx.Node, refusals: Refusals) -> Refusal | None:
    """Scores or probabilities that are compared and that no product in the graph makes."""
    for node in nearest_users(site):
        if node.op != "call_function" or name_of(node) != "kl_div":
            continue
        for which, given in zip(("input", "target"), node.args, strict=False):
            if isinstance(given, fx.Node) and not refusals.levels.has_product(given):
                return Refusal(f"the {which} of kl_div {NOT_MADE}", node)
    for node in nearest_inputs(site):
        name = name_of(node) if node.op == "call_function" else ""
        if name in SOFTMAXES | LOG_SOFTMAXES | CALLS and not refusals.levels.has_product(node):
            return Refusal(f"the input of {name.removeprefix('_')} {ELSEWHERE}", node)
    return None


def _of_padding(node: fx.Node, refusals: Refusals) -> Refusal | None:
    """Scores of one side that are padded with a number, which is a mask of this side alone."""
    for earlier in nearest_inputs(node):
        if earlier.op == "call_function" and name_of(earlier) in PADS:
            if refusals.levels.of(earlier.args[0]) is Level.SCORES:
                fill = named_arguments(earlier).get("value", 0.0) or 0.0
                text = f"scores are padded with {fill:g}, which takes part in the softmax"
                return Refusal(text, earlier)
    return None


def _unsummed(site: fx.Node, refusals: Refusals) -> Refusal:
    """Explains a loss of which no sum over keys is found."""
    if refusals.levels.of(site) is Level.PROBABILITIES:
        for node in nearest_users(site):
            for other in node.all_input_nodes:  # it is combined with what is not known
                found = refusals.captured(other)
                if found is not None:
                    return found
            if name_of(node) in MATMULS:
                return Refusal(AS_PRODUCT, node)
            if refusals.levels.of(node) is Level.ROWS:
                return Refusal(NO_OPERATOR)
        return Refusal(LEAVES)
    if name_of(site) in MATMULS:
        return Refusal(AS_PRODUCT, site)
    if _is_returned_whole(site, refusals):
        return Refusal(LEAVES)
    return Refusal(UNSUMMED)


def _is_returned_whole(site: fx.Node, refusals: Refusals) -> bool:
    """Whether the graph returns something as large as what two distributions meet in."""
    values = [n.meta.get("val") for n in (site, *site.all_input_nodes)]
    least = max((numel(x) for x in values if isinstance(x, Tensor)), default=0)
    for node in nearest_users(site):
        value, outer = node.meta.get("val"), node_of(refusals.trace, node)
        if outer is None or not isinstance(value, Tensor) or 2 * numel(value) < least:
            continue
        if any(user.op == "output" for user in outer.users):
            return True
    return False
