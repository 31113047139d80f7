"""Measures how long direct calls of attention_kl keep the host of a GPU, by implementation.

    python -m bench.direct_calls --json direct_calls.json
    PYTHONPATH=$OLD python -P bench/direct_calls.py --only-print   # of another checkout

A round is 20 calls that wait for nothing; the least of 41 rounds is what the host needs. A step is
torch.autograd.grad of a call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS, CALLS = 41, 20
# batch, heads of queries and keys, tokens, head_dim
CASES = {
    "BERT 32x128": (32, 12, 12, 128, 64),
    "BERT 32x256": (32, 12, 12, 256, 64),
    "BERT 8x512": (8, 12, 12, 512, 64),
    "Llama 512": (1, 32, 8, 512, 128),
}
IMPLEMENTATIONS = {"portable": "triton", "Hopper": "hopper"}


def calls(sizes: tuple[int, ...], impl: str) -> dict[str, Callable[[], object]]:
    """Returns a forward and a step of bfloat16 inputs."""
    from torch_streamkl import attention_kl

    batch, heads, kv_heads, tokens, head_dim = sizes
    shapes = [(batch, n, tokens, head_dim) for n in (heads, kv_heads)] * 2
    torch.manual_seed(0)
    x = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    learning = [y.clone().requires_grad_(i < 2) for i, y in enumerate(x)]
    grad = torch.ones(batch, heads, tokens, device="cuda")

    def step() -> object:
        value = attention_kl(*learning, impl=impl)
        return torch.autograd.grad(value, learning[:2], grad)

    return {"forward": lambda: attention_kl(*x, impl=impl), "step": step}


def milliseconds(call: Callable[[], object]) -> float:
    """Returns the least time of a call among all rounds."""
    for _ in range(5):
        call()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e3)
    torch.cuda.synchronize()
    return min(found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.direct_calls", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only-print", action="store_true", help="without a record")
    options, rest = parser.parse_known_args(argv)
    record: Any = None
    if not options.only_print:
        from bench.measure import Timing
        from bench.records import Program, Row

        saved, record = Program("bench.direct_calls", __doc__, devices=False).begin(rest)
    for case, sizes in CASES.items():
        for name, impl in IMPLEMENTATIONS.items():
            for mode, call in calls(sizes, impl).items():
                ms = milliseconds(call)
                print(f"{case}, {name}: {mode} {ms * 1e3:.1f} us", flush=True)
                if record is not None:
                    timing = {mode: Timing.of([ms])}
                    row = Row(f"{case}, {name}", saved.commit or "today", "host", timing=timing)
                    row.samples = ROUNDS
                    record.rows.append(row)
    if record is not None:
        record.save(saved.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
