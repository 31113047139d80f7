"""Defines shard_sequence(), and the collectives that exchange rows of a sharded sequence.

With ``"head_tail"``, a sequence has 2 n chunks, and rank r has the chunks r and 2 n - 1 - r. Under
a causal mask every rank then computes the same number of pairs. With None, rank r has the r-th of
n equal parts.

`ranges_of_sequence` gathers ranges of the sequence on every rank. `some_heads` and `some_rows`
exchange rows for heads by an all-to-all, and back. All of them differentiate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_streamkl import checks
from torch_streamkl.compiler_marks import is_compiling
from torch_streamkl.distributed import collectives
from torch_streamkl.distributed.collectives import group_of

HEAD_TAIL = "head_tail"
LOAD_BALANCES = (HEAD_TAIL, None)
Bounds = tuple[tuple[int, int], ...]  # where ranges of a sequence start and stop


def shard_sequence(
    x: Tensor,
    mesh: DeviceMesh | ProcessGroup,
    *,
    dim: int = 2,
    load_balance: Literal["head_tail"] | None = "head_tail",
) -> Tensor:
    """Returns this rank's rows of a tensor that every rank has whole.

    It equals, with n ranks and ``load_balance="head_tail"``,

    .. code-block:: python

        chunks = x.chunk(2 * n, dim)
        torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], dim)

    Args:
        x: any tensor, with the sequence at ``dim``. It is the same on every rank.
        mesh: the ranks, as a device mesh of one dimension or a process group.
        dim: the dimension of the sequence; 2 for ``[batch, heads, seqlen, head_dim]``.
        load_balance: ``"head_tail"``, or None for the rank-th of n equal parts. Pass the same
            value to `attention_kl_context_parallel`.

    Returns:
        A tensor like x with 1 / n of the sequence. Gradients flow to x.

    Raises:
        ValueError, TypeError: the number of chunks does not divide the sequence, or an argument
            does not fit.
    """
    group = group_of(mesh, "mesh")
    checks.tensor("x", x)
    checks.integer("dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dimension of x, which has {x.ndim}, got {dim}")
    checks.one_of("load_balance", load_balance, LOAD_BALANCES)
    num_chunks = group.size() * (2 if load_balance else 1)
    if x.shape[dim] % num_chunks:
        raise ValueError(
            f"the sequence must divide into {num_chunks} chunks over {group.size()} ranks with "
            f"load_balance={load_balance!r}, got length {x.shape[dim]}"
        )
    chunks = x.chunk(num_chunks, dim)
    mine = chunks_of(group.rank(), group.size(), load_balance)
    return torch.cat([chunks[index] for index in mine], dim)


def chunks_of(rank: int, num_ranks: int, load_balance: str | None) -> list[int]:
    """Returns the chunks that a rank has, in its order."""
    return [rank, 2 * num_ranks - 1 - rank] if load_balance else [rank]


def in_order(parts: Tensor, load_balance: str | None) -> Tensor:
    """Reorders all ranks' [ranks, batch, heads, rows, ...] to [batch, heads, sequence, ...]."""
    num_ranks, batch, heads, num_rows = parts.shape[:4]
    parts = parts.movedim(0, 2)  # [batch, heads, ranks, rows, ...]
    if load_balance:
        halves = parts.unflatten(3, (2, num_rows // 2))
        parts = torch.cat([halves[:, :, :, 0], halves[:, :, :, 1].flip(2)], 2)
    return parts.reshape(batch, heads, num_ranks * num_rows, *parts.shape[4:])


def by_rank(x: Tensor, num_ranks: int, load_balance: str | None) -> Tensor:
    """Reorders [batch, heads, sequence, ...] to each rank's rows: the inverse of `in_order`."""
    if load_balance:
        chunks = x.unflatten(2, (2 * num_ranks, -1))
        head, tail = chunks[:, :, :num_ranks], chunks[:, :, num_ranks:].flip(2)
        parts = torch.cat([head, tail], 3)
    else:
        parts = x.unflatten(2, (num_ranks, -1))
    return parts.movedim(2, 0).contiguous()


class _Ranges(torch.autograd.Function):
    """Gathers all rows, and returns views of some ranges of them.

    The backward adds the ranges' gradients where the reduce-scatter takes them. Slices of a
    gathered tensor would pad each range's gradient to the whole sequence, and reorder their sum.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group_name: str, size: int, balance: str | None, bounds: Bounds
    ) -> tuple[Tensor, ...]:
        ctx.how = (group_name, size, balance, bounds)
        ctx.shape = tuple(x.shape)
        ctx.set_materialize_grads(False)
        parts = collectives.wait(collectives.all_gather(x.contiguous(), size, group_name))
        whole = in_order(parts.unflatten(0, (size, -1)), balance)
        return tuple(whole[:, :, start:stop] for start, stop in bounds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        *how, bounds = ctx.how
        given = [(b, g) for b, g in zip(bounds, grads, strict=True) if g is not None]
        if not given:  # on every rank: all of them differentiate the same ranges
            return (None,) * 5
        # Dynamo traces no context in a backward, and AOTAutograd has no create_graph
        is_once = is_compiling() or not torch.is_grad_enabled()
        sum_of = _sum_of_ranges if is_once else _SumOfRanges.apply
        arguments = ctx.shape, *how, tuple(b for b, _ in given), *(g for _, g in given)
        return sum_of(*arguments), None, None, None, None


class _SumOfRanges(torch.autograd.Function):
    """Differentiates `_sum_of_ranges`, the adjoint of `_Ranges`: its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *arguments: Any) -> Tensor:
        ctx.how = arguments[:4]
        return _sum_of_ranges(shape, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (None,) * 5 + ranges_of_sequence(grad, *ctx.how)


def _sum_of_ranges(
    shape: tuple[int, ...], group_name: str, size: int, balance: str | None, bounds: Bounds,
    *ranges: Tensor,
) -> Tensor:  # fmt: skip
    """This rank's rows, of that shape, of the sum of all ranks' ranges of the sequence."""
    parts = ranges[0].new_zeros((size, *shape))
    for (start, stop), given in zip(bounds, ranges, strict=True):
        for first, rows in _rows_of_parts(parts, balance):
            low, high = max(start, first), min(stop, first + rows.shape[2])
            if low < high:
                part = given[:, :, low - start : high - start]
                rows[:, :, low - first : high - first] += part
    reduced = collectives.reduce_scatter(parts.flatten(0, 1), size, group_name)
    return collectives.wait(reduced)


def _rows_of_parts(parts: Tensor, load_balance: str | None) -> Iterator[tuple[int, Tensor]]:
    """Yields each chunk's first position in the sequence, and its view of all ranks' parts."""
    size = parts.shape[0]
    for rank in range(size):
        chunks = chunks_of(rank, size, load_balance)
        length = parts.shape[3] // len(chunks)
        for index, chunk in enumerate(chunks):
            yield chunk * length, parts[rank][:, :, index * length : (index + 1) * length]


def ranges_of_sequence(
    x: Tensor, group_name: str, size: int, load_balance: str | None, bounds: Bounds
) -> tuple[Tensor, ...]:
    """Gathers all ranks' rows, and returns those from each start to its stop in the sequence."""
    ranges: tuple[Tensor, ...] = _Ranges.apply(x, group_name, size, load_balance, bounds)
    return ranges


class _Exchange(torch.autograd.Function):
    """Exchanges rows of all heads for all rows of some heads, by an all-to-all, or the reverse."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group_name: str, size: int, balance: str | None, to_heads: bool
    ) -> Tensor:
        ctx.how = (group_name, size, balance, to_heads)
        return _exchanged(x, *ctx.how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        group_name, size, balance, to_heads = ctx.how
        return _exchanged(grad, group_name, size, balance, not to_heads), None, None, None, None


def _exchanged(
    x: Tensor, group_name: str, size: int, balance: str | None, to_heads: bool
) -> Tensor:
    if to_heads:
        parts = x.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
    else:
        parts = by_rank(x, size, balance)
    shape = parts.shape
    counts = [shape[1]] * size
    moved = collectives.all_to_all(parts.flatten(0, 1), counts, counts, group_name)
    moved = collectives.wait(moved).view(shape)
    return in_order(moved, balance) if to_heads else moved.movedim(0, 1).flatten(1, 2)


def some_heads(x: Tensor, group_name: str, size: int, load_balance: str | None) -> Tensor:
    """Converts this rank's rows of all heads into all rows of this rank's heads."""
    return _Exchange.apply(x, group_name, size, load_balance, True)


def some_rows(x: Tensor, group_name: str, size: int, load_balance: str | None) -> Tensor:
    """Returns the inverse of `some_heads`."""
    return _Exchange.apply(x, group_name, size, load_balance, False)
