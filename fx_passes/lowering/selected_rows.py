"""Writes the rows that a boolean mask selects into the user's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from torch_streamkl.fx_passes.capture.retrace import outer_node
from torch_streamkl.fx_passes.closed_forms.repeated_ids import SINGLE_ENTRIES
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import is_tensor, tensor_of
from torch_streamkl.fx_passes.fx_utils.sizes import Size, provably_equal
from torch_streamkl.fx_passes.reading.positions import MaskedRows, Positions
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.graph import Node, Source


class SelectedRows:
    """Inserts the selections; ``tensors_of`` gives the user's tensors that an expression reads."""

    def __init__(
        self,
        build: Builder,
        reading: Reading,
        outer: Mapping[fx.Node, fx.Node],
        tensors_of: Callable[[Node], list[fx.Node]],
    ) -> None:
        self.build, self.reading, self.outer = build, reading, outer
        self.tensors_of = tensors_of

    def selected(
        self, tensor: fx.Node, at: Sequence[Node]
    ) -> tuple[fx.Node, Sequence[Node], set[int]]:
        """Returns a tensor whose dimensions a mask selects, its own dimensions together."""
        at, whole = list(at), set[int]()
        d = 0
        while d < len(at):
            name = _positions(at[d])
            rank = name.rows.rank if name is not None else 0
            run = at[d : d + rank]
            names = [_positions(p) for p in run]
            is_whole = name is not None and names == [Positions(name.rows, i) for i in range(rank)]
            if name is not None and is_whole and len({p.args for p in run}) == 1:
                tensor = self._rows_selected(tensor, d, name)
                at[d : d + rank] = [run[0].args[0]]
                if self.reading.sizes.selected.get(run[0].args[0].value.size) == name.rows:
                    whole.add(d)
            d += 1
        return tensor, at, whole

    def _rows_selected(self, tensor: fx.Node, d: int, name: Positions) -> fx.Node:
        """The rows that a mask selects, from a dimension on."""
        rows, mask = name.rows, self._mask(name)
        for i in range(rows.lacking, rows.rank):
            size = tensor_of(mask).shape[rows.first + i - rows.lacking]
            if not provably_equal(tensor_of(tensor).shape[d + i], size):
                length = self.build.size(size, [mask])
                tensor = self.build.method("narrow", tensor, d + i, 0, length)
        lacking = tensor_of(tensor).shape[d : d + rows.lacking]
        if rows.rank > 1:
            tensor = self.build.method("flatten", tensor, d, d + rows.rank - 1)
        return self.build.method("index_select", tensor, d, self._positions(name, lacking))

    def _mask(self, name: Positions) -> fx.Node:
        return outer_node(name.mask, self.outer)

    def _positions(self, name: Positions, lacking: Sequence[Size] = ()) -> fx.Node:
        """The positions of the rows that a mask selects, flattened."""
        rows, mask = name.rows, self._mask(name)
        if len(lacking) < rows.lacking:
            raise Unsupported(SINGLE_ENTRIES)
        made_of = self.tensors_of(self.reading.array(name.mask).expr)
        self.build.selecting.append(([mask], made_of))
        return self.build.positions(
            rows, mask, lambda build: _mask_of_rows(build, mask, rows, lacking)
        )

    def column(self, name: Positions) -> fx.Node:
        """Returns the positions along one dimension of a mask."""
        mask = self._mask(name)
        flat: fx.Node = self._positions(name)
        shape = tensor_of(mask).shape[name.rows.first : name.rows.last + 1]
        for d in reversed(range(name.dim + 1, len(shape))):
            flat = self.build.call(torch.floor_divide, flat, self.build.size(shape[d], [mask]))
        if name.dim:
            flat = self.build.call(torch.remainder, flat, self.build.size(shape[name.dim], [mask]))
        return flat


def _mask_of_rows(
    build: Builder, mask: fx.Node, rows: MaskedRows, lacking: Sequence[Size]
) -> fx.Node:
    """A mask with one entry for each row; ``lacking`` are sizes that it is broadcast to."""
    for d in reversed(range(tensor_of(mask).dim())):
        if not rows.first <= d <= rows.last:
            mask = build.method("select", mask, d, 0)
    if not lacking:
        return mask
    inputs = [n for n in build.graph.nodes if n.op == "placeholder" and is_tensor(n)]
    sizes = [build.size(n, inputs) for n in lacking]
    return build.method("expand", mask, *sizes, *[-1] * (rows.last - rows.first + 1))


def _positions(at: Node) -> Positions | None:
    """The positions of a mask that a dimension is read at, one for each row."""
    if at.op != "capture" or not isinstance(at.value, Source):
        return None
    is_row = len(at.args) == 1 and at.args[0].op == "index"
    return at.value.name if isinstance(at.value.name, Positions) and is_row else None
