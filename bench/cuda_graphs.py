"""What measuring torch.compile's CUDA graphs needs: marks, counted replays, their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

LEAST_REPLAYS = 2  # of a step: forward and backward


def marked(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, which begins a step: the memory of the step before may be used again."""

    def begin_and_call(*arguments: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return call(*arguments)

    return begin_and_call


def record(step: Callable[[], object]) -> int:
    """Runs a step that ran once until its graphs are recorded; how many it replays.

    Inductor leaves out what it cannot record.
    """
    step()
    replay, replays = torch.cuda.CUDAGraph.replay, []

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
        step()
    if len(replays) < LEAST_REPLAYS:
        raise RuntimeError(
            f"a step must replay at least {LEAST_REPLAYS} CUDA graphs (forward, backward), "
            f"got {len(replays)}: TORCH_LOGS=cudagraphs says why"
        )
    return len(replays)


def pools_bytes() -> int:
    """What the private memory pools of all graphs reserve.

    A replay uses this memory without an allocation, so the allocator's peak does not contain it,
    and nobody else can use it.
    """
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))
