"""Registers operators with torch.library: the code that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

from torch_streamkl import flop_counts

NAMESPACE = "torch_streamkl"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
# Of each operator the one that compiled graphs call. Autograd is done with when a graph is traced,
# but the dispatcher would still pass all arguments through the Python that registers it, and back:
# 33 of the 257 us of CPU time of a compiled step, without its kernels.
WITHOUT_AUTOGRAD: dict[Any, Any] = {}


def define(lib: Library, schema: str, tags: Sequence[torch.Tag] = TAGS) -> Any:
    """Defines an operator by its schema, and returns it."""
    lib.define(schema, tags=tags)
    return _operator(schema.partition("(")[0])


def register(
    lib: Library,
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[[dict[str, Any]], int] = lambda given: 0,
    compiled: Callable[..., Any] | None = None,
) -> None:
    """Registers an operator: its implementation on every device, fake and FLOP count.

    ``flops`` counts those of a call from its arguments by name, with shapes in place of tensors.
    ``compiled`` is the implementation in graphs that Inductor compiles, where it is another.
    """
    names = [argument.name for argument in _operator(name)._schema.arguments]

    def formula(*args: Any, **kwargs: Any) -> int:
        return flops({**dict(zip(names, args, strict=False)), **kwargs})

    schema = str(_operator(name)._schema).removeprefix(f"{NAMESPACE}::")
    lib.define(f"_{schema}", tags=tuple(_operator(name).tags))
    WITHOUT_AUTOGRAD[_operator(name)] = _operator(f"_{name}")
    for each, function in ((name, implementation), (f"_{name}", compiled or implementation)):
        lib.impl(each, _without_dual_numbers(function, name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{each}", fake, lib=lib)
        for device in ("CPU", "CUDA"):
            lib.impl(each, _without_autocast(_operator(each), device), f"Autocast{device}")
        flop_counts.add(getattr(torch.ops.torch_streamkl, each), formula)


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


def register_autograd(
    lib: Library, name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Registers the gradient of an operator.

    Where ``<name>_backward`` computes it, the gradient of that is an error which says what to use.
    """
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=lib
    )
    if hasattr(torch.ops.torch_streamkl, f"{name}_backward"):
        refuse_autograd(
            lib,
            f"{name}_backward",
            f"{name} can be differentiated once; use impl='reference' for higher derivatives",
        )


def register_recomputing(
    lib: Library,
    name: str,
    num_tensors: int,
    saved: slice,
    kept: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Sequence[Tensor | None]] | None = None,
) -> None:
    """Registers the gradient of an operator of tensors, then options, whose first result has one.

    ``<name>_backward(grad, *results[saved], needs_grad, *tensors, *options)`` computes those to
    the first tensors. It gets the operator's tensors, or ``kept(inputs, results)``.
    """
    compute = _operator(f"{name}_backward")
    num_grads = len(compute._schema.returns)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*results[1:])
        tensors = inputs[:num_tensors] if kept is None else kept(inputs, results)
        ctx.save_for_backward(*results[saved], *tensors)
        ctx.options = inputs[num_tensors:]
        ctx.set_materialize_grads(False)

    def autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        given = ctx.saved_tensors
        results, tensors = given[:-num_tensors], given[-num_tensors:]
        needs = list(ctx.needs_input_grad[:num_grads])
        found: list[Any] = [None] * (num_tensors + len(ctx.options))
        if grad is not None and any(needs):
            grads = compute(grad, *results, needs, *tensors, *ctx.options)
            found[:num_grads] = only_needed(grads, needs)
        return tuple(found)

    register_autograd(lib, name, autograd, setup_context)


def refuse_autograd(lib: Library, name: str, message: str) -> None:
    """Makes the gradient of an operator raise ``message``."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", _refusal(message), lib=lib)


def refuse_vmap(lib: Library, *names: str, message: str) -> None:
    """Makes vmap over operators raise ``message``."""
    for name in names:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _refusal(message), lib=lib)


def mapped_tensors(
    names: Iterable[str], in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> Iterator[tuple[int, str, Tensor, int | None]]:
    """Yields position, name and value of each tensor of a call under vmap, and its mapped
    dimension.
    """
    for index, (name, x, dim) in enumerate(zip(names, args, in_dims, strict=False)):
        if isinstance(x, Tensor):
            yield index, name, x, dim


def refuse_mapped(name: str, dim: int | None, others: str) -> None:
    """Raises if vmap maps over an argument that may not vary."""
    if dim is not None:
        raise NotImplementedError(f"vmap over {name} is not supported; map over {others}")


def _refusal(message: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(message)

    return refuse


# ------------------------------------------------------------------------ gradients of an operator
# An operator's schema has a tensor for every gradient: an empty one for a gradient that its output
# mask, ``needs_grad``, does not ask for.


def without_none(grads: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Returns gradients as an operator does."""
    return tuple(like.new_empty(0) if g is None else g for g in grads)


def only_needed(grads: Iterable[Tensor], needs_grad: Iterable[bool]) -> list[Tensor | None]:
    """Returns an operator's gradients as autograd takes them."""
    return [g if need else None for g, need in zip(grads, needs_grad, strict=False)]


def fake_gradients(
    inputs: Sequence[Tensor | None],
    needs_grad: Iterable[bool],
    like: Tensor,
    make: Callable[[Tensor], Tensor] = torch.empty_like,
) -> tuple[Tensor, ...]:
    """Returns what a fake call does, made from the inputs; what the mask lacks is not needed."""
    flags = (*needs_grad, *(False,) * len(inputs))
    each = zip(inputs, flags, strict=False)
    return without_none((make(x) if need and x is not None else None for x, need in each), like)


def contiguous(x: Tensor) -> Tensor:
    """Allocates a tensor of the same shape and dtype, contiguous."""
    return x.new_empty(x.shape)
