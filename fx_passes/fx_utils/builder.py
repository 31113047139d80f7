"""Inserts nodes into a Dynamo graph with complete metadata.

If a node has no recorded value, the AOTAutograd cache bypasses the graph, and later passes guess.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.errors import SIZES_OF_DATA, Unsupported
from torch_streamkl.fx_passes.fx_utils.fake_modes import without_guards
from torch_streamkl.fx_passes.fx_utils.mutation import INFERENCE, autograd_modes
from torch_streamkl.fx_passes.fx_utils.nodes import MEMORY, address_of, example, tensor_of
from torch_streamkl.fx_passes.fx_utils.results import Results, Runs, set_memory
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    FakeTensorMode,
    FloorDiv,
    GuardOnDataDependentSymNode,
    enable_python_dispatcher,
)

_COPIED = ("stack_trace", "nn_module_stack", "source_fn_stack")


class Selections:
    """Holds the positions that masks select, each computed once, and where row counts are read.

    ``results`` and ``runs`` have what calls gave: equal ones give the same.
    ``masked`` has the selections by the symbols that the analysis has for their row counts, one
    for every use of a mask, and how many entries of each row a symbol counts. ``counts`` has
    tensors of positions and their dimensions by size.
    """

    def __init__(self, masked: Mapping[str, tuple[object, int]] | None = None) -> None:
        self.masked = masked or {}
        self.positions: dict[object, fx.Node] = {}
        self.counts: dict[str, tuple[fx.Node, int]] = {}
        self.results, self.runs = Results(), Runs()
        self._has_inference_mode: bool | None = None

    def is_count(self, count: Size, size: Size) -> bool:
        """Returns whether a size is that of inserted positions, which the analysis calls count."""
        found = self.count_of(str(expression(count)))
        if found is None or found[1] != 1:
            return False
        return bool(expression(tensor_of(found[0]).shape[0]) == expression(size))

    def has_inference_mode(self, graph: fx.Graph) -> bool:
        """Returns whether a graph enters inference mode anywhere; nothing inserted does."""
        if self._has_inference_mode is None:
            modes = autograd_modes(graph.nodes).values()
            self._has_inference_mode = INFERENCE in modes
        return self._has_inference_mode

    def count_of(self, size: str) -> tuple[fx.Node, int] | None:
        """Returns the positions of rows, and how many entries of each are ``size`` together."""
        rows, each = self.masked.get(size, (None, 1))
        return (self.positions[rows], each) if rows in self.positions else None


class Builder:
    """Inserts nodes before one node, and finds sizes in the shapes of the given tensors."""

    def __init__(
        self, before: fx.Node, mode: FakeTensorMode, selections: Selections | None = None
    ) -> None:
        self.selections = selections if selections is not None else Selections()
        self.graph = before.graph
        self.before = before
        self.mode = mode
        self.added: list[fx.Node] = []
        # tensors that decide which rows are selected, and what those were made of
        self.selecting: list[tuple[list[fx.Node], list[fx.Node]]] = []

    @contextlib.contextmanager
    def undone_if_unsupported(self) -> Iterator[None]:
        """Removes what was inserted inside of the block if it raises Unsupported."""
        kept = len(self.added)
        try:
            yield
        except Unsupported:
            while len(self.added) > kept:
                self.graph.erase_node(self.added.pop())
            raise

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts a function call."""
        return self._insert(
            "call_function", function, args, kwargs, lambda a, k: function(*a, **k)
        )

    def method(self, name: str, x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts a tensor method call."""
        if name == "detach" and self._is_in_inference_mode:
            return x  # nothing is recorded there
        return self._insert(
            "call_method", name, (x, *args), kwargs, lambda a, k: getattr(a[0], name)(*a[1:], **k)
        )

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Returns a tensor in a type; only another one is inserted."""
        return x if tensor_of(x).dtype == dtype else self.method("to", x, dtype)

    @functools.cached_property
    def _is_in_inference_mode(self) -> bool:
        if not self.selections.has_inference_mode(self.graph):
            return False
        return autograd_modes(self.graph.nodes)[self.before] == INFERENCE

    def copy(self, node: fx.Node, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Inserts the same operation with some of its inputs replaced."""
        given: Any = fx.map_arg((node.args, node.kwargs), lambda n: replaced.get(n, n))
        args, kwargs = given
        if callable(node.target):
            return self.call(node.target, *args, **kwargs)
        return self.method(node.target, *args, **kwargs)

    def _insert(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Any, Any], Any],
    ) -> fx.Node:
        values = fx.map_arg((args, kwargs), _present)
        is_recorded = not self._is_in_inference_mode
        known = self.selections.results.find(kind, target, args, kwargs) if is_recorded else None
        if known is not None:
            node = self._created(kind, target, args, kwargs, known.value)
            node.meta[MEMORY] = known.memory
            return node
        shapes = self.mode.shape_env
        guards = without_guards(self.mode)
        fresh = shapes.ignore_fresh_unbacked_symbols() if shapes is not None else guards
        # as in Dynamo: C++ code of F.pad asks for sizes, also for those that data decides
        with self.mode, guards, fresh, enable_python_dispatcher(), torch.enable_grad():
            try:
                result = run(*values)
            except GuardOnDataDependentSymNode as error:
                raise Unsupported(SIZES_OF_DATA) from error
            except (ValueError, TypeError, NotImplementedError) as refusal:
                # an operator's own check of its inputs
                raise Unsupported(f"{getattr(target, '__name__', target)}: {refusal}") from refusal
        if self._is_in_inference_mode and _is_view_of(result, args):
            raise Unsupported("in inference mode AOTAutograd cannot trace views")
        node = self._created(kind, target, args, kwargs, result)
        set_memory(node)
        if is_recorded:
            self.selections.results.note(node)
        return node

    def _created(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.create_node(kind, target, args, kwargs)
        node.meta["example_value"] = value
        node.meta.update({k: self.before.meta[k] for k in _COPIED if k in self.before.meta})
        self.added.append(node)
        return node

    def size(self, size: Size, tensors: Sequence[fx.Node]) -> int | fx.Node:
        """Returns a size as a constant, or from the tensors' sizes."""
        known = expression(size)
        return known if isinstance(known, int) else self._symbolic(known, tensors)

    def positions(
        self, selection: object, mask: fx.Node, rows: Callable[[Builder], fx.Node]
    ) -> fx.Node:
        """Inserts the positions at which a boolean mask is True, as indices into its flattened
        entries.

        They come after the mask, once for each selection; ``rows`` adds the nodes that make one
        entry a row of it.
        """
        made = self.selections.positions.get(selection)
        if made is None:
            build = Builder(mask.next, self.mode, self.selections)
            with build.undone_if_unsupported():
                flat = build.method("flatten", rows(build))
                made = build.method("squeeze", build.call(torch.nonzero, flat), 1)
            self.selections.positions[selection] = made
        return made

    def count(self, size: Size, tensor: fx.Node, dim: int) -> None:
        """Remembers where a number of selected rows is read."""
        self.selections.counts[str(expression(size))] = (tensor, dim)

    def _symbolic(self, wanted: Any, tensors: Sequence[fx.Node]) -> int | fx.Node:
        if wanted.is_Integer:
            return int(wanted)
        selected = self.selections.count_of(str(wanted))
        if selected is not None:
            rows = self.method("size", selected[0], 0)
            return rows if selected[1] == 1 else self.call(operator.mul, rows, selected[1])
        for tensor in tensors:
            for dim, candidate in enumerate(tensor_of(tensor).shape):
                if str(expression(candidate)) == str(wanted):
                    return self.method("size", tensor, dim)
        if str(wanted) in self.selections.counts:
            return self.method("size", *self.selections.counts[str(wanted)])
        for given in self.graph.find_nodes(op="placeholder"):  # an argument that is a number
            number = example(given)
            if isinstance(number, torch.SymInt) and str(expression(number)) == str(wanted):
                return given
        if wanted.is_Add or wanted.is_Mul:
            first, *rest = (self._symbolic(x, tensors) for x in wanted.args)
            for x in rest:
                first = self.call(operator.add if wanted.is_Add else operator.mul, first, x)
            return first
        if isinstance(wanted, FloorDiv):
            whole, part = (self._symbolic(x, tensors) for x in wanted.args)
            return self.call(operator.floordiv, whole, part)
        raise Unsupported(f"the size {wanted} is not the size of any input of the scores")


MakeBuilder = Callable[[fx.Node], Builder]  # one that inserts before a node


def _present(node: fx.Node) -> Any:
    """Returns an input's value."""
    if node._erased:
        raise Unsupported("a tensor that it reads was removed with the code that was replaced")
    return example(node)


def _is_view_of(result: object, args: tuple[Any, ...]) -> bool:
    """Whether a result has an argument's memory and is not that argument."""
    if not isinstance(result, Tensor):
        return False
    values = [example(a) for a in args if isinstance(a, fx.Node)]
    return not any(x is result for x in values) and any(
        isinstance(x, Tensor) and address_of(x) == address_of(result) for x in values
    )
