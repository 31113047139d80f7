"""Models the time of a problem that ranks share, next to which records show the measured one.

    t(n) = t(1) / n * slower + shown / BANDWIDTH + waits * GATHER_MS

``t(1) / n``: matrix products and row kernels are shared evenly. ``slower`` is 1 where a rank's
kernels are as fast as one GPU's. ``shown`` are the bytes that a rank receives while it computes
nothing, ``waits`` the collectives of few bytes that it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.measure import MIB
from bench.records import Row

# of two and of four H100s, beside a step and alone (bench/notes/several_gpus.md)
BANDWIDTH = 240e9  # bytes a second that a rank receives of messages of 50 MiB and more
GATHER_MS = 0.04  # of row states, 0.75 MiB
# kernels of two chunks of rows, with the keys before them, next to those of whole causal rows
CHUNKS = 1.06
ONE_GPU = "one GPU"


@dataclass(frozen=True)
class Cost:
    """What a rank receives in a step, by arithmetic."""

    received_mib: float
    shown_mib: float | None = None  # that no computation hides; None: there is no model
    waits: int = 0
    slower: float = 1.0

    def ms(self, of_one_ms: float, num_ranks: int) -> float | None:
        """Returns the model of a step's time, from that of one GPU with the whole problem."""
        if self.shown_mib is None:
            return None
        shown = self.shown_mib * MIB / BANDWIDTH * 1e3
        return of_one_ms / num_ranks * self.slower + shown + self.waits * GATHER_MS


def all_gather(whole_mib: float, num_ranks: int) -> float:
    """MiB that a rank receives to have all of it; as many as to reduce-scatter it."""
    return whole_mib * (num_ranks - 1) / num_ranks


def all_reduce(mib: float, num_ranks: int) -> float:
    """MiB that a rank receives: a reduce-scatter, then an all-gather."""
    return 2 * all_gather(mib, num_ranks)


def all_to_all(mine_mib: float, num_ranks: int) -> float:
    """MiB that a rank receives to exchange what it has for as much of all others."""
    return all_gather(mine_mib, num_ranks)


def add_scaling(rows: list[Row], costs: dict[str, Cost], num_ranks: int) -> None:
    """Adds to the rows what ranks receive, their part of one GPU's time, and the model's part."""
    of_one = next((row.ms() for row in rows if row.provider == ONE_GPU), None)
    for row in rows:
        cost = costs.get(row.provider)
        if cost is not None:
            row.more["received_mib"] = cost.received_mib
        ms = row.ms()
        if not of_one or ms is None or row.provider == ONE_GPU or row.status != "ok":
            continue
        row.more["of_one_gpu"] = ms / of_one
        model = None if cost is None else cost.ms(of_one, num_ranks)
        if model is not None:
            row.more["model_of_one_gpu"] = model / of_one
