"""Checks how values lie in memory: code after a replaced value may view it, write to it or read
its strides.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.fake_modes import without_guards
from torch_streamkl.fx_passes.fx_utils.nodes import (
    example,
    following,
    is_call,
    is_view,
    run,
    storage_of,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.sizes import (
    hint_of,
    is_one,
    is_unknown,
    is_zero,
    provably_equal,
)


def with_strides_of(build: Builder, x: fx.Node, like: Tensor) -> fx.Node:
    """Returns ``x`` in the memory layout of another tensor of its shape, or raises Unsupported."""
    if _lie_alike(tensor_of(x), like):
        return x
    strides = [hint_of(s) or 0 for s in like.stride()]
    order = sorted(range(like.dim()), key=lambda d: -strides[d])
    if order != list(range(like.dim())):
        x = build.method("permute", x, tuple(order))
    x = build.method("contiguous", x)
    if order != list(range(like.dim())):
        x = build.method("permute", x, tuple(order.index(d) for d in range(like.dim())))
    if not _lie_alike(tensor_of(x), like):
        raise Unsupported(
            f"its value has strides {tuple(like.stride())}, which are not of one block"
        )
    return x


def as_user(build: Builder, x: fx.Node, node: fx.Node, written: Container[int | None]) -> fx.Node:
    """Returns a value in the type of a node's, whose shape it must have, and in its memory layout.

    It stays in its own layout if no code can tell: a column of probabilities lies as far apart as
    their rows. ``written`` is the memory that the graph writes to.
    """
    like = tensor_of(node)
    x = build.cast(x, like.dtype)
    made = tensor_of(x)
    # a number of selected rows has a symbol of its own in the rewritten graph
    if len(made.shape) != len(like.shape) or not all(
        provably_equal(a, b) or (is_unknown(a) and is_unknown(b))
        for a, b in zip(made.shape, like.shape, strict=True)
    ):
        raise Unsupported(
            f"the fused value has shape {tuple(made.shape)}, the user's {tuple(like.shape)}"
        )
    try:
        return with_strides_of(build, x, like)
    except Unsupported:
        if strides_are_seen(node, x, build, written):
            raise
        return x


def with_own_memory(
    build: Builder, x: fx.Node, node: fx.Node, written: Container[int | None]
) -> fx.Node:
    """Returns ``x``, or a copy of a view that takes the place of a value that is none.

    Autograd refuses gradients of a write to a view that was made without gradients, and to detach
    a view in place. ``written`` is the memory that the graph writes to.
    """
    if is_view(x) and not is_view(node) and may_be_written(node, written):
        return build.method("clone", x)
    return x


def may_be_written(node: fx.Node, written: Container[int | None]) -> bool:
    """Returns whether the graph writes to a value's memory, or its caller, who gets it, may."""
    memory = storage_of(node)
    returned = {storage_of(x) for x in node.graph.output_node().all_input_nodes}
    return memory in written or memory in returned


def strides_are_seen(
    node: fx.Node, other: fx.Node, build: Builder, written: Container[int | None]
) -> bool:
    """Returns whether code after ``node`` could tell that it gets ``other`` in another memory
    layout.

    ``written`` is the memory that the graph writes to. Readers run on fake tensors until their
    results have the old memory layout, as after a ``contiguous()`` or a matmul.
    """
    if _lie_alike(tensor_of(other), tensor_of(node)):
        return False
    changed: dict[fx.Node, Tensor] = {node: tensor_of(other)}
    runs = build.selections.runs
    waiting = set(node.users)
    for reader in following(node):
        if not waiting:
            break
        if reader not in waiting:
            continue
        waiting.remove(reader)
        was = example(reader)
        if (
            not is_call(reader)
            or isinstance(reader.target, torch._ops.HigherOrderOperator)
            or storage_of(reader) in written
            or not isinstance(was, (Tensor, int, torch.SymInt))
        ):
            return True
        if isinstance(was, Tensor):
            try:
                now = runs.of(reader, changed, lambda n: _run(n, changed, build))
            except Exception:  # such as a view that is none in this layout
                return True
            if not _lie_alike(now, was):
                changed[reader] = now
                waiting |= set(reader.users)
    return False


def _run(node: fx.Node, changed: dict[fx.Node, Tensor], build: Builder) -> Tensor:
    with build.mode, without_guards(build.mode), torch.enable_grad():
        result = run(node, lambda x: changed.get(x, example(x)))
    assert isinstance(result, Tensor)
    return result


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether strides are equal, of dimensions that have more than one entry."""
    sizes = list(b.shape)
    return any(is_zero(n) for n in sizes) or all(
        is_one(n) or provably_equal(x, y) or (is_unknown(x) and is_unknown(y))
        for n, x, y in zip(sizes, a.stride(), b.stride(), strict=True)
    )
