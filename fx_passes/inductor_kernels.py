"""Makes Inductor launch our kernels itself, where a call of an operator would be slow.

- With ``cpp_wrapper=True`` a compiled graph is C++, and an AOTInductor package is loaded into a
  process without our Python.
- LM heads with few tokens take less time on a GPU than the Python of their operator takes.

So the lowering of such an operator is not a call of it. Instead the steps of its implementation
are traced (torch_streamkl/runtime/trace.py). They become Inductor's allocations, Inductor's
operations, and launches of our portable kernels by entries (torch_streamkl/kernels/entries.py),
which Inductor treats as kernels of a user.

The classes of Inductor that this needs are private. If one is missing or looks different, or if an
implementation cannot be traced, the operator is called, and the log says why.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_streamkl.attention import ops
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.registration import WITHOUT_AUTOGRAD
from torch_streamkl.stored_gradients import scale_stored, scaled_here

log = logging.getLogger("torch_streamkl")
NOTE = {
    True: "on a GPU this graph's C++ launches the portable kernels; where it calls Python, a "
    "warning says so when the graph is lowered",
    False: "with this torch, C++ calls the Python of our operators",
}


@functools.cache
def install() -> bool:
    """Lowers our operators to their steps; False if Inductor's parts differ."""
    try:
        from torch._inductor.lowering import fallback_handler, lowerings
        from torch._inductor.virtualized import V  # noqa: F401

        _check_inductor()
    except (ImportError, AttributeError, TypeError):
        return False
    for operator, run in (
        (ops.attention_kl, ops.run_forward),
        (ops.attention_kl_backward, ops.run_backward),
        (linear_ops.linear_kl, linear_ops.run_forward),
        (linear_ops.linear_kl_backward, linear_ops.run_backward),
        (linear_ops.linear_kl_sum, linear_ops.run_sum),
    ):
        call = WITHOUT_AUTOGRAD[operator]
        lowerings[call] = functools.partial(_lower, call, run, fallback_handler(call))
    lowerings[WITHOUT_AUTOGRAD[scale_stored]] = _lower_scaled
    return True


def _check_inductor() -> None:
    """Raises if the private parts of Inductor that we use have changed."""
    from torch._inductor import ir
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.kernel.mm import aten_mm

    kernel = ir.UserDefinedTritonKernel
    made = inspect.signature(kernel.__init__)
    options = {"launch_kwargs": ()} if "launch_kwargs" in made.parameters else {}  # torch 2.14
    made.bind(None, kernel_idx=0, grid=(), tma_descriptor_metadata={}, kernel_args={}, **options)
    inspect.signature(ir.MutationOutput.__init__).bind(None, None, None, None)
    inspect.signature(ir.ir_node_to_tensor).bind(None)
    define = PythonWrapperCodegen.define_user_defined_triton_kernel
    names = ("kernel", "configs", "kwargs", "restore_value_args", "reset_to_zero_args", "grids")
    if tuple(inspect.signature(define).parameters)[1:7] != names:
        raise TypeError("another way to define kernels")
    for part in (kernel.get_kernel_and_metadata, PythonWrapperCodegen.define_kernel, aten_mm.bind):
        inspect.signature(part)
    inspect.signature(ir.ReinterpretView).bind(data=None, layout=None)
    if not issubclass(ir.DonatedBuffer, ir.InputBuffer):
        raise TypeError("another way to give buffers away")


def _lower(
    operator: Any, run: Callable[..., Any], fallback: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Returns the lowering of an operator whose implementation is ``run``."""
    given = _by_name(operator, args, kwargs)
    is_attention = "student_q" in given
    device = given["student_q" if is_attention else "student_hidden"].get_device()
    of_cpp = is_needed()
    if of_cpp:
        is_lowered = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    else:  # attention is a bound operator (inductor_calls.py)
        is_lowered = launches_kernels(device) and not is_attention
    if not is_lowered:
        return fallback(*args, **kwargs)
    try:
        from torch_streamkl.fx_passes import inductor_lowering as of

        of_heads = of.linear_implementation if of_cpp else of.short_implementation
        implementation = of.attention_implementation if is_attention else of_heads
        lowering = of.Lowering(given)
        build = lowering.traced(run, implementation)
    except (ImportError, AttributeError, NotImplementedError) as reason:
        if of_cpp:
            log.warning("a graph of C++ calls the Python of %s: %s", operator, reason)
        return fallback(*args, **kwargs)
    is_checked = given.get("labels") is not None and "statistics" not in given
    if is_checked and not of_cpp:  # as the operator's Python does
        lowering.check_labels()
    return build()


def _lower_scaled(stored: Any, factor: Any) -> Any:
    """Lowers the scaling of a stored gradient: in place if its buffer dies and nothing adds to it.

    A kernel in place moves no bytes for a factor of 1: a weight's gradient takes as long as a
    matmul of few tokens. If something is added, Inductor does both in one pass.
    """
    from torch._inductor.lowering import lowerings, to_dtype

    from torch_streamkl.fx_passes import inductor_lowering as of

    given = {"stored": stored, "factor": factor}
    if of.may_overwrite(stored) and launches_kernels(stored.get_device()):
        try:
            lowering = of.Lowering(given, written=("stored",))
            # Inductor passes a tensor without dimensions on a CPU as a number
            return lowering.traced(lambda x, by: (scaled_here(x, by.view(1)),))()[0]
        except NotImplementedError as reason:
            log.debug("a stored gradient is multiplied by Inductor: %s", reason)
    product = lowerings[torch.ops.aten.mul.Tensor](stored, factor)
    return to_dtype(product, stored.get_dtype())


def launches_kernels(device: torch.device) -> bool:
    """Returns whether graphs of Python launch kernels: of LM heads with few tokens, and scalings.

    On an H100 the Python of a call takes some 0.9 ms, and with 512 tokens all that the GPU does
    0.8 (bench/notes/host.md).
    """
    return device.type == "cuda"


def is_needed() -> bool:
    """Returns whether the graph becomes C++, from which a call of Python is slow."""
    from torch._inductor.virtualized import V

    return bool(V.graph.cpp_wrapper)


def _by_name(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments, in the order of the schema."""
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {x.name: given.get(x.name, x.default_value) for x in operator._schema.arguments}
