"""Matches programs with the operators, and holds every match against the program it came from."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch

from tests.support.closed_forms import difference, difference_around
from tests.support.read_programs import (
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

    @property
    def closed(self):
        return [x for x in self.found if isinstance(x, ClosedForm)]

    @property
    def is_right(self):
        return all(error < EXACT for error in self.errors)


def matches_of(case):
    """Captures, reads and matches a program, and recomputes each match."""
    torch.manual_seed(0)
    gm = capture(case.fn, _leaves(case.inputs), case.dynamic, case.wide)
    with in_float64() if case.wide else contextlib.nullcontext():
        return _matches_of(gm, case)


def _matches_of(gm, case):
    inputs = widened(case.inputs) if case.wide else case.inputs
    reading = read(gm, _ran(_Run(gm), inputs).records.__getitem__)
    (results,) = next(n for n in gm.graph.nodes if n.op == "output").args
    arrays = map(reading.array, results)
    every = [match_program(x.expr, [a for d in x.dims for a in d]) for x in arrays]
    matches = Matches([x for m in every for x in m.found.values()])
    sources = dict.fromkeys(x.value for x in walk([m.root for m in every]) if x.op == "capture")
    second = _ran(_Run(gm, list(sources)), inputs)
    sizes = {k: v for k, v in _sizes(gm, reading, second).items() if isinstance(k, Extent)}
    values = {source: tensor.detach() for source, tensor in second.tensors.items()}
    matches.errors = [difference(form, values, sizes) for form in matches.closed]
    matches.errors += [difference_around(m, values, sizes) for m in every if m.closed]
    return matches


def _ran(run, inputs):
    torch.manual_seed(0)
    with torch.enable_grad():
        run.run(*_leaves(inputs))
    return run
