"""Says why operations and sums of a trace are no operator's, and at which node.

A value is captured if no rule reads it, and a sum over keys may have no closed form. Both have
their reasons as short phrases, which hints compare and `wording.py` says in sentences. An
expression is found again in the graph by its form: sums over it have other names for its axes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.closed_forms.alike import Forms
from torch_streamkl.fx_passes.closed_forms.form import NotClosed
from torch_streamkl.fx_passes.closed_forms.heads import (
    EARLIER_SUM,
    OTHER_DIMENSIONS,
    SELECTED_KEYS,
)
from torch_streamkl.fx_passes.closed_forms.limits import SCALED
from torch_streamkl.fx_passes.closed_forms.match import match
from torch_streamkl.fx_passes.closed_forms.repeated_ids import SINGLE_ENTRIES
from torch_streamkl.fx_passes.closed_forms.row_opening import SOME_KEYS
from torch_streamkl.fx_passes.closed_forms.rows import keys_first, sites, sums_over_keys
from torch_streamkl.fx_passes.closed_forms.score_form import OF_ANOTHER_PRODUCT
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    descendants,
    name_of,
    nearest,
    nearest_inputs,
    nearest_users,
)
from torch_streamkl.fx_passes.fx_utils.op_names import LOG_SOFTMAXES, MATMULS, SOFTMAXES
from torch_streamkl.fx_passes.fx_utils.sizes import is_one
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.fx_passes.reading.writes import STALE
from torch_streamkl.fx_passes.reporting.score_levels import Level, ScoreLevels
from torch_streamkl.program.graph import Node, Source
from torch_streamkl.program.walks import walk

NOT_MADE = "is not made from scores in this graph"
ELSEWHERE = f"{NOT_MADE}: it is an input, or a graph break lies between"
DROPOUT = "dropout changes the probabilities after the softmax"
PROBABILITIES = "attention or vocabulary probabilities"
OTHER_SIZES = "two distributions whose sizes are not known to be equal are combined"
OF_BLOCKS = "sums over blocks of them are per-row values and blocks, of row programs alone"
PADDED = "probabilities are padded with other values"
MASKED_ENTRIES = "a mask selects single entries of each row"
SCATTERED = "chosen probabilities are scattered to the keys"
JOINED = "parts of the scores are joined by {}"
STEPS = {"floor", "ceil", "round", "trunc", "fix", "sign", "sgn"}  # whose gradient is 0
NO_GRADIENT = "the gradient of the scores is a constant"
CONSTANT = "a gradient flows through what is a constant"
BY_ZERO = "scores multiplied by 0"
DOUBLE = "softmax of values that are probabilities already (double softmax)"
NO_PRODUCT = "the scores of a softmax are no product"
NOT_IN_GRAPH = "scores that no product in the graph makes"
SUMS = {"sum", "mean", "kl_div", "cross_entropy_loss"}
RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"}
JOINS = {"cat", "stack", "concat"}
PARTS = {"select", "slice", "narrow"}
OF_HEADS = "elements of a head use"  # how a row program says that a sum over rows comes first
OF_A_FACTOR = "a value of another matrix product multiplies scores or probabilities"
_COMBINED = dict.fromkeys(("add", "sub"), OF_ANOTHER_PRODUCT)
_COMBINED |= dict.fromkeys(("mul", "div"), OF_A_FACTOR)
PADS = {"pad", "constant_pad_nd"}
# operations after which the keys of a softmax are no dimension any more
OF_KEYS = {
    "slice": SOME_KEYS, "narrow": SOME_KEYS, "select": SOME_KEYS,
    "index_select": SELECTED_KEYS, "index": SELECTED_KEYS, "masked_select": SINGLE_ENTRIES,
}  # fmt: skip
# reasons of the reader that say less than the operation does
_TECHNICAL = re.compile(
    r"has no rule$|^a view of |^axes of |^a result |^its rule failed|"
    r"^a gradient flows through what is a constant"
)
_OPERATION = re.compile(r"^(\S+) (?:of scores|is part of the sum)$")


@dataclass(frozen=True)
class Refusal:
    """Holds a reason and the node that it is about, None if it is about the whole loss."""

    reason: str
    node: fx.Node | None = None


@dataclass
class Refusals:
    """Finds the reasons of one trace; what is asked for once is kept."""

    trace: Trace
    reading: Reading
    levels: ScoreLevels = field(init=False)
    _found: dict[fx.Node, Refusal | None] = field(default_factory=dict)
    _captured: dict[fx.Node, Refusal | None] = field(default_factory=dict)
    _matched: dict[Node, NotClosed | None] = field(default_factory=dict)
    _first: dict[int, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.levels = ScoreLevels(self.reading)

    def of(self, node: fx.Node) -> Refusal | None:
        """Returns why a node's value is no operator's, if its own operation is the reason."""
        if node not in self._found:
            self._found[node] = (
                self.captured(node)
                or self._of_keys(node)
                or self._of_sum(node)
                or self._of_reduction(node)
            )
        return self._found[node]

    def of_another_product(self, node: fx.Node) -> str:
        """Says how a node is combined with whole scores that are of other products; or nothing."""
        made_of_it = {node, *descendants([node])}
        own = _matmuls_before(node)
        for user in nearest_users(node):
            said = _COMBINED.get(name_of(user), "")
            others = [a for a in user.all_input_nodes if a not in made_of_it] if said else []
            others = [
                a for a in others if self.levels.of(a) in (Level.SCORES, Level.PROBABILITIES)
            ]
            are_whole = not any(map(self.levels.are_chosen, others))
            if others and are_whole and not any(own & _matmuls_before(a) for a in others):
                return said
        return ""

    def before(self, node: fx.Node) -> Refusal | None:
        """Returns why the nearest operation before a node has no form, the node included."""
        for earlier in nearest_inputs(node):
            found = (
                self.captured(earlier)
                or self._of_keys(earlier)
                or self._of_ids(earlier)
                or self._of_parts(earlier)
                or self._of_softmax(earlier)
            )
            if found is not None:
                return found
        return None

    def noted(self) -> dict[fx.Node, str]:
        """Returns the nodes that were found to be the reasons of others, with those reasons."""
        every = [x for x in self._found.values() if x is not None]
        return {x.node: x.reason for x in every if x.node is not None}

    # ------------------------------------------------------------------------- row programs

    def of_programs(self, refused: Mapping[fx.Node, NotClosed]) -> dict[fx.Node, str]:
        """Returns the nodes that row programs do not take, in order, and why.

        These are operations on scores that are not read, and where each sum was ``refused``.
        """
        found: dict[fx.Node, str] = {}
        for root, why in refused.items():
            placed = self._of_steps(root) if why.reason == NO_GRADIENT else None
            placed = placed or self.placed(why, root)
            found[placed.node or root] = placed.reason
        for node in self.trace.graph.nodes:
            captured = self.captured(node)
            if captured is not None and captured.node == node:
                found[node] = captured.reason
        return {n: found[n] for n in self.trace.graph.nodes if n in found}

    def _of_steps(self, root: fx.Node) -> Refusal | None:
        """The nearest function without a gradient that is applied to scores."""
        for node in nearest_inputs(root):
            if node.op == "call_function" and name_of(node) in STEPS:
                if self.levels.of(node) in (Level.SCORES, Level.PROBABILITIES):
                    return Refusal(f"{name_of(node)} of scores", node)
        return None

    def places_of(
        self, refused: Mapping[fx.Node, NotClosed], roots: Iterable[fx.Node]
    ) -> set[fx.Node]:
        """Returns the nodes at which some of these sums were refused."""
        return {self.placed(refused[root], root).node or root for root in roots}

    # ------------------------------------------------------------------------- captured

    def captured(self, node: fx.Node) -> Refusal | None:
        """Returns why an operation on scores is not read, or one that it is computed from."""
        for current in nearest(node, self._unread_sources):
            if current not in self._captured:
                self._captured[current] = self._of_operation(current)
            found = self._captured[current]
            if found is not None:
                return found
        return None

    def _unread_sources(self, node: fx.Node) -> list[fx.Node]:
        """What is not read either, of the tensors that an operation which is not read captures."""
        reasons = self.reading.reasons
        sources = self.levels.sources_of(node.all_input_nodes) if node in reasons else []
        return [x for x in sources if x in reasons]

    def _of_operation(self, node: fx.Node) -> Refusal | None:
        """Why an operation on scores is not read, in terms of scores."""
        reason = self.reading.reasons.get(node)
        if reason is None or node.op != "call_function":
            return None
        if node.target is operator.getitem:  # one of several results
            node = node.all_input_nodes[0]
        found = [self.levels.of(a) for a in node.all_input_nodes]
        level = max(found, key=lambda x: x.value, default=Level.OTHER)
        if level in (Level.OTHER, Level.ROWS):
            return None
        name = name_of(node)
        if reason == CONSTANT and any(a == 0 for a in node.args if isinstance(a, (int, float))):
            return Refusal(BY_ZERO, node)
        if name == "dropout" and level is Level.PROBABILITIES:
            return Refusal(DROPOUT, node)
        if name == "masked_select" or any(
            self.levels.are_entries(a) for a in node.all_input_nodes
        ):
            masked = next(filter(selects_entries, nearest_inputs(node)), None)
            return Refusal(SINGLE_ENTRIES if masked is None else MASKED_ENTRIES, masked or node)
        if selects_entries(node):
            return Refusal(MASKED_ENTRIES, node)
        if name in RESHAPES:
            return Refusal("reshape that mixes the axes of the scores", node)
        if reason.startswith("tensors of sizes "):
            return Refusal(OTHER_SIZES, node)
        if name == "dropout" or name.endswith("_") or _TECHNICAL.search(reason):
            what = "scores" if level is Level.SCORES else PROBABILITIES
            return Refusal(f"{name} of {what}", node)
        return Refusal(reason, node)

    # ------------------------------------------------------------------------- keys

    def _of_keys(self, node: fx.Node) -> Refusal | None:
        """An operation after which the keys that a softmax was over are no dimension any more."""
        if node.op != "call_function" or self.levels.of(node) is not Level.PROBABILITIES:
            return None
        before = [a for a in node.all_input_nodes if self.levels.keys_of(a)]
        if not before or self.levels.keys_of(node):
            return None
        name = name_of(node)
        if name in SUMS:
            return None
        if name in RESHAPES:
            return Refusal(f"reshape that splits the keys: {OF_BLOCKS}", node)
        return Refusal(OF_KEYS.get(name, f"{name} of scores"), node)

    def _of_ids(self, node: fx.Node) -> Refusal | None:
        """An operation that reads scores at ids of each row or key."""
        if node.op != "call_function" or not self.levels.are_chosen(node):
            return None
        if any(self.levels.are_chosen(a) for a in node.all_input_nodes):
            return None
        return Refusal(_of_scores(node), node)

    def _of_parts(self, node: fx.Node) -> Refusal | None:
        """Columns or slices of scores that are put together to other keys."""
        if node.op != "call_function" or name_of(node) not in JOINS:
            return None
        parts = [
            a.all_input_nodes[0] if name_of(a) == "unsqueeze" else a for a in node.all_input_nodes
        ]
        if any(name_of(a) not in PARTS or not a.all_input_nodes for a in parts):
            return None
        sources = [a.all_input_nodes[0] for a in parts]
        if any(self.levels.of(a) is not Level.SCORES for a in sources):
            return None
        return Refusal(JOINED.format(name_of(node)), node)

    def _of_softmax(self, node: fx.Node) -> Refusal | None:
        if node.op != "call_function" or name_of(node) not in SOFTMAXES | LOG_SOFTMAXES:
            return None
        is_double = self.levels.of(node.args[0]) is Level.PROBABILITIES
        return Refusal(DOUBLE, node) if is_double else None

    # ------------------------------------------------------------------------- sums

    def _of_sum(self, node: fx.Node) -> Refusal | None:
        """A sum over keys that begins at a node and has no closed form."""
        found = self.reading.arrays.get(node)
        if node.op != "call_function" or not isinstance(found, Array):
            return None
        order = [a for d in found.dims for a in d]
        for site in self._new_sums(node, found.expr):
            if site not in self._matched:
                result = match(site, order)
                self._matched[site] = result if isinstance(result, NotClosed) else None
            refused = self._matched[site]
            if refused is not None:
                return self.placed(refused, node)
        return None

    def _of_reduction(self, node: fx.Node) -> Refusal | None:
        """An operation that leaves no keys, and is no sum over those of a softmax."""
        before = [a for a in node.all_input_nodes if self.levels.of(a) is Level.PROBABILITIES]
        if node.op != "call_function" or not before or self.levels.keys_of(node):
            return None
        x = self.reading.expression(node)
        if x is None or sums_over_keys([x]):
            return None
        if name_of(node) in SUMS:
            return self.before(node)
        is_row = self.levels.of(node) is Level.ROWS
        return Refusal(f"{name_of(node)} of scores", node) if is_row else None

    def _new_sums(self, node: fx.Node, x: Node) -> list[Node]:
        """The sums over keys of an expression that no input of its node has."""
        if not sums_over_keys([x]):
            return []
        found = sites(keys_first(x))
        given = (y for a in node.all_input_nodes if (y := self.reading.expression(a)) is not None)
        before = set(map(self._forms.of, sums_over_keys(given)))
        return [y for y in found if self._forms.of(y) not in before]

    def placed(self, refused: NotClosed, default: fx.Node | None = None) -> Refusal:
        """Returns the reason of a sum, and the node at which it stopped."""
        at = refused.at
        if refused.reason.startswith(OF_HEADS):
            refused = replace(refused, reason=EARLIER_SUM)
        if at is None:
            return Refusal(refused.reason, default)
        for x in walk([at]):
            inside = self._of_source(x.value) if isinstance(x.value, Source) else None
            if inside is not None:
                return inside
        node = self.first_with(at)
        if node is None:
            return Refusal(refused.reason, default)
        if self.levels.of(node) is Level.OTHER:  # a mask or factor: where scores meet it
            node = self._first_that_reads(at, node, default) or default
        assert node is not None or default is None
        if refused.reason == SOME_KEYS:
            padded = self._padded(default if default is not None else node)
            if padded is not None:
                return Refusal(PADDED, padded)
        is_of_sums = refused.reason in (OTHER_DIMENSIONS, EARLIER_SUM)
        if node is not None and is_of_sums and name_of(node) in ("scatter", "scatter_"):
            return Refusal(SCATTERED, node)
        if node is not None and _OPERATION.match(refused.reason):
            return Refusal(_of_scores(node), node)
        reduced = self._reduction_of(node) if refused.reason == SCALED else None
        if reduced is not None:
            origin = node_of(self.trace, reduced) or reduced
            name = name_of(origin).split(".")[-1]
            return Refusal(f"scores are scaled by what {name} computes of them", reduced)
        return Refusal(refused.reason, node)

    def _reduction_of(self, node: fx.Node | None) -> fx.Node | None:
        """The nearest operation before a node that makes a value of rows, or one, of scores."""
        for earlier in nearest_inputs(node) if node is not None else ():
            before = [self.levels.of(a) for a in earlier.all_input_nodes]
            is_of_keys = Level.SCORES in before or Level.PROBABILITIES in before
            if is_of_keys and self.levels.of(earlier) in (Level.ROWS, Level.OTHER):
                return earlier
        return None

    def _padded(self, site: fx.Node | None) -> fx.Node | None:
        """Returns what pads probabilities before a site, if nothing takes some of them there."""
        every = nearest_inputs(site) if site is not None else ()
        before = [n for n in every if n.op == "call_function" and n.all_input_nodes]
        before = [n for n in before if self.levels.of(n.all_input_nodes[0]) is Level.PROBABILITIES]
        if any(name_of(n) in PARTS for n in before):
            return None
        return next((n for n in before if name_of(n) in PADS | JOINS), None)

    def _of_source(self, source: Source) -> Refusal | None:
        """Returns why a tensor that is made of scores is captured."""
        node = source.name
        if not isinstance(node, fx.Node):
            return None
        found = self.captured(node)
        if found is None and source.version and node in self.reading.reads_products:
            return Refusal(STALE, node)  # it was written in a way that is not read
        return found

    # ------------------------------------------------------------------------- places

    def first_with(self, x: Node) -> fx.Node | None:
        """Returns the first node of the trace whose value has an expression of this form."""
        number = self._forms.of(x)
        return self._first.get(number)

    def _first_that_reads(self, x: Node, after: fx.Node, before: fx.Node | None) -> fx.Node | None:
        """The first node between two that is made of scores and has an expression of this form."""
        wanted, is_after = self._forms.of(x), False
        for node in self.trace.graph.nodes:
            is_after |= node is after
            found = self.reading.expression(node)
            if not is_after or found is None or not self.levels.has_product(node):
                continue
            if any(self._forms.of(y) == wanted for y in walk([found])):
                return node
            if node is before:
                break
        return None

    @cached_property
    def _forms(self) -> Forms:
        """The forms of all expressions of the trace; notes the first node of each."""
        forms, seen = Forms(), set[Node]()
        for node in self.trace.graph.nodes:
            found = self.reading.expression(node)
            if node.op != "call_function" or found is None:
                continue
            for x in walk([found], lambda y: y not in seen):
                if x not in seen:
                    seen.add(x)
                    self._first.setdefault(forms.of(x), node)
        return forms


def _matmuls_before(node: fx.Node) -> set[fx.Node]:
    return {n for n in ancestors(node) if n.op == "call_function" and name_of(n) in MATMULS}


def _of_scores(node: fx.Node) -> str:
    return MASKED_ENTRIES if selects_entries(node) else f"{name_of(node)} of scores"


def selects_entries(node: fx.Node) -> bool:
    """Returns whether a boolean mask over the last dimension selects what a node returns."""
    if node.op != "call_function" or name_of(node) not in ("index", "masked_select"):
        return False
    source, given = node.args[:2]
    indices = given if isinstance(given, (list, tuple)) else [given]
    last = indices[-1]
    if not isinstance(source, fx.Node) or not isinstance(last, fx.Node):
        return False
    mask, x = last.meta["val"], source.meta["val"]
    if mask.dtype != torch.bool or not mask.dim() or is_one(mask.shape[-1]):
        return False  # whole rows of a mask that is broadcast
    return bool(len(indices) - 1 + mask.dim() == x.dim())
