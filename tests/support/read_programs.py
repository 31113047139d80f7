"""Reads programs into the expression graph, and holds value and gradients against eager code.

A program is captured as a pre-dispatch ATen graph, read, and evaluated in float64. What is
captured in the reading is taken from a run of the graph, with its gradients.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.evaluate_program import evaluate
from torch_streamkl.fx_passes.capture.preconditions import why_unsupported
from torch_streamkl.fx_passes.capture.region import find_region
from torch_streamkl.fx_passes.capture.retrace import trace_region
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import storage_of
from torch_streamkl.fx_passes.fx_utils.torch_names import GuardOnDataDependentSymNode
from torch_streamkl.fx_passes.reading.gradients import recorded_gradients
from torch_streamkl.fx_passes.reading.positions import Positions
from torch_streamkl.fx_passes.reading.reader import (
    UNFORESEEN,
    Reading,
    read,
    read_trace,
)
from torch_streamkl.program.graph import Extent
from torch_streamkl.program.walks import walk

EXACT = (
    2.0**-33
)  # of the largest value: rounding in float64 of sums of thousands, and cancellation
NOTHING = 1e-14  # next to a sum of what cancels
ROUNDING = {torch.float32: 2e-4, torch.float16: 6e-2, torch.bfloat16: 3e-1}
ROUNDING |= {torch.float8_e4m3fn: 3e-1, torch.float8_e5m2: 3e-1}


@dataclass
class Outcome:
    """What became of a program: empty strings where all is equal."""

    reading: Reading | None = None
    value: str = ""
    gradient: str = ""
    nan: str = ""  # eager has NaN where the program has a number
    captured: list[str] = field(default_factory=list)  # made of products, and in the results

    @property
    def is_right(self):
        return not self.value and not self.gradient


def capture(fn, inputs, dynamic=False, wide=True):
    """The pre-dispatch ATen graph of a program; ``wide`` makes float32 in it float64."""
    for mode in ("symbolic" if dynamic else "fake", "real"):
        try:
            return _traced(fn, inputs, mode, wide)
        except GuardOnDataDependentSymNode:  # values of data decide: as Dynamo breaks graphs there
            if mode == "real":
                raise
    raise AssertionError


def _traced(fn, inputs, mode, wide):
    def flat(*x):
        return [y for y in tree_leaves(fn(*x)) if isinstance(y, Tensor)]

    options = {"tracing_mode": mode, "pre_dispatch": True, "_allow_non_fake_inputs": True}
    with torch.enable_grad():
        gm = make_fx(flat, **options)(*inputs)
        if wide and _widen(gm):
            with in_float64():
                gm = make_fx(gm, **options)(*widened(inputs))
    return gm


@contextlib.contextmanager
def in_float64():
    """Tensors of no type are made in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widened(inputs):
    """Inputs in float64 in place of float32."""
    return [
        x.detach().double().requires_grad_(x.requires_grad) if x.dtype == torch.float32 else x
        for x in inputs
    ]


class _Run(fx.Interpreter):
    """Runs a graph with autograd; keeps what each node computed, and snapshots of sources."""

    def __init__(
        self,
        gm,
        sources=(),
        recorded=None,
    ):
        super().__init__(gm, garbage_collect_values=False)
        self.recorded = recorded or {}
        self.values: dict[fx.Node, Any] = {}
        self.copies: dict[fx.Node, Tensor] = {}
        self.records: dict[fx.Node, bool] = {}
        self.versions: Counter[int | None] = Counter()
        self.tensors: dict[Any, Tensor] = {}
        self.wanted = list(sources)

    def run_node(self, n):
        result = super().run_node(n)
        flows = isinstance(result, Tensor) and result.requires_grad
        if flows and not self.recorded.get(n, True):
            result = result.detach()  # a trace has none of the user's no_grad
        self.values[n] = result
        if isinstance(result, Tensor):
            with torch.enable_grad():
                self.copies[n] = result.clone()  # later it may be written
        self.records[n] = isinstance(result, Tensor) and result.requires_grad
        for storage in {storage_of(x) for x in written_by(n)}:
            self.versions[storage] += 1
        left = []
        for source in self.wanted:
            node = source.name.mask if isinstance(source.name, Positions) else source.name
            is_now = node in self.values and self.versions[storage_of(node)] == source.version
            if not is_now:
                left.append(source)
                continue
            value = self.values[node]
            if not isinstance(value, Tensor):
                value = torch.tensor(float(value), dtype=torch.float64)
            if isinstance(source.name, Positions):
                value = _rows_of(value, source.name.rows).nonzero()[:, source.name.dim]
            with torch.enable_grad():
                value = value.clone() if source.grad_flows else value.detach().clone()
            self.tensors[source] = value
        self.wanted = left
        return result


