"""Triton's interpreter has to be chosen before a kernel is imported: tests of it run in processes
of their own, which tests/kernels/test_in_the_interpreter.py starts.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETED, reason="runs outside of the interpreter")
# numpy warns where a GPU computes infinities and NaN silently
quiet = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning",
    "ignore:overflow:RuntimeWarning",
    "ignore:divide by zero:RuntimeWarning",
)


def _set_up_once_a_launch():
    """Calls of helpers repeat what the interpreter does to triton.language before a launch.

    That is half of its time. What it does to the same modules twice in a launch is the same.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()
    modules_of = {}

    def patch_once(fn):
        if fn not in modules_of:
            found = (m.__name__ for m in fn.__globals__.values() if m is tl or m is tl.core)
            modules_of[fn] = frozenset(found)
        if modules_of[fn] in patched:
            return None  # helpers restore nothing
        patched.add(modules_of[fn])
        return patch(fn)

    def launch_anew(executor, *args, **kwargs):
        patched.clear()
        launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


def _describe_types_once():
    """A tile's type is made again for every operation, and its shape thrice: half of what is left.

    What a type has depends on its name alone, in which the shape and the element's type are.
    """
    from triton.language import core
    from triton.runtime import interpreter

    numpy_type = interpreter._get_np_dtype
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    dtypes = {}
    types = {}
    tensors = {}

    def dtype_once(type):
        if type.name not in dtypes:
            dtypes[type.name] = numpy_type(type)
        return dtypes[type.name]

    def type_once(self, element_ty, shape):
        key = (element_ty.name, *shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor_once(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            own = ("handle", "type", "dtype")
            tensors[type.name] = {k: x for k, x in vars(self).items() if k not in own}
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    interpreter._get_np_dtype = dtype_once
    core.block_type.__init__, core.tensor.__init__ = type_once, tensor_once


def _operands_of_one_type_stay():
    """Most operands have one type already: what would make it so costs more than the operation."""
    from triton.language import core, semantic

    check, broadcast = (
        semantic.TritonSemantic.binary_op_type_checking_impl,
        semantic.TritonSemantic.broadcast_impl_value,
    )

    def check_types(
        self, lhs, rhs, allow_lhs_ptr = False, allow_rhs_ptr = False,
        arithmetic_check = True, div_or_mod = False,
    ):  # fmt: skip
        if type(lhs) is type(rhs) is core.tensor and not div_or_mod:
            if lhs.dtype.name == rhs.dtype.name and not lhs.dtype.is_ptr():
                return broadcast_shapes(self, lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_shapes(self, lhs, rhs):
        if lhs.type.name == rhs.type.name:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.TritonSemantic.binary_op_type_checking_impl = check_types
    semantic.TritonSemantic.broadcast_impl_value = broadcast_shapes


def _integers_do_not_overflow():
    """Every sum and product of integers is made a second time, with 64 bits, to compare.

    None of tensors as small as those of tests reaches 32 bits; `make test-slow` compares.
    """
    from triton.runtime import interpreter

    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


if INTERPRETED:
    _set_up_once_a_launch()
    _describe_types_once()
    _operands_of_one_type_stay()
    if os.environ.get("COMPARE_INTEGERS") != "1":
        _integers_do_not_overflow()
