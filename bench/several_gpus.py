"""A training step on several GPUs: DistributedDataParallel around a Llama pair's distillation.

    python -m bench.several_gpus --processes 2 --json bench/results/h200-several-gpus.json

Every process has a batch of its own; loss and gradients of the first step are compared with those
of the first provider on the same ranks. A row is the slowest rank's median step and the largest
peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench import machine
from bench.end_to_end import OBJECTIVES, PAIRS, PROVIDERS, build, forget_program, make_loss
from bench.measure import host_seconds, peak_mib
from bench.records import command_line

UNTIMED_STEPS, STEPS = 2, 10  # the same number on every rank, or they would wait for each other
COMPARED = ["eager", "inductor", "streamkl"]


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
    on_gpu = options.device == "cuda"
    device = torch.device(options.device, rank if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=torch.distributed.FileStore(store, options.processes),
        rank=rank,
        world_size=options.processes,
    )
    pair = PAIRS[options.device]
    dtype = torch.bfloat16 if on_gpu else torch.float32
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
                ranks: list[Any] = [None] * options.processes
                torch.distributed.all_gather_object(ranks, row)
                if rank == 0:
                    record["rows"].append(worst_of(ranks))
                    options.json.write_text(json.dumps(record, indent=1) + "\n")
                    print(record["rows"][-1], flush=True)
    torch.distributed.destroy_process_group()


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
    options = parser.parse_args(argv)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": command_line("bench.several_gpus", sys.argv[1:] if argv is None else argv),
        "machine": machine.describe(torch.device(options.device), options.commit),
        "processes": options.processes,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _rank, (options, record, f"{folder}/store"), nprocs=options.processes
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
