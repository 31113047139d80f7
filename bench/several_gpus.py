"""A training step on several GPUs, by DistributedDataParallel or with a problem that ranks share.

    python -m bench.several_gpus --processes 2 --json bench/results/h200-several-gpus.json
    python -m bench.several_gpus --cases vocabulary sequence layers --json bench/results/...
    python -m bench.several_gpus --cases layers --shared-by "traced, streamkl" --limit-s 100

``ddp`` is a Llama pair's distillation where every process has a batch of its own; the other cases
are those of `sharded_cases.py`. Loss and gradients of the first step are compared with those of
the first provider on the same ranks. A row is the slowest rank's median step and the largest peak,
and is written as soon as it is there. Steps of a shared problem are timed in bursts that follow
each other without a wait, as in a training loop. Nothing waits for a lost rank: collectives give
up after a minute, and processes end when the time limit is over.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bench import machine, sharded_cases
from bench.end_to_end import (
    BURST_S,
    OBJECTIVES,
    PAIRS,
    PROVIDERS,
    build,
    forget_program,
    make_loss,
)
from bench.measure import host_seconds, peak_mib, release
from bench.records import command_line

UNTIMED_STEPS, STEPS = 2, 10  # the same number on every rank, or they would wait for each other
FIRST_ROUNDS, ROUNDS = 2, 6  # of bursts
COMPARED = ["eager", "inductor", "streamkl"]
CASES = ("ddp", "vocabulary", "sequence", "layers")
COLLECTIVE_LIMIT = datetime.timedelta(seconds=60)


class Step(nn.Module):
    """The loss as a module with the student's parameters."""

    def __init__(self, student: nn.Module, teacher: nn.Module, objective: str) -> None:
        super().__init__()
        self.student = student
        self._loss_of = make_loss(teacher, student, objective)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self._loss_of(ids)
        return loss


def measure(
    provider: str, step: Step, vocabulary: int, context: int, device: torch.device
) -> tuple[dict[str, Any], list[Tensor]]:
    """One rank's row, and the gradients of its first step."""
    ids_of = [device.index] if device.type == "cuda" else None
    call = PROVIDERS[provider](DistributedDataParallel(step, device_ids=ids_of))
    generator = torch.Generator(device).manual_seed(torch.distributed.get_rank())
    ids = torch.randint(vocabulary, (1, context), device=device, generator=generator)

    def one_step() -> float:
        step.zero_grad(set_to_none=True)
        loss = call(ids)
        loss.backward()
        return float(loss.detach())

    loss = one_step()
    gradients = [p.grad.cpu() for p in step.parameters() if p.grad is not None]
    for _ in range(UNTIMED_STEPS):
        one_step()
    step.zero_grad(set_to_none=True)
    peak = peak_mib(one_step, device)
    times = []
    for _ in range(STEPS):
        torch.distributed.barrier()
        times.append(host_seconds(one_step, device) * 1e3)
    forget_program(step, device)
    return {"loss": loss, "step_ms": statistics.median(times), "peak_mib": peak}, gradients


def _rank(rank: int, options: argparse.Namespace, record: dict[str, Any], store: str) -> None:
    """One process: all rows, of which the first rank writes what all of them measured."""
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    on_gpu = options.device == "cuda"
    device = torch.device(options.device, rank if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=torch.distributed.FileStore(store, options.processes),
        rank=rank,
        world_size=options.processes,
        timeout=COLLECTIVE_LIMIT,
    )

    def write(row: dict[str, Any]) -> None:
        ranks: list[Any] = [None] * options.processes
        torch.distributed.all_gather_object(ranks, row)
        if rank == 0:
            worst = worst_of(ranks)
            same = ("case", "objective", "context", "provider", "shape")
            record["rows"] = [
                other
                for other in record["rows"]
                if any(other.get(name) != worst.get(name) for name in same)
            ]
            record["rows"].append(worst)
            options.json.write_text(json.dumps(record, indent=1) + "\n")
            print(worst, flush=True)

    for name in options.cases:
        if name == "ddp":
            _data_parallel(options, device, write)
        else:
            _shared(name, options, device, write)
    torch.distributed.destroy_process_group()


def _data_parallel(options: argparse.Namespace, device: torch.device, write: Any) -> None:
    pair = PAIRS[options.device]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher = build(pair, pair.teacher_layers, 0, device, dtype).eval().requires_grad_(False)
    student = build(pair, pair.student_layers, 1, device, dtype)
    for objective in options.objectives:
        # a head that takes no part has no gradient, which DDP would wait for
        student.lm_head.requires_grad_(objective == "attention+logits")
        step = Step(student, teacher, objective)
        for context in options.contexts:
            expected: tuple[float, list[Tensor]] | None = None
            for provider in options.providers:
                row, gradients = measure(provider, step, pair.vocabulary, context, device)
                expected = expected or (row["loss"], gradients)
                row |= {
                    "objective": objective,
                    "context": context,
                    "provider": provider,
                    "loss_difference": abs(row["loss"] / expected[0] - 1.0),
                    "gradient_difference": difference(gradients, expected[1]),
                }
                write(row)


