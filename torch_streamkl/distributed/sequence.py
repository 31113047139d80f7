"""Defines shard_sequence(), and the collectives that exchange rows of a sharded sequence.

With ``"head_tail"``, a sequence has 2 n chunks, and rank r has the chunks r and 2 n - 1 - r. Under
a causal mask every rank then computes the same number of pairs. With None, rank r has the r-th of
n equal parts.

`whole_sequence` gathers all rows on every rank. `some_heads` and `some_rows` exchange rows for
heads by an all-to-all, and back. All three differentiate.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_streamkl import checks
from torch_streamkl.distributed import collectives
from torch_streamkl.distributed.collectives import group_of

HEAD_TAIL = "head_tail"
LOAD_BALANCES = (HEAD_TAIL, None)


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


class _WholeSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, size: int, balance: str | None) -> Tensor:
        ctx.how = (group_name, size, balance)
        gathered = collectives.wait(collectives.all_gather(x.contiguous(), size, group_name))
        return in_order(gathered.unflatten(0, (size, -1)), balance)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group_name, size, balance = ctx.how
        parts = by_rank(grad, size, balance).flatten(0, 1)
        reduced = collectives.reduce_scatter(parts, size, group_name)
        return collectives.wait(reduced), None, None, None


def whole_sequence(x: Tensor, group_name: str, size: int, load_balance: str | None) -> Tensor:
    """Gathers all ranks' rows in the order of the sequence; the backward reduce-scatters."""
    return _WholeSequence.apply(x, group_name, size, load_balance)


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
    """Turns this rank's rows of all heads into all rows of this rank's heads."""
    return _Exchange.apply(x, group_name, size, load_balance, True)


def some_rows(x: Tensor, group_name: str, size: int, load_balance: str | None) -> Tensor:
    """Returns the inverse of `some_heads`."""
    return _Exchange.apply(x, group_name, size, load_balance, False)
