"""Defines verify(): runs a program eagerly, compiled and in float64, and compares everything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.explain import check_program, in_a_new_frame, uncompiled
from torch_streamkl.fx_passes.options import Given, split_options
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.reporting.text import fused_text
from torch_streamkl.fx_passes.validation.compare import largest
from torch_streamkl.fx_passes.verification.comparing import Compared, Runs, compare
from torch_streamkl.fx_passes.verification.running import Runner
from torch_streamkl.fx_passes.verification.values import Results, Structure

NUM_ROUNDINGS = 8  # of the program, before a difference is believed
NOTHING = "it returns, writes and accumulates nothing that can be compared"
_LIMITS = {"recompile_limit": 2**30, "accumulated_recompile_limit": 2**30}


@dataclass
class Verification:
    """Holds what `verify` found: a record of each result, and what could not be compared.

    ``print(result)`` shows a table of the norms and errors, and ``result.ok`` says whether all
    agree.

    Attributes:
        results: one record per output, gradient and write, with its values in eager mode, compiled
            and in float64, and the errors of both.
        report: the `Report` of the compilation.
        not_judged: why the program cannot be judged at all, or an empty text.
        side_effects: what else the program changes. It was compared, and restored.
        not_compared: outputs and gradients that could not be compared, and why.
    """

    results: list[Compared] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    not_judged: str = ""  # why the program cannot be judged
    side_effects: list[str] = field(default_factory=list)  # compared, and put back
    not_compared: list[str] = field(default_factory=list)  # outputs and gradients, and why

    @property
    def num_compared(self) -> int:
        """Counts the numbers, texts and other values that were compared."""
        return sum(x.num_entries for x in self.results)

    @property
    def ok(self) -> bool:
        """True if something was compared, nothing was left out, and nothing differs."""
        is_judged = not self.not_judged and not self.not_compared and self.num_compared > 0
        return is_judged and all(x.agrees for x in self.results)

    def __str__(self) -> str:
        if self.not_judged:
            return f"streamkl: not judged: {self.not_judged}"
        width = max([6, *(len(x.name) for x in self.results)])
        titles = ("eager", "compiled", "float64", "eager off", "compiled off")
        lines = [
            f"streamkl: {self._verdict()}, {fused_text(self.report)}",
            f"{'':{width}}" + "".join(f"{title:>14}" for title in titles),
        ]
        for x in self.results:
            numbers = (x.eager, x.compiled, x.exact, x.eager_error, x.compiled_error)
            shown = "".join(f"{'None' if n is None else f'{n:.6g}':>14}" for n in numbers)
            lines.append(f"{x.name:{width}}{shown}")
            lines += [f"  {text}" for text in (x.difference, x.note) if text]
        if self.side_effects:
            lines.append(f"side effects, compared and put back: {', '.join(self.side_effects)}")
        lines += [f"not compared: {text}" for text in self.not_compared]
        return "\n".join(lines)

    def _verdict(self) -> str:
        total = len(self.results)
        wrong = sum(bool(x.difference) for x in self.results)
        odd = sum(bool(x.note and not x.difference) for x in self.results)
        if wrong:
            return f"{wrong} of {total} results differ"
        count = f"{self.num_compared} values"
        if odd:
            return f"{odd} of {total} results are NaN or infinite in eager, see below ({count})"
        return f"all {total} results agree ({count})"


def verify(
    fn: Callable[..., Any], *args: Any, options: Given = None, **kwargs: Any
) -> Verification:
    """Runs ``fn(*args, **kwargs)`` eagerly, compiled and in float64, and compares the results.

    .. code-block:: python

        result = torch_streamkl.verify(step, batch)
        assert result.ok, result

    It compares what the function returns (tensors, numbers, texts and containers of them), the
    gradients of its outputs, what it accumulates in ``.grad``, and what it changes: arguments,
    parameters, buffers, attributes, lists, closures and globals of your code. Each entry of a
    compiled result may have the error that rounding gives eager code; the reference is float64.
    Everything is restored at the end. `verify` compiles the program again, and does not change
    code that you compiled before.

    It takes as long as one compilation, two runs in eager mode, one compiled and one in float64.
    If a result differs, up to eight more eager runs follow. The run in float64 needs twice the
    memory of a naive one in float32.

    Three things are not compared: strides, whether results share memory with each other or with
    arguments, and whether a result is an `nn.Parameter`. If the compiled program changes the grad
    mode or random seeds, they are restored, and nothing is reported.

    Args:
        fn: a function, bound method or module, compiled by torch.compile or not.
        args, kwargs: its arguments; tensors in lists, tuples and dicts are found.
        options: of the compilation, as in ``torch.compile(backend="streamkl", options=)``. To pass
            an argument named ``options`` to fn, use `functools.partial`.

    Returns:
        A `Verification`, printable, with ``ok``. ``ok`` is False, and ``not_judged`` says why, if
        the program draws random numbers, reads an iterator, or differs between two eager runs.
        ``ok`` is also False if eager code is NaN and the compiled program is not. NaN in both
        agrees.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: a tensor is on the meta device, or an option breaks its rule.
        Exception: whatever ``fn`` raises in eager mode.
    """
    return _verify(fn, args, kwargs, options)


def _verify(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: Given = None,
    compiler: Callable[..., Any] | None = None,
) -> Verification:
    """Implements `verify`; ``compiler`` replaces torch.compile in tests of wrong programs."""
    check_program("verify", fn, options)
    split_options(options)
    program = uncompiled(fn)
    runner = Runner(program, args, kwargs)
    if runner.on_meta:
        raise ValueError(
            f"verify() runs the program: its tensors must have values, got {runner.on_meta[0]} on "
            "the meta device"
        )
    if runner.iterators:
        where = runner.iterators[0] or "the function"
        return Verification(not_judged=f"it reads an iterator, which cannot be put back: {where}")
    with runner.restored():
        eager = runner.run(program)
        if runner.draws_random():
            return Verification(not_judged="it draws random numbers")
        if not _same(eager, runner.run(program)):
            return Verification(not_judged="two runs in eager mode differ")
        compile_it = compiler or _compiled(options)
        of_thread = backend.reports_of_this_thread()
        with of_thread as report, torch._dynamo.config.patch(_LIMITS):
            try:
                compiled = runner.run(compile_it(in_a_new_frame(program)), compiled=True)
            except Exception as error:
                text = f"the compiled program raises {type(error).__name__}: {error}"
                return Verification([Compared("program", None, None, None, 0, 0, text)], report)
        try:
            exact = runner.run(program, wide=True)
        except Exception as error:
            text = f"in float64 it raises {type(error).__name__}: {error}"
            return Verification(report=report, not_judged=text)
        runs = Runs(eager, compiled, exact)
        found = _judged(runner, program, runs)
    left_out = [*runner.notes, *_opaque(eager)]
    changed = list(dict.fromkeys([*eager.changed, *compiled.changed]))
    has_some = left_out or any(x.num_entries or not x.agrees for x in found)
    not_judged = "" if has_some else NOTHING
    return Verification(found, report, not_judged, changed, left_out)


def _compiled(options: Given) -> Callable[..., Any]:
    new_backend = functools.partial(backend.streamkl, options=options)
    return functools.partial(torch.compile, backend=new_backend)


def _judged(runner: Runner, program: Callable[..., Any], runs: Runs) -> list[Compared]:
    """Compares all results; those that differ are compared again with operations rounded
    otherwise.
    """
    found = compare(runs)
    if any(x.note or x.difference for x in found) and _has_nan(runs.exact):
        try:
            runs.defined = runner.run(program, wide=True, finite=True)
        except Exception:  # a mask of it asks for -inf
            runs.defined = None
        found = compare(runs)
    for seed in range(NUM_ROUNDINGS):
        if not any(x.difference for x in found):
            break
        try:
            runs.add(runner.run(program, seed=seed), is_rounded=True)
        except Exception:  # an operation that no mode may see
            runs.add(runner.run(program, moved=seed), is_rounded=False)
        found = compare(runs)
    return found


def _has_nan(run: Results) -> bool:
    tensors = [x for x in run.values.values() if isinstance(x, Tensor) and not x.is_nested]
    numbers = [x for x in run.values.values() if isinstance(x, float)]
    return any(bool(x.isnan().any()) for x in tensors) or any(x != x for x in numbers)


def _opaque(run: Results) -> list[str]:
    return [
        f"{name} is a {x.text}"
        for name, x in run.values.items()
        if isinstance(x, Structure) and x.is_opaque and not name.endswith(" after")
    ]


def _same(a: Results, b: Results) -> bool:
    """Whether two eager runs gave the same results, up to the order of a device's sums."""
    if a.values.keys() != b.values.keys():
        return False
    return all(_is_near(x, b.values[name]) for name, x in a.values.items())


def _is_near(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and (x == y or x != x)
    if x.is_nested or y.is_nested:
        return len(x.unbind()) == len(y.unbind()) and all(map(_is_near, x.unbind(), y.unbind()))
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    near = 32 * torch.finfo(x.dtype).eps * largest(x)
    return torch.allclose(x.double(), y.double(), rtol=0.0, atol=near, equal_nan=True)
