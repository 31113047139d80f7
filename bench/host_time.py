"""What a call of attention_kl costs on the host, its kernels left out: direct, and in a graph.

    python -m bench.host_time                    # CPU clock, medians of rounds that alternate
    python -m cProfile -s tottime -m bench.host_time
    python -m bench.host_time --device cuda --json FILE  # small calls, with their kernels

On the CPU no GPU takes part: kernels are replaced by a call that does nothing, and what is
recorded of them (torch_streamkl/runtime/capture.py) is what a GPU's calls would issue. On a GPU
a call is timed as fast as the host can issue it, with a wait after each, and its kernels alone in
a CUDA graph.
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
COPIES = 50  # of a call in one CUDA graph
COLUMNS = {
    "small call": "{name}", "host us a call": "{call_us:.1f}",
    "with a wait us": "{synchronised_us:.1f}", "its kernels us": "{kernels_us:.1f}",
}  # fmt: skip


class NoKernel:
    """Stands for a compiled kernel."""

    function, packed_metadata = 0, ()

    def run(self, *arguments: Any) -> None:
        pass


def calls() -> dict[str, Callable[[], object]]:
    """What is timed, by name: 32 x 12 heads of 128 queries and keys, head_dim 64."""
    import torch

    from torch_streamkl import attention_kl
    from torch_streamkl.attention.bound_op import CompiledBackward, CompiledForward

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


def main(argv: list[str] | None = None) -> int:
    if not any("cuda" in x for x in (sys.argv[1:] if argv is None else argv)):
        os.environ["TRITON_INTERPRET"] = "1"  # the kernels run without a GPU
    import torch

    from bench.records import Program, Rows

    parser = Program("bench.host_time", __doc__)
    parser.set_defaults(device="cpu")
    torch.set_num_threads(1)
    options, head = parser.begin(argv)
    record = Rows("attention_kl: small calls", COLUMNS, head, options.json)
    for name, row in (on_gpu if options.device == "cuda" else on_cpu)().items():
        record.add({"name": name, **row})
    return 0


def on_cpu() -> dict[str, dict[str, float]]:
    """Microseconds of the CPU's clock."""
    from bench.measure import interleaved_calls
    from torch_streamkl.runtime import capture, launch

    def take(function: Callable[[], object]) -> Callable[[int], float]:
        timer = timeit.Timer(function, timer=time.process_time)
        timer.timeit(10)
        return lambda _: timer.timeit(CALLS) / CALLS * 1e6

    with (
        mock.patch.object(launch, "_start", return_value=NoKernel()),
        mock.patch.object(capture, "runs_directly", return_value=True),
    ):
        found = interleaved_calls(
            {name: take(function) for name, function in calls().items()}, ROUNDS
        )
    return {name: {"call_us": statistics.median(times)} for name, times in found.items()}


def on_gpu() -> dict[str, dict[str, float]]:
    """Of tiny inputs, microseconds: of the host, with a wait, and of the kernels."""
    import torch

    from bench.measure import host_seconds, median_ms
    from torch_streamkl import attention_kl
    from torch_streamkl.attention import ops

    device = torch.device("cuda")
    shape = (1, 2, 16, 64)
    plain = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
    leaves = [x.clone().requires_grad_(i < 2) for i, x in enumerate(plain)]
    weight = torch.ones(shape[:3], device=device)

    def step() -> object:
        return torch.autograd.grad(attention_kl(*leaves, is_causal=True), leaves[:2], weight)

    def us(call: Callable[[], object], repeats: int, rounds: int) -> float:
        return 1e6 * statistics.median(host_seconds(call, device, repeats) for _ in range(rounds))

    small: dict[str, Callable[[], object]] = {
        "forward": lambda: attention_kl(*plain, is_causal=True),
        "capture": lambda: attention_kl(*leaves, is_causal=True),
        "step": step,
        "dispatched": lambda: ops.attention_kl(*plain, window_right=0),
    }
    found = {}
    for name, call in small.items():
        us(call, 50, 1)
        found[name] = {"call_us": us(call, 20, 100), "synchronised_us": us(call, 1, 500)}
    for name in ("forward", "step"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(COPIES):
                small[name]()
        found[name]["kernels_us"] = median_ms(graph.replay, device, 20) / COPIES * 1e3
    found["empty kernel"] = {"synchronised_us": us(lambda: weight.add_(0.0), 1, 500)}
    return found


if __name__ == "__main__":
    main()
