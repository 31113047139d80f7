"""Restores the user's graph of DTensors from a rewritten graph of whole tensors.

The user's own nodes get back what they were. Our operators get DTensors, by
`distributed.graph_calls`. Their rows are plain tensors that every rank has; if the user's code
goes on with a DTensor, they are placed as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_streamkl.attention import ops
from torch_streamkl.distributed import graph_calls
from torch_streamkl.fx_passes.dtensors.alike import Alike
from torch_streamkl.fx_passes.dtensors.unshard import OWN_ROWS, conversion
from torch_streamkl.fx_passes.fx_utils.dtensors import dtensors_in, is_dtensor
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported, first_line
from torch_streamkl.fx_passes.fx_utils.fake_modes import without_guards
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import (
    MEMORY,
    descendants,
    example,
    is_call,
    is_tensor,
    name_of,
    named_arguments,
    reached,
    run,
)
from torch_streamkl.fx_passes.fx_utils.opaque_nodes import opaque, same, same_detached
from torch_streamkl.fx_passes.fx_utils.results import set_memory
from torch_streamkl.fx_passes.fx_utils.shape_reads import WITH_SIZES
from torch_streamkl.fx_passes.fx_utils.sizes import is_unknown
from torch_streamkl.fx_passes.fx_utils.torch_names import FakeTensorMode, enable_python_dispatcher
from torch_streamkl.fx_passes.lowering.sites import SITE
from torch_streamkl.fx_passes.passes.flex_attention import softcapped_attention
from torch_streamkl.fx_passes.validation.changes import Change, compare_graphs
from torch_streamkl.fx_passes.validation.regions import replacement_of
from torch_streamkl.linear import ops as linear_ops

OPERATORS = (linear_ops.linear_kl, linear_ops.linear_kl_sum)
DIMENSIONS = ("batch", "heads", "queries")
SIDES = ("student", "teacher")
REFUSALS = (Unsupported, ValueError, TypeError, NotImplementedError, RuntimeError)
OF_TOKENS = {"flatten", "reshape", "view", "narrow", "slice", "getitem", "select"}


class DoesNotFit(Exception):
    """Raised if losses of a graph cannot be restored to DTensors; says why in the user's terms."""

    def __init__(self, reason: str, sites: frozenset[str]) -> None:
        super().__init__(reason)
        self.sites = sites