def _rows_of(mask, rows):
    for d in reversed(range(mask.dim())):
        if not rows.first <= d <= rows.last:
            mask = mask.select(d, 0)
    return mask


def _leaves(inputs):
    return [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    ]


def examine(fn, inputs, dynamic=False, wide=True):
    """Captures, reads, evaluates and compares a program."""
    torch.manual_seed(0)
    gm = capture(fn, _leaves(inputs), dynamic, wide)
    if not wide:
        return _of_graph(gm, inputs)
    with in_float64():
        return _of_graph(gm, widened(inputs))


def _of_graph(gm, inputs):
    torch.manual_seed(0)
    first = _Run(gm)
    leaves, again = _leaves(inputs), _leaves(inputs)
    with torch.enable_grad():
        first.run(*leaves)
    outcome = Outcome(read(gm, first.records.__getitem__))
    (results,) = next(n for n in gm.graph.nodes if n.op == "output").args
    return hold(gm, outcome, results, first, (leaves, again))


def hold(
    gm,
    outcome,
    results,
    first,
    inputs,
):
    """Evaluates what was read of a graph's results, and compares with a run of the graph."""
    reading = outcome.reading
    assert reading is not None
    outcome.value = next((r for r in reading.reasons.values() if r.startswith(UNFORESEEN)), "")
    outputs = [first.copies[n] for n in results]
    made = [reading.array(n) for n in results]
    sources = [x.value for x in walk([x.expr for x in made]) if x.op == "capture"]
    sources = list(dict.fromkeys(sources))
    for source in sources:
        if source.name in reading.reads_products:
            outcome.captured.append(f"{source}: {reading.reasons.get(source.name)}")
    torch.manual_seed(0)
    second = _Run(gm, sources, first.recorded)
    leaves, again = inputs
    with torch.enable_grad():
        second.run(*again)
    missing = [s for s in sources if s not in second.tensors]
    if missing:
        outcome.value = f"no tensors for {missing}"
        return outcome
    sizes = _sizes(gm, reading, second)
    found = [_evaluated(x, second.tensors, sizes, y) for x, y in zip(made, outputs, strict=True)]
    exact = _tolerance(gm)
    for x, y in zip(outputs, found, strict=True):
        outcome.value = outcome.value or _difference(x, y, exact)
        outcome.nan = outcome.nan or _nan(x, y)
    if not outcome.value:
        outcome.gradient = _gradients(outputs, leaves, found, again, exact)
    return outcome


def examine_compiled(fn, inputs, dynamic=False):
    """Compiles a program, and holds what is read of each graph that the rewrite analyses."""
    outcomes = []

    def backend(gm, examples):
        region = None if why_unsupported(gm.graph) else find_region(gm.graph)
        if region is None:
            return gm.forward
        trace = trace_region(gm, region)
        reading = read_trace(trace)
        is_done = False

        def run(*args):
            nonlocal is_done
            user = _Run(gm)
            with torch.enable_grad():
                result = user.run(*args)
            if not is_done:
                is_done = True
                outcomes.append(_of_trace(trace, reading, user))
            return result

        return run

    torch._dynamo.reset()
    with torch._dynamo.config.patch(CAPTURE):
        torch.compile(fn, backend=backend, dynamic=dynamic or None)(*_leaves(inputs))
    return outcomes


def _of_trace(trace, reading, user):
    placeholders = [n for n in trace.graph.nodes if n.op == "placeholder"]
    given = [user.values[trace.outer[n]] for n in placeholders]
    leaves, again = _leaves(given), _leaves(given)
    torch.manual_seed(0)
    first = _Run(trace.module, (), recorded_gradients(trace))
    with torch.enable_grad():
        first.run(*leaves)
    outcome = Outcome(reading)
    made = [
        n
        for n in trace.graph.nodes
        if n.op == "call_function" and n in first.copies and not written_by(n)
    ]
    losses = [n for n in made if not first.copies[n].dim()]
    results = losses or [n for n in made if all(u.op == "output" for u in n.users)]
    return hold(trace.module, outcome, results, first, (leaves, again))


def _widen(gm):
    """Makes float32 in a graph float64, so that all that is computed is exact."""
    values = [n.meta.get("val") for n in gm.graph.nodes]
    changed = any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in values)

    def wider(x):
        nonlocal changed
        changed |= x is torch.float32
        return torch.float64 if x is torch.float32 else x

    doubles = {}  # two attributes may be one tensor
    for n in gm.graph.nodes:
        n.args, n.kwargs = tree_map(wider, n.args), tree_map(wider, dict(n.kwargs))
        held = getattr(gm, str(n.target), None) if n.op == "get_attr" else None
        if isinstance(held, Tensor) and held.dtype == torch.float32:
            doubles.setdefault(id(held), held.double())
            setattr(gm, str(n.target), doubles[id(held)])
            changed = True
    gm.recompile()
    return changed


