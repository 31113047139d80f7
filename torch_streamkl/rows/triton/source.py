"""A row program as Triton source: a kernel for each level, for row operands, for column operands.

Every kernel walks tiles [BLOCK_M, BLOCK_N] of rows and keys of one head. What is computed in a
tile is written out from the program's nodes (rows/expressions.py), one assignment each; the walk
around it is the same for all programs. Values are float32 and in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_streamkl.rows.derive import BackwardPlan, ForwardPlan
from torch_streamkl.rows.expressions import Node
from torch_streamkl.rows.operations import OPERATIONS
from torch_streamkl.rows.program import (
    COLUMNS,
    KEY,
    LOGSUMEXP,
    MAX,
    PAIR,
    ROW,
    VALUES,
    Program,
)

SUM_HEADS = ("sum_heads", "expand_heads")


@dataclass(frozen=True)
class Source:
    """A kernel's text, the name of its function, and its arguments in order."""

    text: str
    name: str
    arguments: tuple[str, ...]


def obstacle(program: Program, plan: BackwardPlan | None) -> str:
    """Why a program has no kernels; empty if it has."""
    kinds = {c.kind for c in program.captures}
    if kinds & {COLUMNS, VALUES}:
        return "columns"
    nodes = list(program.nodes)
    if plan is not None:
        nodes += [plan.nodes[i] for i in _used_by(plan.nodes, [x for x in plan.dots if x])]
    if any(reduction.kind == MAX for reduction in program.reductions):
        return "maxima"
    if any(node.op in SUM_HEADS for node in nodes):
        return "sums over heads"
    return ""


