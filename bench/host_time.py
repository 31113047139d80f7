"""What a call of attention_kl costs on the host, its kernels left out: direct, and in a graph.

    python -m bench.host_time                    # CPU clock, medians of rounds that alternate
    python -m bench.host_time --profile forward

No GPU takes part: tensors are on the CPU, kernels are replaced by a call that does nothing, and
what is recorded of them (torch_streamkl/kernels/recorded.py) is what a GPU's calls would issue.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
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
    """What is timed, by name: 32 x 12 heads of 128 queries and keys, head_dim 64."""
    import torch

    from torch_streamkl import attention_kl
    from torch_streamkl.attention.sites import CompiledBackward, CompiledForward

    shape = (32, 12, 128, 64)
    with torch.no_grad():
        plain = [torch.empty(shape) for _ in range(4)]
    learning = [torch.empty(shape, requires_grad=i < 2) for i in range(4)]
    grad = torch.ones(shape[:3])

    def forward() -> object:
        return attention_kl(*plain, reduction="none")

    def with_gradients() -> object:
        value = attention_kl(*learning, reduction="none")
        return torch.autograd.grad(value, learning[:2], grad)

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

    def least() -> object:
        return torch.autograd.grad(Least.apply(*learning), learning[:2], grad)

    # what a compiled graph calls for a site: less can be shared by sites of one shape
    options = ("(P*(logP-logS))", 0.125, 0.125)
    site = CompiledForward(options, 4, False)
    gradients = CompiledBackward(options, 4, False, (True, True, False, False))
    _, *statistics = site(*plain)

    return {
        "a site of a compiled graph": lambda: site(*plain),
        "its gradients": lambda: gradients(grad, *statistics, *plain),
        "forward": forward,
        "its allocations alone": allocations,
        "forward and gradients": with_gradients,
        "their allocations and autograd alone": least,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", choices=("forward", "gradients"))
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels run without a GPU
    import torch

    torch.set_num_threads(1)
    from torch_streamkl.attention.triton import plans
    from torch_streamkl.launches import recorded

    with (
        mock.patch.object(plans.Plan, "_launch", return_value=NoKernel()),
        mock.patch.object(recorded, "runs_directly", return_value=True),
    ):
        functions = calls()
        if args.profile:
            name = "forward" if args.profile == "forward" else "forward and gradients"
            profile(functions[name])
            return
        for name, us in medians(functions).items():
            print(f"{name:<40}{us:8.1f} us")


def medians(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of the CPU's clock."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(10):
            function()
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.process_time()
            for _ in range(CALLS):
                function()
            found[name].append((time.process_time() - start) / CALLS * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def profile(function: Callable[[], object]) -> None:
    """Where the time goes, by function."""
    for _ in range(10):
        function()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(5000):
        function()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
