"""Runs a program from the same state: eager, compiled, in float64, and with other roundings.

Arguments are copied for every run. Everything else that the program reaches is restored after it.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_streamkl.fx_passes.fx_utils.torch_names import tree_flatten, tree_map, tree_unflatten
from torch_streamkl.fx_passes.validation.gradient_terms import random_signs
from torch_streamkl.fx_passes.validation.running import (
    LOWEST,
    NARROW,
    default_dtype,
    modes_restored,
    weights,
)
from torch_streamkl.fx_passes.verification.program_state import reached_from
from torch_streamkl.fx_passes.verification.rounding import PerturbRounding
from torch_streamkl.fx_passes.verification.values import Results, flattened, output_parts

FREED = "no gradient of the outputs is compared: the program ran backward() through them itself"


class InFloat64(TorchFunctionMode):
    """Computes in float64 where code asks for a narrower dtype; ``finite`` replaces -inf."""

    def __init__(self, finite: bool = False) -> None:
        super().__init__()
        self.finite = finite

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double

        def wide(x: Any) -> Any:
            if self.finite and isinstance(x, float) and x == -math.inf:
                return LOWEST
            return torch.float64 if isinstance(x, torch.dtype) and x in NARROW else x

        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


@contextlib.contextmanager
def _in_float64(finite: bool) -> Iterator[None]:
    with default_dtype(torch.float64), InFloat64(finite):
        yield


class Runner:
    """Runs a program on fresh arguments, with all else as it was at the beginning."""

    def __init__(self, program: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.given, self.shape = tree_flatten((args, kwargs))
        others, self.holders, self.iterators = reached_from(program, self.given)
        self.others = others
        self.data = {name: x.data for name, x in others.items()}
        self.flags = {name: x.requires_grad for name, x in others.items() if x.is_leaf}
        self.grads = {n: x.grad for n, x in others.items() if x.is_leaf}
        self.on_meta = [n for n, x in {**_named(self.given), **others}.items() if x.is_meta]
        self.takes_gradients = True
        self.notes: list[str] = []
        if not self.on_meta:
            self.saved = {name: x.detach().clone() for name, x in others.items()}
            self.saved_grads = {
                n: None if g is None else g.detach().clone() for n, g in self.grads.items()
            }
            self.random = _random_state()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores everything as it was, whatever happens."""
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for holder in self.holders:
            holder.restore()
        for name, x in self.others.items():
            if x.is_leaf and x.requires_grad != self.flags.get(name, x.requires_grad):
                x.requires_grad_(self.flags[name])
            if name in self.grads:
                x.grad = None
            x.data = self.data[name]
            if not _same_bits(x.data, self.saved[name]):
                x.data.copy_(self.saved[name])
            grad, copy = self.grads.get(name), self.saved_grads.get(name)
            if grad is not None and copy is not None:
                if not _same_bits(grad.detach(), copy):
                    grad.data.copy_(copy)
                x.grad = grad
        _set_random_state(self.random)

    def draws_random(self) -> bool:
        """Returns whether the last run drew random numbers, so that no two runs are equal."""
        now = _random_state()
        same = (torch.equal(x, y) for x, y in zip(self.random[0], now[0], strict=False))
        return not all(same) or now[1] != self.random[1] or not _same_numpy(now[2], self.random[2])

    def run(
        self,
        program: Callable[..., Any],
        *,
        wide: bool = False,
        finite: bool = False,
        seed: int | None = None,
        moved: int | None = None,
        compiled: bool = False,
    ) -> Results:
        """Runs a program, and returns everything that it gives.

        With ``seed`` operations are rounded otherwise, with ``moved`` the arguments are.
        """
        self._restore()
        copied = [*self.given, *(self.others.values() if wide else ())]
        copies = _fresh_copies(copied, wide, finite)
        fresh = [self._same_if_reached(x, c) for x, c in zip(self.given, copies, strict=False)]
        if moved is not None:
            _move(fresh, moved)
        if wide:
            self._widen(copies[len(self.given) :])
        args, kwargs = tree_unflatten([_entrance(x) for x in fresh], self.shape)
        tensors = {**self.others, **_named(fresh)}
        kept = {} if wide else self.saved
        before = {n: kept[n] if n in kept else x.detach().clone() for n, x in tensors.items()}
        grads = {n: None if x.grad is None else x.grad.clone() for n, x in _leaves(tensors)}
        flat = dict(flattened((args, kwargs), "argument"))
        # what torch.compile made inside of the program runs as it was written
        stance = "default" if compiled else "force_eager"
        with contextlib.ExitStack() as modes:
            modes.enter_context(modes_restored())
            modes.enter_context(torch.compiler.set_stance(stance))
            rounded = contextlib.nullcontext() if seed is None else PerturbRounding(seed)
            with _in_float64(finite) if wide else contextlib.nullcontext(), rounded:
                output = program(*args, **kwargs)
            found = self._gradients(output, tensors, rounded)
        results = Results()
        for name, part in output_parts(output):
            results.add(name, part)
        for name, leaf in _all_parts(output):
            results.needs_grad[name] = isinstance(leaf, Tensor) and leaf.requires_grad
        for name, gradient in found.items():
            results.add(f"gradient of {name}", gradient)
        self._add_changes(results, tensors, before, grads)
        self._add_changed_arguments(results, flat, (args, kwargs))
        return results

    def _gradients(
        self, output: Any, leaves: Mapping[str, Tensor], rounded: Any
    ) -> dict[str, Tensor | None]:
        requires_grad = {n: x for n, x in leaves.items() if x.requires_grad}
        parts = [x for _, x in _all_parts(output)]
        roots = [x for x in parts if isinstance(x, Tensor) and x.requires_grad]
        if not requires_grad or not roots or not self.takes_gradients:
            return {}
        given = [weights(x) for x in roots]  # the same in every run: in no mode
        try:
            with rounded:
                found = torch.autograd.grad(
                    roots, list(requires_grad.values()), given, allow_unused=True
                )
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            self.takes_gradients = False
            self.notes.append(FREED)
            return {}
        return dict(zip(requires_grad, found, strict=True))

    def _add_changes(
        self,
        results: Results,
        tensors: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
        grads: Mapping[str, Tensor | None],
    ) -> None:
        """Adds what was written to, accumulated, replaced and appended."""
        for name, x in tensors.items():
            if not _same_bits(x.detach(), before[name]):
                results.add(f"{name} after", x.detach())
        for name, x in _leaves(tensors):
            old, new = grads.get(name), x.grad
            if (old is None) != (new is None) or not (
                old is None or new is None or _same_bits(old, new)
            ):
                results.add(f"{name}.grad after", new)
        for holder in self.holders:
            for name, value in holder.changed():
                results.changed.append(name)
                results.add(f"{name} after", value)

    def _add_changed_arguments(self, results: Results, before: dict[str, Any], given: Any) -> None:
        """Records entries of list and dict arguments that the program replaced."""
        after = dict(flattened(given, "argument"))
        for name in dict.fromkeys([*before, *after]):
            old, new = before.get(name), after.get(name)
            if isinstance(old, Tensor) and old is new:
                continue
            if old is not new and (isinstance(new, Tensor) or old != new):
                results.changed.append(name)
                results.add(f"{name} after", new)

    def _same_if_reached(self, given: Any, copy: Any) -> Any:
        """Returns the argument itself if the program also reaches it by another name, else its
        copy.
        """
        return given if any(given is x for x in self.others.values()) else copy

    def _widen(self, copies: list[Any]) -> None:
        for (name, x), copy in zip(self.others.items(), copies, strict=True):
            grad = self.grads.get(name)
            if name in self.grads:
                x.grad = None
            x.data = copy.detach()
            if grad is not None and x.is_leaf:
                x.grad = _wide(grad.detach(), False)


