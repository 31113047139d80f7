"""Triton's interpreter has to be chosen before a kernel is imported: tests of it run in processes
of their own, which tests/test_in_the_interpreter.py starts.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETED, reason="is that process")
# numpy warns where a GPU computes infinities and NaN silently
quiet = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning",
    "ignore:overflow:RuntimeWarning",
    "ignore:divide by zero:RuntimeWarning",
)


def _set_up_once_a_launch() -> None:
    """Calls of helpers repeat what the interpreter does to triton.language before a launch.

    That is half of its time. What it does to the same modules twice in a launch is the same.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()

    def patch_once(fn: Any) -> Any:
        modules = frozenset(m.__name__ for m in fn.__globals__.values() if m is tl or m is tl.core)
        if modules in patched:
            return None  # helpers restore nothing
        patched.add(modules)
        return patch(fn)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


def _describe_types_once() -> None:
    """A tile's type is made again for every operation, and its shape thrice: half of what is left.

    What a type has depends on its name alone, in which the shape and the element's type are.
    """
    from triton.language import core
    from triton.runtime import interpreter

    numpy_type = interpreter._get_np_dtype
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def dtype_once(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = numpy_type(type)
        return dtypes[type.name]

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            own = ("handle", "type", "dtype")
            tensors[type.name] = {k: x for k, x in vars(self).items() if k not in own}
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    interpreter._get_np_dtype = dtype_once
    core.block_type.__init__, core.tensor.__init__ = type_once, tensor_once


if INTERPRETED:
    _set_up_once_a_launch()
    _describe_types_once()
