"""Compares what the rewrite matches today with what is matched through programs.

Every graph that the rewrite sees is read into a program as well, and matched. Both sides are lists
of operator calls, which are compared by operator, divergence, scores, masks, heads and operands.
``python -m tests.support.shadow corpus|users|misleading|forms [names]`` prints what differs, and
counts agreement by family. It goes when the rewrite has one of them.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor, fx

from torch_streamkl.fx_passes import backend, pipeline
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.closed_forms import form as closed
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.domain.masks import AxisExcept
from torch_streamkl.fx_passes.domain.score_form import ScoreForm, read
from torch_streamkl.fx_passes.fx_utils.nodes import is_view, name_of
from torch_streamkl.fx_passes.planning.plan import Call
from torch_streamkl.fx_passes.reading.reader import read_trace
from torch_streamkl.program.divergences import Functional
from torch_streamkl.program.graph import constant

NAMES = (
    "plain pairs",
    "causal and windows",
    "mask tensors and fills",
    "bias and softcap",
    "LM heads and adapters",
    "averaged teachers",
    "selections",
    "padding",
    "writes",
)


@dataclass(frozen=True)
class Described:
    """An operator call as both sides have it."""

    operator: str
    divergence: tuple[float, ...]
    scales: tuple[float, float]  # of the student, of the teacher
    softcaps: tuple[float, float]
    biases: tuple[int, int]
    factors: tuple[int, int]
    adapters: tuple[int, int]
    head_mean: bool
    window: tuple[object, object]
    mask_tensors: int
    row_masks: int
    vocab: bool
    fill: float | None
    stricter: int | None
    trained: tuple[bool, bool]
    operands: tuple[str, ...]
    text: str = field(compare=False, default="")

    def swapped(self) -> Described:
        """The same with the roles of both sides exchanged."""
        pairs = {
            f.name: tuple(reversed(getattr(self, f.name)))
            for f in fields(self)
            if f.name in ("scales", "softcaps", "biases", "factors", "adapters", "trained")
        }
        other = _values(Functional.of(self.text), swap=True)
        a, b = self.operands[:2], self.operands[2:]
        stricter = None if self.stricter is None else 1 - self.stricter
        return replace(self, **pairs, divergence=other, operands=(*b, *a), stricter=stricter)

    def differences(self, other: Described) -> list[str]:
        if "None" in other.operands:  # computed in the graph
            other = replace(other, operands=self.operands)
        return [
            f"{f.name}: {getattr(self, f.name)} -> {getattr(other, f.name)}"
            for f in fields(self)
            if f.compare
            and f.name != "trained"
            and getattr(self, f.name) != getattr(other, f.name)
        ]


def _values(functional: Functional, swap: bool = False) -> tuple[float, ...]:
    """A divergence by its values, up to a factor."""
    from torch_streamkl.program.divergences import evaluate

    g = torch.Generator().manual_seed(0)
    p, s = torch.rand(2, 6, generator=g, dtype=torch.float64) * 0.5
    if swap:
        p, s = s, p
    f = evaluate(functional.expr, {"P": p, "S": s, "logP": p.log(), "logS": s.log()})
    f = f.expand(6)
    largest = f[f.abs().argmax()]
    return tuple(round(float(x), 6) for x in f / largest)


def of_plan(call: Call) -> Described:
    """Describes a call of today's planning."""
    shape = call.geometry
    sides = (shape.student, shape.teacher)
    forms = [read(side.distribution.scores) for side in sides]

    def pair(of: Callable[[ScoreForm], Any]) -> tuple[Any, Any]:
        return of(forms[0]), of(forms[1])

    names = [_base(o.node) for side in sides for o in (side.rows, side.keys)]
    mask = call.mask
    return Described(
        "linear_kl" if call.is_head else "attention_kl",
        _values(call.functional),
        pair(lambda f: _rounded(f.scale * (f.softcap or 1.0))),
        pair(lambda f: _rounded(f.softcap)),
        pair(lambda f: len(f.biases) + len(f.inner_biases)),
        pair(lambda f: len(f.factors)),
        pair(lambda f: len(f.products)),
        bool(shape.teacher.distribution.averaged),
        (_bound(mask.window_left), _bound(mask.window_right)),
        len(mask.tensors),
        len(mask.row_tensors),
        any(isinstance(x, AxisExcept) for f in forms for x in f.mask)
        or any(f.padded is not None for f in forms),
        mask.fill,
        None if mask.stricter is None else mask.stricter.side,
        (sides[0].distribution.requires_grad, sides[1].distribution.requires_grad),
        tuple(names),
        call.functional.text,
    )


