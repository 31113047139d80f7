"""Describes a call's arguments as texts that ranks compare, in one way for all functions.

The texts follow the function's own signature, so an argument that is added later is compared too.
If two ranks have equal texts, their argument checks give the same result: the checks read nothing
that is not in the texts. The values of tensors are not in them, because reading them would wait
for the GPU.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torch_streamkl import checks
from torch_streamkl.compiler_marks import is_compiling
from torch_streamkl.distributed.agreement import together, together_on_mesh

# of an argument: dimensions in which each rank has a size of its own, or None if the argument is
# not compared
Own = Mapping[str, tuple[int, ...] | None]

_signature = functools.cache(inspect.signature)


def bound(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns every argument of a call by its name, those that were left out too.

    Raises TypeError, as the call would, if they do not fit the signature; and what a function has
    refused before it got here (nitrobrew.py), so that all ranks hear of it.
    """
    if (refusal := getattr(function, "refusal", None)) is not None:
        raise refusal
    # a compiler does not trace caches
    signature = inspect.signature if is_compiling() else _signature
    parameters = signature(function).parameters
    takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    for name in kwargs:
        if name not in parameters and not takes_any:
            checks.refuse_option(function.__name__, name, parameters)
    call = signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the default arguments of a function."""
    parameters = _signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


def described(arguments: Mapping[str, Any], own: Own, device: torch.device) -> dict[str, str]:
    """Returns the text of every argument, and of the modes of torch that a call depends on."""
    texts = {}
    for name, x in arguments.items():
        dims = own.get(name, ())
        if dims is not None:
            texts[name] = _text(x, dims)
    texts["grad mode"] = _text(torch.is_grad_enabled())
    is_on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    texts["autocast"] = _text(torch.get_autocast_dtype(device.type) if is_on else None)
    return texts


def check_without_numbers(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises what the call would raise on one rank, on tensors without values."""
    with FakeTensorMode():
        whole = {
            name: torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if isinstance(x, Tensor)
            else x
            for name, x in given.items()
        }
        function(**whole)


def compared(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    own: Own,
    check: Callable[[], Any],
    explain: Callable[[], Any] | None = None,
) -> Any:
    """Returns ``check()`` of a call with DTensors, after the ranks of their mesh compared it.

    What they then compute, exchange or refuse is the same on all of them. A compiler traces the
    same program on every rank. If arguments differ, ``explain()`` raises what a rank would alone;
    by default it tries the call on tensors without values.
    """
    if is_compiling():
        return check()

    def tried() -> None:
        check_without_numbers(function, bound(function, args, kwargs))

    placed = next(x for x in (*args, *kwargs.values()) if isinstance(x, DTensor))
    return together_on_mesh(
        placed.device_mesh,
        placed.device,
        f"{function.__name__} of DTensors",
        lambda: described(bound(function, args, kwargs), own, placed.device),
        check,
        explain or tried,
    )


def on_group(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    group: ProcessGroup,
    own: Own,
    call: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Returns ``function(...)``, or ``call(given)`` of its arguments by name, after the ranks of a
    group compared them.

    All ranks compute, or none does: what one of them refuses is raised on all.
    """
    run = (lambda given: function(**given)) if call is None else call

    def given() -> dict[str, Any]:
        found = dict(bound(function, args, kwargs))
        return found | found.pop("options", {})

    tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    device = next((x.device for x in tensors), torch.device("cpu"))
    name = function.__name__
    return together(
        group, device, name, lambda: described(given(), own, device), lambda: run(given())
    )


def _text(x: object, own_dims: tuple[int, ...] = ()) -> str:
    if isinstance(x, Tensor):
        return _tensor(x, own_dims)
    if x is None or isinstance(x, bool | str | torch.dtype):
        return str(x).removeprefix("torch.")
    if isinstance(x, numbers.Real):  # 1 and 1.0 are the same
        number = float(x)
        return str(int(number)) if number.is_integer() else repr(number)
    if isinstance(x, list | tuple):
        return f"({', '.join(map(_text, x))})"
    return f"a {type(x).__name__}"  # whose text may hold an address, and which is no argument


def _tensor(x: Tensor, own_dims: tuple[int, ...]) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    mesh = getattr(x, "device_mesh", None)
    own = own_dims if mesh is None else ()  # a DTensor's sizes are those of the whole tensor
    if x.is_nested:  # it may have no shape to show
        return f"{x.device.type} {dtype} nested tensor"
    shape = ["any" if dim in own else str(size) for dim, size in enumerate(x.shape)]
    text = f"{x.device.type} {dtype} [{', '.join(shape)}]"
    if mesh is not None:
        placed = ", ".join(map(str, x.placements))  # type: ignore[attr-defined]
        text = f"DTensor {text} ({placed}) on a mesh {tuple(mesh.shape)}"
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    return f"{text} with a gradient" if needs_grad else text
