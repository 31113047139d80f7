"""Matches programs with the operators, and holds every match against the program it came from.

``python -m tests.support.match_programs corpus|users|misleading [names]`` prints what is matched,
and the reasons of what is not; ``fuzz 500`` does of 500 random programs.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from tests.support.closed_forms import difference, difference_around
from tests.support.read_programs import (
    SETS,
    Case,
    _leaves,
    _Run,
    _sizes,
    capture,
    in_float64,
    widened,
)
from torch_streamkl.fx_passes.closed_forms.form import ClosedForm, NotClosed
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.reading.reader import read
from torch_streamkl.program.graph import Extent
from torch_streamkl.program.walks import walk

EXACT = 1e-8  # of the largest row: cancellation in float64


@dataclass
class Matches:
    """What became of a program's sums over keys, and which matches mean something else."""

    found: list[ClosedForm | NotClosed] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # of the closed ones, of whole programs
    seconds: float = 0.0

    @property
    def closed(self) -> list[ClosedForm]:
        return [x for x in self.found if isinstance(x, ClosedForm)]

    @property
    def is_right(self) -> bool:
        return all(error < EXACT for error in self.errors)


def matches_of(case: Case) -> Matches:
    """Captures, reads and matches a program, and recomputes each match."""
    torch.manual_seed(0)
    gm = capture(case.fn, _leaves(case.inputs), case.dynamic, case.wide)
    with in_float64() if case.wide else contextlib.nullcontext():
        return _matches_of(gm, case)


def _matches_of(gm: fx.GraphModule, case: Case) -> Matches:
    inputs = widened(case.inputs) if case.wide else case.inputs
    reading = read(gm, _ran(_Run(gm), inputs).records.__getitem__)
    (results,) = next(n for n in gm.graph.nodes if n.op == "output").args
    every, start = [], time.perf_counter()
    for x in map(reading.array, results):
        every.append(match_program(x.expr, [a for d in x.dims for a in d]))
    matches = Matches([x for m in every for x in m.found.values()])
    matches.seconds = time.perf_counter() - start
    sources = dict.fromkeys(x.value for x in walk([m.root for m in every]) if x.op == "capture")
    second = _ran(_Run(gm, list(sources)), inputs)
    sizes = {k: v for k, v in _sizes(gm, reading, second).items() if isinstance(k, Extent)}
    values = {source: tensor.detach() for source, tensor in second.tensors.items()}
    matches.errors = [difference(form, values, sizes) for form in matches.closed]
    matches.errors += [difference_around(m, values, sizes) for m in every if m.closed]
    return matches


def _ran(run: _Run, inputs: Sequence[Tensor]) -> _Run:
    torch.manual_seed(0)
    with torch.enable_grad():
        run.run(*_leaves(inputs))
    return run


def text_of(form: ClosedForm | NotClosed) -> str:
    """Returns a match in a line."""
    if isinstance(form, NotClosed):
        return f"not closed: {form.reason}"
    parts = []
    for call in form.calls:
        masks = {k: v for k, v in vars(call.masks).items() if v not in (None, ())}
        sides = [
            f"{s.scale:g}"
            + (f" cap {s.softcap:g}" if s.softcap else "")
            + (f" {len(s.added)} biases" if s.added else "")
            + (f" {len(s.product.factors)} factors" if s.product.factors else "")
            + (" averaged" if s.averaged else "")
            + (" trained" if s.requires_grad else "")
            for s in call.sides
        ]
        parts.append(f"{call.operator} {call.functional.text} {sides} {masks}")
    return "; ".join(parts)


def fuzz() -> Iterator[Case]:
    """Random programs; names of cases are their seeds."""
    from tests.fuzz.run import program

    for seed in range(10_000):
        drawn = program(seed)
        if drawn.dtype == torch.float64:
            yield Case(f"seed{seed}", drawn.function(), drawn.inputs(), drawn.dynamic, wide=False)


def main(which: str, *names: str) -> None:
    totals: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    sets = {**SETS, "fuzz": fuzz}
    for case in sets[which]():
        if names and names[0].isdigit() and case.name == f"seed{names[0]}":
            break
        if names and not names[0].isdigit() and not any(n in case.name for n in names):
            continue
        try:
            found = matches_of(case)
        except Exception as error:
            if names and not names[0].isdigit():
                raise
            totals["crash"] += 1
            print(f"CRASH {case.name:44s} {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        mark = "ok" if found.is_right else "WRONG"
        totals[mark] += 1
        totals["closed"] += len(found.closed)
        totals["programs with closed"] += bool(found.closed)
        reasons.update(x.reason for x in found.found if isinstance(x, NotClosed))
        print(f"{mark:6s}{case.name:40s} {found.seconds * 1e3:.0f} ms", end=" ")
        print(" | ".join(text_of(x)[: 400 if names else 200] for x in found.found), flush=True)
        if not found.is_right:
            print("      errors", found.errors)
    print(totals)
    for reason, count in reasons.most_common(60):
        print(f"{count:5d} {reason[:120]}")


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
