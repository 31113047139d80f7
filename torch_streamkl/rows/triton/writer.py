"""Writes the lines of a row program's kernel: what a tile computes, from the program's nodes.

A node is a value of a row [BLOCK_M, 1], of a key [1, BLOCK_N], or of both. Per-row and per-key
values are computed when rows and keys are loaded, outside of the loop over the other. Values are
float32 and in nats. Exponentials are exp2, and their factor log2(e) is folded into the factor of
the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_streamkl.program.graph import LOGSUMEXP, MAX
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.steps import Step, exceeds_int32, used_by
from torch_streamkl.rows.program import KEY, ROW, Program
from torch_streamkl.rows.tile import held
from torch_streamkl.rows.triton.powers import power

CONST, OF_ROW, OF_KEY, OF_BOTH = "const", "row", "key", "both"
# operations of nodes that a kernel loads
LOADED = frozenset(
    ["const", "reduction", "seed", "row_index", "key_index", "capture", "materialized"]
)
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Source:
    """Holds a kernel's text, its function's name, and its arguments in order, constants last."""

    text: str
    name: str
    arguments: tuple[str, ...]
    num_constants: int


@dataclass(frozen=True)
class Scaled:
    """Marks an element that is a factor times a dot product: no mask or bias has changed it."""

    dot: str
    factor: float


class Writer:
    """Collects the lines of one kernel.

    With float32 operands, the largest element of a row is subtracted as it is: a difference of
    rounded numbers is exact, and naive code has it. 16-bit operands round before that, by more
    than folding the factor of the scores into exp2 loses.
    """

    def __init__(
        self, program: Program, nodes: Sequence[Step], roots: Sequence[int], is_exact: bool
    ) -> None:
        self.program, self.nodes, self.is_exact = program, nodes, is_exact
        self.order = used_by(nodes, roots)
        self.shape = self._shapes()
        self.as_index = ".to(tl.int64)" if exceeds_int32([nodes[i] for i in self.order]) else ""
        self.arguments: list[str] = []
        self.lines: list[str] = []
        self.log_normalizer = 1
        # what tiles need next to the nodes, by name: per-row values, and of keys
        self.of_rows: dict[str, str] = {}
        self.of_keys: dict[str, str] = {}
        self.in_parts: set[int] = set()  # log-sum-exps that something is compared with
        self.expressions = {
            i: self._expression(i) for i in self.order if not self._is_loaded(nodes[i].op)
        }

    def line(self, text: str) -> None:
        self.lines.append("    " * self.log_normalizer + text)

    def take(self, *names: str) -> None:
        """Adds arguments of the kernel."""
        self.arguments += [n for n in names if n not in self.arguments]

    def leaves(self, op: str) -> list[int]:
        return [int(self.nodes[i].value) for i in self.order if self.nodes[i].op == op]

    def name(self, index: int) -> str:
        node = self.nodes[index]
        if node.op != "const":
            return f"v{index}"
        if node.dtype != "float":
            return repr(bool(node.value) if node.dtype == "bool" else int(node.value))
        number = held(node.value, torch.float32)
        return repr(number) if abs(number) < math.inf else f"float('{number}')"

    # ------------------------------------------------------------------ what nodes are

    def _shapes(self) -> dict[int, str]:
        parts: dict[int, frozenset[str]] = {}
        shapes = {}
        for i in self.order:
            own = frozenset((self._own_shape(i),)) - {CONST}
            parts[i] = own.union(*(parts[a] for a in self.nodes[i].args))
            if parts[i]:
                (shapes[i],) = parts[i] if len(parts[i]) == 1 else (OF_BOTH,)
            else:  # a comparison of constants is computed with the rows
                shapes[i] = CONST if self.nodes[i].op == "const" else OF_ROW
        return shapes

    def _own_shape(self, index: int) -> str:
        node = self.nodes[index]
        match node.op:
            case "dot" | "materialized":
                return OF_BOTH
            case "seed" if node.by_key:
                return OF_BOTH
            case "reduction" | "seed" | "row_index":
                return OF_ROW
            case "key_index":
                return OF_KEY
            case "capture":
                kind = self.program.captures[int(node.value)].kind
                return {ROW: OF_ROW, KEY: OF_KEY}.get(kind, OF_BOTH)
        return CONST

    def _is_loaded(self, op: str) -> bool:
        return op in LOADED

    def scaled(self, index: int) -> Scaled | None:
        """Returns a plain score, whose factor may be folded into another."""
        if self.is_exact:
            return None
        node = self.nodes[index]
        match node.op:
            case "dot" | "materialized":
                return Scaled(self.name(index), 1.0)
            case "detach" | "expand_heads":
                return self.scaled(node.args[0])
            case "mul":
                for i in (0, 1):
                    other = self.nodes[node.args[1 - i]]
                    inner = self.scaled(node.args[i])
                    if inner is not None and other.op == "const" and math.isfinite(other.value):
                        return Scaled(inner.dot, inner.factor * other.value)
        return None

    def _log_sum_exp(self, index: int) -> int | None:
        """Returns the number of a log-sum-exp."""
        node = self.nodes[index]
        if node.op == "reduction" and self.program.reductions[int(node.value)].kind == LOGSUMEXP:
            return int(node.value)
        return None

    # ------------------------------------------------------------------ expressions

    def _expression(self, index: int) -> str:
        node = self.nodes[index]
        args = [self.name(a) for a in node.args]
        match node.op:
            case "dot":
                i = int(node.value)
                return f"tl.dot(a{i}_x, b{i}_t, input_precision=PRECISION)"
            case "exp":
                return f"tl.math.exp2({self._in_log2(node.args[0])})"
            case "sub":
                return self._difference(*node.args)
            case "mul0":
                return self._guarded_product(*node.args)
            case "div" | "div0" if inverse := self._inverse(*node.args):
                product = f"{args[0]} * {inverse}"
                return product if node.op == "div" else f"tl.where({args[0]} == 0, 0.0, {product})"
            case "log_div" if logarithm := self._split_logarithm(*node.args):
                return logarithm
            case "pow":
                return power(args[0], node.value)
            case "expand_heads":
                return args[0]
        operation = OPERATIONS[node.op]
        is_int = bool(operation.triton_int) and self.nodes[node.args[-1]].dtype == "int"
        return (operation.triton_int if is_int else operation.triton).format(*args)

    def _in_log2(self, index: int) -> str:
        """Writes the argument of an exponential, times log2(e)."""
        node = self.nodes[index]
        if node.op == "sub" and self.shape[index] != OF_ROW:
            x, row = node.args
            number = self._log_sum_exp(row)
            if number is not None:
                score = self._own_score(x, number)
                if score is not None:
                    total = self.row_value(f"v{row}log2", f"({self._total(row)}) * {LOG2E!r}")
                    return f"{score.dot} * {score.factor * LOG2E!r} - {total}"
                self.in_parts.add(row)
                row_sum = self.row_value(f"v{row}s2", f"v{row}s * {LOG2E!r}")
                return f"({self.name(x)} - v{row}p) * {LOG2E!r} - {row_sum}"
        if node.op == "mul":
            for i in (0, 1):
                factor = self.nodes[node.args[1 - i]]
                if factor.op == "const":
                    return f"{self.name(node.args[i])} * {factor.value * LOG2E!r}"
        return f"{self.name(index)} * {LOG2E!r}"

    def _own_score(self, x: int, number: int) -> Scaled | None:
        """Returns the plain score under a log-sum-exp, if no mask changes its elements.

        Where one has, one number in place of two parts would lose the count of keys.
        """
        return self.scaled(x) if self.program.reductions[number].node == x else None

    def _total(self, row: int) -> str:
        """Returns a log-sum-exp as one number, 0 for rows without keys."""
        return f"tl.where(v{row} == float('-inf'), 0.0, v{row})"

    def _difference(self, a: int, b: int) -> str:
        x, y = self.name(a), self.name(b)
        if (number := self._log_sum_exp(b)) is not None:
            if score := self._own_score(a, number):
                total = self.row_value(f"v{b}nats", self._total(b))
                return f"{score.dot} * {score.factor!r} - {total}"
            self.in_parts.add(b)
            return f"({x} - v{b}p) - v{b}s"
        if (number := self._log_sum_exp(a)) is not None:
            if score := self._own_score(b, number):
                total = self.row_value(f"v{a}nats", self._total(a))
                return f"{total} - {score.dot} * {score.factor!r}"
            self.in_parts.add(a)
            return f"v{a}s - ({y} - v{a}p)"
        return f"{x} - {y}"

    def _guarded_product(self, a: int, b: int) -> str:
        """Writes a product that is 0 if a factor is 0; only a factor next to a possibly infinite
        one is tested.
        """
        x, y = self.name(a), self.name(b)
        if self.nodes[a].is_finite:
            return f"tl.where({x} == 0, 0.0, {x} * {y})"
        if self.nodes[b].is_finite:
            return f"tl.where({y} == 0, 0.0, {x} * {y})"
        return OPERATIONS["mul0"].triton.format(x, y)

    def _inverse(self, a: int, b: int) -> str | None:
        """Writes one division per row or key, if many elements are divided by the same value."""
        if self.shape[b] not in (OF_ROW, OF_KEY) or self.shape[a] in (self.shape[b], CONST):
            return None
        value = f"1.0 / {self.name(b)}"
        add = self.row_value if self.shape[b] == OF_ROW else self.key_value
        return add(f"v{b}inverse", value)

    def _split_logarithm(self, a: int, b: int) -> str | None:
        """Writes log(a / b) of a key's and a row's value as a difference, NaN for a negative
        quotient.
        """
        if {self.shape[a], self.shape[b]} != {OF_ROW, OF_KEY}:
            return None
        logs, signs = [], []
        for i in (a, b):
            add = self.row_value if self.shape[i] == OF_ROW else self.key_value
            x = self.name(i)
            logs.append(add(f"v{i}logarithm", f"tl.log(tl.abs({x}))"))
            signs.append(add(f"v{i}sign", OPERATIONS["sign"].triton.format(x)))
        return f"tl.where({signs[0]} * {signs[1]} < 0, float('nan'), {logs[0]} - {logs[1]})"

    def row_value(self, name: str, value: str) -> str:
        """Returns a value of a row that tiles need."""
        self.of_rows[name] = value
        return name

    def key_value(self, name: str, value: str) -> str:
        """Returns a value of a key that tiles need."""
        self.of_keys[name] = value
        return name

    # ------------------------------------------------------------------ loads

    def bind(self, batch: str, head: str) -> None:
        """Writes where the tensors of a head begin."""
        for i in self.leaves("dot"):
            self.take(*(f"{x}{i}{s}" for x in "ab" for s in ("", "_b", "_h", "_m", "_d")))
            self.take(f"group{i}")
            for x, of in (("a", head), ("b", f"({head} // group{i})")):
                self.line(f"{x}{i}_p = {x}{i} + {batch} * {x}{i}_b + {of} * {x}{i}_h")
        for i in self.leaves("capture"):
            self.take(f"c{i}", *(f"c{i}_{s}" for s in "bhmn"))
            self.line(f"c{i}_p = c{i} + {batch} * c{i}_b + {head} * c{i}_h")
        for i in self.leaves("materialized"):
            self.take(f"tensor{i}", f"tensor{i}_b", f"tensor{i}_m")
            self.line(f"tensor{i}_p = tensor{i} + {batch} * tensor{i}_b")
        for kind, prefix in (("reduction", "r"), ("seed", "g")):
            for i in self.leaves(kind):
                self.take(f"{prefix}{i}", f"{prefix}{i}_b", f"{prefix}{i}_h")
                self.line(f"{prefix}{i}_at = {batch} * {prefix}{i}_b + {head} * {prefix}{i}_h")
                self.line(f"{prefix}{i}_p = {prefix}{i} + {prefix}{i}_at")
                if self.program.reductions[i].size:
                    self.take(f"{prefix}{i}_m")
        if self.program.keys.has_mask:
            self.take("mask", *(f"mask_{s}" for s in "bmn"))
            self.line(f"mask_p = mask + {batch} * mask_b")

    def bind_sequence(self, batch: str) -> None:
        """Writes sizes, and which keys there are; first_row and first_key are those of a block."""
        keys = self.program.keys
        self.take("num_rows", "num_keys", "first_row", "first_key", "offset")
        valid = "num_keys"
        if keys.has_lengths:
            self.take("lengths", "lengths_b")
            length = f"tl.load(lengths + {batch} * lengths_b).to(tl.int32) - first_key"
            valid = f"tl.minimum(num_keys, {length})"
        self.line(f"valid = {valid}")
        self.line("seq = Sequence(0, 0, num_rows, num_keys, valid, offset, 0)")
        self.line(f"window = Window({keys.left or 0}, {keys.right or 0})")

    def _operand(self, x: str, i: int, places: str, count: str, is_checked: bool) -> None:
        self.line(
            f"{x}{i}_x = load_tile({x}{i}_p, {places}, {count}, {x}{i}_m, {x}{i}_d, "
            f"SIZE{i}, DIM{i}, {is_checked})"
        )

    def load_rows(self, is_checked: bool) -> None:
        """Writes loads of row operands, per-row values and their positions."""
        self.line("m64 = m.to(tl.int64)[:, None]")
        self.line("in_rows = m[:, None] < num_rows")
        for i in self.leaves("dot"):
            self._operand("a", i, "m", "num_rows", is_checked)
        for index in self.order:
            node = self.nodes[index]
            if self.shape[index] != OF_ROW:
                continue
            i = int(node.value) if self._is_loaded(node.op) else 0
            prefix = {"reduction": "r", "seed": "g"}.get(node.op)
            if prefix:
                place = f"{prefix}{i}_p + m64"
                self.line(f"v{index} = tl.load({place}, mask=in_rows, other=0.0)")
                if prefix == "r":
                    self._load_parts(index, i)
            elif node.op == "capture":
                self._load(index, f"c{i}_p + m64 * c{i}_m", "in_rows")
            elif node.op == "row_index":
                self.line(f"v{index} = (m[:, None] + first_row){self.as_index}")
            else:
                self.line(f"v{index} = {self.expressions[index]}")
        for name, value in self.of_rows.items():
            self.line(f"{name} = {value}")

    def _load_parts(self, index: int, i: int) -> None:
        """Loads a log-sum-exp as its maximum and the logarithm of the rest, 0 for rows without
        keys.
        """
        low = "float('-inf')"
        if self.program.reductions[i].kind == MAX:
            self.line(f"v{index} = tl.where(v{index} == {low}, 0.0, v{index})")
        if index not in self.in_parts:
            return
        for part in "ps":
            self.take(f"r{part}{i}")
            place = f"r{part}{i} + r{i}_at + m64"
            self.line(f"v{index}{part} = tl.load({place}, mask=in_rows, other=0.0)")
            self.line(f"v{index}{part} = tl.where(v{index} == {low}, 0.0, v{index}{part})")

    def load_column_operands(self, is_checked: bool) -> None:
        """Writes loads of column operands, as rows of keys."""
        for i in self.leaves("dot"):
            self._operand("b", i, "n", "num_keys", is_checked)
            # before a loop over rows, or it would go to shared memory every time
            self.line(f"b{i}_t = tl.trans(b{i}_x)")

    def load_columns(self, is_checked: bool, has_operands: bool = False) -> None:
        """Writes loads of column operands if they are not there yet, and values of keys."""
        self.line("n64 = n.to(tl.int64)[None, :]")
        self.line("in_keys = n[None, :] < num_keys")
        mask = "in_keys" if is_checked else ""
        if not has_operands:
            self.load_column_operands(is_checked)
        for index in self.order:
            node = self.nodes[index]
            if self.shape[index] != OF_KEY:
                continue
            if node.op == "capture":
                i = int(node.value)
                self._load(index, f"c{i}_p + n64 * c{i}_n", mask)
            elif node.op == "key_index":
                self.line(f"v{index} = (n[None, :] + first_key){self.as_index}")
            else:
                self.line(f"v{index} = {self.expressions[index]}")
        for name, value in self.of_keys.items():
            self.line(f"{name} = {value}")

    def elements(self, is_checked: bool) -> None:
        """Writes everything of one tile, which may end beyond the last key where that is
        checked.
        """
        inside = "(in_rows & in_keys)" if is_checked else "in_rows"
        written = inside
        if is_checked and self.leaves("materialized"):
            written = self._written(inside)
        for index in self.order:
            node = self.nodes[index]
            if self.shape[index] != OF_BOTH:
                continue
            i = int(node.value) if self._is_loaded(node.op) else 0
            if node.op == "capture":
                self._load(index, f"c{i}_p + m64 * c{i}_m + n64 * c{i}_n", inside)
            elif node.op == "seed":
                block = f"(n64 + first_key) // {self.program.reductions[i].size}"
                place = f"g{i}_p + m64 * g{i}_m + {block}"
                self.line(f"v{index} = tl.load({place}, mask={inside}, other=0.0)")
            elif node.op == "materialized":
                place = f"tensor{i}_p + m64 * tensor{i}_m + n64"
                cast = " != 0" if node.dtype == "bool" else ".to(tl.float32)"
                self.line(f"v{index} = tl.load({place}, mask={written}, other=0){cast}")
            else:
                self.line(f"v{index} = {self.expressions[index]}")

    def _written(self, inside: str) -> str:
        """Masks the loads of a materialized node in tiles that no kernel has written.

        Up to a multiple of 16 keys, which no tile is narrower than: masked by single keys, a
        tensor would be loaded key by key.
        """
        keys = self.program.keys
        parts, stop = [inside], "valid" if keys.has_lengths else ""
        if keys.right is not None:
            stop = f"tl.minimum(valid, m[:, None] + offset + {keys.right + 1})"
        if stop:
            self.line(f"written_stop = ({stop} + 15) // 16 * 16")
            parts.append("(n[None, :] < written_stop)")
        if keys.left is not None:
            self.line(f"written_start = (m[:, None] + offset - {keys.left}) // 16 * 16")
            parts.append("(n[None, :] >= written_start)")
        return " & ".join(parts)

    def keep(self) -> None:
        """Writes which keys of a tile take part."""
        keys = self.program.keys
        self.line("keep = in_rows & (n[None, :] < valid)")
        if keys.left is not None:
            self.line(f"keep &= n[None, :] >= m[:, None] + offset - {keys.left}")
        if keys.right is not None:
            self.line(f"keep &= n[None, :] <= m[:, None] + offset + {keys.right}")
        if keys.has_mask:
            place = "mask_p + m64 * mask_m + n64 * mask_n"
            self.line(f"keep &= tl.load({place}, mask=keep, other=0) != 0")

    def kept(self, index: int, other: str, is_masked: bool) -> str:
        """Returns an element over the whole tile, replaced where its key is excluded."""
        x = self.name(index)
        if not is_masked and self.shape[index] == OF_BOTH:
            return x
        if is_masked:
            return f"tl.where(keep, {x}, {other})"
        # a value of a row or a key, or a constant, counts for every element
        return f"({x} + tl.zeros([BLOCK_M, BLOCK_N], tl.float32))"

    def _load(self, index: int, place: str, mask: str) -> None:
        number = int(self.nodes[index].value)
        dtype = self.program.captures[number].dtype
        cast = {"float": ".to(tl.float32)", "bool": " != 0", "int": ".to(tl.int64)"}[dtype]
        masked = f", mask={mask}, other=0" if mask else ""
        self.line(f"v{index} = tl.load({place}{masked}){cast}")

    # ------------------------------------------------------------------ loops

    def is_dense(self) -> bool:
        """Returns whether every tile is looked at for a mask: a dense one has no structure.

        And float32 operands of two loops would spill (bench/notes/portable_kernels.md).
        """
        return self.program.keys.has_mask or self.is_exact

    def bounds(self, of: str, start: str) -> None:
        """Writes loop bounds: tiles in [first, left) and [right, stop) need a mask; of is
        keys_of_rows or its twin.
        """
        keys = self.program.keys
        sizes = "BLOCK_M, BLOCK_N" if of == "keys_of_rows" else "BLOCK_N, BLOCK_M"
        flags = f"{keys.left is not None}, {keys.right is not None}, {self.is_dense()}"
        self.line(f"first, left, right, stop = {of}(window, seq, {start}, {sizes}, {flags})")

    def loops(self, has_head: bool) -> list[tuple[str, str, bool]]:
        """Bounds of each loop over tiles, and whether it looks at masks."""
        if self.is_dense():
            return [("right", "stop", True)]
        found = [("first", "left", True)] if has_head else []
        return [*found, ("left", "right", False), ("right", "stop", True)]

    def source(self, name: str, *more: str) -> Source:
        """Returns the kernel of this name; it has more constants than sizes."""
        sizes = [f"{x}{i}" for i in self.leaves("dot") for x in ("SIZE", "DIM")]
        constants = [*sizes, "PRECISION", "BLOCK_M", "BLOCK_N", *more]
        head = ", ".join([*self.arguments, *(f"{c}: tl.constexpr" for c in constants)])
        body = "\n".join(self.lines)
        text = f"@triton.jit\ndef {name}({head}):\n{body}\n"
        return Source(text, name, (*self.arguments, *constants), len(constants))
