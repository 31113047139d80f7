"""Measures what a call of attention_kl costs on the host without kernels: direct, and in a graph.

    python -m bench.host_time                    # CPU clock, medians of rounds that alternate
    python -m cProfile -s tottime -m bench.host_time

No GPU takes part: kernels are replaced by a call that does nothing, and what is recorded of them
(torch_streamkl/runtime/capture.py) is what a GPU's calls would issue. `python -m bench steps` says
on a GPU how long a step keeps the host.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any
from unittest import mock

ROUNDS, CALLS = 41, 200


class NoKernel:
    """Stands for a compiled kernel."""

    function, packed_metadata = 0, ()

    def run(self, *arguments: Any) -> None:
        pass


def calls() -> dict[str, Callable[[], object]]:
    """Returns what is timed, by name: 32 x 12 heads of 128 queries and keys, head_dim 64."""
    import torch

    from torch_streamkl import attention_kl
    from torch_streamkl.attention.bound_op import CompiledBackward, CompiledForward

    shape = (32, 12, 128, 64)
    with torch.no_grad():
        plain = [torch.empty(shape) for _ in range(4)]
    learning = [torch.empty(shape, requires_grad=i < 2) for i in range(4)]
    grad = torch.ones(shape[:3])

    # what no implementation in Python can do without: allocations, and autograd
    def allocations() -> object:
        return [torch.empty(shape[:3]), torch.empty(2, *shape[:3]), torch.empty(2, *shape[:3])]

    class Least(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            value, *statistics = allocations()
            ctx.save_for_backward(*statistics, *tensors)
            return value

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            q, k = ctx.saved_tensors[2:4]
            return torch.empty_like(q), torch.empty_like(k), None, None

    def gradients_of(call: Callable[..., Any]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(*learning), learning[:2], grad)

    # what a compiled graph calls for a site: less can be shared by sites of one shape
    options = ("(P*(logP-logS))", 0.125, 0.125)
    site = CompiledForward(options, 4, False)
    gradients = CompiledBackward(options, 4, False, (True, True, False, False))
    _, *statistics = site(*plain)
    return {
        "a site of a compiled graph": lambda: site(*plain),
        "its gradients": lambda: gradients(grad, *statistics, *plain),
        "forward": lambda: attention_kl(*plain),
        "its allocations alone": allocations,
        "forward and gradients": gradients_of(attention_kl),
        "their allocations and autograd alone": gradients_of(Least.apply),
    }


def main(argv: list[str] | None = None) -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels run without a GPU
    import torch

    from bench.measure import Timing, interleaved_calls
    from bench.records import Program, Row
    from torch_streamkl.runtime import capture, launch

    torch.set_num_threads(1)
    options, record = Program("bench.host_time", __doc__, devices=False).begin(argv)

    def take(function: Callable[[], object]) -> Callable[[int], float]:
        timer = timeit.Timer(function, timer=time.process_time)
        timer.timeit(10)
        return lambda _: timer.timeit(CALLS) / CALLS * 1e3

    with (
        mock.patch.object(launch, "_start", return_value=NoKernel()),
        mock.patch.object(capture, "runs_directly", return_value=True),
    ):
        takes = {name: take(function) for name, function in calls().items()}
        for name, times in interleaved_calls(takes, ROUNDS).items():
            record.rows.append(Row(name, "direct", "host", timing={"step": Timing.of(times)}))
            print(f"{name}: {statistics.median(times) * 1e3:.1f} us", flush=True)
    record.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
