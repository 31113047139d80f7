"""Makes Inductor call a bound operator instead of the dispatcher.

A compiled graph calls a custom operator through the dispatcher, which passes some thirty arguments
to Python and back. For short kernels that is most of the time. With this module it calls an object
of `torch_streamkl.attention.bound_op` instead, which knows everything but the tensors and their
varying sizes. The generated code builds that object from literals, so that it works in another
process, too, where Inductor finds the code in its caches.

Inductor's table for such code, CUSTOM_EXTERN_KERNEL_CODEGEN, is private. If it is missing, with
the C++ wrapper, and with options that vary, the operator is called.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch_streamkl.attention import ops
from torch_streamkl.fx_passes.fx_utils.torch_names import has
from torch_streamkl.registration import WITHOUT_AUTOGRAD

FORWARD, BACKWARD = "CompiledForward", "CompiledBackward"
IMPORT = f"from torch_streamkl.attention.bound_op import {BACKWARD}, {FORWARD}"
WITHOUT_TABLE = (
    "this torch's Inductor calls attention_kl by the dispatcher: short steps take longer"
)
NUM_GRADIENT_TENSORS = 3  # before the tensors of the forward: grad and both statistics


NEEDED = {
    "torch._inductor.codegen.custom_extern_kernel_codegen": (
        "CUSTOM_EXTERN_KERNEL_CODEGEN",
        "CustomCodegen",
    ),
    "torch._inductor.codegen.wrapper": ("ExternKernelAllocLine",),
    "torch._inductor.virtualized": ("V",),
}


def can_install() -> bool:
    """Whether this torch has what `install` needs; it imports none of it."""
    return all(has(module, *names) for module, names in NEEDED.items())


@functools.cache
def install() -> bool:
    """Lets Inductor write bound operators into its graphs; False if it has no table for that."""
    if not can_install():
        return False
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import (
            CUSTOM_EXTERN_KERNEL_CODEGEN,
            CustomCodegen,
        )
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine  # noqa: F401
        from torch._inductor.virtualized import V  # noqa: F401
    except ImportError:
        return False
    for operator, kind in ((ops.attention_kl, FORWARD), (ops.attention_kl_backward, BACKWARD)):
        write = functools.partial(_write, kind)
        name = f"torch.ops.{WITHOUT_AUTOGRAD[operator]}"
        CUSTOM_EXTERN_KERNEL_CODEGEN[name] = CustomCodegen(python=write)
    return True


def _fixed_arguments(node: Any) -> list[str] | None:
    """Writes the source of the operator's positional arguments; None if an option varies."""
    from torch._inductor.virtualized import V

    arguments: list[str] = list(node.codegen_args())
    if node.codegen_kwargs() or V.graph.cpp_wrapper:
        return None
    first = 0 if len(node.outputs) == ops.NUM_RESULTS else NUM_GRADIENT_TENSORS + 1
    options = arguments[first + ops.NUM_TENSORS :]
    return arguments if all(_is_literal(x) for x in options) else None


def _varies(node: Any) -> bool:
    """Whether a tensor's size or stride does."""
    return not all(_is_number(n) for x in node.inputs for n in (*x.get_size(), *x.get_stride()))


def _is_number(size: Any) -> bool:
    return isinstance(size, int) or bool(getattr(size, "is_Integer", False))


def _is_literal(source: str) -> bool:
    try:
        ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return False
    return True


def _given(arguments: Sequence[str]) -> tuple[list[str], tuple[Any, ...]]:
    """Splits arguments into tensors, without trailing None, and options."""
    tensors = list(arguments[: ops.NUM_TENSORS])
    while tensors and tensors[-1] == "None":
        tensors.pop()
    return tensors, tuple(ast.literal_eval(x) for x in arguments[ops.NUM_TENSORS :])


def _write(kind: str, node: Any, writeline: Callable[[str], None]) -> None:
    from torch._inductor.virtualized import V

    arguments = _fixed_arguments(node)
    if arguments is None:
        _write_operator(node)
        return
    gradients: list[str] = []
    flags: tuple[Any, ...] = ()
    if kind == BACKWARD:
        gradients, (needs_grad, *arguments) = (
            arguments[:NUM_GRADIENT_TENSORS],
            arguments[NUM_GRADIENT_TENSORS:],
        )
        flags = (tuple(ast.literal_eval(needs_grad)),)
    tensors, options = _given(arguments)
    made_of = (options, len(tensors), _varies(node), *flags)
    wrapper = V.graph.wrapper_code  # that of a partition writes no header
    root = wrapper.get_root_graph() if hasattr(wrapper, "get_root_graph") else wrapper
    if IMPORT not in root.header.getvalue():
        root.header.writeline(IMPORT)
    site = f"streamkl_{node.get_name()}"
    root.header.writeline(f"{site} = {kind}{made_of!r}")
    writeline(f"{node.get_name()} = {site}({', '.join([*gradients, *tensors])})")


def _write_operator(node: Any) -> None:
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    wrapper = V.graph.wrapper_code
    wrapper.writeline(ExternKernelAllocLine(wrapper, node))
