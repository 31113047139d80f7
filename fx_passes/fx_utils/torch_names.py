"""Imports, in one place, every private part of torch that the rewrite cannot do without.

A release of torch may move any of them. The error then names the part, and what to do. Parts that
the rewrite can do without are imported where they are used, and skipped if they are missing
(docs/reference/compatibility.md). This module is imported first, so that a failed import leaves
nothing half-initialised.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torch_streamkl.version import __version__


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Returns an ImportError that says what to do, in place of one that names what is missing."""
    try:
        yield
    except (ImportError, AttributeError) as missing:
        raise ImportError(
            f"torch_streamkl {__version__} rewrites graphs with a private part of torch that "
            f"torch {torch.__version__} does not have where it was: {missing}. Install a release "
            "of torch that docs/reference/compatibility.md lists, or a newer torch_streamkl. "
            "Until then, compile "
            "without the rewrite; attention_kl and linear_kl do not need it"
        ) from missing


with _explained():
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.exc import ShortenTraceback
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing, counters
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import (
        disable_proxy_modes_tracing,
        get_proxy_mode,
        get_proxy_slot,
        make_fx,
        track_tensor,
    )
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
        ShapeEnv,
        free_unbacked_symbols,
        statically_known_true,
    )
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        is_traceable_wrapper_subclass,
    )
    from torch.utils._pytree import (
        key_get,
        tree_flatten,
        tree_leaves,
        tree_map,
        tree_unflatten,
    )
    from torch.utils._sympy.functions import FloorDiv

    for _owner, _name in (
        (ShapeEnv, "suppress_guards"),
        (ShapeEnv, "ignore_fresh_unbacked_symbols"),
        (ShapeEnv, "_rename_unbacked_to"),
        (FakeTensorMode, "epoch"),
        (torch.UntypedStorage, "_cdata"),
    ):
        getattr(_owner, _name)


def later(module: str, name: str) -> Any:
    """Imports a name from a slow part of torch when it is needed."""
    with _explained():
        return getattr(importlib.import_module(module), name)


def optional(module: str, name: str) -> Any:
    """Returns an optional name of a torch module, or None if it is missing."""
    try:
        owner = importlib.import_module(module)
        return getattr(owner, name, None) or importlib.import_module(f"{module}.{name}")
    except ImportError:
        return None


def has(module: str, *names: str) -> bool:
    """Whether a module of torch has these names, without importing a slow module for that.

    A graph from Inductor's caches needs none of Inductor's own modules, which take a second to
    import. So the source of a module that is not imported yet is searched.
    """
    imported = sys.modules.get(module)
    if imported is not None:
        return all(getattr(imported, name, None) is not None for name in names)
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return False
    if spec is None or spec.origin is None:
        return False
    source = Path(spec.origin).read_text()
    return all(re.search(rf"\b{name}\b", source) for name in names)


__all__ = [
    "ELEMENTWISE_TYPE_PROMOTION_KIND",
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "GuardOnDataDependentSymNode",
    "ShortenTraceback",
    "TorchDispatchMode",
    "_disable_current_modes",
    "_disable_saved_tensors_hooks_during_tracing",
    "counters",
    "disable_proxy_modes_tracing",
    "elementwise_dtypes",
    "enable_python_dispatcher",
    "free_unbacked_symbols",
    "get_proxy_mode",
    "get_proxy_slot",
    "get_unwrapped",
    "has",
    "is_functorch_wrapped_tensor",
    "is_traceable_wrapper_subclass",
    "key_get",
    "later",
    "make_fx",
    "optional",
    "statically_known_true",
    "track_tensor",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unset_fake_temporarily",
]
