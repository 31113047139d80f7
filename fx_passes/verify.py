"""verify(fn, *args): a program in eager mode, compiled and in float64, side by side."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.explain import in_a_new_frame
from torch_streamkl.fx_passes.fx_utils.torch_names import tree_flatten, tree_map, tree_unflatten
from torch_streamkl.fx_passes.leaves import closed_over, modules_of, uncompiled
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.reporting.text import losses_text
from torch_streamkl.fx_passes.validation.compare import MULTIPLE, distance, largest
from torch_streamkl.fx_passes.validation.running import NARROW, default_dtype, weights

NUM_ROUNDINGS = 5  # of the inputs, before a difference is believed
_LIMITS = {"recompile_limit": 2**30, "accumulated_recompile_limit": 2**30}


@dataclass(frozen=True)
class Compared:
    """One result: its size in every run, and how far the runs are from float64."""

    name: str  # "output 0", "gradient of argument 1", "gradient of weight", "argument 2 after"
    eager: float | None  # the number itself, or the norm of a tensor; None where there is none
    compiled: float | None
    exact: float | None
    eager_error: float
    compiled_error: float
    difference: str = ""  # empty when the compiled program is as right as eager


@dataclass
class Verification:
    """What `verify` found; printable."""

    results: list[Compared] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    not_judged: str = ""  # why the program cannot be judged

    @property
    def ok(self) -> bool:
        """Whether everything was compared and nothing differs."""
        return not self.not_judged and not any(x.difference for x in self.results)

    def __str__(self) -> str:
        if self.not_judged:
            return f"streamkl: not judged: {self.not_judged}"
        wrong = sum(bool(x.difference) for x in self.results)
        verdict = (
            f"{wrong} of {len(self.results)} results differ" if wrong else "all results agree"
        )
        width = max([6, *(len(x.name) for x in self.results)])
        titles = ("eager", "compiled", "float64", "eager off", "compiled off")
        lines = [
            f"streamkl: {verdict}, {losses_text(self.report.num_fused)} fused",
            f"{'':{width}}" + "".join(f"{title:>14}" for title in titles),
        ]
        for x in self.results:
            numbers = (x.eager, x.compiled, x.exact, x.eager_error, x.compiled_error)
            shown = "".join(f"{'None' if n is None else f'{n:.6g}':>14}" for n in numbers)
            lines.append(
                f"{x.name:{width}}{shown}" + (f"  {x.difference}" if x.difference else "")
            )
        return "\n".join(lines)


def verify(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Verification:
    """Run ``fn(*args, **kwargs)`` in eager mode, compiled and in float64, and compare.

    Compared are all outputs, the gradients of their weighted sum (of tensor arguments, parameters
    of modules, and tensors that the function closes over or names as globals), and arguments,
    parameters and buffers that the function modifies in place. The compiled program may be off
    from float64 by four times what eager is off, plus one rounding::

        result = torch_streamkl.verify(step, batch)
        assert result.ok, result

    Args:
        fn: function, bound method, module, or what torch.compile made of one.
        args, kwargs: its arguments; tensors in lists, tuples and dicts are found, too.

    Returns:
        `Verification`: printable, with ``ok``, one record a result, and the report of the
        compilation. Programs that draw random numbers, have side effects or do not give the same
        twice cannot be judged: ``not_judged`` says why, and ``ok`` is False.

    Raises:
        What ``fn`` raises in eager mode.

    Tensors, gradients and random state are left as they were. The program is compiled anew, so
    that what was compiled before stays.
    """
    return _verify(fn, args, kwargs, {})


def _verify(
    fn: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]
) -> Verification:
    program = uncompiled(fn)
    given, shape = tree_flatten((args, kwargs))
    runner = _Runner(program, given, shape)
    with runner.restored():
        eager = runner.run(program)
        reason = runner.side_effect()
        again = runner.run(program)
        reason = reason or ("" if _same(eager, again) else "two runs in eager mode differ")
        if reason:
            return Verification(not_judged=reason)
        with backend.collected() as report, torch._dynamo.config.patch(_LIMITS):
            new_backend = functools.partial(backend.streamkl, options=options)
            compiled_fn = torch.compile(in_a_new_frame(program), backend=new_backend)
            try:
                compiled = runner.run(compiled_fn)
            except Exception as error:
                text = f"the compiled program raises {type(error).__name__}: {error}"
                return Verification([Compared(text, None, None, None, 0.0, 0.0, text)], report)
        try:
            exact = runner.run(program, wide=True)
        except Exception as error:
            text = f"in float64 it raises {type(error).__name__}: {error}"
            return Verification(report=report, not_judged=text)
        compared = _compared(runner, program, eager, compiled, exact)
    return Verification(compared, report)


@dataclass
class _Results:
    """What a run gave, by name."""

    values: dict[str, Any] = field(default_factory=dict)
    needs_grad: dict[str, bool] = field(default_factory=dict)


class _InFloat64(TorchFunctionMode):
    """Programs that ask for a narrower dtype get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double

        def wide(x: Any) -> Any:
            return torch.float64 if isinstance(x, torch.dtype) and x in NARROW else x

        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    with default_dtype(torch.float64), _InFloat64():
        yield