def _tolerance(gm):
    """What is computed in a narrow type is not more exact."""
    found = EXACT
    for n in gm.graph.nodes:
        for x in tree_leaves(n.meta.get("val")):
            if isinstance(x, Tensor) and x.dtype in ROUNDING:
                found = max(found, ROUNDING[x.dtype])
    return found


def _sizes(gm, reading, run):
    found = {}
    for n in gm.graph.nodes:
        value, actual = n.meta.get("val"), run.values.get(n)
        pairs = zip(tree_leaves(value), tree_leaves(actual), strict=False)
        for x, y in pairs if actual is not None else ():
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                for a, b in zip(x.shape, y.shape, strict=False):
                    found[reading.sizes.of(a)] = b
            if isinstance(x, torch.SymInt) and isinstance(y, int):
                found[reading.sizes.of(x)] = y
    known = {str(k): v for k, v in found.items()}
    for extent in list(reading.sizes._known.values()):
        if extent not in found:
            expr = extent.size.node.expr
            values = {s: known[str(s)] for s in expr.free_symbols if str(s) in known}
            found[extent] = int(expr.subs(values))
    return found


def _evaluated(x, tensors, sizes, like):
    order = [a for d in x.dims for a in d]
    value = evaluate(
        x.expr, tensors, {k: v for k, v in sizes.items() if isinstance(k, Extent)}, order
    )
    value = value.reshape(like.shape)
    if like.dtype == torch.bool or not like.is_floating_point():
        return value.to(like.dtype)
    return value.double()


def _difference(x, y, exact, least=NOTHING):
    """NaN that eager has and the program has not is no mistake, the reverse is one."""
    if not x.is_floating_point():
        return "" if torch.equal(x, y) else "other integers"
    x, y = x.detach().double(), y.detach().double()
    largest = float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0
    where = ~x.isnan()
    if torch.allclose(x[where], y[where], rtol=exact, atol=max(exact * largest, least)):
        return ""
    return f"{_size(x)} -> {_size(y)}, off by {_size(x - y)}"


def _nan(x, y):
    if not x.is_floating_point():
        return ""
    count = int((x.isnan() & ~y.isnan()).sum())
    return f"{count} NaN of eager are numbers" if count else ""


def _size(x):
    return "None" if x is None else f"{float(x.abs().max()) if x.numel() else 0.0:.4g}"


def _gradients(
    eager,
    leaves,
    read,
    again,
    exact,
):
    needs = [x.requires_grad for x in eager if x.is_floating_point()]
    found = [x.requires_grad for x in read if x.is_floating_point()]
    if needs != found:
        return f"outputs need gradients: {needs} -> {found}"
    pairs = []
    for outputs, inputs in ((eager, leaves), (read, again)):
        results = [x for x in outputs if x.requires_grad]
        trained = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        if not results or not trained:
            return ""
        weights = [torch.linspace(0.5, 1.5, x.numel()).view(x.shape).to(x.dtype) for x in results]
        pairs.append(torch.autograd.grad(results, trained, weights, allow_unused=True))
    for i, (x, y) in enumerate(zip(*pairs, strict=True)):
        a = torch.zeros(()) if x is None else x
        b = torch.zeros(()) if y is None else y
        if x is None and y is not None and not bool((y == 0).all()):
            return f"gradient {i}: None -> {_size(y)}"
        if x is not None and y is None and not bool((x == 0).all()):
            return f"gradient {i}: {_size(x)} -> None"
        if x is not None and y is not None and (wrong := _difference(a, b, exact)):
            return f"gradient {i}: {wrong}"
    return ""


# ------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable[..., Any]
    inputs: list[Tensor]
    dynamic: bool = False
    wide: bool = True


def corpus():
    from tests.corpus.naive_losses import ALL_CASES

    for case in ALL_CASES:
        args = case["make_inputs"](torch.float64)
        tensors = [a for a in args if isinstance(a, Tensor)]

        def fn(*xs, args=args, fn=case["fn"]):
            rest = iter(xs)
            return fn(*(next(rest) if isinstance(a, Tensor) else a for a in args))

        yield Case(case["name"], fn, tensors)


def users():
    import tests.support.more_user_losses  # adds to USER_LOSSES
    import tests.support.public_losses  # noqa: F401  # so does this
    from tests.support.user_losses import USER_LOSSES

    for name, loss in USER_LOSSES.items():
        yield Case(name, loss.fn, loss.inputs())


def misleading():
    from tests.support import misleading_programs  # noqa: F401  # they register themselves
    from tests.support.misleading.registry import PROGRAMS

    for p in PROGRAMS.values():
        yield Case(p.name, p.fn, p.inputs(), p.dynamic, wide=False)


SETS = {"corpus": corpus, "users": users, "misleading": misleading}
