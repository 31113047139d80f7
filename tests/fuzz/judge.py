"""Whether a compiled program computes what eager does, and which rules it met."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.fuzz.rounding import PerturbRounding
from tests.fuzz.tree import Program
from tests.support.compiling import compile_rewritten
from tests.support.misleading_programs import Results, run
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.reading.reader import RULES
from torch_streamkl.fx_passes.reading.registry import NoRule

# between what rounding does and what a mistake does, relative to the largest entry
EXACT = {torch.float64: 2.0**-28, torch.float32: 2.0**-10, torch.bfloat16: 2.0**-4}
NUDGE = {
    torch.float64: 2.0**-44,
    torch.float32: 2.0**-20,
    torch.bfloat16: 2.0**-8,
}  # how far inputs move, relative
IN_FLOAT32 = 2.0**-18  # of programs in float64 that go through float32 somewhere
NUM_NUDGES = 3
PLACES = ("argmax(", ".max(")  # rounding decides them where several elements are nearly largest
NUM_NUDGES_OF_PLACES = 64  # so many runs find one such element or another, before a mistake is


@dataclass(frozen=True)
class Verdict:
    """What became of a program."""

    difference: str  # empty when it computes what eager does
    num_fused: int = 0
    num_sites: int = 0
    reasons: tuple[str, ...] = ()


class Invalid(Exception):
    """Eager does not run the program, or has no number to compare."""


def judge(
    program: Program, inner: str = "eager", verify: str = "never", row_programs: bool = True
) -> Verdict:
    """Run a program in eager and compiled.

    The rules are judged alone unless ``verify`` says that rewrites are checked when compiled.
    """
    fn, inputs = program.function(), program.inputs()
    eager = _run_eager(program)
    with backend.collected() as report:
        compiled_fn = compile_rewritten(
            fn,
            inner=inner,
            dynamic=program.dynamic,
            verify=verify,
            min_mib=0.0,  # all of these programs are small
            row_programs=row_programs,
        )
        try:
            compiled = run(compiled_fn, inputs)
        except Exception as error:
            if not report.num_fused and _fails_without_us(fn, inputs, program.dynamic, inner):
                raise Invalid(f"torch.compile: {error}") from error
            found = f"runs -> {type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        else:
            found = _difference(program, eager, compiled)
    if report.failures:
        found = found or f"the analysis fails: {report.failures[0]}"
    reasons = tuple(site.reason or site.skipped for site in report.sites if not site.fused)
    return Verdict(found, report.num_fused, len(report.sites), reasons)


def is_valid(program: Program) -> bool:
    """Whether eager runs it and there is a number to compare."""
    try:
        _run_eager(program)
    except Invalid:
        return False
    return True


def _run_eager(program: Program) -> Results:
    try:
        results = run(program.function(), program.inputs())
    except Exception as error:
        raise Invalid(str(error)) from error
    if not any(x.numel() == 0 or bool(x.isfinite().any()) for x in results.outputs):
        raise Invalid("no finite output")
    return results


def _fails_without_us(fn: Any, inputs: list[Tensor], dynamic: bool, inner: str) -> bool:
    torch._dynamo.reset()
    try:
        run(torch.compile(fn, backend=inner, dynamic=dynamic), inputs)
    except Exception:
        return True
    return False


def _difference(program: Program, eager: Results, compiled: Results) -> str:
    if eager.needs_grad != compiled.needs_grad:
        return f"outputs need gradients: {eager.needs_grad} -> {compiled.needs_grad}"
    near: list[list[Tensor | None]] | None = None
    source = program.source()
    pairs = [*zip(_all(eager), _all(compiled), strict=True)]
    if any(bool(x.isnan().any()) for x in eager.outputs):
        pairs = pairs[: len(eager.outputs)]  # what flows back from NaN is of no use to anybody
    for i, ((name, x), (_, y)) in enumerate(pairs):
        if x is None or y is None:
            if x is not y:
                return f"{name}: {_size(x)} -> {_size(y)}"
            continue
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{name}: {x.dtype} {tuple(x.shape)} -> {y.dtype} {tuple(y.shape)}"
        off = _distance(x, y)
        exact = max(
            EXACT.get(x.dtype, EXACT[torch.bfloat16]), IN_FLOAT32 if ".float()" in source else 0.0
        )
        if off <= exact * max(1.0, _largest(x)):
            continue
        if near is None:
            near = _near(program)
        found = [results[i] for results in near]
        if not x.dtype.is_floating_point:
            differs = not _is_one_of(y, [x, *found])
        else:
            differs = off > exact * max(1.0, _largest(x)) + 8 * _moved(x, found)
        if differs:
            return f"{name}: {_size(x)} -> {_size(y)}, off by {off:.3g}"
    return ""


def _near(program: Program) -> list[list[Tensor | None]]:
    """Eager's own results when inputs and all that is computed round otherwise, of each run."""
    has_places = any(name in program.source() for name in PLACES)
    runs = []
    for seed in range(NUM_NUDGES_OF_PLACES if has_places else NUM_NUDGES):
        generator = torch.Generator().manual_seed(seed)
        inputs = [_nudged(x, NUDGE[program.dtype], generator) for x in program.inputs()]
        with PerturbRounding(seed):
            runs.append([x for _, x in _all(run(program.function(), inputs))])
    return runs


