"""A training step on several GPUs, by DistributedDataParallel or with a problem that ranks share.

    python -m bench.several_gpus --processes 2 --json bench/results/h200-several-gpus.json
    python -m bench.several_gpus --cases vocabulary sequence layers --json bench/results/...
    python -m bench.several_gpus --cases layers --shared-by "traced, streamkl" --limit-s 100

The cases are those of `sharded_cases.py`; ``ddp`` is a Llama pair's distillation where every
process has a batch of its own. Loss and gradients of the first step are compared with those of
the first provider on the same ranks. A row is the slowest rank's median step and the largest peak,
and is written as soon as it is there. Steps are timed in bursts that follow each other without a
wait, as in a training loop. Nothing waits for a lost rank: collectives give up after a minute, and
processes end when the time limit is over.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench import machine, sharded_cases
from bench.accuracy import total_error
from bench.measure import BURST_S, host_seconds, interleaved_calls, peak_mib, release
from bench.models import OBJECTIVES
from bench.records import Program, Rows
from bench.sharded_cases import Case, Step
from bench.steps import PROVIDERS

# of bursts; the same number on every rank, or they would wait for each other
FIRST_ROUNDS, ROUNDS = 2, 6
COMPARED = ["eager", "inductor", "streamkl"]
CASES = ("ddp", "vocabulary", "sequence", "layers")
COLLECTIVE_LIMIT = datetime.timedelta(seconds=60)
COLUMNS = {
    "case": "{case}", "shape": "{shape}", "provider": "{provider}", "step ms": "{step_ms:.1f}",
    "peak GiB a rank": "{peak_gib:.2f}", "received MiB a rank": "{received_mib:.1f}",
    "loss off the first's": "{loss_difference:.1e}",
    "gradients off the first's": "{gradient_difference:.1e}",
}  # fmt: skip


def _rank(rank: int, options: argparse.Namespace, record: Rows, store: str) -> None:
    """One process: all rows, of which the first rank writes what all of them measured."""
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    on_gpu = options.device == "cuda"
    device = torch.device(options.device, rank if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
    backend, size = "cpu:gloo,cuda:nccl" if on_gpu else "gloo", options.processes
    torch.distributed.init_process_group(
        backend, store=torch.distributed.FileStore(store, size), rank=rank, world_size=size,
        timeout=COLLECTIVE_LIMIT,
    )  # fmt: skip

    def write(row: dict[str, Any]) -> None:
        worst = worst_of(_of_all_ranks(row))
        if rank == 0:
            same = ("case", "provider", "shape")
            record.rows = [x for x in record.rows if any(x[k] != worst[k] for k in same)]
            record.add(worst)

    for case in _cases(options, device):
        make = {k: x for k, x in case.make.items() if k in (options.shared_by or case.make)}
        _measure(replace(case, make=make), device, write)
    torch.distributed.destroy_process_group()


def _cases(options: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    mesh = init_device_mesh(device.type, (options.processes,))
    for name in options.cases:
        if name == "ddp":
            for problem in itertools.product(options.objectives, options.contexts):
                yield sharded_cases.data_parallel(device, *problem, options.providers)
        elif name == "sequence":
            yield from (sharded_cases.sequence(mesh, device, n) for n in options.rows)
        else:
            yield getattr(sharded_cases, name)(mesh, device)


def _measure(case: Case, device: torch.device, write: Callable[[dict[str, Any]], None]) -> None:
    """A row for each provider, written again with what more rounds have said."""
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    expected: tuple[float, list[Tensor]] | None = None

    def timed(rounds: int, *names: str) -> None:
        for name, times in _times({n: steps[n] for n in names}, device, rounds).items():
            write(rows[name] | {"step_ms": statistics.median(times)})

    for provider, make in case.make.items():
        start = time.monotonic()
        step = steps[provider] = make()
        made = time.monotonic()
        loss, given = step()
        first = {"make_s": made - start, "first_step_s": time.monotonic() - made}
        if torch.distributed.get_rank() == 0:  # says how far a run came that is cut off
            print({"provider": provider, **first}, flush=True)
        gradients = [g.detach().cpu() for g in given]
        del given
        expected = expected or (float(loss), gradients)
        step()
        rows[provider] = {
            "case": case.name,
            "shape": ", ".join(f"{size} {name}" for name, size in case.shape.items()),
            "provider": provider,
            **first,
            "loss": float(loss),
            "peak_gib": peak_mib(step, device) / 1024,
            "loss_difference": abs(float(loss) / expected[0] - 1.0),
            "gradient_difference": total_error(gradients, expected[1]),
        }
        if provider in case.received_mib:
            rows[provider]["received_mib"] = case.received_mib[provider]
        timed(FIRST_ROUNDS, provider)
        if not case.interleaves:
            timed(ROUNDS, provider)
            steps.clear()
            del step
            torch._dynamo.reset()
            release(device)
    timed(ROUNDS, *steps)


def _times(steps: dict[str, Step], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every provider's steps, in turn, each time of a burst of them."""

    def take(step: Step) -> Callable[[int], float]:
        length = math.ceil(BURST_S / max(host_seconds(step, device), 1e-6))
        length = max(_of_all_ranks(length))

        def burst(_: int) -> float:
            torch.distributed.barrier()
            return host_seconds(step, device, length) * 1e3

        return burst

    return interleaved_calls({name: take(step) for name, step in steps.items()}, rounds)


def _of_all_ranks(mine: Any) -> list[Any]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return every


def worst_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of all ranks: the slowest, the largest, the farthest off."""
    names = ("step_ms", "peak_gib", "loss_difference", "gradient_difference")
    return {**rows[0], **{name: max(row[name] for row in rows) for name in names}}


def main(argv: list[str] | None = None) -> int:
    parser = Program("bench.several_gpus", __doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--objectives", nargs="*", default=["attention"], choices=OBJECTIVES)
    parser.add_argument("--contexts", nargs="*", type=int, default=[4096])
    parser.add_argument("--providers", nargs="*", default=COMPARED, choices=PROVIDERS)
    parser.add_argument("--cases", nargs="*", default=["ddp"], choices=CASES)
    parser.add_argument("--shared-by", nargs="*", help="providers of a case's own; all of them")
    parser.add_argument("--rows", nargs="*", type=int, default=[65536], help="of the sequence")
    parser.add_argument("--limit-s", type=float, default=340.0, help="after which all is over")
    parser.set_defaults(json=machine.ROOT / "out" / "several-gpus.json")
    options, head = parser.begin(argv)
    head |= {"processes": options.processes, "text": f"{options.processes} processes, a GPU each."}
    title = "Problems that several GPUs share: forward and backward"
    record = Rows(title, COLUMNS, head, options.json)
    # multicast is not available in every container, and these messages gain nothing by it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        # without a GPU they are forked from one that has imported this, and done nothing else
        method = "spawn" if options.device == "cuda" else "forkserver"
        if method == "forkserver":
            torch.multiprocessing.get_context(method).set_forkserver_preload([_rank.__module__])
        torch.multiprocessing.start_processes(
            _rank, (options, record, f"{folder}/store"), nprocs=options.processes,
            start_method=method,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
