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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench import ranks, sharded_models
from bench.measure import MIB, ROOT, Timing, release, synchronize, usual_dtype
from bench.records import Program, Record, Row
from bench.sharded import local
from bench.steps import random_ids

WARM_UP = 3  # steps that do not count: they compile
CHECKED = 20  # steps after which ranks ask each other for the time


def main(argv: list[str] | None = None) -> int:
    program = Program("bench.at_size", __doc__)
    add = program.add_argument
    add("--processes", type=int, default=2, help="ranks, a GPU each")
    add("--steps", type=int, default=200, help="of each way")
    add("--batch", type=int, default=2, help="sequences of a rank")
    add("--seqlen", type=int, default=4096)
    known = "of eager, inductor, streamkl, linear_topk_kl; the first is compared with"
    ways = ["inductor", "linear_topk_kl"]
    add("--ways", nargs="*", default=ways, metavar="NAME", help=known)
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
    training = Training(options, device)
    first: list[float] = []
    for way in options.ways:
        row, losses = training.run(way)
        first = first or losses
        both = zip(losses, first, strict=False)
        row.loss_error = max(abs(a - b) / abs(b) for a, b in both)
        row = ranks.worst(row)
        tokens = options.batch * options.seqlen * options.processes
        row.more["tokens_per_s"] = tokens / (row.ms() or 1) * 1e3
        if rank == 0:
            record.rows.append(row)
            record.save(path)
            print(f"{way}: {row.ms():.1f} ms a step, {row.more}", flush=True)
    ranks.end(rank, record, path)


class Training:
    """A sharded student and the weights that every way begins with."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.student, self.teacher = sharded_models.OF_1B[device.type]
        model = self.student.model(device, 1, options.seqlen, torch.float32, "sdpa")
        self.module: Any = sharded_models.HeadsOutside(model, None, torch.add)
        policy = MixedPrecisionPolicy(
            param_dtype=usual_dtype(device), reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # entries are float32
        )  # fmt: skip
        mesh = init_device_mesh(device.type, (options.processes,))
        self.module.shard(device, mesh=mesh, mp_policy=policy)
        self.weights = [x.clone() for x in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return local([p.detach() for p in self.module.parameters()])

    def run(self, way: str) -> tuple[Row, list[float]]:
        """Trains with one way to compute the loss; returns its row and the losses of its steps."""
        options, device, module, start = self.options, self.device, self.module, time.monotonic()
        for p, weight in zip(self._parameters(), self.weights, strict=True):
            p.copy_(weight)
        module.loss = sharded_models.loss_of(way, True, device)
        on_gpu = device.type == "cuda"
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=on_gpu)
        losses = []
        held = counted = 0
        while counted < options.steps:
            if len(losses) == WARM_UP:
                synchronize(device)
                release(device)
                if on_gpu:  # a peak is counted from weights and the optimizer's states on
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                ranks.largest(0)  # they begin together
                begin = time.monotonic()
            losses.append(self._step(optimizer, len(losses)))
            counted = len(losses) - WARM_UP
            if counted > 0 and counted % CHECKED == 0:  # the host runs ahead in between
                late = time.monotonic() - start > options.limit_s
                if ranks.largest(int(late)):
                    break
        synchronize(device)
        mean = (time.monotonic() - begin) / counted * 1e3
        names = f"{self.student.name} from {self.teacher.name}"
        shape = f"{names}, {options.batch} x {options.seqlen} tokens a rank"
        row = Row(
            "at size", way, "shared", shape=shape, timing={"step": Timing.of([mean])},
            loss=float(losses[-1]), compile_s=begin - start, samples=counted,
        )  # fmt: skip
        row.more = {"first_loss": float(losses[0]), "last_loss": float(losses[-1])}
        if on_gpu:
            peak = torch.cuda.max_memory_allocated()
            row.peak_mib = (peak - held) / MIB
            row.more["peak_with_weights_mib"] = peak / MIB
        return row, torch.stack(losses).tolist()

    def _step(self, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        options, vocabulary = self.options, self.student.vocabulary
        seed = step * options.processes + distributed.get_rank()
        ids = random_ids(vocabulary, options.batch, options.seqlen, self.device, seed)
        tokens = options.batch * options.seqlen
        loss = self.module(ids, *sharded_models.entries(vocabulary, tokens, self.device, seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


if __name__ == "__main__":
    sys.exit(main())