def of_match(call: closed.Call) -> Described:
    """Describes a call that was matched."""
    sides, masks = (call.student, call.teacher), call.masks

    def pair(of: Callable[[closed.Side], Any]) -> tuple[Any, Any]:
        return of(sides[0]), of(sides[1])

    names = [
        _base(getattr(x.source, "name", None))
        for side in sides
        for x in (side.product.rows, side.product.keys)
    ]
    return Described(
        call.operator,
        _values(call.functional),
        pair(lambda s: _rounded(s.scale)),
        pair(lambda s: _rounded(s.softcap)),
        pair(lambda s: len(s.added)),
        pair(lambda s: len(s.product.factors)),
        pair(lambda s: len(s.adapters)),
        call.head_mean,
        (_window(masks.window_left), _window(masks.window_right)),
        len(masks.tensors) + len(masks.segments) + (masks.lengths is not None),
        len(masks.rows),
        bool(masks.vocab) or any(s.num_keys is not None for s in sides),
        masks.fill,
        None if call.stricter is None else call.stricter.side,
        (sides[0].requires_grad, sides[1].requires_grad),
        tuple(names),
        call.functional.text,
    )


def _base(node: Any) -> str:
    """The name of the tensor that an operand is a view of."""
    while isinstance(node, fx.Node) and node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node.name if isinstance(node, fx.Node) else repr(node)


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")


def _bound(x: Any) -> object:
    return x if x is None or isinstance(x, int) else "symbolic"


def _window(x: Any) -> object:
    value = None if x is None else constant(x)
    return None if x is None else "symbolic" if value is None else int(value)


@dataclass
class Compared:
    """Both sides of one graph: calls, and why there are none."""

    old: list[Described] = field(default_factory=list)
    new: list[Described] = field(default_factory=list)
    planned: list[tuple[str, list[Described]]] = field(default_factory=list)
    old_reasons: list[str] = field(default_factory=list)
    new_reasons: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    @property
    def is_equal(self) -> bool:
        return not self.differences

    def compare(self) -> None:
        left = list(self.new)
        for each in self.old:
            same = [
                x
                for x in left
                if not each.differences(x) or not each.differences(_swapped_if_trained(x))
            ]
            if same:
                left.remove(same[0])
                continue
            near = min(left, key=lambda x: len(each.differences(x)), default=None)
            if near is None or len(each.differences(near)) > 8:
                self.differences.append(f"missing {each.operator} {each.text[:60]}")
            else:
                left.remove(near)
                self.differences.append("; ".join(each.differences(near)))
        self.differences += [f"more {x.operator} {x.text[:60]}" for x in left]

    def family(self) -> str:
        for name in ("selections", "padding", "writes"):
            if name in self.kinds:
                return name
        every = self.old or self.new
        tests: dict[str, Callable[[Described], bool]] = {
            "averaged teachers": lambda x: x.head_mean,
            "LM heads and adapters": lambda x: x.operator == "linear_kl",
            "bias and softcap": lambda x: any(x.biases) or any(x.softcaps),
            "mask tensors and fills": lambda x: bool(x.mask_tensors or x.row_masks),
            "causal and windows": lambda x: x.window != (None, None),
        }
        return next((n for n, f in tests.items() if any(map(f, every))), "plain pairs")


def _swapped_if_trained(x: Described) -> Described:
    return x.swapped() if x.trained == (True, True) or not any(x.trained) else x


_KINDS = {"selections": ("index", "masked_select", "nonzero"), "padding": ("pad",
          "constant_pad_nd"), "writes": ("copy_", "fill_", "masked_fill_", "index_put_",
          "scatter_", "zero_")}  # fmt: skip


@contextlib.contextmanager
def watched(found: list[Compared]) -> Iterator[None]:
    """Compares every graph that is rewritten meanwhile."""
    original = pipeline.find_candidates

    def both(trace: Trace, values: Any) -> Any:
        candidates, plans = original(trace, values)
        result = Compared(old_reasons=[p for p in plans.values() if isinstance(p, str)])
        result.planned = [(x.node.name, [of_plan(c) for c in x.plan.calls]) for x in candidates]
        operations = {name_of(n) for n in trace.graph.nodes if n.op == "call_function"}
        result.kinds = {k for k, ops in _KINDS.items() if operations & set(ops)}
        try:
            _match(trace, result)
        except Exception as error:
            result.new_reasons.append(f"CRASH {type(error).__name__}: {error}"[:200])
            if "-v" in sys.argv:
                raise
        found.append(result)
        return candidates, plans

    with mock.patch.object(pipeline, "find_candidates", both):
        yield


