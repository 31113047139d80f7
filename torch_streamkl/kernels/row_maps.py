"""Row programs whose elements are computed for a block of rows at a time, into memory.

A sum over heads is the same for all heads, and the logits of an LM head are a matmul of many
dimensions: neither fits a tile's loop. They become maps [batch, rows, keys] of a block of rows: of
dot products by a matmul of torch, of sums over heads by a kernel that loops over heads, of
columns by a scatter. What is left of the program is pointwise in them, and its sums and gradients
have the kernels of row_source.py, which read maps instead of multiplying. A gradient to elements
without heads is a map too, which takes the place of the dot products where they are its only use.

Workspace is bounded: blocks have as many rows (in the backward of LM heads, as many words) as fit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from torch_streamkl.devices import gpu_of
from torch_streamkl.kernels import row_programs, row_source
from torch_streamkl.kernels.row_programs import MAX_DIM, padded_dim, row_argument, slots_of, start
from torch_streamkl.kernels.row_writer import Source
from torch_streamkl.linear_problem import (
    DEFAULT_WORKSPACE_MIB,
    MAX_LOW_PRECISION_SUMS,
    MIB,
    even_ranges,
    even_step,
    padded,
)
from torch_streamkl.rows import blocked, derive, tile
from torch_streamkl.rows.blocked import Result
from torch_streamkl.rows.expressions import Node
from torch_streamkl.rows.problem import ALL, RowProblem, part
from torch_streamkl.rows.program import COLUMNS, KEY, PAIR, ROW, VALUES, Program
from torch_streamkl.tiles import Operands, TritonLaunch, head_mean_launch

FORWARD, DIFFERENTIATED, BACKWARD = "forward", "differentiated", "backward"
ATTENTION_WORKSPACE_MIB = 64
# rows, and keys, of tiles that multiply nothing; neighbours that a thread has of them
ROW_SUMS, ROW_WIDTH = TritonLaunch(1, 4096, 8, 1), 8
ELEMENTS = TritonLaunch(4, 1024, 4, 1)
INTERPRETED = TritonLaunch(4, 32, 4, 1)
MEMBERS = 16  # query heads, at least, that a program of a key head's gradient adds up


# ------------------------------------------------------------------------ which maps there are


@functools.lru_cache(maxsize=256)
def nodes_of(program: Program, which: str) -> tuple[Node, ...]:
    """What the forward, with derivatives or without, or the backward computes."""
    if which == BACKWARD:
        return derive.backward_plan(program).nodes
    return derive.forward_plan(program, which == DIFFERENTIATED).nodes


@functools.lru_cache(maxsize=256)
def _behind_maps(program: Program, which: str) -> tuple[bool, ...]:
    """Of each node, whether a map comes into it."""
    found: list[bool] = []
    for node in nodes_of(program, which):
        found.append(_is_own_map(program, node) or any(found[a] for a in node.args))
    return tuple(found)


def _is_own_map(program: Program, node: Node) -> bool:
    """What no kernel computes inside of a tile."""
    if node.op == "capture":
        return program.captures[int(node.value)].kind in (COLUMNS, VALUES)
    return node.by_key and (node.op == "sum_heads" or (node.op == "dot" and not node.head))


@functools.lru_cache(maxsize=512)
def _with_maps(
    program: Program, which: str, wanted: tuple[int, ...], axis: int
) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The nodes as a kernel over the heads of an axis reads them, and the maps that it reads.

    Elements that all heads share, and that come from maps, are one map.
    """
    nodes, behind = list(nodes_of(program, which)), _behind_maps(program, which)
    found: list[int] = []
    seen, stack = set(wanted), list(wanted)
    while stack:
        i = stack.pop()
        node = nodes[i]
        is_shared = bool(axis) and not node.head and node.by_key and behind[i]
        if _is_own_map(program, node) or is_shared:
            found.append(i)
            continue
        for a in node.args:
            if a not in seen:
                seen.add(a)
                stack.append(a)
    for i in found:
        nodes[i] = Node("map", (), i, nodes[i].dtype, 0, True, nodes[i].is_finite)
    return tuple(nodes), tuple(sorted(found))


