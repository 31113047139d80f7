"""What one launch for several layers of one shape could gain: `python -m bench.together`.

Four sites of a BERT step, 32 x 12 heads of 128 tokens, forward and gradients, called one after the
other, and one site of four times the batch: the same work in a quarter of the launches, without
the pointers of four layers that a kernel of several would look up. So what is between the two is
the most that sharing could gain. Both as CUDA graphs, for the GPU alone, and as direct calls,
whose host time counts too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from torch_streamkl import attention_kl

SITES, BATCH, HEADS, SEQLEN, HEAD_DIM = 4, 32, 12, 128, 64
ROUNDS, REPEATS = 15, 40


def step_of(sites: int, batch: int) -> Callable[[], object]:
    """Values and gradients of some sites."""
    shape = (batch, HEADS, SEQLEN, HEAD_DIM)
    inputs: list[list[Tensor]] = [
        [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(i < 2)
            for i in range(4)
        ]
        for _ in range(sites)
    ]
    students = [x for site in inputs for x in site[:2]]

    def step() -> object:
        value = sum(attention_kl(*site, reduction="batchmean") for site in inputs)
        assert isinstance(value, Tensor)
        return torch.autograd.grad(value, students)

    return step


def as_graph(step: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def microseconds(step: Callable[[], object]) -> float:
    """Of a call, between events around several."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / REPEATS * 1e3


def main() -> None:
    steps = {f"{SITES} sites": step_of(SITES, BATCH), "one site": step_of(1, SITES * BATCH)}
    contenders = {f"{name}, direct calls": step for name, step in steps.items()}
    contenders |= {f"{name}, CUDA graph": as_graph(step) for name, step in steps.items()}
    for step in contenders.values():
        for _ in range(5):
            step()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, step in contenders.items():
            found[name].append(microseconds(step))
    for name, times in found.items():
        print(f"{name:<24}{statistics.median(times):10.1f} us", flush=True)


if __name__ == "__main__":
    main()