def _moved(x: Tensor, near: list[Tensor | None]) -> float:
    """How far a result moves."""
    return max((_distance(x, y) for y in near if y is not None and y.shape == x.shape), default=0)


def _is_one_of(y: Tensor, near: list[Tensor | None]) -> bool:
    """Whether every place, or what is counted of places, is what some run has there."""
    same = [x == y for x in near if x is not None and x.shape == y.shape]
    return bool(torch.stack(same).any(0).all())


def _nudged(x: Tensor, by: float, generator: torch.Generator) -> Tensor:
    if not x.dtype.is_floating_point:
        return x
    signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    return (x.detach() * (1 + by * signs)).requires_grad_(x.requires_grad)


def _all(results: Results) -> list[tuple[str, Tensor | None]]:
    return [
        (f"{kind[:-1]} {i}", x)
        for kind in ("outputs", "gradients", "inputs")
        for i, x in enumerate(getattr(results, kind))
    ]


def _distance(x: Tensor, y: Tensor) -> float:
    """Largest difference where ``x`` is a number; an infinity that differs is far."""
    if not x.dtype.is_floating_point:
        return 0.0 if torch.equal(x, y) else float("inf")
    where = ~x.isnan() & (x != y)
    off = (x.double() - y.double()).abs().nan_to_num(nan=float("inf"))
    return float(off[where].max()) if bool(where.any()) else 0.0


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def _size(x: Tensor | None) -> str:
    return "None" if x is None else f"{_largest(x):.4g}"


class Coverage:
    """How often each rule says something, and how often it is reached and says nothing."""

    def __init__(self) -> None:
        self.fired: Counter[str] = Counter()
        self.blocked: Counter[str] = Counter()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            counting = {k: self._counting(str(k), v) for k, v in RULES.items()}
            stack.enter_context(mock.patch.dict(RULES, counting))
            yield

    def _counting(self, name: str, method: Any) -> Any:

        def counting(*args: Any) -> object:
            try:
                value = method(*args)
            except NoRule:
                self.blocked[name] += 1
                raise
            (self.blocked if value is None else self.fired)[name] += 1
            return value

        return counting

    def add(self, other: Coverage) -> None:
        self.fired += other.fired
        self.blocked += other.blocked

    def missing(self) -> tuple[list[str], list[str], list[str]]:
        """Rules that never say anything, that always do, and overloads that no program has."""
        of_rule: dict[str, list[str]] = {}
        for overload, method in RULES.items():
            of_rule.setdefault(method.__qualname__, []).append(str(overload))
        silent = sorted(r for r, names in of_rule.items() if not any(map(self.fired.get, names)))
        open_ = sorted(r for r, names in of_rule.items() if not any(map(self.blocked.get, names)))
        met = self.fired.keys() | self.blocked.keys()
        known = list(map(str, RULES))
        return silent, open_, sorted(x for x in known if x not in met)