class _Runner:
    """Runs a program on fresh arguments, with all else as it was at the beginning."""

    def __init__(self, program: Callable[..., Any], given: list[Any], shape: Any) -> None:
        self.given, self.shape = given, shape
        plain_args = [x for x in given if not isinstance(x, Tensor)]
        self.others = closed_over(program, plain_args)
        self.modules = modules_of(program, plain_args)
        self.data = {name: x.data for name, x in self.others.items()}
        self.saved = {name: x.detach().clone() for name, x in self.others.items()}
        self.grads = {
            n: (x.grad, None if x.grad is None else x.grad.clone())
            for n, x in self.others.items()
            if x.is_leaf
        }
        self.state = self._state()
        self.random = _random_state()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as it was, whatever happens."""
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for name, x in self.others.items():
            x.data = self.data[name]
            if not _same_bits(x.data, self.saved[name]):
                x.data.copy_(self.saved[name])
            if name in self.grads:
                grad, copy = self.grads[name]
                x.grad = grad
                if grad is not None and copy is not None:
                    grad.data.copy_(copy)
        for module, attributes in self.state:
            vars(module).update(attributes)
        _set_random_state(self.random)

    def _state(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """The numbers and texts that modules keep, such as a count of steps."""
        plain = (int, float, bool, str)
        return [
            (m, {name: x for name, x in vars(m).items() if isinstance(x, plain)})
            for m in self.modules
        ]

    def side_effect(self) -> str:
        """What the last run changed that is not compared."""
        if not _same_random_state(self.random, _random_state()):
            return "it draws random numbers"
        for name, (grad, copy) in self.grads.items():
            now = self.others[name].grad
            is_same = copy is None or (now is not None and torch.equal(copy, now))
            if now is not grad or not is_same:
                return f"it has side effects: it sets the gradient of {name}"
        for (module, before), (_, after) in zip(self.state, self._state(), strict=True):
            changed = [name for name in after if after[name] != before.get(name)]
            if changed:
                return f"it has side effects: it changes {changed[0]} of {type(module).__name__}"
        return ""

    def run(
        self, program: Callable[..., Any], *, wide: bool = False, seed: int | None = None
    ) -> _Results:
        """Outputs, gradients and modified tensors; with inputs rounded otherwise by a seed."""
        self._restore()
        fresh = [self._fresh(x, wide, seed) for x in self.given]
        for name, x in self.others.items():
            if wide or seed is not None:
                x.data = _changed(self.data[name], wide, seed)
        # programs get views, so that an argument that is written to keeps its gradient
        entries = [_entrance(x) for x in fresh]
        args, kwargs = tree_unflatten(entries, self.shape)
        before = {**_tensors(fresh), **self.others}
        copies = {name: x.detach().clone() for name, x in before.items()}
        with _in_float64() if wide else contextlib.nullcontext():
            output = program(*args, **kwargs)
        results = _Results()
        flat: list[Any] = tree_flatten(output)[0]
        outputs = [x for x in flat if isinstance(x, (Tensor, int, float))]
        for i, made in enumerate(outputs):
            results.values[f"output {i}"] = (
                made.detach().clone() if isinstance(made, Tensor) else made
            )
            results.needs_grad[f"output {i}"] = isinstance(made, Tensor) and made.requires_grad
        self._add_gradients(results, outputs, before)
        after = {**_tensors(entries), **self.others}
        for name, x in after.items():
            if not _same_bits(x.detach(), copies[name]):
                results.values[f"{name} after"] = x.detach().clone()
        return results

    def _add_gradients(
        self, results: _Results, outputs: list[Any], leaves: dict[str, Tensor]
    ) -> None:
        trained = {n: x for n, x in leaves.items() if x.requires_grad}
        roots = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        if not trained or not roots:
            return
        found = torch.autograd.grad(
            roots, list(trained.values()), [weights(x) for x in roots], allow_unused=True
        )
        for name, gradient in zip(trained, found, strict=True):
            results.values[f"gradient of {name}"] = gradient

    def _fresh(self, x: Any, wide: bool, seed: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        copy = _changed(x.detach(), wide, seed)
        copy = copy.clone() if copy.data_ptr() == x.data_ptr() else copy
        return copy.requires_grad_(x.requires_grad)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    if x.dtype.is_floating_point:
        x, y = x.nan_to_num(0.123), y.nan_to_num(0.123)
    return torch.equal(x, y)


def _entrance(x: Any) -> Any:
    return x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x


def _tensors(given: list[Any]) -> dict[str, Tensor]:
    return {f"argument {i}": x for i, x in enumerate(given) if isinstance(x, Tensor)}


def _changed(x: Tensor, wide: bool, seed: int | None) -> Tensor:
    """In float64, and every entry moved up or down by one unit in its last place."""
    if not x.dtype.is_floating_point:
        return x.clone()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        up = torch.randint(0, 2, x.shape, generator=generator).to(x.device)
        change = (2 * up - 1) * torch.finfo(x.dtype).eps
        x = (x.double() * (1 + change)).to(x.dtype)
    return x.double() if wide and x.dtype in NARROW else x


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _same_random_state(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=False))


def _same(a: _Results, b: _Results) -> bool:
    """Whether two runs gave the same, but for the order of a device's sums."""
    if a.values.keys() != b.values.keys():
        return False
    for name, x in a.values.items():
        y = b.values[name]
        if isinstance(x, Tensor) != isinstance(y, Tensor):
            return False
        if isinstance(x, Tensor):
            if x.shape != y.shape:
                return False
            near = 32 * torch.finfo(x.dtype).eps * largest(x) if x.is_floating_point() else 0.0
            if not torch.allclose(x, y, rtol=0.0, atol=near, equal_nan=True):
                return False
        elif x != y:
            return False
    return True