def _match(trace: Trace, result: Compared) -> None:
    reading = read_trace(trace)
    seen, matched = set(), set()
    if "-v" in sys.argv:
        for node, why in reading.reasons.items():
            print("CAPTURED", node, node.target, why)
    for node in trace.graph.nodes:
        value = node.meta.get("val")
        is_end = all(user.op == "output" for user in node.users)
        if node.op != "call_function" or not is_end or not isinstance(value, Tensor):
            continue
        x = reading.arrays.get(node)
        if x is None or isinstance(x, tuple) or x.expr in seen:
            continue
        if "-v" in sys.argv:
            print("END", node, str(x.expr)[:3000])
        seen.add(x.expr)
        for each in match_program(x.expr, [a for d in x.dims for a in d]).found.values():
            if isinstance(each, closed.NotClosed):
                result.new_reasons.append(each.reason)
            elif each.site not in matched:
                matched.add(each.site)
                result.new += [of_match(call) for call in each.calls]


@dataclass(frozen=True)
class Program:
    name: str
    fn: Callable[..., Any]
    inputs: list[Any]
    dynamic: bool = False


def corpus() -> Iterator[Program]:
    from tests.corpus.naive_losses import ALL_CASES

    for case in ALL_CASES:
        yield Program(case["name"], case["fn"], case["make_inputs"](0, dtype=torch.float32))


def users() -> Iterator[Program]:
    import tests.support.more_user_losses  # noqa: F401  # adds to USER_LOSSES
    from tests.support.user_losses import USER_LOSSES

    for name, loss in USER_LOSSES.items():
        yield Program(name, loss.fn, loss.inputs())


def misleading() -> Iterator[Program]:
    from tests.support import misleading_programs  # noqa: F401  # they register themselves
    from tests.support.misleading.registry import PROGRAMS

    for p in PROGRAMS.values():
        yield Program(p.name, p.fn, p.inputs(), p.dynamic)


def forms() -> Iterator[Program]:
    """Every choice of tests/support/programs.py, next to the plainest of the others."""
    from tests.support import programs as p

    choices = {
        "producer": p.PRODUCERS, "scale": p.SCALES, "mask": p.MASKS, "spelling": p.SPELLINGS,
        "reduction": p.REDUCTIONS, "call": p.CALLS, "gradient": p.GRADIENTS,
    }  # fmt: skip
    for dimension, names in choices.items():
        for name in names:
            made = p.Program(**{dimension: name})
            yield Program(f"{dimension} {name}", made, made.inputs())
    for mask in p.MASKS:  # which divergences are 0 for equal distributions, and which are not
        for spelling in ("js", "cross_entropy", "where_positive", "eps_both"):
            made = p.Program(mask=mask, spelling=spelling)
            yield Program(f"{mask} {spelling}", made, made.inputs())


SETS = {"forms": forms, "corpus": corpus, "users": users, "misleading": misleading}


def compared(program: Program) -> list[Compared]:
    """Compiles a program, and compares each of its graphs."""
    found: list[Compared] = []
    torch._dynamo.reset()
    options = {"streamkl.min_mib": 0, "streamkl.inner": "eager", "streamkl.verify": "never"}
    with torch._dynamo.config.patch(CAPTURE), watched(found), backend.collected() as report:
        fn = torch.compile(
            program.fn, backend="streamkl", dynamic=program.dynamic or None, options=options
        )
        with contextlib.suppress(Exception):
            fn(*program.inputs)
    closed_sites = {
        s.node
        for s in report.sites
        if s.kind in ("attention_kl", "linear_kl") and not _is_limit(s.reason)
    }
    for each in found:
        each.old_reasons += [s.reason for s in report.sites if not s.fused and s.reason]
        each.old = [c for node, calls in each.planned if node in closed_sites for c in calls]
        each.compare()
    return found


def _is_limit(reason: str) -> bool:
    """Whether a planned call is refused for what an operator does not compute."""
    return "needs a gradient" in reason or "dimension that its place" in reason


def main(which: str, *names: str) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for program in SETS[which]():
        if names and not any(n in program.name for n in names if n != "-v"):
            continue
        for each in compared(program):
            count = counts[each.family()]
            count["programs"] += 1
            count["old"] += bool(each.old)
            count["new"] += bool(each.new)
            count["equal"] += each.is_equal
            if each.differences or (names and each.new):
                print(f"{program.name:44s} {' | '.join(each.differences)}"[:600], flush=True)
                why = (each.new_reasons, list(dict.fromkeys(each.old_reasons)))
                print("      new:", *why[0][:3], "| old:", *why[1][:2], flush=True)
    for name in (*NAMES, *(n for n in counts if n not in NAMES)):
        print(f"{name:26s} {dict(counts[name])}")
    print("all", dict(sum(counts.values(), Counter())))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