class Restore:
    """Converts one rewritten graph of whole tensors into one of DTensors, in place."""

    def __init__(
        self, user: fx.Graph, whole: fx.Graph, rewritten: fx.Graph, mode: FakeTensorMode
    ) -> None:
        self.graph, self.mode = rewritten, mode
        self.user = {n.name: n for n in user.nodes}
        self.present = {n.name: n for n in rewritten.nodes}
        comparison = compare_graphs(whole, rewritten)
        self.changes = comparison.changes
        self.replaced = {c: replacement_of(c, comparison) for c in comparison.changes}
        self.own = {
            (n.args[0].name, n.args[1].name)  # hidden states that a rank has, and their head
            for n in whole.nodes
            if OWN_ROWS in n.meta
        }
        self.rows: set[fx.Node] = set()  # operators of ours on DTensors, and what is made of them
        self.how: dict[str, str] = {}  # by site: how ranks share it
        self.alike = Alike(user)

    def run(self) -> None:
        """Restores the graph; raises DoesNotFit if that is impossible."""
        for node in list(self.graph.nodes):
            try:
                if node.name in self.user:
                    self._as_it_was(node)
                else:
                    self._on_dtensors(node)
            except REFUSALS as reason:
                raise DoesNotFit(_said(reason), self._sites_of(node)) from reason
        for change in self.changes:
            try:
                self._as_read_before(change)
            except REFUSALS as reason:
                sites = {n.meta[SITE] for n in self.replaced[change] if SITE in n.meta}
                raise DoesNotFit(_said(reason), frozenset(sites)) from reason
        of_own_vocab = self._makers_of_own_vocab()
        for node in reversed(list(self.graph.nodes)):
            is_left_over = node.target is same or node.name in of_own_vocab
            if is_left_over and not node.users:
                self.graph.erase_node(node)

    def _makers_of_own_vocab(self) -> set[str]:
        """Returns the nodes that compute logits of this rank's vocabulary shard, which must have
        no reader.
        """
        heads = {n for n in self.user.values() if conversion(n) == "from_local"}
        chain = {a for n in heads for a in n.all_input_nodes if name_of(a) == "linear"}
        chain |= {a for n in chain for a in n.all_input_nodes if conversion(a) == "to_local"}
        return {n.name for n in chain if n.users}

    def _sites_of(self, node: fx.Node) -> frozenset[str]:
        """Finds the losses to refuse so that a node disappears."""
        own = [c for c, made in self.replaced.items() if node in made]
        follow_ups = {
            c.before.name for c in own if not any(SITE in n.meta for n in self.replaced[c])
        }
        sites = {n.meta[SITE] for n in descendants([node]) if SITE in n.meta}
        return frozenset(follow_ups or sites)

    # -------------------------------------------------------------------- the user's own nodes
    def _as_it_was(self, node: fx.Node) -> None:
        old = self.user[node.name]
        is_opaque_node = node.target in (same, same_detached, opaque)
        if is_opaque_node or OWN_ROWS in node.meta:
            # a stand-in has some of the inputs, in their order; the others are nodes of the user's
            own = node.all_input_nodes if is_opaque_node else []
            given = dict(zip(old.all_input_nodes, own, strict=False))

            def now(n: fx.Node) -> fx.Node:
                return given[n] if n in given else self.present[n.name]

            node.op, node.target = old.op, old.target
            restored: Any = fx.map_arg((old.args, old.kwargs), now)
            node.args, node.kwargs = restored
        if "example_value" in old.meta:
            node.meta["example_value"] = old.meta["example_value"]

    def _as_read_before(self, change: Change) -> None:
        """Converts a new value to the type and placements that its readers had before."""
        old, new = self.user[change.before.name], change.after
        wanted, have = example(old), example(new)
        if not isinstance(wanted, Tensor) or not isinstance(have, Tensor):
            return
        readers = [n for n in new.users if n.name in self.user]
        if not is_dtensor(wanted):
            if is_dtensor(have):
                self._replace_for(readers, new, self._insert_after(new, "full_tensor", new))
            return
        if is_dtensor(have) and have.placements == wanted.placements:
            return
        placements = wanted.placements
        partial = any(p.is_partial() for p in placements)
        looser = self._looser(readers) if partial else []
        like = new if is_dtensor(have) else self._a_dtensor_of(change)
        if like is None or _dtensor(like).device_mesh != wanted.device_mesh:
            raise Unsupported(
                "the loss and its hidden states or queries are on other device meshes"
            )
        encoded = graph_calls.encoded(placements)
        if is_dtensor(have):
            placed = self._insert_after(new, graph_calls.placed, new, encoded)
        else:
            placed = self._insert_after(new, graph_calls.placed_like, new, like, encoded)
        self._replace_for(readers, new, placed)
        for node in looser:
            self._record(node)

    def _replace_for(self, readers: list[fx.Node], old: fx.Node, new: fx.Node) -> None:
        for reader in readers:
            reader.replace_input_with(old, new)

    def _looser(self, readers: list[fx.Node]) -> list[fx.Node]:
        """Finds nodes between a Partial value and its reduction, which may read the reduced value
        instead.

        It may as well be computed from the sum, unless somebody sees the terms.
        """
        found: dict[fx.Node, None] = {}
        stack = list(readers)
        while stack:
            node = stack.pop()
            if node in found or conversion(node) in ("full_tensor", "redistribute"):
                continue
            if (
                not is_dtensor(example(node))
                or conversion(node)
                or not is_call(node)
                or written_by(node)
            ):
                raise Unsupported("the code reads the ranks' own terms of a sum (Partial)")
            found[node] = None
            stack.extend(node.users)
        return [n for n in self.graph.nodes if n in found]

    def _a_dtensor_of(self, change: Change) -> fx.Node | None:
        for node in self.replaced[change]:
            if node in self.rows and SITE in node.meta:
                return next((a for a in node.all_input_nodes if is_dtensor(example(a))), None)
        return None

    # ------------------------------------------------------------------------------- our nodes
    def _on_dtensors(self, node: fx.Node) -> None:
        if node.target is same:
            node.replace_all_uses_with(node.all_input_nodes[0])
            return
        if node.target is same_detached:
            node.op, node.target = "call_method", "detach"
        inputs = node.all_input_nodes
        if not any(dtensors_in(example(a)) for a in inputs) and not self.rows & set(inputs):
            return  # its value is the one that is recorded
        if node.target is softcapped_attention:
            raise Unsupported("FlexAttention does not run on DTensors")
        if node.target is ops.attention_kl:
            self._share_attention(node)
        elif name_of(node) == "scaled_dot_product_attention":
            node.target = graph_calls.scaled_dot_product_attention
            self._of_dtensors(node)
        elif node.target in OPERATORS:
            self._call_together(node)
        elif self.rows & set(inputs):
            self._of_rows(node)
        else:
            self._of_dtensors(node)

    def _call_together(self, node: fx.Node) -> None:
        self.alike.check_numbers(node)
        given = named_arguments(node, linear_ops.linear_kl)
        own = [side for side in SIDES if self._is_own(side, given)]
        if own:
            node.kwargs = {**node.kwargs, "own_rows": own}
        # in the same order on every rank: these communicate
        for hidden in dict.fromkeys(given[f"{side}_hidden"] for side in SIDES):
            self._add_up_terms(hidden, node)
        is_sum = node.target is linear_ops.linear_kl_sum
        node.target = graph_calls.linear_kl_sum if is_sum else graph_calls.linear_kl
        self._record(node)
        self.rows.add(node)
        heads: Any = [given[f"{side}_weight"] for side in SIDES]
        count = graph_calls.num_ranks([_dtensor(head) for head in heads])
        self.how[node.meta[SITE]] = (
            f"vocabulary sharded over {count} ranks, one gather of row statistics"
            if count > 1
            else ""
        )

    def _add_up_terms(self, hidden: fx.Node, call: fx.Node) -> None:
        """Sums hidden states that are ``Partial()``, before a call reads them."""
        x = example(hidden)
        if not is_dtensor(x) or not any(p.is_partial() for p in x.placements):
            return
        wanted = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        added = self._insert_before(call, graph_calls.placed, hidden, graph_calls.encoded(wanted))
        call.replace_input_with(hidden, added)

    def _gather_tokens(self, node: fx.Node) -> None:
        """Gathers tokens that are flattened or sliced, over ranks that also share the vocabulary.

        Those ranks need all of the tokens in any case.
        """
        if name_of(node) not in OF_TOKENS:
            return
        source = node.all_input_nodes[0]
        x = example(source)
        if not is_dtensor(x):
            return
        gathered = self._dims_of_vocab(node)
        wanted = tuple(
            Replicate() if dim in gathered and type(p) is Shard and p.dim < x.dim() - 1 else p
            for dim, p in enumerate(x.placements)
        )
        if wanted != tuple(x.placements):
            encoded = graph_calls.encoded(wanted)
            whole = self._insert_before(node, graph_calls.placed, source, encoded)
            node.replace_input_with(source, whole)

    def _dims_of_vocab(self, node: fx.Node) -> set[int]:
        """Returns mesh dimensions that shard the vocabulary of every call with these hidden
        states.

        Empty where something else reads the node.
        """
        found: list[set[int]] = []
        for call in descendants([node]):
            if call.target not in OPERATORS:
                continue
            given = named_arguments(call, linear_ops.linear_kl)
            if not any(node in self._steps_to(given[f"{side}_hidden"]) for side in SIDES):
                return set()
            heads = {
                self.user[name]
                for side in SIDES
                for name in self._sources(given[f"{side}_weight"])
            }
            found.append(
                {
                    dim
                    for head in heads
                    if is_dtensor(x := example(head))
                    for dim, p in enumerate(x.placements)
                    if p.is_shard()
                }
            )
        return set.intersection(*found) if found else set()

    def _share_attention(self, node: fx.Node) -> None:
        node.target = graph_calls.attention_kl
        self._of_dtensors(node)
        value, *_ = dtensors_in(example(node))
        shared = [
            f"{name} shared by {value.device_mesh.size(dim)} ranks"
            for dim, placement in enumerate(value.placements)
            for own, name in enumerate(DIMENSIONS)
            if placement.is_shard(own) and value.device_mesh.size(dim) > 1
        ]
        self.how[node.meta[SITE]] = " and ".join(shared)

    def _is_own(self, side: str, given: dict[str, Any]) -> bool:
        """Whether logits are this rank's own: plain hidden states times its shard of the head."""
        hidden, head = (self._sources(given[f"{side}_{x}"]) for x in ("hidden", "weight"))
        return (
            not is_dtensor(example(given[f"{side}_hidden"]))
            and len(hidden) == len(head) == 1
            and (*hidden, *head) in self.own
        )

    def _sources(self, node: fx.Node) -> set[str]:
        """Returns the user's tensors that a new node is computed from."""
        return {n.name for n in self._steps_to(node) if n.name in self.user}

    def _steps_to(self, node: fx.Node) -> set[fx.Node]:
        """Lists the new tensors that lead to a node, from the user's tensors on."""

        def made_of(n: fx.Node) -> list[fx.Node]:
            return [] if n.name in self.user else [a for a in n.all_input_nodes if is_tensor(a)]

        return reached([node], made_of)

    def _of_rows(self, node: fx.Node) -> None:
        """Makes per-row values plain tensors, the same on every rank."""
        self.rows.add(node)
        for source in node.all_input_nodes:
            if is_dtensor(example(source)) and not _reads_sizes(node):
                whole = self._insert_before(node, "full_tensor", source)
                node.replace_input_with(source, whole)
        self._record(node)

    def _of_dtensors(self, node: fx.Node) -> None:
        """Views, casts and scales of hidden states and heads, on DTensors; nothing is sent."""
        self.alike.check_numbers(node)
        inputs = node.all_input_nodes
        placed = [a for a in inputs if is_dtensor(example(a))]
        plain = [a for a in inputs if isinstance(x := example(a), Tensor) and not is_dtensor(x)]
        for source in plain if placed else []:
            if not self.alike.add_constant(source):
                raise Unsupported(
                    f"{source.name} is a plain tensor next to DTensors, and nothing says that "
                    "ranks have the same"
                )
            copies = self._insert_before(node, graph_calls.replicated_like, source, placed[0])
            node.replace_input_with(source, copies)
        self._gather_tokens(node)
        placed = [a for a in node.all_input_nodes if is_dtensor(example(a))]
        self._record(node)
        made = example(node)
        if not is_dtensor(made):
            if isinstance(made, Tensor):
                raise Unsupported(f"{name_of(node)} of a DTensor is not a DTensor")
            return
        if any(is_unknown(size) for size in made.shape):
            raise Unsupported("rows of a DTensor are selected whose number only the data decides")
        for source in placed:
            x = _dtensor(source)
            for dim, (have, now) in enumerate(zip(x.placements, made.placements, strict=True)):
                is_lost = have.is_shard() and not (now.is_shard() or now.is_partial())
                if is_lost and x.device_mesh.size(dim) > 1:
                    raise Unsupported(
                        f"{name_of(node)} of a DTensor that is placed {x.placements} would "
                        "gather it"
                    )

    # --------------------------------------------------------------------------------- helpers
    def _record(self, node: fx.Node) -> None:
        """Updates the example value of a node from those of its inputs."""
        guards = without_guards(self.mode)
        with self.mode, guards, enable_python_dispatcher(), torch.enable_grad():
            made = run(node, example)
        node.meta["example_value"] = made
        node.meta.pop(MEMORY, None)
        set_memory(node)

    def _insert_before(
        self, place: fx.Node, target: str | Callable[..., Any], *args: Any
    ) -> fx.Node:
        with self.graph.inserting_before(place):
            return self._inserted(place, target, args)

    def _insert_after(
        self, place: fx.Node, target: str | Callable[..., Any], *args: Any
    ) -> fx.Node:
        with self.graph.inserting_after(place):
            return self._inserted(place, target, args)

    def _inserted(self, like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, {})
        copied = ("stack_trace", "nn_module_stack", "source_fn_stack")
        node.meta.update({key: like.meta[key] for key in copied if key in like.meta})
        self._record(node)
        return node


def _dtensor(node: fx.Node) -> DTensor:
    value = example(node)
    assert is_dtensor(value)
    return value


def _reads_sizes(node: fx.Node) -> bool:
    return name_of(node) in {"size", "numel", "type_as", *WITH_SIZES}


def _said(error: Exception) -> str:
    return first_line(error) or type(error).__name__
