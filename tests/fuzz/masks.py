"""Random masks and what they are made of: indices, triangles, buffers, padding."""

from __future__ import annotations

import random

from tests.fuzz.tree import Node, node_of

INDEX_DTYPES = ("int8", "uint8", "int16", "int32", "bfloat16", "float16", "float32", "float64")
MASK_DTYPES = ("bool", "bool", "bool", "float32", "int64", "uint8", "float64")
COMPARISONS = (">=", ">=", "<=", ">", "<", "==", "!=")


class Masks:
    """Masks of ``num_queries`` by ``num_keys``, whose numbers are code."""

    def __init__(
        self, draw: random.Random, num_queries: str, num_keys: str, is_map: bool, mean: float
    ) -> None:
        self.draw = draw
        self.n, self.m = num_queries, num_keys
        self.is_map = is_map
        self.mean = mean

    def _one(self, *choices: str) -> str:
        return self.draw.choice(choices)

    def mask(self) -> Node:
        kind = self.draw.random()
        if kind < 0.3:
            node = self.triangle()
        elif kind < 0.62:
            node = self.comparison()
        elif kind < 0.72 and self.is_map:
            node = Node("mask", "keep[:, None, None, :]")
        elif kind < 0.77 and self.is_map:
            node = Node("mask", "rows[:, None, :, None]")
        elif kind < 0.87:
            ways = ("({0} & {1})", "({0} & {1})", "({0} | {1})", "torch.logical_and({0}, {1})")
            more = ("torch.logical_or({0}, {1})", "({0} * {1})", "{0}.clone().logical_and_({1})")
            way = self._one(*ways, *ways, *more)
            node = node_of("mask", way, self.mask(), self.mask())
        elif kind < 0.92:
            node = node_of("mask", self._one("(~{0})", "torch.logical_not({0})"), self.mask())
        else:
            node = Node(
                "mask",
                f"(torch.arange({self.m}) {self._one('<', '>=', '!=')} {self.draw.randint(0, 5)})",
            )
        if self.draw.random() < self.mean:
            node = self._changed(node)
        return node

    def _changed(self, node: Node) -> Node:
        steps = [
            f"{{0}}[-{self.draw.choice((1, 3, 64))}:]",
            f"{{0}}[..., -{self.draw.choice((2, 64))}:]",
            "{0}[1:]",
            "{0}[:1]",
            "{0}[..., :1]",
            f"{{0}}[:{self.n}]",
            f"{{0}}[..., : {self.m}]",
            f"{{0}}.expand({self.n}, {self.m})",
            f"{{0}}.narrow(0, -{self.draw.randint(1, 3)}, 1)",
            "{0}.flip(-1)",
            "{0}.mT",
            "{0}[None]",
            "{0}[None, None]",
            "{0}.float().bool()",
            "{0}.to(torch.uint8).bool()",
            "{0}.clone()",
            "{0}.contiguous()",
            "({0} & {0}.any(-1, keepdim=True))",
            "({0} | ~{0}.any(-1, keepdim=True))",
            "({0} & True)",
            "({0} | False)",
            "{0}.logical_not().logical_not()",
            "{0}.bitwise_not().bitwise_not()",
            "{0}.long().cumsum(-1).bool()",
            "({0}.long() == 1)",
            "({0}.double() > 0.5)",
            "(1 - {0}.long()).eq(0)",
            "torch.where({0}, 1.0, 0.0).bool()",
            "torch.zeros_like({0}).masked_fill({0}, True)",
            "torch.ones_like({0}).logical_and({0})",
            "{0}.new_ones({0}.shape).tril()",
            "{0}.new_zeros({0}.shape).logical_or({0})",
            "torch.full_like({0}, True)",
            "{0}.new_full({0}.shape, True).triu()",
            "{0}.roll(1, -1)",
            "{0}.unsqueeze(0).squeeze(0)",
            "{0}.clone().bitwise_and_({0})",
            "{0}.clone().bitwise_or_({0})",
            "{0}.isfinite()",
            "{0}.double().isnan().logical_not()",
            "torch.zeros({0}.shape).masked_fill(~{0}, -inf).isinf().logical_not()",
            "torch.zeros({0}.shape).masked_fill(~{0}, -inf).exp().bool()",
            "{0}.expand_as({0})",
            "{0}.repeat(1, 1)",
            "{0}.diagonal()",
        ]
        return node_of("mask", self.draw.choice(steps), node)

    def triangle(self) -> Node:
        draw = self.draw
        rows = self._one(self.n, self.n, self.n, "1", self.m, "64")
        columns = self._one(self.m, self.m, self.m, self.n, "64")
        dtype = draw.choice(MASK_DTYPES)
        diagonal = self._one("", "", str(draw.randint(-3, 4)), f"{self.m} - {self.n}", "20")
        full = f"torch.ones({rows}, {columns}, dtype=torch.{dtype})"
        if draw.random() < 0.2:
            full = f"torch.full(({rows}, {columns}), 1, dtype=torch.{dtype})"
        side = self._one("tril", "tril", "tril", "triu")
        code = f"{full}.{side}({diagonal})"
        if draw.random() < 0.15:
            code = f"torch.{side}({full}, {diagonal or 0})"
        if rows != self.n and rows != "1":
            code += self._one(
                f"[:{self.n}]", f"[-{self.n}:]", f"[:{self.n}]", f"[-64:][:{self.n}]"
            )
        if columns != self.m:
            code += f"[:, :{self.m}]"
        if dtype != "bool":
            code = f"({code} {self._one('== 1', '> 0', '!= 0')})"
        if draw.random() < 0.2:
            code = f"(~{code})"
        return Node("mask", code)

    def comparison(self) -> Node:
        draw = self.draw
        i, j = self.index(self.n), self.index(self.m)
        symbol = draw.choice(COMPARISONS)
        kind = draw.random()
        if kind < 0.55:
            return node_of("mask", f"({{0}}[:, None] {symbol} {{1}})", i, j)
        if kind < 0.75:
            return node_of(
                "mask", f"({{0}}[:, None] - {{1}} {symbol} {draw.randint(-2, 4)})", i, j
            )
        if kind < 0.85:
            return node_of(
                "mask",
                f"(({{0}}[:, None] - {{1}}).abs() {self._one('<', '<=')} {draw.randint(1, 4)})",
                i,
                j,
            )
        if kind < 0.93:
            return node_of("mask", f"({{0}}[:, None] // 2 {symbol} {{1}} // 2)", i, j)
        return node_of("mask", "(({0}[:, None] + {1}) % 2 == 0)", i, j)

    def index(self, size: str) -> Node:
        draw = self.draw
        start = self._one("", "", "", "", "2", "300", "-3")
        dtype = (
            f", dtype=torch.{draw.choice(INDEX_DTYPES)}" if draw.random() < 0.1 + self.mean else ""
        )
        code = f"torch.arange({f'{start}, {start} + ' if start else ''}{size}{dtype})"
        if draw.random() < 0.1 * (1 + self.mean):
            code = self._one(
                f"torch.arange(1{dtype})",
                f"torch.arange(1).expand({size})",
                f"(torch.ones({size}).cumsum(0) - 1)",
                f"torch.arange(0, 2 * {size}, 2)",
                f"torch.arange({size}).flip(0)",
                f"torch.arange({size} + 3)[-{size}:]",
                f"torch.arange({size} + 3)[3:]",
                f"torch.arange({size})[-100:]",
                f"torch.arange({size}).unsqueeze(0).expand(2, -1)[1]",
                f"torch.arange({size}).repeat_interleave(1)",
                f"torch.full(({size},), 2)",
                f"torch.arange(2 * {size}).view(2, -1)[0]",
                f"torch.arange({size} + 1).diff().cumsum(0)",
                f"torch.linspace(0, {size} - 1, {size})",
            )
        node = Node("index", code)
        while draw.random() < 0.3:
            step = self._one(
                f"({{0}} + {draw.randint(1, 4)})",
                f"({{0}} - {draw.randint(1, 4)})",
                f"({draw.randint(0, 6)} - {{0}})",
                "({0} * 2)",
                "(-{0})",
                f"{{0}}.to(torch.{draw.choice(INDEX_DTYPES)})",
                f"{{0}}.clamp(min={draw.randint(0, 3)})",
                "{0}.long()",
                "{0}.float()",
                "({0} // 2)",
                "({0} % 3)",
                "{0}.div(2, rounding_mode='floor')",
                f"({{0}} - {size} + 3)",
                "{0}.clamp(0, 3)",
            )
            node = node_of("index", step, node)
        return node
