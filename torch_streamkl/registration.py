"""Registers operators with torch.library: the code that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.library import Library

from torch_streamkl import flop_counts

NAMESPACE = "torch_streamkl"
# Of each operator the one that compiled graphs call. Autograd is done with when a graph is traced,
# but the dispatcher would still pass all arguments through the Python that registers it, and back:
# 33 of the 257 us of CPU time of a compiled step, without its kernels.
WITHOUT_AUTOGRAD: dict[Any, Any] = {}


def register(
    lib: Library,
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
    compiled: Callable[..., Any] | None = None,
) -> None:
    """Registers an operator: its implementation on every device, fake and FLOP count.

    ``compiled`` is the implementation in graphs that Inductor compiles, where it is another.
    """
    schema = str(_operator(name)._schema).removeprefix(f"{NAMESPACE}::")
    lib.define(f"_{schema}", tags=tuple(_operator(name).tags))
    WITHOUT_AUTOGRAD[_operator(name)] = _operator(f"_{name}")
    for each, function in ((name, implementation), (f"_{name}", compiled or implementation)):
        lib.impl(each, _without_dual_numbers(function, name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{each}", fake, lib=lib)
        for device in ("CPU", "CUDA"):
            lib.impl(each, _without_autocast(_operator(each), device), f"Autocast{device}")
        flop_counts.add(getattr(torch.ops.torch_streamkl, each), flops)


def _without_dual_numbers(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps an implementation to raise if the dispatcher would drop a tangent silently.

    Dynamo does not compile again for a level of dual numbers that is entered later.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            raise NotImplementedError(
                f"{name} has no forward-mode derivative, and runs inside of a level of dual "
                "numbers; enter the level before the program is compiled, or use backward()"
            )
        return function(*args, **kwargs)

    return call


def _operator(name: str) -> Any:
    return getattr(torch.ops.torch_streamkl, name).default


def _without_autocast(op: Any, device: str) -> Any:
    # Inside the operator nothing may be cast again; the public functions cast what a matmul would.
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*args, **kwargs)

    return call


def without_autocast(function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function(*args)`` as the dispatcher runs an operator, on a device of any type."""
    if not torch._C._is_any_autocast_enabled():
        return function(*args)
    with torch._C._DisableAutocast():
        return function(*args)


def register_no_double_backward(lib: Library, name: str) -> None:
    """Makes the gradient of ``<name>_backward`` an error that says what to use."""

    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} can be differentiated once; use impl='reference' for higher derivatives"
        )

    torch.library.register_autograd(f"{NAMESPACE}::{name}_backward", refuse, lib=lib)