class _Writer:
    """The lines of one kernel."""

    def __init__(self, program: Program, nodes: Sequence[Node], wanted: Sequence[int]) -> None:
        self.program, self.nodes = program, nodes
        self.order = _used_by(nodes, wanted)
        # log-sum-exps that something is compared with, which needs their two parts
        self.in_parts = {
            a
            for i in self.order
            if nodes[i].op == "sub"
            for a in nodes[i].args
            if nodes[a].op == "reduction" and int(nodes[a].value) in program.logsumexps
        }
        self.arguments: list[str] = []
        self.lines: list[str] = []
        self.depth = 1

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def take(self, *names: str) -> None:
        """Arguments of the kernel."""
        self.arguments += [n for n in names if n not in self.arguments]

    def leaves(self, op: str) -> list[int]:
        return [int(self.nodes[i].value) for i in self.order if self.nodes[i].op == op]

    def name(self, index: int) -> str:
        node = self.nodes[index]
        if node.op != "const":
            return f"v{index}"
        return repr(node.value) if abs(node.value) < float("inf") else f"float('{node.value}')"

    def bind(self, batch: str, head: str) -> None:
        """Where the tensors of a head begin."""
        for i in self.leaves("dot"):
            self.take(*(f"{x}{i}{s}" for x in "ab" for s in ("", "_b", "_h", "_m", "_d")))
            self.take(f"group{i}")
            for x, of in (("a", head), ("b", f"({head} // group{i})")):
                self.line(f"{x}{i}_p = {x}{i} + {batch} * {x}{i}_b + {of} * {x}{i}_h")
        for i in self.leaves("capture"):
            self.take(f"c{i}", *(f"c{i}_{s}" for s in "bhmn"))
            self.line(f"c{i}_p = c{i} + {batch} * c{i}_b + {head} * c{i}_h")
        for kind, prefix in (("reduction", "r"), ("seed", "g")):
            for i in self.leaves(kind):
                self.take(f"{prefix}{i}", f"{prefix}{i}_b", f"{prefix}{i}_h")
                self.line(f"{prefix}{i}_at = {batch} * {prefix}{i}_b + {head} * {prefix}{i}_h")
                self.line(f"{prefix}{i}_p = {prefix}{i} + {prefix}{i}_at")
        keys = self.program.keys
        self.take("num_rows", "num_keys")
        self.line("valid = num_keys")
        if keys.has_lengths:
            self.take("lengths")
            self.line(f"valid = tl.minimum(num_keys, tl.load(lengths + {batch}).to(tl.int32))")
        if keys.has_mask:
            self.take("mask", *(f"mask_{s}" for s in "bmn"))
            self.line(f"mask_p = mask + {batch} * mask_b")

    def load_rows(self) -> None:
        """Row operands, values of rows and their positions."""
        self.line("m64 = m.to(tl.int64)[:, None]")
        self.line("in_rows = m[:, None] < num_rows")
        for i in self.leaves("dot"):
            self.line(f"d{i} = tl.arange(0, DIM{i})[None, :]")
            self.line(
                f"a{i}_x = tl.load(a{i}_p + m64 * a{i}_m + d{i} * a{i}_d, "
                f"mask=in_rows & (d{i} < SIZE{i}), other=0.0)  # [BLOCK_M, DIM]"
            )
        for index in self.order:
            node = self.nodes[index]
            i = int(node.value) if node.op in ("reduction", "seed", "capture") else 0
            prefix = {"reduction": "r", "seed": "g"}.get(node.op)
            if prefix:
                place = f"{prefix}{i}_p + m64"
                self.line(f"v{index} = tl.load({place}, mask=in_rows, other=0.0)")
                if prefix == "r" and self.program.reductions[i].kind == LOGSUMEXP:
                    self._load_parts(index, i)
            elif node.op == "capture" and self.program.captures[i].kind == ROW:
                self._load(index, f"c{i}_p + m64 * c{i}_m", "in_rows")
            elif node.op == "row_index":
                self.line(f"v{index} = m[:, None]")

    def _load_parts(self, index: int, i: int) -> None:
        """Largest element and logarithm of the rest of a log-sum-exp, 0 where it has no keys."""
        if index not in self.in_parts:
            return
        for part in "ps":
            self.take(f"r{part}{i}")
            place = f"r{part}{i} + r{i}_at + m64"
            self.line(f"v{index}{part} = tl.load({place}, mask=in_rows, other=0.0)")
            self.line(f"v{index}{part} = tl.where(v{index} == float('-inf'), 0.0, v{index}{part})")

    def load_columns(self) -> None:
        """Column operands, as rows of keys, and captured tensors of keys."""
        self.line("n64 = n.to(tl.int64)")
        self.line("in_keys = n < num_keys")
        for i in self.leaves("dot"):
            self.line(f"e{i} = tl.arange(0, DIM{i})[None, :]")
            self.line(
                f"b{i}_x = tl.load(b{i}_p + n64[:, None] * b{i}_m + e{i} * b{i}_d, "
                f"mask=in_keys[:, None] & (e{i} < SIZE{i}), other=0.0)  # [BLOCK_N, DIM]"
            )
        for index in self.order:
            node = self.nodes[index]
            if node.op == "capture" and self.program.captures[int(node.value)].kind == KEY:
                i = int(node.value)
                self._load(index, f"c{i}_p + n64[None, :] * c{i}_n", "in_keys[None, :]")
            elif node.op == "key_index":
                self.line(f"v{index} = n[None, :]")

    def elements(self) -> None:
        """Everything of one tile, and which keys take part."""
        keys = self.program.keys
        self.line("keep = in_rows & (n[None, :] < valid)")
        shift = "(m[:, None] + num_keys - num_rows)"
        if keys.left is not None:
            self.line(f"keep &= n[None, :] >= {shift} - {keys.left}")
        if keys.right is not None:
            self.line(f"keep &= n[None, :] <= {shift} + {keys.right}")
        if keys.has_mask:
            self.line(
                "keep &= tl.load(mask_p + m64 * mask_m + n64[None, :] * mask_n, "
                "mask=keep, other=0) != 0"
            )
        for index in self.order:
            node = self.nodes[index]
            args = [self.name(a) for a in node.args]
            match node.op:
                case "const" | "reduction" | "seed" | "key_index" | "row_index":
                    pass
                case "dot":
                    i = int(node.value)
                    self.line(
                        f"v{index} = tl.dot(a{i}_x, tl.trans(b{i}_x), input_precision=PRECISION)"
                    )
                case "capture":
                    i = int(node.value)
                    if self.program.captures[i].kind == PAIR:
                        place = f"c{i}_p + m64 * c{i}_m + n64[None, :] * c{i}_n"
                        self._load(index, place, "(in_rows & in_keys[None, :])")
                case "sub" if node.args[1] in self.in_parts:
                    a = node.args[1]
                    self.line(f"v{index} = ({args[0]} - v{a}p) - v{a}s")
                case "sub" if node.args[0] in self.in_parts:
                    a = node.args[0]
                    self.line(f"v{index} = v{a}s - ({args[1]} - v{a}p)")
                case "pow":
                    self.line(f"v{index} = {_power(args[0], node.value)}")
                case op:
                    self.line(f"v{index} = {OPERATIONS[op].triton.format(*args)}")

    def _load(self, index: int, place: str, mask: str) -> None:
        number = int(self.nodes[index].value)
        dtype = self.program.captures[number].dtype
        cast = {"float": ".to(tl.float32)", "bool": " != 0", "int": ""}[dtype]
        self.line(f"v{index} = tl.load({place}, mask={mask}, other=0){cast}")

    def key_bounds(self) -> None:
        """First and last key of a block of rows, in whole blocks."""
        keys = self.program.keys
        self.line("first = 0")
        self.line("stop = valid")
        if keys.left is not None:
            self.line(f"low = start + num_keys - num_rows - {keys.left}")
            self.line("first = tl.maximum(low, 0) // BLOCK_N * BLOCK_N")
        if keys.right is not None:
            self.line(f"high = start + BLOCK_M + num_keys - num_rows + {keys.right}")
            self.line("stop = tl.minimum(stop, high)")

    def row_bounds(self) -> None:
        """First and last row of a block of keys, in whole blocks."""
        keys = self.program.keys
        self.line("first = 0")
        self.line("stop = num_rows")
        if keys.right is not None:
            self.line(f"low = start - (num_keys - num_rows) - {keys.right}")
            self.line("first = tl.maximum(low, 0) // BLOCK_M * BLOCK_M")
        if keys.left is not None:
            self.line(f"high = start + BLOCK_N - (num_keys - num_rows) + {keys.left}")
            self.line("stop = tl.minimum(stop, high)")

    def source(self, name: str) -> Source:
        sizes = [f"{x}{i}" for i in self.leaves("dot") for x in ("SIZE", "DIM")]
        constants = [*sizes, "PRECISION", "BLOCK_M", "BLOCK_N"]
        head = ", ".join([*self.arguments, *(f"{c}: tl.constexpr" for c in constants)])
        body = "\n".join(self.lines)
        text = f"@triton.jit\ndef {name}({head}):\n{body}\n"
        return Source(text, name, (*self.arguments, *constants))