def _compared(
    runner: _Runner,
    program: Callable[..., Any],
    eager: _Results,
    compiled: _Results,
    exact: _Results,
) -> list[Compared]:
    """A record of every result; what differs is tried with inputs rounded otherwise."""
    errors = {name: _error(eager, exact, name) for name in eager.values}
    rounding = dict.fromkeys(errors, 0.0)
    for seed in range(NUM_ROUNDINGS):
        found = _records(eager, compiled, exact, errors, rounding)
        if not any(x.difference for x in found):
            return found
        near, exact_near = (
            runner.run(program, seed=seed),
            runner.run(program, seed=seed, wide=True),
        )
        for name in errors:
            errors[name] = max(errors[name], _error(near, exact_near, name))
            rounding[name] = max(rounding[name], _error(exact_near, exact, name))
    return _records(eager, compiled, exact, errors, rounding)


def _records(
    eager: _Results,
    compiled: _Results,
    exact: _Results,
    errors: dict[str, float],
    rounding: dict[str, float],
) -> list[Compared]:
    names = dict.fromkeys([*eager.values, *compiled.values])
    found = []
    for name in names:
        x, y, z = (r.values.get(name) for r in (eager, compiled, exact))
        off = _error(compiled, exact, name, eager)
        difference = ""
        if (x is None) != (y is None):
            difference = "eager has none" if x is None else "the compiled program has none"
        elif eager.needs_grad.get(name) != compiled.needs_grad.get(name):
            difference = "one of them requires a gradient"
        elif isinstance(x, Tensor) and isinstance(y, Tensor):
            difference = _of_tensors(
                x, y, z, off, MULTIPLE * errors.get(name, 0.0) + rounding.get(name, 0.0)
            )
        elif x != y:
            difference = "not the same"
        sizes = (_size(x), _size(y), _size(z))
        found.append(Compared(name, *sizes, errors.get(name, 0.0), off, difference))
    return found


def _of_tensors(x: Tensor, y: Tensor, z: Any, off: float, measured: float) -> str:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{y.dtype} {tuple(y.shape)} in place of {x.dtype} {tuple(x.shape)}"
    if not x.dtype.is_floating_point:
        return "" if torch.equal(x, y) else "not the same"
    if not isinstance(z, Tensor):
        return "float64 has none"
    return "" if off <= measured + torch.finfo(x.dtype).eps * largest(z) else "too far off"


def _error(of: _Results, exact: _Results, name: str, where: _Results | None = None) -> float:
    x, z = of.values.get(name), exact.values.get(name)
    y = (where or of).values.get(name)
    if not isinstance(x, Tensor) or not isinstance(z, Tensor) or not isinstance(y, Tensor):
        return 0.0
    return distance(x, z, y) if x.shape == z.shape == y.shape else 0.0


def _size(x: Any) -> float | None:
    if x is None:
        return None
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 else float(x.double().norm())
    return float(x)
