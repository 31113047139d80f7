"""Chooses which sums over keys become row programs, and which of them one program computes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.region import ENTRIES, Region
from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.closed_forms import row_sites
from torch_streamkl.fx_passes.closed_forms.earliest import ProductType
from torch_streamkl.fx_passes.closed_forms.form import (
    NoForm,
    NotClosed,
    Product,
    sources_in,
)
from torch_streamkl.fx_passes.closed_forms.row_checks import is_as_special, is_never_infinite
from torch_streamkl.fx_passes.closed_forms.row_facts import (
    dtype_of,
    facts_of,
    log_softmaxes_of,
    logarithms_of,
    taken_in,
)
from torch_streamkl.fx_passes.closed_forms.row_program import row_form
from torch_streamkl.fx_passes.closed_forms.row_sites import (
    bindings_of,
    maxima_places_in,
    operands_in,
    places_of_keys,
    products_in,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import (
    Memory,
    by_storage,
    is_in_place,
    written_memory,
)
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    location_of,
    name_of,
    reached,
    said_name,
    storage_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.fx_utils.shape_reads import read_for_metadata
from torch_streamkl.fx_passes.fx_utils.sizes import numel
from torch_streamkl.fx_passes.planning.profitability import are_all_keys, why_small
from torch_streamkl.fx_passes.planning.readers import Readers
from torch_streamkl.fx_passes.planning.row_eager import OF_LABELS, check_eager, has_labels
from torch_streamkl.fx_passes.planning.row_levels import Levels
from torch_streamkl.fx_passes.planning.row_plan import ProgramPlan, RowOutput, recorded
from torch_streamkl.fx_passes.planning.special_values import special_reason
from torch_streamkl.fx_passes.reading.arrays import Array, NoView, met
from torch_streamkl.fx_passes.reading.gradients import trained
from torch_streamkl.fx_passes.reading.positions import nodes_read
from torch_streamkl.fx_passes.reading.reader import Reading

SUMS = {
    "sum", "mean", "logsumexp", "kl_div", "mse_loss", "l1_loss", "cross_entropy_loss",
    "linalg_vector_norm", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
}  # fmt: skip


@dataclass(frozen=True)
class _Read:
    """Holds the names of the products that a sum is made of, and of tensors with gradient."""

    products: frozenset[object]
    learned: frozenset[object]


def may_have_programs(trace: Trace) -> bool:
    """Returns whether there are a product and a sum, or entries at ids, at all."""
    names = {name_of(n) for n in trace.graph.nodes if n.op == "call_function"}
    return bool(names & MATMULS) and bool(names & (SUMS | ENTRIES))


class RowPlanner:
    """Plans the row programs of a trace; ``refused`` says why a sum has none, and at what."""

    def __init__(
        self,
        trace: Trace,
        reading: Reading,
        region: Region,
        types: Mapping[frozenset[object], ProductType],
    ) -> None:
        self.trace, self.reading, self.region = trace, reading, region
        made = {names: found.result for names, found in types.items()}
        self.facts = replace(facts_of(reading), product_types=made)
        self._logarithms, self._log_softmaxes = logarithms_of(reading), log_softmaxes_of(reading)
        self.levels = Levels(trace, reading)
        self.refused: dict[fx.Node, NotClosed] = {}
        self.position = {n: i for i, n in enumerate(region.nodes[0].graph.nodes)}
        self._recorded = recorded(region.nodes[0].graph)
        written = ((i, written_memory(n)) for n, i in self.position.items())
        self._writes = [(i, memory) for i, memory in written if memory]
        self._matmuls = self._products()
        self._read: dict[fx.Node, _Read] = {}
        self._plans: dict[tuple[fx.Node, ...], ProgramPlan] = {}

    def _products(self) -> dict[object, fx.Node]:
        """The matmul that makes each product, by its operands."""
        found: dict[object, fx.Node] = {}
        for node in self.trace.graph.nodes:
            x = self.reading.expression(node)
            if name_of(node) in MATMULS and x is not None:
                for product in products_in([x]):
                    found.setdefault(operands_in(product), node)
        return found

    # ------------------------------------------------------------------------ plans

    def plan(self, roots: Sequence[fx.Node]) -> ProgramPlan:
        """Returns one program for these sums, or raises Unsupported.

        Kept, because `find` asks again for those that `sharing` has asked for.
        """
        key = tuple(roots)
        if key not in self._plans:
            if any(map(self.reading.loses_gradient, roots)):
                raise Unsupported("a gradient flows through what is a constant")
            self._plans[key] = self._plan_of(roots, [self.reading.array(r) for r in roots])
        return self._plans[key]

    def _plan_of(self, roots: Sequence[fx.Node], arrays: list[Array]) -> ProgramPlan:
        arrays = _with_shared_rows(arrays)
        order = [a for x in arrays for d in x.dims for a in d]
        inside = {a for r in roots for a in ancestors(r)}
        facts = replace(
            self.facts,
            logarithms=taken_in(inside, self._logarithms),
            log_softmaxes=taken_in(inside, self._log_softmaxes),
        )
        form = row_form([x.expr for x in arrays], list(dict.fromkeys(order)), facts)
        outputs = tuple(
            RowOutput(r, self.trace.outer[r], around, x.dims)
            for r, around, x in zip(roots, form.around, arrays, strict=True)
        )
        every = [x for p in form.replaced for x in (p.rows, p.keys)]
        dtypes = set(map(dtype_of, sources_in(*every)))
        check_eager(roots, form.read_of_rows, dtypes, self.reading)
        matmuls = tuple(self._matmul(p) for p in form.replaced)
        first = self._first([o.node for o in outputs])
        place = self._place(first, bool(trained([x.expr for x in arrays])))
        return ProgramPlan(form, outputs, matmuls, first, place, frozenset(dtypes))

    def _first(self, nodes: Iterable[fx.Node]) -> fx.Node:
        return min(nodes, key=self.position.__getitem__)

    def _place(self, first: fx.Node, is_learned: bool) -> fx.Node:
        """The node before which a program stands: where its gradients are recorded, if any."""
        return self._recorded[first] if is_learned else first

    def _matmul(self, product: Product) -> fx.Node | None:
        names = row_sites.name_of(product.rows), row_sites.name_of(product.keys)
        return self._matmuls.get(names) or self._matmuls.get(names[::-1])

    # ------------------------------------------------------------------------ choices

    def find(self, handled: Collection[fx.Node]) -> list[ProgramPlan]:
        """Returns the programs of a region that leave none of their products to other code.

        ``handled`` are nodes that other operators compute already.
        """
        plans: list[ProgramPlan] = []
        for root in sorted(self.levels.roots(self.region), key=has_labels):
            if root in handled:
                continue
            if has_labels(root):  # `linear_kl` computes it next to a divergence
                if not self._join(plans, root):
                    self.refused[root] = NotClosed(OF_LABELS)
                continue
            try:
                alone = self.plan([root])
            except Unsupported as blocked:
                at = blocked.at if isinstance(blocked, NoForm) else None
                self.refused[root] = NotClosed(str(blocked), at)
                continue
            if not self._join(plans, root):
                plans.append(alone)
        self._add_entries(plans)
        self._merge(plans)
        replaced = {o.node for plan in plans for o in plan.outputs}
        fused = (self.trace.outer[n] for n in handled if n in self.trace.outer)
        replaced |= {node for node in fused if not node.users}
        found = []
        # not once for all calls: a loss that was fused in between has memory of its own
        memory = by_storage(self.region.nodes[0].graph) if plans else {}
        for plan in plans:
            reason = why_small(plan.form) or self.why_kept(plan, replaced, memory)
            for output in plan.outputs if reason else ():
                self.refused[output.inner] = NotClosed(reason)
            if not reason:
                found.append(plan)
        return found

    def _add_entries(self, plans: list[ProgramPlan]) -> None:
        """Adds programs of entries at ids that something else than a program's sum reads.

        What a mask selects of them, for example, is no sum over the ids of each row.
        """
        for node in self.levels.entries(self.region, self.refused):
            try:
                alone = self.plan([node])
            except Unsupported:
                continue
            if are_all_keys(alone.form):
                continue
            self.refused = {n: x for n, x in self.refused.items() if node not in ancestors(n)}
            before = list(plans)
            if not self._join(plans, node):
                plans.append(alone)
            for i, plan in enumerate(before):
                sums = [o.inner for o in plan.outputs]
                if plans[i] is not plan and self._is_made_of(sums, node):
                    plans[i] = alone

    def _is_made_of(self, roots: Sequence[fx.Node], entries: fx.Node) -> bool:
        """Whether sums are of entries alone: the user's code computes them from these."""

        def inputs(node: fx.Node) -> Sequence[fx.Node]:
            return () if node is entries else node.all_input_nodes

        return reached(roots, inputs).isdisjoint(self._matmuls.values())

    def _join(self, plans: list[ProgramPlan], root: fx.Node) -> bool:
        """Lets the first program that can compute another sum, too; returns whether one can."""
        for i, plan in enumerate(plans):
            joined = self._joined(plan, root)
            if joined is not None:
                plans[i] = joined
                return True
        return False

    def _joined(self, plan: ProgramPlan, root: fx.Node) -> ProgramPlan | None:
        """One program with another sum, if all that it reads is there before the first sum."""
        inner = [*(o.inner for o in plan.outputs), root]
        nodes = [self.trace.outer[n] for n in inner]
        reads = list(map(self._reads, inner))
        if all(reads[-1].products.isdisjoint(x.products) for x in reads[:-1]):
            return None
        # A tensor that only some of the results depend on would get zeros from the others, not
        # None. A result without any gradient, such as a metric, is detached
        learned = [x.learned for x in reads]
        if len({x for x in learned if x}) > 1:
            return None
        exprs = [self.reading.array(n).expr for n in inner]
        first = self.position[self._place(self._first(nodes), any(learned))]
        read = nodes_read(*exprs)
        outer = self.trace.outer
        if any(n not in outer or self.position[outer[n]] > first for n in read):
            return None
        last = max(self.position[n] for n in nodes)
        if self._is_written_between(first, last, read):
            return None
        if any(set(inner) & ancestors(n) for n in read):
            return None
        try:
            joined = self.plan(inner)
        except Unsupported:
            return None
        matmuls = map(self._matmuls.get, map(operands_in, joined.of_rows))
        is_there = all(self.position[outer[n]] <= first for n in matmuls if n in outer)
        return joined if is_there else None

    def _reads(self, root: fx.Node) -> _Read:
        """What a sum reads: asked of every pair of sums."""
        if root not in self._read:
            exprs = [self.reading.array(root).expr]
            products = frozenset(map(operands_in, products_in(exprs)))
            self._read[root] = _Read(products, frozenset(trained(exprs)))
        return self._read[root]

    def _is_written_between(self, first: int, last: int, read: Iterable[fx.Node]) -> bool:
        """Whether what sums read is written between two places: a call reads it at the first."""
        memory = {storage_of(self.trace.outer[n]) for n in read} - {None}
        return any(first < at < last and memory & written for at, written in self._writes)

    def _merge(self, plans: list[ProgramPlan]) -> None:
        """Joins programs that a later sum has connected: it reads products of both."""
        pairs = [(i, j) for i in range(len(plans)) for j in range(len(plans)) if i != j]
        for i, j in pairs:
            joined: ProgramPlan | None = plans[i]
            for output in plans[j].outputs:
                if joined is not None:
                    joined = self._joined(joined, output.inner)
            if joined is not None:
                plans[i] = joined
                del plans[j]
                self._merge(plans)
                return

    def sharing(self, inner: Collection[fx.Node]) -> list[ProgramPlan]:
        """Returns programs that compute some of these divergences together with other sums.

        Those read the same products, such as entropies next to a divergence. A cross-entropy with
        labels is no reason for a program.
        """
        roots = {r for r in self.levels.roots(self.region) if not has_labels(r)}
        if not roots & set(inner) or len(roots) < 2:
            return []
        found = []
        for plan in self.find(set()):
            outputs = plan.unlabelled
            if outputs & set(inner) and len(outputs) > 1 and outputs <= roots:
                found.append(plan)
        return found

    def places(self, replaced: Collection[fx.Node]) -> list[ProgramPlan]:
        """Returns programs of the places of maxima that other code reads at, such as labels.

        ``replaced`` are the user's nodes that operators have taken the place of, which may read
        them: such a program is inserted last.
        """
        every = self.reading.places.items() if self.reading.places else ()
        memory = by_storage(self.region.nodes[0].graph) if every else {}
        found = []
        for node, x in every:
            if node not in self.trace.outer or not places_of_keys(bindings_of([x.expr])):
                continue
            try:
                plan = self._plan_of([node], [x])
            except Unsupported:
                continue
            if maxima_places_in(o.around for o in plan.outputs):
                continue  # of rows' values, which the user's code finds
            if not self.why_kept(plan, {*replaced, self.trace.outer[node]}, memory):
                found.append(plan)
        return found

    def compared(self) -> set[fx.Node]:
        """Returns the sums without a program that compare two products."""
        exprs = {n: self.reading.expression(n) for n in self.refused}
        return {n for n, x in exprs.items() if x is not None and len(products_in([x])) > 1}

    # ------------------------------------------------------------------------ readers

    def keeps_products(self, plan: ProgramPlan) -> bool:
        """Returns whether code that stays needs all products of a program."""
        graph = self.region.nodes[0].graph
        gone = {n for n in graph.nodes if not n.users and n.op != "output"}
        gone |= {o.node for o in plan.outputs}
        return bool(self.why_kept(plan, gone, by_storage(graph)))

    def why_kept(self, plan: ProgramPlan, gone: Collection[fx.Node], memory: Memory) -> str:
        """Explains why fusing would recompute: other code also needs all products of a program.

        ``gone`` are nodes of the user's graph that operators take the place of, and ``memory``
        has all its nodes by their memory. That attention reads its map as well is usual: the map
        of the loss is another one.
        """
        inside, gone = set(self.region.nodes), set(gone)
        for node in reversed(self.region.nodes):
            is_unread = all(
                user in gone or name_of(user) in MATMULS or read_for_metadata(user) is node
                for user in node.users
            )
            if is_unread and (node.users or _is_unread(node, gone, memory)):
                gone.add(node)
        kept = ""
        for matmul in plan.matmuls:
            made = None if matmul is None else node_of(self.trace, matmul)
            if made is None or made in gone:
                return ""
            size, smaller = _num_elements(made), None
            while made not in gone:
                readers = [u for u in made.users if u not in gone]
                following = next((u for u in readers if u in inside), None)
                if following is None:
                    kept = _reader_text([smaller] if smaller is not None else readers)
                    kept = kept or name_of(made)
                    break
                made = following
                if smaller is None and _num_elements(made) * 2 < size:
                    smaller = made
        return f"the scores are also read by {kept}"

    def reads_products(self, node: fx.Node, plans: Sequence[ProgramPlan]) -> bool:
        """Returns whether a node reads products of programs other than by their results."""
        products = {m for plan in plans for m in plan.matmuls}
        results = {o.inner for plan in plans for o in plan.outputs}
        behind = reached([node], lambda n: () if n in results else n.all_input_nodes)
        return bool((behind - results) & products) or not ancestors(node) & results


