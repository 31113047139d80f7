"""What every operator of the library needs said to torch.library in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.library import Library

NAMESPACE = "torch_streamkl"


def register(
    lib: Library, name: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """An operator: its implementation on every device, its fake, and autocast kept out of it."""
    lib.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=lib)
    op = getattr(torch.ops.torch_streamkl, name).default
    for device in ("CPU", "CUDA"):
        lib.impl(name, _without_autocast(op, device), f"Autocast{device}")


def _without_autocast(op: Any, device: str) -> Any:
    # Inside the operator nothing may be cast again; the public functions cast what a matmul would.
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*args, **kwargs)

    return call


def register_no_double_backward(lib: Library, name: str) -> None:
    """The gradient of ``<name>_backward`` is an error that says what to use."""

    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} can be differentiated once; use impl='reference' for higher derivatives"
        )

    torch.library.register_autograd(f"{NAMESPACE}::{name}_backward", refuse, lib=lib)
