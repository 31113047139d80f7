"""Trains Llama 1B on a cached 8B teacher's entries under FSDP2: tokens per second and peak.

    python -m bench.at_size --processes 2 --json bench/results/h100-two-at-size.json

The widths are those of the models, the weights are random, the head has weights of its own. Every
layer is compiled and sharded; parameters are float32, and cast to bfloat16 where they are used.
The ways differ in the loss alone: each begins with the same weights and sees the same tokens. Each
step draws other tokens, and the 64 entries of each that a teacher's cache would hold.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from bench import ranks, sharded_models
from bench.measure import MIB, ROOT, Timing, release, synchronize, usual_dtype
from bench.records import Program, Record, Row
from bench.steps import random_ids

WAYS = ("inductor", "linear_topk_kl")
WARM_UP = 3  # steps that do not count: they compile
CHECKED = 20  # steps after which ranks ask each other for the time


@dataclass(frozen=True)
class Settings:
    """What is trained, and how long."""

    device: torch.device
    steps: int
    batch: int
    seqlen: int
    limit_s: float  # of a way, its compilation included

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen


def main(argv: list[str] | None = None) -> int:
    program = Program("bench.at_size", __doc__)
    add = program.add_argument
    on_gpu = torch.cuda.is_available()
    add("--processes", type=int, default=2, help="ranks, a GPU each")
    add("--steps", type=int, default=200, help="of each way")
    add("--batch", type=int, default=2, help="sequences of a rank")
    add("--seqlen", type=int, default=4096 if on_gpu else 16)
    known = "of eager, inductor, streamkl, linear_topk_kl; the first is compared with"
    add("--ways", nargs="*", default=list(WAYS), metavar="NAME", help=known)
    add("--limit-s", type=float, default=70.0, help="a way ends after so many seconds")
    options, record = program.begin(argv)
    record.title = "1B from a cached 8B teacher, FSDP2: a run at size"
    record.machine["processes"] = str(options.processes)
    path = options.json or ROOT / "out" / "at_size.json"
    ranks.start(_rank, (options, record, path), options.processes, options.device)
    return 0


def _rank(rank: int, options: argparse.Namespace, record: Record, path: Path, store: str) -> None:
    limit = datetime.timedelta(seconds=120)
    device = ranks.join(rank, options.processes, options.device, store, limit)
    settings = Settings(device, options.steps, options.batch, options.seqlen, options.limit_s)
    training = Training(settings)
    first: list[float] = []
    for way in options.ways:
        row, losses = training.run(way)
        first = first or losses
        both = list(zip(losses, first, strict=False))
        row.loss_error = max(abs(a - b) / abs(b) for a, b in both)
        row = ranks.worst(row)
        row.more["tokens_per_s"] = settings.tokens * options.processes / (row.ms() or 1) * 1e3
        if rank == 0:
            record.rows.append(row)
            record.save(path)
            shown = {name: f"{x:.4g}" for name, x in row.more.items()}
            print(f"{way}: {row.ms():.1f} ms a step, {shown}", flush=True)
    if rank == 0:
        record.is_complete = True
        record.save(path)
    distributed.destroy_process_group()


class Training:
    """A sharded student and the weights that every way begins with."""

    def __init__(self, settings: Settings) -> None:
        self.settings, device = settings, settings.device
        student, teacher = sharded_models.student_and_teacher(device)
        self.names, self.vocab = (student.name, teacher.name), student.vocab
        model = student.model(device, 1, torch.float32, settings.seqlen)
        self.module = sharded_models.HeadsOutside(model, None, sharded_models.of_entries)
        policy = MixedPrecisionPolicy(
            param_dtype=usual_dtype(device), reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # entries are float32
        )  # fmt: skip
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        self.module.shard(device, mesh=mesh, mp_policy=policy)
        self.weights = [_local(p).clone() for p in self.module.parameters()]

    def batch(self, step: int) -> tuple[Tensor, ...]:
        settings = self.settings
        seed = step * distributed.get_world_size() + distributed.get_rank()
        shape = (settings.batch, settings.seqlen)
        ids = random_ids(self.vocab, *shape, settings.device, seed=seed)
        return ids, *sharded_models.entries(self.vocab, settings.tokens, settings.device, seed)

    def run(self, way: str) -> tuple[Row, list[float]]:
        """Trains with one way to compute the loss; returns its row and the losses of its steps."""
        device, module, start = self.settings.device, self.module, time.perf_counter()
        with torch.no_grad():
            for p, weight in zip(module.parameters(), self.weights, strict=True):
                _local(p).copy_(weight)
        module.loss = sharded_models.loss_of(way, True, device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=device.type == "cuda")
        losses = [self._step(optimizer, step) for step in range(WARM_UP)]
        synchronize(device)
        release(device)
        held = _start_of_peak(device)
        ranks.largest(0)  # they begin together
        begin = time.perf_counter()
        compile_s, counted = begin - start, 0
        while counted < self.settings.steps:
            losses.append(self._step(optimizer, WARM_UP + counted))
            counted += 1
            if counted % CHECKED == 0:  # the host runs ahead in between, as in a training loop
                late = time.perf_counter() - start > self.settings.limit_s
                if ranks.largest(int(late)):
                    break
        synchronize(device)
        mean = (time.perf_counter() - begin) / counted * 1e3
        row = Row(
            "at size", way, "shared", shape=self._shape(), timing={"step": Timing.of([mean])},
            loss=float(losses[-1]), compile_s=compile_s, samples=counted,
        )  # fmt: skip
        row.more = {"first_loss": float(losses[0]), "last_loss": float(losses[-1])}
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
            row.peak_mib = (peak - held) / MIB
            row.more["peak_with_weights_mib"] = peak / MIB
        return row, torch.stack(losses).tolist()

    def _step(self, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss = self.module(*self.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def _shape(self) -> str:
        student, teacher = self.names
        settings = self.settings
        return f"{student} from {teacher}, {settings.batch} x {settings.seqlen} tokens a rank"


def _start_of_peak(device: torch.device) -> int:
    """Bytes that weights and the optimizer's states take, from which a peak is counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _local(x: Any) -> Tensor:
    return x.detach().to_local() if isinstance(x, DTensor) else x.detach()


if __name__ == "__main__":
    sys.exit(main())
