"""Replaces the losses of a graph by operators, one loss or row program at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from torch_streamkl.fx_passes.capture.aliases import Aliases, LateWrite
from torch_streamkl.fx_passes.closed_forms.earliest import Divergence
from torch_streamkl.fx_passes.closed_forms.form import LINEAR, Call, ClosedForm, RowValue
from torch_streamkl.fx_passes.closed_forms.row_sites import operands_in
from torch_streamkl.fx_passes.closed_forms.rows import replaced
from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder
from torch_streamkl.fx_passes.fx_utils.errors import NotWorthIt, Refused, Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    location_of,
    name_of,
    needs_gradient,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.strides import as_user, with_own_memory
from torch_streamkl.fx_passes.lowering import row_calls
from torch_streamkl.fx_passes.lowering.attention_call import CallTensors
from torch_streamkl.fx_passes.lowering.linear_call import HeadTensors
from torch_streamkl.fx_passes.lowering.sites import SITE, mark_site
from torch_streamkl.fx_passes.lowering.writer import Writer
from torch_streamkl.fx_passes.planning.losses import Losses
from torch_streamkl.fx_passes.planning.profitability import (
    why_ids_are_left,
    why_left,
    why_program_is_left,
    why_twice_is_left,
)
from torch_streamkl.fx_passes.planning.readers import Readers, readers_behind
from torch_streamkl.fx_passes.planning.row_descriptions import (
    describe_program,
    is_maximum,
    operator_of,
)
from torch_streamkl.fx_passes.planning.row_plan import ProgramPlan, RowOutput
from torch_streamkl.fx_passes.planning.row_plans import RowPlanner, why_special
from torch_streamkl.fx_passes.planning.special_values import (
    Scores,
    check_masked_logarithms,
    check_nan_readers,
    check_promoted,
    check_replaced,
    special_reason,
)
from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reporting.described import describe, roles_of, warning_of
from torch_streamkl.fx_passes.reporting.divergence_sites import without_divergence
from torch_streamkl.fx_passes.reporting.hints import FORCE_SIZE, hint_for
from torch_streamkl.fx_passes.reporting.refusals import Refusals
from torch_streamkl.fx_passes.reporting.report import Site
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.program.canonical import linear, product
from torch_streamkl.program.graph import INT, Node, Source, capture, index
from torch_streamkl.program.reductions import substitute
from torch_streamkl.rows import op as row_op


@dataclass
class Fused:
    """Holds what became of the losses of one graph; all nodes are those of the trace."""

    values: list[fx.Node]  # that operators compute, or for which some were planned
    unfused: list[fx.Node]  # where distributions meet, and no operator computes the result
    sites: list[tuple[fx.Node, Site]] = field(default_factory=list)  # fused, with their values
    left: list[Site] = field(default_factory=list)  # skipped for their size, or refused
    operands: list[fx.Node] = field(default_factory=list)  # of the products of row programs
    of_rows: set[object] = field(default_factory=set)  # of products that programs read as tensors


class Fusing:
    """Replaces divergences, and then what row programs compute.

    What one of those may compute as well waits for them, as does what only elements read.
    ``sites`` are where distributions meet.
    """

    def __init__(self, insert: Inserting, sites: Sequence[fx.Node]) -> None:
        losses = insert.losses
        self.insert, self.losses, self.sites = insert, losses, sites
        values = [d.inner for d in losses.divergences]
        self.fused = Fused(values, without_divergence(losses.trace, sites, losses.divergences))
        self.stayed: list[tuple[Divergence, Site]] = []
        self.handled: set[fx.Node] = set()

    def run(self) -> Fused:
        """Replaces all losses that operators compute."""
        planner, fused = self.losses.planner, self.fused
        waiting, sharing = self.losses.delayed(self._is_left)
        for divergence in self.losses.divergences:
            if divergence not in waiting:
                self._fuse_divergence(divergence)
        if planner is not None:
            plans = [x for p in planner.find(self.handled) for x in self.insert.parted(p, planner)]
            replaced = [p for p in plans if self._fuse_program(p, sharing, waiting)]
            computed = {a for p in replaced for o in p.outputs for a in ancestors(o.inner)}
            waiting = [d for d in waiting if not d.parts <= computed]
            fused.unfused = [n for n in fused.unfused if planner.reads_products(n, replaced)]
            fused.of_rows = {operands_in(x) for p in replaced for x in p.of_rows}
        for divergence in waiting:
            self._fuse_divergence(divergence)
        if planner is not None:
            self._fuse_places(planner)
        fused.left += [site for _, site in self.stayed]
        return fused

    def _fuse_places(self, planner: RowPlanner) -> None:
        """Replaces places of maxima that other code reads at: labels, by what reads them."""
        outer = self.losses.trace.outer
        values = (outer[n] for n in {*self.handled, *self.fused.values} if n in outer)
        replaced = {n for n in values if not n.users}
        for plan in planner.places(replaced) if replaced else ():
            self._fuse_program(plan, (), ())

    def _fuse_divergence(self, divergence: Divergence) -> None:
        site = self.insert.divergence(divergence)
        if site.skipped:
            self.fused.left.append(site)
        elif not site.fused:
            self.stayed.append((divergence, site))
            return
        else:
            self.fused.sites.append((divergence.inner, site))
        self.handled |= ancestors(divergence.inner)

    def _is_left(self, plan: ProgramPlan) -> bool:
        device = tensor_of(plan.outputs[0].node).device.type
        return bool(why_program_is_left(plan.form.products, device, self.insert.min_mib))

    def _fuse_program(
        self, plan: ProgramPlan, sharing: Sequence[Divergence], waiting: Sequence[Divergence]
    ) -> bool:
        """Inserts a row program; returns whether it or its report takes the place of its sums."""
        inner, fused = [o.inner for o in plan.outputs], self.fused
        if any(d.parts == set(inner) for d in sharing):
            return False  # a divergence after all
        computed = {a for n in inner for a in ancestors(n)}
        sites = self.insert.program(plan)
        own = {d.inner: d for d in sharing}
        named = [own.get(n) for n in inner]
        sites = [
            site if d is None else self.insert.named(site, d)
            for site, d in zip(sites, named, strict=True)
        ]
        if sites[0].reason and any(d.parts <= computed for d, _ in self.stayed):
            return False  # why the divergence stays says more
        if not sites[0].fused and any(d.parts <= computed for d in waiting):
            return False  # it is fused as a divergence, later
        is_new = computed.isdisjoint(self.sites)
        if sites[0].reason and is_new and sites[0].node not in self.insert.refused:
            sites = [replace(s, is_required=False) for s in sites]
        fused.sites += [x for x in zip(inner, sites, strict=True) if x[1].fused]
        fused.left += [site for site in sites if not site.fused]
        fused.values += inner
        fused.operands += plan.operands
        fused.unfused = [n for n in fused.unfused if n not in computed]
        self.stayed = [(d, site) for d, site in self.stayed if not d.parts <= computed]
        return True


@dataclass
class Inserting:
    """Inserts the operators of one loss into a graph.

    ``refused`` has the sites that an attempt before has refused, by name. ``late`` gets what is
    written after a site, of what its operators read.
    """

    losses: Losses
    refusals: Refusals
    builder: MakeBuilder
    aliases: Aliases
    refused: Refused
    outside: Readers
    min_mib: float | None
    late: dict[str, list[LateWrite]] = field(default_factory=dict)

    def divergence(self, found: Divergence) -> Site:
        """Inserts the operators of one loss and moves its users over, or changes nothing."""
        node, build = found.node, self.builder(found.node)
        site = self._described(found)
        small = why_left(found.forms, tensor_of(node).device.type, self.min_mib)
        small = small or self._why_not_worth_it([node])
        if small:
            return replace(site, fused=False, skipped=small, hint=FORCE_SIZE, roles="", warning="")
        try:
            with build.undone_if_unsupported():
                if reason := self._why_refused(node):
                    raise Unsupported(reason)
                self._check(found)
                replacement = self._value(build, found)
                self.late[node.name] = self.aliases.check(
                    build.added, build.selecting, before=node
                )
                mark_site(build.added, node.name)
        except Unsupported as blocked:
            reason = str(blocked)
            return replace(
                site, fused=False, reason=reason, hint=hint_for(reason), roles="", warning=""
            )
        node.replace_all_uses_with(replacement)
        return site

    def _why_refused(self, node: fx.Node) -> str:
        """Why an attempt before has refused a site; empty if it has not."""
        reason = self.refused.get(node.name, "")
        return "" if isinstance(reason, NotWorthIt) else reason

    def _why_not_worth_it(self, nodes: Iterable[fx.Node]) -> str:
        """Why an attempt before has found that one of some sites is not worth it."""
        reasons = (self.refused.get(n.name, "") for n in nodes)
        return next((r for r in reasons if isinstance(r, NotWorthIt)), "")

    def _value(self, build: Builder, found: Divergence) -> fx.Node:
        """Inserts the calls of a loss, and returns what takes the place of the user's node."""
        losses, writes, root = self.losses, self.aliases.writes, found.matched.root
        writer = Writer(build, losses.reading, losses.trace.outer, [root])
        changes = {
            site: self._rows(writer, form, number)
            for number, (site, form) in enumerate(found.matched.closed.items())
        }
        dims = losses.reading.array(found.inner).dims
        total = writer.tensor(replaced(root, changes), dims, expand=range(len(dims)))
        total = as_user(build, total, found.node, writes)
        return with_own_memory(build, total, found.node, writes)

    def _rows(self, writer: Writer, form: ClosedForm, number: int) -> Node:
        """The rows of a sum over keys, as an expression of the operators' results."""
        terms = []
        for i, call in enumerate(form.calls):
            name = (RowValue(number), i)
            kind = HeadTensors if call.operator == LINEAR else CallTensors
            writer.values[name] = kind(writer, call, self.losses.product_types).emit()
            dims = (call.axes.rows,) if call.operator == LINEAR else call.axes.scores[:3]
            at = [arrays.position(dim) for dim in dims]
            value = capture(Source(name, 0, form.site.flows), at=at)
            terms.append((1.0, product(call.weight, value)))
        own = {mine: index(original) for original, mine in form.names}
        return substitute(linear(0.0, terms), own)

    def _described(self, found: Divergence) -> Site:
        kind, form = describe(found.calls)
        site = Site(True, kind, form, "", *location_of(found.node), node=found.node.name)
        roles = roles_of(found.calls, self.refusals)
        is_loss = self.losses.trace.is_learned(found.node)
        return replace(site, is_loss=is_loss, warning=warning_of(found.calls), roles=roles)

    def _check(self, found: Divergence) -> None:
        """Raises Unsupported if code would see another number than in eager code."""
        scores = Scores(found.inner, found.forms, self.losses.reading)
        for call in found.calls:
            self._check_comparisons(call)
        check_promoted(scores)
        check_masked_logarithms(scores)
        check_replaced(scores)
        check_nan_readers(found.node, scores, self.outside)

    def _check_comparisons(self, call: Call) -> None:
        """Raises Unsupported if a formula compares scores that eager code has rounded."""
        if not call.functional.compares:
            return
        for side in call.sides:
            found = self.losses.product_types.get(side.product.names)
            if found is not None and found.result.itemsize < 4:
                raise Unsupported("scores of a narrow type are compared")

    def named(self, site: Site, found: Divergence) -> Site:
        """Describes a result of a program as the divergence that it is."""
        described = self._described(found)
        return replace(site, form=described.form, roles=described.roles, warning=described.warning)

    def parted(self, plan: ProgramPlan, planner: RowPlanner) -> list[ProgramPlan]:
        """Returns the programs of what is refused and of all others, if only a part is refused.

        The losses of a program that was refused are tried without its metrics. What is refused
        may keep all products of the others: then these are not worth a program.
        """
        if len(plan.outputs) == 1:
            return [plan]
        apart = {o.inner for o in plan.outputs if self._is_misread(plan, o)}
        if self._why_refused(plan.first):
            is_learned = self.losses.trace.is_learned
            apart |= {o.inner for o in plan.outputs if not is_learned(o.node)}
        parts = [[o.inner for o in plan.outputs if (o.inner in apart) == x] for x in (False, True)]
        try:
            found = [planner.plan(x) for x in parts] if all(parts) else [plan]
        except Unsupported:
            return [plan]
        device = tensor_of(plan.first).device.type
        is_left = self.min_mib is None and why_twice_is_left(0.0, ("other code",), device)
        return [plan] if is_left and planner.keeps_products(found[0]) else found

    def _is_misread(self, plan: ProgramPlan, output: RowOutput) -> bool:
        try:
            self._check_readers(plan, output)
        except Unsupported:
            return True
        return False

    def program(self, plan: ProgramPlan) -> list[Site]:
        """Inserts one row program, or changes nothing; returns a site for each of its sums.

        All of them are known by the first one's name: they are refused together.
        """
        name, build = plan.first.name, self.builder(plan.place)
        device = tensor_of(plan.first).device.type
        small = why_program_is_left(plan.form.replaced, device, self.min_mib)
        small = small or why_ids_are_left(plan.form, device, self.min_mib)
        # one of its divergences may not be worth it, of which each has its own name
        small = small or self._why_not_worth_it([o.node for o in plan.outputs])
        reason = ""
        try:
            with build.undone_if_unsupported():
                if refusal := self._why_refused(plan.first):
                    raise Unsupported(refusal)
                for output in plan.outputs:
                    self._check_readers(plan, output)
                if not small:
                    self._insert(build, plan, name)
        except Unsupported as blocked:
            reason, small = str(blocked), ""
        site = Site(not reason and not small, "", "", reason, "", node=name)
        hint = hint_for(reason) if reason else FORCE_SIZE if small else ""
        site = replace(site, skipped=small, hint=hint)
        return [self._of_output(site, plan, output) for output in plan.outputs]

    def _of_output(self, site: Site, plan: ProgramPlan, output: RowOutput) -> Site:
        location, code = location_of(output.node)
        is_loss = self.losses.trace.is_learned(output.node) and not is_maximum(plan, output)
        site = replace(site, location=location, code=code, is_loss=is_loss)
        kind, form = operator_of(plan, output), describe_program(plan, output)
        return replace(site, kind=kind, form=form)

    def _check_readers(self, plan: ProgramPlan, output: RowOutput) -> None:
        """Raises Unsupported if code after a sum would see another number than in eager code."""
        scores = Scores(output.inner, (), self.losses.reading)
        if output.around.dtype == INT:  # the place of a maximum, also of NaN and infinity
            if scores.has_lost_rows:
                raise Unsupported(special_reason(name_of(output.node)))
            return
        found = readers_behind([output.node], self.outside)
        if not found.special and not found.infinite:
            return
        special = why_special(plan, output, found)
        if special:
            raise Unsupported(special)
        if scores.may_underflow or (found.special and scores.has_lost_rows):
            raise Unsupported(special_reason(min(found.special or found.infinite)))

    def _insert(self, build: Builder, plan: ProgramPlan, name: str) -> None:
        losses = self.losses
        replacements = row_calls.emit(
            build, plan, losses.reading, losses.trace.outer, self.aliases.writes
        )
        self.aliases.check(build.added, build.selecting)
        mark_site(build.added, name)
        for node, replacement in replacements.items():
            node.replace_all_uses_with(replacement)


def read_after_writes(graph: fx.Graph, late: Mapping[str, Sequence[LateWrite]]) -> dict[str, str]:
    """Finds losses with an operator that reads a tensor after a write, and says why not.

    `linear_kl` reads hidden states and weights again in its backward. `linear_kl_sum` does
    not, because it computes its gradients in the forward. Which of the two a divergence
    becomes is known at the end. So it is fused first, and if it stays `linear_kl`, the graph
    is rewritten again without it: a teacher that is updated in the step.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[str, str] = {}
    for node in graph.nodes:
        for write in late.get(node.meta.get(SITE, ""), ()):
            is_later = position[write.write] > position[node]
            if not is_later or _reads_again(node):
                found[node.meta[SITE]] = write.reason
    return found


def _reads_again(node: fx.Node) -> bool:
    """Whether an operator has a backward that reads its inputs."""
    if node.target in (linear_ops.linear_kl_sum, row_op.row_program_sum):
        return False
    return any(map(needs_gradient, node.all_input_nodes))
