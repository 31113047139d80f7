"""Random row programs: a seed gives tensors, options, and a function for elements and tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.naive_rows import naive

Expression = Callable[[Any], Any]
# smooth and bounded by small arguments: nothing here is a matter of one rounding
SMOOTH: list[Callable[[Any], Any]] = [
    torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.cos, F.softplus, F.logsigmoid,
    lambda x: torch.tanh(x).exp(), lambda x: torch.tanh(x).sinh(), lambda x: torch.tanh(x).cosh(),
    lambda x: torch.expm1(torch.sin(x)), lambda x: torch.exp2(x.tanh()), lambda x: 2 ** x.sin(),
    lambda x: 3.0 ** x.tanh(), lambda x: (x * x + 0.1).log(), lambda x: (x**2 + 0.1).sqrt(),
    lambda x: (x.square() + 0.5) ** -0.5, lambda x: torch.log1p(x * x), lambda x: 0.3 * x**3,
    lambda x: (x**2 + 0.25) ** 1.5, lambda x: torch.rsqrt(x * x + 1), lambda x: 1 - 0.5 * x,
    lambda x: (x * x + 1).reciprocal(), lambda x: (x * x + 0.5).log2(), lambda x: -x,
    lambda x: torch.rsub(x, 0.5), lambda x: x * 0.0, lambda x: x**0, lambda x: x * 1.0,
    lambda x: (x * x + 0.5).log10(), lambda x: torch.tan(0.5 * x.tanh()), lambda x: x + 0,
    lambda x: torch.xlogy(x.sin() ** 2, x.cos() ** 2 + 0.1),
]  # fmt: skip
# with kinks and steps: of exact numbers only
KINKED: list[Callable[[Any], Any]] = [
    torch.relu, torch.abs, torch.sign, torch.floor, torch.ceil, torch.trunc,
    lambda x: x.clamp(-0.5, 1.0), lambda x: x.clamp_min(0.0), lambda x: x % 1.5,
    lambda x: x // 0.5, lambda x: torch.div(x, 0.75, rounding_mode="trunc"),
    lambda x: torch.where(x > 0, x, 0.25), lambda x: x.masked_fill(x <= -0.5, 2.0),
]  # fmt: skip
PAIRED: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y.tanh(), lambda x, y: y * x.sin(),
    lambda x, y: x / (y * y + 1), torch.logaddexp, lambda x, y: torch.add(x, y, alpha=0.5),
    lambda x, y: x - x * y.cos(), lambda x, y: x * x.tanh() + y, lambda x, y: x + 0.0 * y,
]  # fmt: skip
EXACT_PAIRED: list[Callable[[Any, Any], Any]] = [
    torch.minimum, torch.maximum, lambda x, y: torch.where(x > y, x, y * 0.5),
    lambda x, y: torch.where((x >= 0) ^ (y >= 0), x, y), lambda x, y: torch.clamp(x, max=y),
]  # fmt: skip


@dataclass
class Drawn:
    """A call of `row_program` and what it is drawn as."""

    function: Expression
    dots: dict[str, tuple[Tensor, Tensor]]
    options: dict[str, Any]
    groups: dict[str, dict[str, Any]]
    learned: list[Tensor]
    description: list[str] = field(default_factory=list)

    def arguments(self, dtype: torch.dtype, device: str) -> tuple[dict[str, Any], list[Tensor]]:
        """Of another type, on another device, and the tensors that get gradients."""
        made: dict[int, Tensor] = {}

        def of(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(of(y) for y in x)
            if id(x) not in made:
                y = x.to(device, dtype if x.is_floating_point() else x.dtype)
                is_learned = any(x is z for z in self.learned)
                made[id(x)] = y.detach().clone().requires_grad_(is_learned)
            return made[id(x)]

        given = {k: {n: of(x) for n, x in v.items()} for k, v in self.groups.items()}
        options = {k: of(x) if isinstance(x, Tensor) else x for k, x in self.options.items()}
        arguments = {"dots": {n: of(x) for n, x in self.dots.items()}, **given, **options}
        return arguments, [made[id(x)] for x in self.learned]

    def naive(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """All per-row values, of materialized products."""
        return naive(self.function, **arguments)


class Drawing:
    """The choices of one program, and its numbers: ``program`` is the seed of its text, if that
    is another.
    """

    def __init__(self, seed: int, program: int | None = None) -> None:
        self.random = random.Random(seed if program is None else program)
        self.generator = torch.Generator().manual_seed(seed)

    def exact(self, *shape: int) -> Tensor:
        """Multiples of 1/4, whose products and sums every type has."""
        x = torch.randint(-6, 7, shape, generator=self.generator)
        return x.double() / 4

    def drawn(self) -> Drawn:
        r = self.random
        is_vocab = r.random() < 0.35
        learned: list[Tensor] = []

        def leaf(*shape: int) -> Tensor:
            x = self.exact(*shape)
            if r.random() < 0.7:
                learned.append(x)
            return x

        rows, keys = r.randint(1, 6), r.randint(1, 9)
        keys = max(rows, keys)
        heads = {"t": 1, "s": 1}
        dots: dict[str, tuple[Tensor, Tensor]] = {}
        batch, self.shape = r.randint(1, 2), (rows,)
        if is_vocab:
            self.shape = r.choice([(rows,), (2, rows), (1, rows)])
        else:
            heads["t"] = r.choice([1, 2, 4])
            heads["s"] = heads["t"] if r.random() < 0.6 else r.choice([1, 2, 3])
        for name in ("t", "s")[: r.randint(1, 2)]:
            dim, h = r.randint(1, 4), heads[name]
            if is_vocab:
                dots[name] = leaf(*self.shape, dim), leaf(keys, dim)
            else:
                group = r.choice([g for g in (1, 2) if h % g == 0])
                dots[name] = leaf(batch, h, rows, dim), leaf(batch, h // group, keys, dim)
        if not learned:
            learned.append(dots["t"][0])
        of_dots = {heads[n] for n in dots}
        most = of_dots.pop() if len(of_dots) == 1 else 1  # a tensor with heads meets one dot only
        groups = self._captures(is_vocab, batch, rows, keys, most, leaf)
        options = {} if is_vocab else self._masks(batch, rows, keys)
        self.heads = {n: heads[n] for n in dots}
        self.groups = groups
        outputs = {f"o{i}": self._rows(2) for i in range(r.randint(1, 2))}
        return Drawn(
            lambda e: {name: f(e) for name, f in outputs.items()},
            dots, options, groups, learned,
        )  # fmt: skip

    def _captures(
        self, is_vocab: bool, batch: int, rows: int, keys: int, heads: int, leaf: Any
    ) -> dict[str, dict[str, Any]]:
        r = self.random
        groups: dict[str, dict[str, Any]] = {"rows": {}, "keys": {}, "pairs": {}, "columns": {}}
        lead = self.shape if is_vocab else (batch, r.choice([1, heads]), rows)
        some = {
            "row": ("rows", lambda: leaf(*lead)),
            "label": ("rows", lambda: self._ids(keys, *lead)),
            "key": ("keys", lambda: leaf(*(() if is_vocab else (r.choice([1, batch]), 1)), keys)),
            "pair": ("pairs", lambda: leaf(*self._pair(is_vocab, batch, rows), keys)),
            "flag": ("pairs", lambda: self.exact(*self._pair(is_vocab, batch, rows), keys) > 0),
            "top": ("columns", lambda: self._ids(keys, *self._column(is_vocab, batch, rows), 2)),
            "cached": (
                "columns",
                lambda: (
                    self._ids(keys, *(shape := self._column(is_vocab, batch, rows)), 3),
                    leaf(*shape, 3),
                ),
            ),
        }
        for name, (group, make) in some.items():
            if r.random() < 0.4:
                groups[group][name] = make()
        return groups

    def _pair(self, is_vocab: bool, batch: int, rows: int) -> tuple[int, ...]:
        return self.shape if is_vocab else (batch, 1, rows)

    def _column(self, is_vocab: bool, batch: int, rows: int) -> tuple[int, ...]:
        return self.shape if is_vocab else (batch, 1, rows)

    def _ids(self, keys: int, *shape: int) -> Tensor:
        return torch.randint(-1, keys, shape, generator=self.generator)

    def _masks(self, batch: int, rows: int, keys: int) -> dict[str, Any]:
        """Each row has a key: what there is without one is another test's."""
        r = self.random
        match r.randint(0, 5):
            case 0:
                return {"is_causal": True}
            case 1:
                return {"window": (r.randint(0, 3), r.choice([None, 0, 2]))}
            case 2:
                lengths = torch.randint(1, keys + 1, (batch,), generator=self.generator)
                return {"key_lengths": lengths, "is_causal": r.random() < 0.5}
            case 3:
                mask = self.exact(batch, 1, rows, keys) > -0.3
                mask[..., 0] = True
                return {"mask": mask}
        return {}

    # ------------------------------------------------------------------ expressions

    def _leaf(self, side: str) -> Expression:
        """An exact element of one dot, or of a captured tensor."""
        r = self.random
        names = [n for g in self.groups.values() for n in g if n not in ("label", "flag", "top")]
        if names and r.random() < 0.35:
            name = r.choice(names)
            return lambda e: getattr(e, name) * 1.0
        if r.random() < 0.08:
            return lambda e: e.key_index * 0.25 - 1
        return lambda e: getattr(e, side)

    def _condition(self, side: str) -> Expression:
        r = self.random
        names = [n for g in self.groups.values() for n in g]
        options: list[Expression] = [
            lambda e: e.key_index <= e.row_index, lambda e: e.key_index % 2 == 0,
            lambda e: getattr(e, side) > 0.25, lambda e: (e.key_index + e.row_index) % 3 != 1,
            lambda e: e.key_index // 2 == 1,
        ]  # fmt: skip
        if "label" in names:
            options += [lambda e: e.key_index == e.label, lambda e: e.label - 1 >= e.key_index]
        options += [lambda e, n=n: getattr(e, n) for n in names if n in ("flag", "top")]
        first, second = r.choice(options), r.choice(options)
        return r.choice(
            [
                first, lambda e: first(e) & second(e), lambda e: first(e) | ~second(e),
                lambda e: torch.logical_xor(first(e), second(e)), lambda e: first(e) + second(e),
                lambda e: first(e) * second(e),
            ]
        )  # fmt: skip

    def _exact(self, side: str) -> Expression:
        r = self.random
        x = self._leaf(side)
        if r.random() < 0.4:
            return x
        if r.random() < 0.5:
            f = r.choice(KINKED)
            return lambda e: f(x(e))
        f, y = r.choice(EXACT_PAIRED), self._leaf(side)
        return lambda e: f(x(e), y(e))

    def _element(self, side: str, log_normalizer: int) -> Expression:
        r = self.random
        if log_normalizer == 0:
            return self._exact(side)
        x = self._element(side, log_normalizer - 1)
        match r.randint(0, 9):
            case 0 | 1:
                f = r.choice(SMOOTH)
                return lambda e: f(x(e))
            case 2 | 3:
                y, g = self._element(side, r.randint(0, log_normalizer - 1)), r.choice(PAIRED)
                return lambda e: g(x(e), y(e))
            case 4:
                condition, y = self._condition(side), self._element(side, log_normalizer - 1)
                return lambda e: torch.where(condition(e), x(e), y(e))
            case 5:
                return lambda e: x(e).softmax("key")
            case 6:
                return lambda e: (p := x(e).log_softmax("key")).exp() * p
            case 7:
                row = self._row_of(side, log_normalizer - 1)
                return lambda e: x(e) * row(e).tanh()
            case 8:
                condition = self._condition(side)
                return lambda e: condition(e) * x(e)
        return x

    def _row_of(self, side: str, log_normalizer: int) -> Expression:
        x = self._element(side, log_normalizer)
        if self.random.random() < 0.4:
            return lambda e: x(e).logsumexp("key")
        return lambda e: x(e).sum("key")

    def _rows(self, log_normalizer: int) -> Expression:
        """A value of rows of all dots."""
        r = self.random
        sides = list(self.heads)
        if len(set(self.heads.values())) > 1 or r.random() < 0.2:
            parts = []
            for side in sides:
                x, over = self._element(side, log_normalizer), r.choice(["sum", "mean"])
                parts.append(lambda e, x=x, over=over: getattr(x(e), over)("head"))
            last = parts[-1]
            return lambda e: (parts[0](e).tanh() * last(e).sin()).sum("key")
        x, y = (self._row_of(side, log_normalizer) for side in (sides[0], sides[-1]))
        coefficient = r.choice([0.0, 1.0, 0.5, 0, 1])
        match r.randint(0, 3):
            case 0:
                return x
            case 1:
                return lambda e: coefficient * x(e) + (1 - coefficient) * y(e)
            case 2:
                mixed = r.choice(PAIRED)
                a, b = (self._element(s, log_normalizer) for s in (sides[0], sides[-1]))
                return lambda e: mixed(a(e), b(e)).sum("key")
        return lambda e: torch.where(y(e) == 0.1, x(e), coefficient * x(e).tanh())