def _shared(name: str, options: argparse.Namespace, device: torch.device, write: Any) -> None:
    """Rows of a case in which ranks share one problem."""
    mesh = init_device_mesh(device.type, (options.processes,))
    if name == "layers":
        cases = [sharded_cases.layers(mesh, device, Step)]
    elif name == "sequence":
        cases = [sharded_cases.sequence(mesh, device, rows) for rows in options.rows]
    else:
        cases = [sharded_cases.vocabulary(mesh, device)]
    for case in cases:
        steps: dict[str, sharded_cases.Step] = {}
        rows: dict[str, dict[str, Any]] = {}
        expected: tuple[float, list[Tensor]] | None = None
        chosen = {k: x for k, x in case.make.items() if k in (options.shared_by or case.make)}
        for provider, make in chosen.items():
            start = time.monotonic()
            step = make()
            made = time.monotonic()
            loss, given = step()
            compiled = time.monotonic()
            first = {
                "provider": provider,
                "make_s": made - start,
                "first_step_s": compiled - made,
            }
            if torch.distributed.get_rank() == 0:  # says how far a run came that is cut off
                print(first, flush=True)
            gradients = [g.detach().cpu() for g in given]
            del given
            expected = expected or (float(loss), gradients)
            step()
            rows[provider] = {
                "case": case.name,
                "shape": case.shape,
                **first,
                "loss": float(loss),
                "peak_mib": peak_mib(step, device),
                "received_mib": case.received_mib.get(provider, 0.0),
                "loss_difference": abs(float(loss) / expected[0] - 1.0),
                "gradient_difference": difference(gradients, expected[1]),
                "step_ms": statistics.median(
                    _times({provider: step}, device, FIRST_ROUNDS)[provider]
                ),
            }
            write(rows[provider])
            steps[provider] = step
            if not case.interleaves:
                more = _times({provider: step}, device, ROUNDS)[provider]
                write(rows[provider] | {"step_ms": statistics.median(more)})
                steps.clear()
                del step
                torch._dynamo.reset()
                release(device)
        for provider, times in _times(steps, device, ROUNDS).items():
            write(rows[provider] | {"step_ms": statistics.median(times)})


def _times(steps: Any, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every provider's steps, in turn, each time of a burst of them."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    lengths = {name: _burst(step, device) for name, step in steps.items()}
    for _ in range(rounds):
        for name, step in steps.items():
            torch.distributed.barrier()
            times[name].append(host_seconds(step, device, lengths[name]) * 1e3)
    return times


def _burst(step: Any, device: torch.device) -> int:
    """How many steps take `BURST_S`, the same number on every rank."""
    number = math.ceil(BURST_S / max(host_seconds(step, device), 1e-6))
    numbers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(numbers, number)
    return int(max(numbers))


def difference(given: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference of all gradients over their norm."""
    pairs = list(zip(given, expected, strict=True))
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return float((off / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5)


def worst_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of all ranks: the slowest, the largest, the farthest off."""
    names = ("step_ms", "peak_mib", "loss_difference", "gradient_difference")
    return {**rows[0], **{name: max(row[name] for row in rows) for name in names}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.several_gpus", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--objectives", nargs="*", default=["attention"], choices=OBJECTIVES)
    parser.add_argument("--contexts", nargs="*", type=int, default=[4096])
    parser.add_argument("--providers", nargs="*", default=COMPARED, choices=PROVIDERS)
    parser.add_argument("--json", type=Path, default=machine.ROOT / "out" / "several-gpus.json")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cases", nargs="*", default=["ddp"], choices=CASES)
    parser.add_argument(
        "--shared-by", nargs="*", help="providers of the shared cases; all of them"
    )
    parser.add_argument("--rows", nargs="*", type=int, default=[65536], help="of the sequence")
    parser.add_argument("--limit-s", type=float, default=340.0, help="after which all is over")
    options = parser.parse_args(argv)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": command_line("bench.several_gpus", sys.argv[1:] if argv is None else argv),
        "machine": machine.describe(torch.device(options.device), options.commit),
        "processes": options.processes,
        "rows": [],
    }
    # multicast is not available in every container, and these messages gain nothing by it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        processes = torch.multiprocessing.spawn(
            _rank, (options, record, f"{folder}/store"), nprocs=options.processes, join=False
        )
        end = time.monotonic() + options.limit_s
        while not processes.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                for process in processes.processes:
                    process.kill()
                print(f"not done after {options.limit_s:.0f} s", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
