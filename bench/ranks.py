"""Runs cases that ranks share, in processes of one machine: `python -m bench shared`.

Nothing waits for a lost rank: collectives give up after a minute, and processes end when the time
limit is over. A row is the slowest rank's time and the largest peak.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from bench import costs, sharded, sharded_models, table
from bench.providers import of_case
from bench.records import Record, Row
from bench.runner import run_case

COLLECTIVE_LIMIT = datetime.timedelta(seconds=60)
LIMIT_S = 340.0  # after which all is over, where nobody says
CASES = {
    "vocabulary": sharded.vocabulary, "sequence": sharded.sequence,
    "mesh": sharded.two_dimensions, "fsdp": sharded_models.fsdp,
    "fsdp-live": sharded_models.fsdp_live, "layers": sharded_models.layers,
    "ddp": sharded_models.ddp,
}  # fmt: skip
# on a GPU, with two ranks and with more; 0 is a case's usual size
SIZES = {"vocabulary": ((8192,), (8192, 32768)), "sequence": ((65536,), (131072, 524288))}


def main(options: argparse.Namespace, record: Record, path: Path) -> int:
    """Starts the ranks; the first one writes the record."""
    record.machine["processes"] = str(options.processes)
    for name in options.cases:
        if name not in CASES:
            known = ", ".join(CASES)
            raise ValueError(f"a case that ranks share must be one of {known}, got {name}")
    chosen = [
        (name, size)
        for name in options.cases or CASES
        for size in sizes_of(name, options.sizes, options.device, options.processes)
    ]
    if options.list:
        print("\n".join(f"{name:<12} {size or 'its usual size'}" for name, size in chosen))
        return 0
    start((options, chosen, record, path), options.processes, options.device)
    return 0


def sizes_of(name: str, given: list[int] | None, device: str, num_ranks: int) -> tuple[int, ...]:
    """Returns the sizes of a case: tokens, or rows of a sequence."""
    if given:
        return tuple(given)
    usual = SIZES.get(name, ((0,), (0,)))
    return usual[num_ranks > 2] if device == "cuda" else (0,)


def start(arguments: tuple[Any, ...], num_ranks: int, device: str) -> None:
    """Runs `_rank` in processes, and waits for them."""
    # multicast is not available in every container, and these messages gain nothing by it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # without a GPU they are forked from one that has imported this, and done nothing else
    method = "spawn" if device == "cuda" else "forkserver"
    if method == "forkserver":
        torch.multiprocessing.get_context(method).set_forkserver_preload(["bench.ranks"])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank, (f"{folder}/store", *arguments), nprocs=num_ranks, start_method=method
        )


def _joined(rank: int, num_ranks: int, kind: str, store: str) -> torch.device:
    """Joins this process to the others; returns its device."""
    on_gpu = kind == "cuda"
    device = torch.device(kind, rank if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=rank, world_size=num_ranks,
        store=distributed.FileStore(store, num_ranks), timeout=COLLECTIVE_LIMIT,
    )  # fmt: skip
    return device


def _rank(
    rank: int, store: str, options: argparse.Namespace, chosen: list[tuple[str, int]],
    record: Record, path: Path,
) -> None:  # fmt: skip
    from bench.__main__ import settings_of

    limit = options.limit_s if options.limit_s < float("inf") else LIMIT_S
    faulthandler.dump_traceback_later(limit, exit=True)
    device = _joined(rank, options.processes, options.device, store)
    mesh = init_device_mesh(device.type, (options.processes,))
    settings = replace(settings_of(options, device), agree=largest, worst=worst)
    for name, size in chosen:
        case = CASES[name](mesh, device, size)
        names = [n for n in options.providers if n in case.own()]
        rows = run_case(case, of_case(case, names, ()), settings)
        costs.add_scaling(rows, case.costs, options.processes)
        record.rows += rows
        record.is_complete = (name, size) == chosen[-1]
        if rank == 0:
            record.save(path)
            print(table.text(rows), flush=True)
    distributed.destroy_process_group()


def _of_all_ranks(mine: Any) -> list[Any]:
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, mine)
    return every


def largest(mine: int) -> int:
    """Returns the largest of all ranks' numbers."""
    return int(max(_of_all_ranks(mine)))


def worst(row: Row) -> Row:
    """Returns a row of all ranks' rows."""
    return worst_of(_of_all_ranks(row))


def worst_of(rows: list[Row]) -> Row:
    """Returns a row of all ranks: the slowest, the largest, the farthest off."""
    slowest = max(rows, key=lambda row: row.ms() or 0.0)
    names = ("peak_mib", "loss_error", "gradient_error")
    most = {name: max((getattr(row, name) or 0.0) for row in rows) for name in names}
    failed = next((row for row in rows if row.status != "ok"), rows[0])
    return replace(slowest, **most, status=failed.status, detail=failed.detail)