def _all_parts(output: Any) -> Iterator[tuple[str, Any]]:
    for name, part in output_parts(output):
        yield from flattened(part, name)


def _named(given: list[Any]) -> dict[str, Tensor]:
    return {f"argument {i}": x for i, x in enumerate(given) if isinstance(x, Tensor)}


def _leaves(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name, x) for name, x in tensors.items() if x.is_leaf)


def _entrance(x: Any) -> Any:
    """Returns a view of an inner tensor, so that the program may write to it."""
    is_inner = isinstance(x, Tensor) and getattr(x, "streamkl_inner", False)
    return x.view_as(x) if is_inner else x


def _fresh_copies(given: list[Any], wide: bool, finite: bool) -> list[Any]:
    """Copies of tensors; those that are one, or share memory, do so again."""
    made: dict[int, Tensor] = {}
    memory: dict[tuple[int, torch.dtype], Tensor] = {}
    shared = _shared_memory(given)
    for x in given:
        if not isinstance(x, Tensor) or id(x) in made:
            continue
        data = x.detach()
        key = _memory_of(data)
        if key is not None and key in shared:
            if key not in memory:
                whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(data.untyped_storage())
                memory[key] = _wide(whole, finite) if wide else whole.clone()
            copy = memory[key].as_strided(data.shape, data.stride(), data.storage_offset())
        else:
            copy = _wide(data, finite) if wide else data.clone()
        copy = copy.detach()
        if x.is_leaf and x.grad is not None:
            grad = x.grad.detach()
            copy.grad = _wide(grad, finite) if wide else grad.clone()
        copy.requires_grad_(x.requires_grad)
        copy.streamkl_inner = x.requires_grad and not x.is_leaf  # type: ignore[attr-defined]
        made[id(x)] = copy
    return [made.get(id(x), x) for x in given]


def _move(tensors: list[Any], seed: int) -> None:
    """Moves every number of the arguments up or down by one rounding."""
    for x in tensors:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype in (*NARROW, torch.float64):
            sign = random_signs(x, torch.Generator().manual_seed(seed))
            x.data.add_(x.data * sign * torch.finfo(x.dtype).eps)


def _memory_of(x: Tensor) -> tuple[int, torch.dtype] | None:
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:
        return None
    return x.untyped_storage().data_ptr(), x.dtype


def _shared_memory(given: list[Any]) -> set[Any]:
    owners: dict[Any, set[int]] = {}
    for x in given:
        if isinstance(x, Tensor) and (key := _memory_of(x.detach())) is not None and key[0]:
            owners.setdefault(key, set()).add(id(x))
    return {key for key, ids in owners.items() if len(ids) > 1}


def _wide(x: Tensor, finite: bool) -> Tensor:
    x = x.double() if x.dtype in NARROW else x.clone()
    return x.masked_fill(x == -math.inf, LOWEST) if finite and x.is_floating_point() else x


def _same_bits(x: Tensor, y: Tensor) -> bool:
    if x.is_nested or y.is_nested:
        return x is y or all(map(_same_bits, x.unbind(), y.unbind()))
    if x.layout is not torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if x.is_complex():
        x, y = torch.view_as_real(x), torch.view_as_real(y)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    if not x.dtype.is_floating_point:
        return torch.equal(x, y)
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def _random_state() -> tuple[list[Tensor], Any, Any]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    return states, random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_state(saved: tuple[list[Tensor], Any, Any]) -> None:
    states, of_python, of_numpy = saved
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _same_numpy(a: Any, b: Any) -> bool:
    if a is None or b is None:  # it was imported meanwhile
        return True
    return a[0] == b[0] and bool((a[1] == b[1]).all()) and a[2:] == b[2:]
