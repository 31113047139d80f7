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
from torch.distributed.device_mesh import init_device_mesh

from bench.records import Record, Row

COLLECTIVE_LIMIT = datetime.timedelta(seconds=60)
LIMIT_S = 340.0  # after which all is over, where nobody says


def main(options: argparse.Namespace, record: Record, path: Path) -> int:
    """Starts the ranks; the first one writes the record."""
    for name in options.cases:
        if name not in CASES:
            known = ", ".join(CASES)
            raise ValueError(f"a case that ranks share must be one of {known}, got {name}")
    if options.list:
        print("\n".join(listed(options)))
        return 0
    start(_rank, (options, record, path), options.processes or 2, options.device)
    return 0


def listed(options: argparse.Namespace) -> list[str]:
    """Returns a line for each case and size that the options choose, without starting a rank."""
    num_ranks = options.processes or 2
    return [
        f"{name:<12} {size or 'its usual size'}"
        for name in options.cases or CASES
        for size in sizes_of(name, options.sizes, options.device, num_ranks)
    ]


def start(function: Any, arguments: tuple[Any, ...], num_ranks: int, device: str) -> None:
    """Runs ``function(rank, *arguments, store)`` in processes, and waits for them."""
    # multicast is not available in every container, and these messages gain nothing by it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        # without a GPU they are forked from one that has imported this, and done nothing else
        method = "spawn" if device == "cuda" else "forkserver"
        if method == "forkserver":
            torch.multiprocessing.get_context(method).set_forkserver_preload(
                ["bench.sharded_models"]
            )
        torch.multiprocessing.start_processes(
            function, (*arguments, f"{folder}/store"), nprocs=num_ranks, start_method=method
        )


def join(
    rank: int, num_ranks: int, kind: str, store: str, limit: datetime.timedelta = COLLECTIVE_LIMIT
) -> torch.device:
    """Joins this process to the others; returns its device."""
    on_gpu = kind == "cuda"
    device = torch.device(kind, rank if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=rank, world_size=num_ranks,
        store=torch.distributed.FileStore(store, num_ranks), timeout=limit,
    )  # fmt: skip
    return device


def _rank(rank: int, options: argparse.Namespace, record: Record, path: Path, store: str) -> None:
    from bench import costs, table
    from bench.__main__ import settings_of
    from bench.providers import of_case
    from bench.runner import run_case

    limit = options.limit_s if options.limit_s < float("inf") else LIMIT_S
    faulthandler.dump_traceback_later(limit, exit=True)
    size = options.processes or 2
    device = join(rank, size, options.device, store)
    mesh = init_device_mesh(device.type, (size,))
    settings = replace(settings_of(options, device), agree=largest, worst=worst)
    for name in options.cases or CASES:
        for given in sizes_of(name, options.sizes, device.type, size):
            case = maker_of(name)(mesh, device, given)
            own = case.own()
            names = [n for n in options.providers if n in own]
            rows = run_case(case, of_case(case, names), settings)
            costs.add_scaling(rows, case.costs, size)
            if rank == 0:
                record.rows += rows
                record.save(path)
                print(table.text(rows), flush=True)
    if rank == 0:
        record.is_complete = True
        record.save(path)
    torch.distributed.destroy_process_group()


# sizes on a GPU by default, with two ranks and with more; 0 is a case's usual one
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "vocabulary": ((8192,), (8192, 32768)),
    "sequence": ((65536,), (131072, 524288)),
    "mesh": ((0,), (0,)),
    "fsdp": ((0,), (0,)),
    "fsdp-live": ((0,), (0,)),
    "layers": ((0,), (0,)),
    "ddp": ((0,), (0,)),
}


def maker_of(name: str) -> Any:
    """Returns the function that makes a case."""
    from bench import sharded, sharded_models

    return {
        "vocabulary": sharded.vocabulary, "sequence": sharded.sequence,
        "mesh": sharded.two_dimensions, "fsdp": sharded_models.fsdp,
        "fsdp-live": sharded_models.fsdp_live, "layers": sharded_models.layers,
        "ddp": sharded_models.ddp,
    }[name]  # fmt: skip


def sizes_of(name: str, given: list[int] | None, device: str, num_ranks: int) -> tuple[int, ...]:
    """Returns the sizes of a case: tokens, or rows of a sequence."""
    usual = CASES.get(name, ((0,), (0,)))[num_ranks > 2]
    if given:
        return tuple(given)
    return usual if device == "cuda" else (0,)


def _of_all_ranks(mine: Any) -> list[Any]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
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