def _used_by(nodes: Sequence[Node], wanted: Sequence[int]) -> list[int]:
    needed, stack = set(wanted), list(wanted)
    while stack:
        for a in nodes[stack.pop()].args:
            if a not in needed:
                needed.add(a)
                stack.append(a)
    return sorted(needed)


def _power(x: str, exponent: float) -> str:
    magnitude = f"tl.exp({exponent!r} * tl.log(tl.abs({x})))"
    if exponent != int(exponent):
        return f"tl.exp({exponent!r} * tl.log({x}))"
    return magnitude if exponent % 2 == 0 else f"tl.where({x} < 0, -1.0, 1.0) * {magnitude}"


def _start(w: _Writer, block: str, positions: str) -> None:
    w.take("num_heads")
    w.line(f"start = tl.program_id(0) * {block}")
    w.line(f"{positions} = start + tl.arange(0, {block})")
    w.line("batch = (tl.program_id(1) // num_heads).to(tl.int64)")
    w.line("head = (tl.program_id(1) % num_heads).to(tl.int64)")


def level_kernel(program: Program, plan: ForwardPlan, level: int) -> tuple[Source, list[int]]:
    """What one pass over the keys gathers, and the slots that it writes."""
    count = len(program.reductions)
    slots: dict[int, tuple[int, str]] = {
        c: (r.node, r.kind) for c, r in enumerate(program.reductions) if program.levels[c] == level
    }
    for slot, jacobian in enumerate(plan.jacobians, start=count):
        if jacobian.level == level:
            slots[slot] = (jacobian.node, "sum")
    w = _Writer(program, plan.nodes, [node for node, _ in slots.values()])
    _start(w, "BLOCK_M", "m")
    w.bind("batch", "head")
    w.load_rows()
    for slot, (_, kind) in slots.items():
        w.line(f"sum{slot} = tl.zeros([BLOCK_M], tl.float32)")
        if kind == LOGSUMEXP:
            w.line(f"peak{slot} = tl.full([BLOCK_M], float('-inf'), tl.float32)")
    w.key_bounds()
    w.line("for j in range(first, stop, BLOCK_N):")
    w.depth = 2
    w.line("n = j + tl.arange(0, BLOCK_N)")
    w.load_columns()
    w.elements()
    for slot, (node, kind) in slots.items():
        x = w.name(node)
        if kind != LOGSUMEXP:
            w.line(f"sum{slot} += tl.sum(tl.where(keep, {x}, 0.0), 1)")
            continue
        w.line(f"y{slot} = tl.where(keep, {x}, float('-inf'))")
        w.line(f"new{slot} = tl.maximum(peak{slot}, tl.max(y{slot}, 1))")
        w.line(f"base{slot} = tl.where(new{slot} == float('-inf'), 0.0, new{slot})")
        w.line(f"sum{slot} *= tl.exp(peak{slot} - base{slot})")
        w.line(f"sum{slot} += tl.sum(tl.exp(y{slot} - base{slot}[:, None]), 1)")
        w.line(f"peak{slot} = new{slot}")
    w.depth = 1
    for slot, (_, kind) in slots.items():
        w.take(f"out{slot}", f"out{slot}_b", f"out{slot}_h")
        value = f"sum{slot}"
        if kind == LOGSUMEXP:
            value = f"tl.where({value} == 0.0, float('-inf'), peak{slot} + tl.log({value}))"
        # without heads every head finds and writes the same
        place = f"batch * out{slot}_b + head * out{slot}_h + m"
        w.line(f"tl.store(out{slot} + {place}, {value}, mask=m < num_rows)")
        if kind == LOGSUMEXP:
            w.take(f"outp{slot}", f"outs{slot}")
            w.line(f"tl.store(outp{slot} + {place}, peak{slot}, mask=m < num_rows)")
            w.line(f"tl.store(outs{slot} + {place}, tl.log(sum{slot}), mask=m < num_rows)")
    return w.source(f"row_program_level_{level}"), list(slots)