def _with_shared_rows(arrays: list[Array]) -> list[Array]:
    """Returns sums over the same rows with the same axes, where views have split those of some."""
    plain = [replace(x, dims=tuple(d for d in x.dims if d)) for x in arrays]
    sizes = [[[a.size for a in d] for d in x.dims] for x in plain]
    if len(set(map(len, sizes))) > 1 or all(x == sizes[0] for x in sizes):
        return arrays
    try:
        exprs, dims = met(*plain)
    except NoView:
        return arrays
    found = []
    for x, expr in zip(arrays, exprs, strict=True):
        rest = iter(dims)
        found.append(replace(x, expr=expr, dims=tuple(next(rest) if d else d for d in x.dims)))
    return found


def why_special(plan: ProgramPlan, output: RowOutput, found: Readers) -> str:
    """Explains why code after one of the sums sees another number.

    ``found`` is what reads it: operations that make a number of NaN, or of infinity.
    """
    program = plan.program_of(output)
    if program is None:  # entries have the numbers of the whole product
        return ""
    names = found.special
    if not names and not is_never_infinite(program, plan.dtypes):
        names = found.infinite
    if names and not is_as_special(program, plan.dtypes):
        return special_reason(min(names))
    return ""


def _is_unread(node: fx.Node, gone: Collection[fx.Node], memory: Memory) -> bool:
    """Whether a node writes to memory that only these nodes read, or masks of other writes."""
    same = [n for storage in written_memory(node) for n in memory[storage]]

    def following(reader: fx.Node) -> Iterable[fx.Node]:  # of ``x[x < 0] = 0``
        return () if reader in gone or is_in_place(reader) else reader.users

    ends = [x for x in reached(same, following) if x not in gone and not x.users]
    return bool(same) and all(map(is_in_place, ends))


def _num_elements(node: fx.Node) -> int:
    """Counts the elements of a tensor; 0 of anything else."""
    value = example(node)
    return numel(value) if isinstance(value, Tensor) else 0


def _reader_text(readers: Sequence[fx.Node]) -> str:
    """Names the operation that reads scores, and its line; the caller, if there is none."""
    named = next((n for n in readers if n.op != "output"), None)
    if named is None:
        return "the code after this graph" if readers else ""
    return f"{said_name(named)} at {location_of(named)[0]}"
