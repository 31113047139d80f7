"""Materializes elements of a row program, for a block of rows and keys.

A sum over heads is the same for all heads, and the logits of an LM head are a matmul of many
dimensions: neither fits a tile's loop. They are materialized for a block, as [batch, rows, keys]:
dot products by a torch matmul, sums over heads by a kernel that loops over heads, and columns by a
scatter. What remains of the program is pointwise in them. The kernels of source.py compute its
sums and gradients, and read these tensors instead of multiplying.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.kernels.tiles import (
    TritonLaunch,
    ceil_div,
    next_power_of_2,
    one_dot_launch,
    sum_of_heads_launch,
)
from torch_streamkl.program.masks import Keys
from torch_streamkl.program.steps import Step
from torch_streamkl.rows import derive, tile
from torch_streamkl.rows.problem import ALL, RowProblem, part
from torch_streamkl.rows.program import COLUMNS, VALUES, Program
from torch_streamkl.rows.torch_impl import Result
from torch_streamkl.rows.triton import launches as row_kernels
from torch_streamkl.rows.triton import source as row_source
from torch_streamkl.rows.triton.launches import launch_rows, node_of, start
from torch_streamkl.rows.triton.writer import Source
from torch_streamkl.runtime.devices import gpu_of
from torch_streamkl.runtime.workspace import padded

FORWARD, DIFFERENTIATED, BACKWARD = "forward", "differentiated", "backward"
# rows, and keys, of tiles that multiply nothing; neighbours that a thread has of them
ROW_SUMS, ROW_WIDTH = TritonLaunch(1, 4096, 8, 1), 8
ELEMENTS = TritonLaunch(4, 1024, 4, 1)
INTERPRETED = TritonLaunch(4, 32, 4, 1)


# ------------------------------------------------------------------------ what is materialized


@functools.lru_cache(maxsize=256)
def nodes_of(program: Program, which: str) -> tuple[Step, ...]:
    """Returns the nodes that the forward, with or without derivatives, or the backward
    computes.
    """
    if which == BACKWARD:
        return derive.backward_plan(program).nodes
    return derive.forward_plan(program, which == DIFFERENTIATED).nodes


@functools.lru_cache(maxsize=256)
def _reads_materialized(program: Program, which: str) -> tuple[bool, ...]:
    """Marks the nodes that are computed from a materialized node."""
    found: list[bool] = []
    for node in nodes_of(program, which):
        found.append(_is_materialized(program, node) or any(found[a] for a in node.args))
    return tuple(found)


def _is_materialized(program: Program, node: Step) -> bool:
    """Tells nodes that no kernel computes inside of a tile."""
    if node.op == "capture":
        return program.captures[int(node.value)].kind in (COLUMNS, VALUES)
    return node.by_key and (node.op == "sum_heads" or (node.op == "dot" and not node.head))


@functools.lru_cache(maxsize=512)
def _with_materialized(
    program: Program, which: str, roots: tuple[int, ...], axis: int
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """Rewrites nodes for a kernel over the heads of an axis, and lists the tensors it reads.

    Elements that all heads share, and that come from materialized nodes, are one tensor.
    """
    nodes, depends = list(nodes_of(program, which)), _reads_materialized(program, which)
    found: list[int] = []
    seen, stack = set(roots), list(roots)
    while stack:
        i = stack.pop()
        node = nodes[i]
        is_shared = bool(axis) and not node.head and node.by_key and depends[i]
        if _is_materialized(program, node) or is_shared:
            found.append(i)
            continue
        for a in node.args:
            if a not in seen:
                seen.add(a)
                stack.append(a)
    for i in found:
        nodes[i] = Step("materialized", (), i, nodes[i].dtype, 0, True, nodes[i].is_finite)
    return tuple(nodes), tuple(sorted(found))


@functools.lru_cache(maxsize=512)
def nodes_to_materialize(
    program: Program, which: str, roots: tuple[tuple[int, int], ...]
) -> tuple[int, ...]:
    """Returns the materialized nodes that the given nodes need, each with its axis of heads."""
    nodes = nodes_of(program, which)
    found: set[int] = set()
    stack = list(roots)
    while stack:
        i, axis = stack.pop()
        for each in _with_materialized(program, which, (i,), axis)[1]:
            if each not in found:
                found.add(each)
                stack += _inputs_of(nodes, each)
    return tuple(sorted(found))


def dots_of(program: Program, axis: int) -> list[int]:
    """Returns the dot products of an axis of heads."""
    return [i for i, head in enumerate(program.dot_heads) if head == axis]


def _inputs_of(nodes: Sequence[Step], i: int) -> list[tuple[int, int]]:
    """Returns the nodes that a materialized node is computed from, with their axis of heads."""
    node = nodes[i]
    if node.op == "sum_heads":
        return [(node.args[0], nodes[node.args[0]].head)]
    if node.op in ("dot", "capture"):
        return []
    return [(a, 0) for a in node.args]


@functools.lru_cache(maxsize=256)
def read_twice(program: Program) -> tuple[int, ...]:
    """Sums over heads of the program itself that forward and backward need."""
    plans = derive.forward_plan(program, True), derive.backward_plan(program)
    forward = [r.node for r in program.reductions] + [j.node for j in plans[0].jacobians]
    backward = [n for n in (*plans[1].dots, *plans[1].captures) if n is not None]
    found: list[set[int]] = []
    for which, roots in ((DIFFERENTIATED, forward), (BACKWARD, backward)):
        nodes = nodes_of(program, which)
        found.append(
            set(nodes_to_materialize(program, which, tuple((n, nodes[n].head) for n in roots)))
        )
    own = enumerate(program.nodes)  # with which the nodes of both begin
    return tuple(i for i, n in own if n.op == "sum_heads" and all(i in x for x in found))


def new_buffer(problem: RowProblem, dtype: torch.dtype) -> Tensor:
    """Allocates a materialized node of a block, or of all rows."""
    # rows start aligned, which the fast matmuls need
    shape = (problem.batch, problem.num_rows, padded(problem.num_keys))
    x = problem.like.new_empty(shape, dtype=dtype)
    return x.narrow(-1, 0, problem.num_keys)


def multiplied(problem: RowProblem, dot: int, out: Tensor | None = None) -> Tensor:
    """Computes a dot product without heads by a matmul of torch."""
    q, k = problem.operands[dot]
    if out is None:
        out = new_buffer(problem, q.dtype)
    for b in range(out.shape[0]):
        rows, vocab = (x.select(0, b).select(0, 0) for x in (q, k))
        torch.mm(rows, vocab.t(), out=out.select(0, b))
    return out


# ------------------------------------------------------------------------ sources


@functools.lru_cache(maxsize=512)
def _sums_source(
    program: Program,
    which: str,
    slots: tuple[tuple[int, int, str], ...],
    axis: int,
    is_exact: bool,
) -> Source:
    roots = tuple(node for _, node, _ in slots)
    nodes = _with_materialized(program, which, roots, axis)[0]
    listed = {s: (node, kind) for s, node, kind in slots}
    return row_source.sums_kernel(program, nodes, listed, is_exact)


@functools.lru_cache(maxsize=512)
def _elements_source(
    program: Program,
    which: str,
    roots: tuple[int, ...],
    axis: int,
    is_exact: bool,
    has_one_key_head: bool = False,
) -> Source:
    nodes = _with_materialized(program, which, roots, axis)[0]
    return row_source.maps_kernel(program, nodes, roots, is_exact, axis != 0, has_one_key_head)


@functools.lru_cache(maxsize=512)
def _element_source(program: Program, which: str, node: int, is_exact: bool) -> Source:
    """Writes the kernel of a materialized node that is computed from other materialized nodes."""
    given = nodes_of(program, which)
    args = _with_materialized(program, which, given[node].args, 0)[0]
    nodes = [*args[:node], given[node], *args[node + 1 :]]
    return row_source.maps_kernel(program, nodes, (node,), is_exact, is_summed=False)


@functools.lru_cache(maxsize=512)
def rows_source(
    program: Program, dot: int, sums: tuple[tuple[int, int], ...], is_exact: bool
) -> Source:
    """Writes a kernel with sums over keys of the same heads, as number and node."""
    node = node_of(derive.backward_plan(program), dot)
    every = (node, *(n for _, n in sums))
    nodes = _with_materialized(program, BACKWARD, every, program.dot_heads[dot])[0]
    return row_source.rows_kernel(program, nodes, {dot: node}, dict(sums), is_exact)


@functools.lru_cache(maxsize=512)
def columns_source(program: Program, dot: int, is_exact: bool) -> Source:
    """Writes a kernel of the gradient to a dot's column operand."""
    node = node_of(derive.backward_plan(program), dot)
    nodes = _with_materialized(program, BACKWARD, (node,), program.dot_heads[dot])[0]
    return row_source.columns_kernel(program, nodes, dot, node, is_exact)