def rows_kernel(program: Program, plan: BackwardPlan, dots: Sequence[int]) -> Source:
    """Gradients to row operands of these dots."""
    wanted = [_node(plan, i) for i in dots]
    w = _Writer(program, plan.nodes, [*wanted, *_dots_of(plan, dots)])
    _start(w, "BLOCK_M", "m")
    w.bind("batch", "head")
    w.load_rows()
    for i in dots:
        w.line(f"da{i} = tl.zeros([BLOCK_M, DIM{i}], tl.float32)")
    w.key_bounds()
    w.line("for j in range(first, stop, BLOCK_N):")
    w.depth = 2
    w.line("n = j + tl.arange(0, BLOCK_N)")
    w.load_columns()
    w.elements()
    for i, node in zip(dots, wanted, strict=True):
        w.line(f"x{i} = tl.where(keep, {w.name(node)}, 0.0).to(b{i}_x.dtype)")
        w.line(f"da{i} = tl.dot(x{i}, b{i}_x, da{i}, input_precision=PRECISION)")
    w.depth = 1
    for i in dots:
        _store(w, f"da{i}", "m64", f"d{i}", f"in_rows & (d{i} < SIZE{i})", "head")
    return w.source("row_program_rows")


def columns_kernel(program: Program, plan: BackwardPlan, dot: int) -> Source:
    """The gradient to the column operand of a dot, summed over the heads that share it."""
    node = _node(plan, dot)
    w = _Writer(program, plan.nodes, [node, *_dots_of(plan, [dot])])
    _start(w, "BLOCK_N", "n")
    w.take(f"group{dot}")
    w.line(f"db{dot} = tl.zeros([BLOCK_N, DIM{dot}], tl.float32)")
    w.line(f"for member in range(group{dot}):")
    w.depth = 2
    w.line(f"h = head * group{dot} + member")
    w.bind("batch", "h")
    w.load_columns()
    w.row_bounds()
    w.line("for i in range(first, stop, BLOCK_M):")
    w.depth = 3
    w.line("m = i + tl.arange(0, BLOCK_M)")
    w.load_rows()
    w.elements()
    w.line(f"x = tl.where(keep, {w.name(node)}, 0.0).to(a{dot}_x.dtype)")
    w.line(f"db{dot} = tl.dot(tl.trans(x), a{dot}_x, db{dot}, input_precision=PRECISION)")
    w.depth = 1
    w.line("k64 = n.to(tl.int64)[:, None]")
    w.line(f"f = tl.arange(0, DIM{dot})[None, :]")
    _store(w, f"db{dot}", "k64", "f", f"(k64 < num_keys) & (f < SIZE{dot})", "head")
    return w.source("row_program_columns")


def _node(plan: BackwardPlan, dot: int) -> int:
    node = plan.dots[dot]
    assert node is not None
    return node


def _dots_of(plan: BackwardPlan, dots: Sequence[int]) -> list[int]:
    """The nodes of dots whose operands a gradient multiplies, computed or not."""
    return [i for i, n in enumerate(plan.nodes) if n.op == "dot" and int(n.value) in dots]


def _store(w: _Writer, name: str, places: str, dims: str, mask: str, head: str) -> None:
    w.take(f"{name}_out", *(f"{name}_{s}" for s in "bhmd"))
    base = f"{name}_out + batch * {name}_b + {head} * {name}_h"
    w.line(
        f"tl.store({base} + {places} * {name}_m + {dims} * {name}_d, "
        f"{name}.to({name}_out.dtype.element_ty), mask={mask})"
    )
