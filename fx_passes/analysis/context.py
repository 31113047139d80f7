"""Holds what every rule of the interpreter reads: values found so far, gradients, reasons."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain.layout import Layout
from torch_streamkl.fx_passes.domain.row_selection import RowSelection
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    Entries,
    Number,
    RowFactor,
    Rows,
    Shifted,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one

SINGLE_ENTRIES = "single entries of scores or probabilities are selected"


class Analysis:
    """Holds the state of the interpreter, and answers the questions of its rules.

    Rules are methods that `registry.rule` registers for overloads: ``method(node, arguments)``
    says what the operation makes of its inputs' values. They are grouped by kind of operation in
    the files of ``rules/``.
    """

    trace: Trace
    values: dict[fx.Node, object]
    reasons: dict[fx.Node, str]
    canonical: dict[fx.Node, fx.Node]
    rank: dict[fx.Node, int]
    written: dict[fx.Node, tuple[fx.Node, Scores]]  # by write: the tensor that has new scores
    written_storages: set[int | None]  # memory that the trace or the user's graph writes to
    unrecorded: set[fx.Node]  # the user's nodes that autograd does not record
    selections: dict[object, RowSelection]  # by what they are made of
    # by operation: its rows, the dimension that counts them, and the entries of each it counts
    counted: dict[fx.Node, tuple[RowSelection, int, Size]]

    def _dtype_of(self, node: fx.Node) -> torch.dtype:
        """Returns the dtype that Dynamo recorded, which accounts for autocast, or else that of the
        trace.
        """
        source = self.trace.outer.get(node)
        value = example(source) if source is not None else node.meta["val"]
        assert isinstance(value, Tensor)
        return value.dtype

    def _no_rule(self, node: fx.Node, name: str) -> object:
        """Gives up on an operation without a rule; raises if one of its inputs had a meaning."""
        known = [self.value(a) for a in node.all_input_nodes]
        if any(isinstance(v, Rows) for v in known):
            return None  # what the user does with rows stays the user's code
        if any(isinstance(v, (Elements, Shifted)) for v in known):
            raise Unsupported(f"{name} of attention or vocabulary probabilities")
        if any(isinstance(v, Scores) for v in known):
            raise Unsupported(f"{name} of scores")
        if any(isinstance(v, Entries) for v in known):
            raise Unsupported(SINGLE_ENTRIES)
        for a in node.all_input_nodes:
            if a in self.reasons:
                raise Unsupported(self.reasons[a])
        return None

    def value(self, x: object) -> object:
        """Returns the abstract value of an argument; a number represents itself."""
        if isinstance(x, fx.Node):
            return self.values.get(x)
        if isinstance(x, (bool, int, float)):
            return Number(float(x))
        return None

    def requires_grad(self, node: fx.Node) -> bool:
        """Returns whether gradient flows through a node, as Dynamo recorded it for the user's
        code.

        Its record of an attribute such as ``k.mT`` ignores no_grad.
        """
        source = node_of(self.trace, node)
        if source is None or not _requires_grad(source):
            return False
        return source not in self.unrecorded or name_of(source) == "requires_grad_"

    def _hides_its_write(self, node: fx.Node) -> bool:
        """Whether a tensor that has a gradient is written to without autograd's knowledge."""
        source = node_of(self.trace, node)
        written = (node_of(self.trace, x) for x in written_by(node))
        return source in self.unrecorded and any(x is None or _requires_grad(x) for x in written)

    def reference(self, node: fx.Node, layout: Layout = ()) -> TensorRef:
        """Returns a reference to a tensor that a value reads, with its own gradient flag."""
        return TensorRef(self.canonical[node], layout, grad=self.requires_grad(node))

    def _stays_blocked(self, *nodes: object) -> None:
        """Raises the reason of an input that is unsupported."""
        for node in nodes:
            if isinstance(node, fx.Node) and node in self.reasons:
                raise Unsupported(self.reasons[node])

    def _row_factor(
        self,
        x: Elements,
        other: object,
        *,
        selects: bool = False,
        keeps: bool = True,
        divides: bool = False,
    ) -> RowFactor:
        if not isinstance(other, fx.Node):
            raise Unsupported(
                "a value that is neither a tensor nor a number multiplies the divergence"
            )
        self._stays_blocked(other)
        value = other.meta.get("val")
        if isinstance(value, Tensor):
            dim = value.dim() - (x.rank - x.key_dim)
            if value.dim() > x.rank:
                raise Unsupported(
                    "the divergence is broadcast against a tensor with more dimensions"
                )
            if dim >= 0 and not is_one(value.shape[dim]):
                raise Unsupported("weights that vary along the keys multiply the divergence")
        return RowFactor(self.reference(other), x.rank, selects, keeps, divides)

    def _axis(self, x: Scores, dim: int) -> int:
        pieces = x.layout[dim]
        if len(pieces) != 1 or lay.axis_dim(x.layout, pieces[0].axis) != dim:
            raise Unsupported("a reduction over a dimension that is not one axis of the scores")
        return pieces[0].axis


def _requires_grad(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, Tensor) and value.requires_grad