# ------------------------------------------------------------------------ a block


class Block:
    """Holds a block of batch, rows and keys, with the materialized elements that were needed so
    far.

    If elements of all rows are kept, the first block that needs them writes them, and others read
    them.
    """

    def __init__(
        self,
        problem: RowProblem,
        which: str,
        result: Result,
        seeds: dict[int, Tensor],
        at: tuple[slice, slice, slice],
        kept: dict[int, Tensor],
        is_first: bool = False,
    ) -> None:
        batch, rows, keys = at
        kept = {i: part(x, batch, rows, keys) for i, x in kept.items()}
        self.whole, self.at, self.which = problem, at, which
        self.program = problem.program
        self.problem = problem.of_block(*at)
        self.nodes = nodes_of(problem.program, which)
        own = result.of_rows(batch, rows)
        self.arguments = {
            **row_kernels.arguments_of(
                self.problem, own, {c: part(x, batch, ALL, rows) for c, x in seeds.items()}
            ),
            **row_kernels.outputs_of(self.problem, own),
            "first_row": rows.start,
            "first_key": keys.start,
            "offset": problem.num_keys - problem.num_rows + rows.start - keys.start,
        }
        self.is_exact = row_kernels.is_exact(problem)
        self.tensors: dict[int, Tensor] = {} if is_first else kept
        self.places = kept if is_first else {}

    def share(self, tensors: dict[int, Tensor], seeds: dict[int, Tensor]) -> None:
        """Takes over tensors of the program's own nodes, and gradients of its reductions."""
        self.tensors.update(tensors)
        for c, x in seeds.items():
            self.arguments.update(row_kernels.row_argument(f"g{c}", x))

    @property
    def own_tensors(self) -> dict[int, Tensor]:
        """Returns the tensors of the program's own nodes, which come first in every plan."""
        return {i: x for i, x in self.tensors.items() if i < len(self.program.nodes)}

    def tensor(self, i: int) -> Tensor:
        """Returns a materialized node, which is computed when it is first needed."""
        if i not in self.tensors:
            self.tensors[i] = self._computed(i)
        return self.tensors[i]

    def masked_tensor(self, i: int) -> Tensor:
        """Returns a materialized node with 0 at the keys that take no part.

        Only a sum over heads is not written so: every reader masks it, and tiles of which no row
        has a key are not written at all.
        """
        x = self.tensor(i)
        if self.nodes[i].op == "sum_heads" and self.program.keys != Keys():
            source = _elements_source(self.program, self.which, (i,), 0, self.is_exact)
            given = {**self.reads((i,), 0), **_place(f"to{i}", x)}
            self._start_elements(source, self._elements(), 1, given)
        return x

    def _computed(self, i: int) -> Tensor:
        node = self.nodes[i]
        match node.op:
            case "dot":
                return multiplied(self.problem, int(node.value))
            case "capture":
                return self._of_columns(int(node.value))
            case "sum_heads":
                inside = node.args[0]
                axis = self.nodes[inside].head
                out = self.places.get(i)
                if out is None:
                    out = new_buffer(self.problem, torch.float32)
                source = _elements_source(
                    self.program,
                    self.which,
                    (inside,),
                    axis,
                    self.is_exact,
                    self._has_one_key_head(axis),
                )
                more = {**self.reads((inside,), axis), **_place(f"to{inside}", out)}
                launch = self.launch_of("mean", axis)
                self._start_elements(source, launch, self.whole.num_heads(axis), more)
                return out
        out = new_buffer(self.problem, torch.float32)
        source = _element_source(self.program, self.which, i, self.is_exact)
        more = {**self.reads(node.args, 0), **_place(f"to{i}", out)}
        self._start_elements(source, self._elements(), 1, more)
        return out

    def _has_one_key_head(self, axis: int) -> bool:
        """Whether all heads of an axis share their keys."""
        heads = zip(self.problem.operands, self.program.dot_heads, strict=True)
        return all(k.shape[1] == 1 for (_, k), head in heads if head == axis)

    def _of_columns(self, number: int) -> Tensor:
        """Ids of a row, as whether a key is one of them; or the values at them."""
        declared, p = self.program.captures[number], self.problem
        places = tile.column_places(self.whole, number, self.at)
        dtype = torch.bool if declared.kind == COLUMNS else torch.float32
        shape = (p.batch, p.num_rows, padded(p.num_keys + 1))
        out = places.new_zeros(shape, dtype=dtype)
        places = places.select(1, 0).expand(p.batch, p.num_rows, -1)
        if declared.kind == COLUMNS:
            out.scatter_(-1, places, True)
        else:
            values = p.captures[number].select(1, 0).float()
            out.scatter_add_(-1, places, values.expand(places.shape))
        return out.narrow(-1, 0, p.num_keys)

    def reads(self, roots: Sequence[int], axis: int) -> dict[str, Any]:
        """Returns the tensors that a kernel of these nodes reads."""
        found: dict[str, Any] = {}
        for i in _with_materialized(self.program, self.which, tuple(roots), axis)[1]:
            found.update(_place(f"tensor{i}", self.tensor(i)))
        return found

    def launch_of(self, kernel: str, axis: int) -> TritonLaunch:
        """Returns tiles of "forward", "dq", "dk" or, of sums over heads, "mean" over heads of an
        axis.
        """
        q = self.problem.like
        if q.device.type != "cuda":
            return row_kernels.INTERPRETED
        operands = row_kernels.operands_of(self.problem, dots_of(self.program, axis))
        gpu = gpu_of(q.device)
        if kernel == "mean":
            return sum_of_heads_launch(operands, gpu)
        return one_dot_launch(kernel, operands, gpu)

    def _elements(self) -> TritonLaunch:
        return ELEMENTS if self.problem.is_on_gpu else INTERPRETED

    def _start_elements(
        self, source: Source, launch: TritonLaunch, num_heads: int, more: dict[str, Any]
    ) -> None:
        num_blocks = ceil_div(self.problem.num_rows, launch.block_m)
        num_tiles = ceil_div(self.problem.num_keys, launch.block_n)
        given = {**self.arguments, **more, "num_tiles": num_tiles}
        start(source, launch, num_blocks, num_heads, num_tiles * self.problem.batch, given)

    def sums(self, slots: dict[int, tuple[int, str]], axis: int, out: dict[str, Any]) -> None:
        """Makes one pass over the keys, of the heads of an axis."""
        listed = tuple((slot, node, kind) for slot, (node, kind) in slots.items())
        source = _sums_source(self.program, self.which, listed, axis, self.is_exact)
        given = {**self.arguments, **self.reads([n for n, _ in slots.values()], axis), **out}
        if axis:
            launch = self.launch_of("forward", axis)
        else:
            is_here = not self.problem.is_on_gpu
            launch = INTERPRETED if is_here else self._row_sums()
            given.update(LANES=launch.block_n // ROW_WIDTH, WIDTH=ROW_WIDTH)
        launch_rows(source, self.problem, self.whole.num_heads(axis), launch, given)

    def _row_sums(self) -> TritonLaunch:
        """Chooses a tile no longer than the keys."""
        keys = max(256, next_power_of_2(self.problem.num_keys))
        if keys >= ROW_SUMS.block_n:
            return ROW_SUMS
        return replace(ROW_SUMS, block_n=keys, num_warps=max(1, keys // 512))

    def element_gradients(self, roots: dict[int, int]) -> dict[int, Tensor]:
        """Returns gradients to dot products without heads, in place of the dot products."""
        nodes = tuple(roots.values())
        reads = self.reads(nodes, 0)
        out = {}
        for dot, node in roots.items():
            at = next(
                (i for i, n in enumerate(self.nodes) if n.op == "dot" and n.value == dot), -1
            )
            dtype = self.problem.operands[dot][0].dtype
            out[dot] = self.tensors[at] if at in self.tensors else new_buffer(self.problem, dtype)
            reads.update(_place(f"to{node}", out[dot]))
        source = _elements_source(self.program, self.which, nodes, 0, self.is_exact)
        self._start_elements(source, self._elements(), 1, reads)
        return out


def _place(name: str, x: Tensor) -> dict[str, Any]:
    return {name: x, f"{name}_b": x.stride(0), f"{name}_m": x.stride(1)}