@functools.lru_cache(maxsize=512)
def _every_map(program: Program, which: str, wanted: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """All maps that nodes need, which are given with their axis of heads."""
    nodes = nodes_of(program, which)
    found: set[int] = set()
    stack = list(wanted)
    while stack:
        i, axis = stack.pop()
        for each in _with_maps(program, which, (i,), axis)[1]:
            if each not in found:
                found.add(each)
                stack += _insides(nodes, each)
    return tuple(sorted(found))


def _insides(nodes: Sequence[Node], i: int) -> list[tuple[int, int]]:
    """What a map is computed from, with the axis of heads."""
    node = nodes[i]
    if node.op == "sum_heads":
        return [(node.args[0], nodes[node.args[0]].head)]
    if node.op in ("dot", "capture"):
        return []
    return [(a, 0) for a in node.args]


def obstacle(problem: RowProblem, is_differentiated: bool) -> str:
    """Why a problem cannot run by maps; empty if it can."""
    program = problem.program
    if problem.compute_dtype == torch.float64:
        return "kernels compute in float32, and operands are float64"
    if any(c.kind in (COLUMNS, VALUES) and c.head for c in program.captures):
        return "columns that differ between heads have no kernels"
    for (q, _), head in zip(problem.operands, program.dot_heads, strict=True):
        if head and q.shape[-1] > MAX_DIM:
            return f"operands have at most {MAX_DIM} dimensions in kernels, got {q.shape[-1]}"
    for which in (DIFFERENTIATED, BACKWARD) if is_differentiated else (FORWARD,):
        if any(n.op == "sum_heads" and not n.by_key for n in nodes_of(program, which)):
            return "sums over heads of values of rows have no kernels"
    return ""


# ------------------------------------------------------------------------ sources


@functools.lru_cache(maxsize=512)
def _sums_source(
    program: Program, which: str, slots: tuple[tuple[int, int, str], ...], axis: int
) -> Source:
    wanted = tuple(node for _, node, _ in slots)
    nodes = _with_maps(program, which, wanted, axis)[0]
    return row_source.sums_kernel(program, nodes, {s: (node, kind) for s, node, kind in slots})


@functools.lru_cache(maxsize=512)
def _maps_source(program: Program, which: str, wanted: tuple[int, ...], axis: int) -> Source:
    nodes = _with_maps(program, which, wanted, axis)[0]
    return row_source.maps_kernel(program, nodes, wanted, axis != 0)


@functools.lru_cache(maxsize=512)
def _element_source(program: Program, which: str, node: int) -> Source:
    """Of a map that is an expression of others: it is not read itself."""
    given = nodes_of(program, which)
    args = _with_maps(program, which, given[node].args, 0)[0]
    nodes = [*args[:node], given[node], *args[node + 1 :]]
    return row_source.maps_kernel(program, nodes, (node,), is_summed=False)


@functools.lru_cache(maxsize=512)
def _rows_source(program: Program, dot: int) -> Source:
    node = derive.backward_plan(program).dots[dot]
    assert node is not None
    nodes = _with_maps(program, BACKWARD, (node,), program.dot_heads[dot])[0]
    return row_source.rows_kernel(program, nodes, {dot: node})


@functools.lru_cache(maxsize=512)
def _columns_source(program: Program, dot: int) -> Source:
    node = derive.backward_plan(program).dots[dot]
    assert node is not None
    nodes = _with_maps(program, BACKWARD, (node,), program.dot_heads[dot])[0]
    return row_source.columns_kernel(program, nodes, dot, node)


# ------------------------------------------------------------------------ a block


class Block:
    """A block of batch, rows and keys with the maps of it that were needed so far."""

    def __init__(
        self,
        problem: RowProblem,
        which: str,
        result: Result,
        seeds: dict[int, Tensor],
        at: tuple[slice, slice, slice],
    ) -> None:
        batch, rows, keys = at
        self.whole, self.at, self.which = problem, at, which
        self.program = problem.program
        self.problem = problem.of_block(*at)
        self.nodes = nodes_of(problem.program, which)
        own = Result(
            [part(x, batch, ALL, rows) for x in result.reductions],
            [(part(a, batch, ALL, rows), part(b, batch, ALL, rows)) for a, b in result.parts],
            [part(x, batch, ALL, rows) for x in result.jacobians],
        )
        self.arguments = {
            **row_programs.arguments_of(
                self.problem, own, {c: part(x, batch, ALL, rows) for c, x in seeds.items()}
            ),
            **row_programs.outputs_of(self.problem, own),
            "first_row": rows.start,
            "first_key": keys.start,
            "offset": problem.num_keys - problem.num_rows + rows.start - keys.start,
        }
        self.maps: dict[int, Tensor] = {}

    def new_map(self, dtype: torch.dtype) -> Tensor:
        p = self.problem
        # rows start aligned, which the fast matmuls need
        shape = (p.batch, p.num_rows, padded(p.num_keys))
        return p.operands[0][0].new_empty(shape, dtype=dtype).narrow(-1, 0, p.num_keys)

    def map(self, i: int) -> Tensor:
        """A map, computed when it is first needed."""
        if i not in self.maps:
            self.maps[i] = self._computed(i)
        return self.maps[i]

    def _computed(self, i: int) -> Tensor:
        node = self.nodes[i]
        match node.op:
            case "dot":
                q, k = self.problem.operands[int(node.value)]
                out = self.new_map(q.dtype)
                for b in range(out.shape[0]):
                    rows, words = (x.select(0, b).select(0, 0) for x in (q, k))
                    torch.mm(rows, words.t(), out=out.select(0, b))
                return out
            case "capture":
                return self._of_columns(int(node.value))
            case "sum_heads":
                inside = node.args[0]
                axis = self.nodes[inside].head
                out = self.new_map(torch.float32)
                source = _maps_source(self.program, self.which, (inside,), axis)
                more = {**self.reads((inside,), axis), **_place(f"to{inside}", out)}
                launch = self._launch_of_sums(axis)
                self._start_maps(source, launch, self.whole.num_heads(axis), more)
                return out
        out = self.new_map(torch.float32)
        source = _element_source(self.program, self.which, i)
        more = {**self.reads(node.args, 0), **_place(f"to{i}", out)}
        self._start_maps(source, self._elements(), 1, more)
        return out

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

    def reads(self, wanted: Sequence[int], axis: int) -> dict[str, Any]:
        """The maps that a kernel of these nodes reads."""
        found: dict[str, Any] = {}
        for i in _with_maps(self.program, self.which, tuple(wanted), axis)[1]:
            found.update(_place(f"map{i}", self.map(i)))
        return found

    def _operands(self, axis: int) -> Operands:
        q = self.problem.operands[0][0]
        dims = [
            padded_dim(q.shape[-1])
            for (q, _), head in zip(self.problem.operands, self.program.dot_heads, strict=True)
            if head == axis
        ]
        is_full = torch.get_float32_matmul_precision() == "highest"
        return Operands(tuple(dims), q.element_size(), is_full)

    def _launch_of_sums(self, axis: int) -> TritonLaunch:
        q = self.problem.operands[0][0]
        if q.device.type != "cuda":
            return row_programs.INTERPRETED
        return head_mean_launch("mean", self._operands(axis), gpu_of(q.device))

    def _elements(self) -> TritonLaunch:
        return ELEMENTS if self.problem.operands[0][0].device.type == "cuda" else INTERPRETED

    def _start_maps(
        self, source: Source, launch: TritonLaunch, num_heads: int, more: dict[str, Any]
    ) -> None:
        num_blocks = triton.cdiv(self.problem.num_rows, launch.block_m)
        num_tiles = triton.cdiv(self.problem.num_keys, launch.block_n)
        programs = num_blocks * num_tiles * self.problem.batch
        given = {**self.arguments, **more, "num_tiles": num_tiles}
        start(source, launch, num_blocks, num_heads, programs, given)

    def sums(self, slots: dict[int, tuple[int, str]], axis: int, out: dict[str, Any]) -> None:
        """One pass over the keys, of the heads of an axis."""
        listed = tuple((slot, node, kind) for slot, (node, kind) in slots.items())
        source = _sums_source(self.program, self.which, listed, axis)
        given = {**self.arguments, **self.reads([n for n, _ in slots.values()], axis), **out}
        if axis:
            launch = row_programs.launch_of(self.problem, "forward", self._operands(axis))
        else:
            is_here = self.problem.operands[0][0].device.type != "cuda"
            launch = INTERPRETED if is_here else self._row_sums()
            given.update(LANES=launch.block_n // ROW_WIDTH, WIDTH=ROW_WIDTH)
        num_heads = self.whole.num_heads(axis)
        num_blocks = triton.cdiv(self.problem.num_rows, launch.block_m)
        start(source, launch, num_blocks, num_heads, num_blocks * num_heads * self.problem.batch, given)

    def _row_sums(self) -> TritonLaunch:
        """A tile no longer than the keys."""
        keys = max(256, triton.next_power_of_2(self.problem.num_keys))
        if keys >= ROW_SUMS.block_n:
            return ROW_SUMS
        return replace(ROW_SUMS, block_n=keys, num_warps=max(1, keys // 512))

    def element_gradients(self, wanted: dict[int, int]) -> dict[int, Tensor]:
        """Gradients to dot products without heads, by the dot's node, in place of the map of it."""
        nodes = tuple(wanted.values())
        reads = self.reads(nodes, 0)
        out = {}
        for dot, node in wanted.items():
            at = next(
                (i for i, n in enumerate(self.nodes) if n.op == "dot" and n.value == dot), -1
            )
            dtype = self.problem.operands[dot][0].dtype
            out[dot] = self.maps[at] if at in self.maps else self.new_map(dtype)
            reads.update(_place(f"to{node}", out[dot]))
        source = _maps_source(self.program, self.which, nodes, 0)
        self._start_maps(source, self._elements(), 1, reads)
        return out


def _place(name: str, x: Tensor) -> dict[str, Any]:
    return {name: x, f"{name}_b": x.stride(0), f"{name}_m": x.stride(1)}


# ------------------------------------------------------------------------ blocks of a problem


def _bytes_of(problem: RowProblem, which: str, wanted: tuple[tuple[int, int], ...]) -> int:
    """Of all maps, for one row and key, with the gradients that take no dot product's place."""
    nodes, found = nodes_of(problem.program, which), 0
    for i in _every_map(problem.program, which, wanted):
        node = nodes[i]
        if node.op == "dot":
            found += problem.operands[int(node.value)][0].element_size()
        elif node.op == "capture" and problem.program.captures[int(node.value)].kind == COLUMNS:
            found += 1
        else:
            found += 4
    return max(found, 2)


def _is_of_words(problem: RowProblem) -> bool:
    """Whether no dot has heads: an LM head."""
    return not any(problem.program.dot_heads)


def _workspace(problem: RowProblem) -> int:
    device = problem.operands[0][0].device.type
    mib = DEFAULT_WORKSPACE_MIB.get(device, DEFAULT_WORKSPACE_MIB["cuda"])
    return MIB * (mib if _is_of_words(problem) else min(mib, ATTENTION_WORKSPACE_MIB))


def _row_blocks(problem: RowProblem, bytes_of_pair: int) -> Iterator[tuple[slice, slice, slice]]:
    """Blocks of batch elements and rows, with all keys."""
    keys = slice(0, problem.num_keys)
    room = max(1, _workspace(problem) // (bytes_of_pair * padded(problem.num_keys)))
    batch = max(1, min(problem.batch, room // problem.num_rows))
    for b in range(0, problem.batch, batch):
        for rows in even_ranges(problem.num_rows, max(1, room // batch), 128):
            yield slice(b, min(b + batch, problem.batch)), rows, keys


def forward(problem: RowProblem, is_differentiated: bool) -> Result:
    """All passes of a block of rows before the next one: they share its maps."""
    program, which = problem.program, DIFFERENTIATED if is_differentiated else FORWARD
    result = blocked.allocate(problem, is_differentiated)
    plan = derive.forward_plan(program, is_differentiated)
    passes: list[tuple[dict[int, tuple[int, str]], int]] = []
    for level in range(1, plan.num_passes + 1):
        slots = slots_of(program, plan, level)
        for axis in sorted({axis for _, _, axis in slots.values()}, reverse=True):
            passes.append(({s: x[:2] for s, x in slots.items() if x[2] == axis}, axis))
    wanted = tuple((node, axis) for slots, axis in passes for node, _ in slots.values())
    for at in _row_blocks(problem, _bytes_of(problem, which, wanted)):
        block = Block(problem, which, result, {}, at)
        for slots, axis in passes:
            block.sums(slots, axis, {})
    return result


def backward(
    problem: RowProblem,
    result: Result,
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients to operands and captured tensors, block by block."""
    seeds = row_programs.seeds_of(problem, result, grads)
    out = _Gradients(problem, wanted)
    nodes = nodes_of(problem.program, BACKWARD)
    each = tuple((n, nodes[n].head) for n in (*out.dots.values(), *out.captures.values()))
    if each:
        size = _bytes_of(problem, BACKWARD, each)
        blocks = _word_blocks if _is_of_words(problem) else _row_blocks
        for at in blocks(problem, size):
            out.add(Block(problem, BACKWARD, result, seeds, at))
    rest = blocked.backward(problem, result, grads, out.rest) if any(out.rest) else None
    return out.finished(rest)


def _word_blocks(problem: RowProblem, bytes_of_pair: int) -> Iterator[tuple[slice, slice, slice]]:
    """Blocks of words with all tokens where they fit: a gradient to them is then one matmul."""
    room = _workspace(problem) // bytes_of_pair
    fewest = -(-problem.num_keys // MAX_LOW_PRECISION_SUMS)
    words = padded(max(room // problem.num_rows, fewest), 256)
    words = even_step(problem.num_keys, words, 256)
    tokens = max(1, room // padded(words))
    for keys in even_ranges(problem.num_keys, words, 256):
        for rows in even_ranges(problem.num_rows, tokens, 128):
            yield slice(0, problem.batch), rows, keys


class _Gradients:
    """What the blocks' gradients are added to."""

    def __init__(self, problem: RowProblem, wanted: Sequence[bool]) -> None:
        self.problem, self.program = problem, problem.program
        plan = derive.backward_plan(problem.program)
        operands = [x for pair in problem.operands for x in pair]
        count = len(operands)
        kinds = [c.kind for c in self.program.captures]
        self.tensors = [*operands, *problem.captures]
        self.dots = {
            i: node
            for i, node in enumerate(plan.dots)
            if node is not None and (wanted[2 * i] or wanted[2 * i + 1])
        }
        self.captures = {
            i: node
            for i, node in enumerate(plan.captures)
            if node is not None
            and wanted[count + i]
            and (kinds[i] == ROW or not plan.nodes[node].head)
        }
        # a tensor of keys or pairs that differs between heads
        self.rest = [False] * count + [
            bool(need) and plan.captures[i] is not None and i not in self.captures
            for i, need in enumerate(wanted[count : count + len(kinds)])
        ]
        self.out: list[Tensor | None] = [
            self._allocated(n) if need else None
            for n, need in enumerate(wanted[: len(self.tensors)])
        ]

    def _dtype(self, n: int) -> torch.dtype:
        """Where blocks add to each other, but for the matmuls of words, in float32."""
        x = self.tensors[n]
        if n >= 2 * len(self.problem.operands):
            return torch.float32
        is_added = n % 2 == 1 and not _is_of_words(self.problem)
        return torch.float32 if is_added else x.dtype

    def _allocated(self, n: int) -> Tensor:
        """0 where blocks add to each other from the first one on."""
        x, dtype = self.tensors[n], self._dtype(n)
        is_written = n // 2 in self.dots and n < 2 * len(self.problem.operands)
        if is_written and n % 2:  # of a dot with heads, kernels add
            is_written = not self.program.dot_heads[n // 2] and dtype == x.dtype
        make = torch.empty if is_written else torch.zeros
        return make(x.shape, dtype=dtype, device=x.device)

    def finished(self, rest: list[Tensor | None] | None) -> list[Tensor | None]:
        found = [g if g is None else g.to(x.dtype) for g, x in zip(self.out, self.tensors, strict=True)]
        for i, g in enumerate(rest or ()):
            found[i] = g if g is not None else found[i]
        return found

    def add(self, block: Block) -> None:
        """What a block contributes."""
        for i, node in self.captures.items():
            self._add_capture(block, i, node)
        for i, node in self.dots.items():
            if self.program.dot_heads[i]:
                self._add_headed(block, i, node)
        alone = {i: node for i, node in self.dots.items() if not self.program.dot_heads[i]}
        if alone:
            for i, d in block.element_gradients(alone).items():
                self._add_matmuls(block, i, d)

    def _add_matmuls(self, block: Block, i: int, d: Tensor) -> None:
        """Operands of a dot without heads, of which blocks of words and tokens ascend."""
        q, k = block.problem.operands[i]
        batch, rows, keys = block.at
        dq, dk = self.out[2 * i], self.out[2 * i + 1]
        for b in range(d.shape[0]):
            at, each = batch.start + b, d.select(0, b)
            a, words = (x.select(0, b).select(0, 0) for x in (q, k))
            if dq is not None:
                into = part(dq.select(0, at).select(0, 0), rows)
                _matmul_into(into, each, words, keys.start == 0)
            if dk is not None:
                into = part(dk.select(0, at).select(0, 0), keys)
                _matmul_into(into, each.t(), a, rows.start == 0)

    def _add_headed(self, block: Block, i: int, node: int) -> None:
        """Operands of a dot with heads."""
        batch, rows, _ = block.at
        axis = self.program.dot_heads[i]
        at_dot = [j for j, n in enumerate(block.nodes) if n.op == "dot" and n.value == i]
        given = {**block.arguments, **block.reads((node, *at_dot), axis)}
        dq, dk = self.out[2 * i], self.out[2 * i + 1]
        if dq is not None:
            mine = part(dq, batch, ALL, rows)
            given.update(row_programs.operand_argument(f"da{i}", mine, f"da{i}_out"))
            launch = row_programs.launch_of(block.problem, "dq", block._operands(axis))
            source = _rows_source(self.program, i)
            row_programs.launch_rows(source, block.problem, dq.shape[1], launch, given)
        if dk is not None:
            group = given[f"group{i}"]
            shares = max(1, group // MEMBERS) if group % MEMBERS == 0 else 1
            mine = part(dk, batch)
            parts = mine.unsqueeze(0) if shares == 1 else mine.new_zeros(shares, *mine.shape)
            given.update(row_programs.operand_argument(f"db{i}", parts.select(0, 0), f"db{i}_out"))
            given.update({f"db{i}_share": parts.stride(0), "num_shares": shares, "ADD": True})
            launch = row_programs.launch_of(block.problem, "dk", block._operands(axis))
            source = _columns_source(self.program, i)
            num_heads = dk.shape[1] * shares
            row_programs.launch_columns(source, block.problem, num_heads, launch, given)
            if shares > 1:
                mine += parts.sum(0)

    def _add_capture(self, block: Block, i: int, node: int) -> None:
        """The sum of a node's elements over what a captured tensor does not have."""
        batch, rows, keys = block.at
        kind = self.program.captures[i].kind
        target = self.out[2 * len(self.problem.operands) + i]
        assert target is not None
        if kind == ROW:
            axis = block.nodes[node].head
            heads = self.problem.num_heads(axis)
            d = target.new_zeros(block.problem.batch, heads, block.problem.num_rows)
            # a number that no reduction has
            block.sums({999: (node, "sum")}, axis, row_argument("out999", d))
            into = part(target, batch, ALL, rows)
        elif kind == KEY:
            d = block.map(node).sum(1).unsqueeze(1)
            into = part(target, batch, ALL, keys)
        elif kind == PAIR:
            d = block.map(node).unsqueeze(1)
            into = part(target, batch, ALL, rows, keys)
        else:
            places = tile.column_places(self.problem, i, block.at).select(1, 0)
            found = block.map(node).expand(*places.shape[:-1], -1)
            inside = places < found.shape[-1]
            d = torch.where(inside, found.gather(-1, places.clamp_max(found.shape[-1] - 1)), 0.0)
            d, into = d.unsqueeze(1), part(target, batch, ALL, rows)
        into += d.sum_to_size(into.shape)


def _matmul_into(out: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Add a product, which has the operands' dtype, to a sum; or begin one."""
    if out.dtype != a.dtype:
        out += a @ b
    elif is_first:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)
