"""A training step on several GPUs: DistributedDataParallel around a Llama pair's distillation.

    python -m bench.several_gpus --processes 2 --json bench/results/h200-several-gpus.json

Every process has a batch of its own; loss and gradients of the first step are compared with
eager's on the same ranks. A row is the slowest rank's median step and the largest peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench import machine
from bench.end_to_end import PAIRS, Pair, build, forget_program, make_loss, with_streamkl
from bench.measure import MIB, synchronize
from bench.memory import peak_bytes
from bench.records import command_line

UNTIMED_STEPS, STEPS = 2, 10  # the same number on every rank, or they would wait for each other
PROVIDERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "inductor": lambda step: torch.compile(step, dynamic=False),
    "streamkl": with_streamkl,
}


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
    provider: str, pair: Pair, objective: str, context: int, device: torch.device
) -> tuple[dict[str, Any], list[Tensor]]:
    """One rank's row, and the gradients of its first step."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher = build(pair, pair.teacher_layers, 0, device, dtype).eval().requires_grad_(False)
    student = build(pair, pair.student_layers, 1, device, dtype)
    if objective == "attention":  # the LM head takes no part, and DDP would wait for its gradient
        student.lm_head.requires_grad_(False)
    step = Step(student, teacher, objective)
    ids_of = [device.index] if device.type == "cuda" else None
    call = PROVIDERS[provider](DistributedDataParallel(step, device_ids=ids_of))
    generator = torch.Generator(device).manual_seed(torch.distributed.get_rank())
    ids = torch.randint(pair.vocabulary, (1, context), device=device, generator=generator)

    def one_step() -> float:
        student.zero_grad(set_to_none=True)
        loss = call(ids)
        loss.backward()
        return float(loss)

    loss = one_step()
    gradients = [p.grad.cpu() for p in student.parameters() if p.grad is not None]
    for _ in range(UNTIMED_STEPS):
        one_step()
    student.zero_grad(set_to_none=True)
    peak = peak_bytes(one_step, device) / MIB
    times = []
    for _ in range(STEPS):
        torch.distributed.barrier()
        synchronize(device)
        start = time.perf_counter()
        one_step()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    forget_program(student, device)
    return {"loss": loss, "step_ms": statistics.median(times), "peak_mib": peak}, gradients


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    store = torch.distributed.FileStore(f"{folder}/store", options.processes)
    torch.distributed.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=options.processes,
    )
    rows: list[dict[str, Any]] = []
    truth: dict[tuple[str, int], tuple[float, list[Tensor]]] = {}
    for objective in options.objectives:
        for context in options.contexts:
            for provider in options.providers:
                pair = PAIRS[options.device]
                row, gradients = measure(provider, pair, objective, context, device)
                loss, expected = truth.setdefault((objective, context), (row["loss"], gradients))
                row |= {
                    "objective": objective,
                    "context": context,
                    "provider": provider,
                    "loss_difference": abs(row["loss"] - loss) / abs(loss),
                    "gradient_difference": difference(gradients, expected),
                }
                rows.append(row)
                Path(f"{folder}/{rank}.json").write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


def difference(given: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference of all gradients over their norm."""
    pairs = list(zip(given, expected, strict=True))
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return float((off / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5)


def together(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of all ranks: the slowest, the largest, the farthest off."""
    worst = ("step_ms", "peak_mib", "loss_difference", "gradient_difference")
    return [
        {**rows[0], **{key: max(row[key] for row in rows) for key in worst}}
        for rows in zip(*ranks, strict=True)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.several_gpus", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--objectives", nargs="*", default=["attention"])
    parser.add_argument("--contexts", nargs="*", type=int, default=[4096])
    parser.add_argument("--providers", nargs="*", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--json", type=Path, default=machine.ROOT / "out" / "several-gpus.json")
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (options, folder), nprocs=options.processes)
        ranks = [
            json.loads(Path(f"{folder}/{rank}.json").read_text())
            for rank in range(options.processes)
        ]
    record = {
        "command": command_line("bench.several_gpus", sys.argv[1:] if argv is None else argv),
        "machine": machine.describe(torch.device(options.device), options.commit),
        "processes": options.processes,
        "rows": together(ranks),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    for row in record["rows"]:
        print({k: v for k, v in row.items() if k != "loss"}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
