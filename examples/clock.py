"""A clock of training steps: times without the first, losses, and the memory of the last."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Clock:
    """Call `start`, then `tick(loss)` after every step.

    The first step, which compiles, is not part of the bar and of the times; the last one is
    recorded for its memory, not its time.
    """

    def __init__(self, title: str, num_steps: int, first: str) -> None:
        self.title, self.num_steps, self.first = title, num_steps, first
        self.times: list[float] = []
        self.losses: list[float] = []
        self.peak_mib = 0.0

    def start(self) -> None:
        print(f"{self.title}: {self.first}... ", end="", flush=True)
        self.times = [time.perf_counter()]

    def tick(self, loss: Tensor) -> None:
        self.losses.append(loss.item())  # waits for a GPU
        self.times.append(time.perf_counter())
        done = len(self.times) - 1
        if done == 1:
            print(f"{self.times[1] - self.times[0]:.1f} s", flush=True)
            self.bar = tqdm(total=self.num_steps - 1, desc=self.title)
        else:
            self.bar.update()
        if done == self.num_steps - 1:
            self._begin()
        elif done == self.num_steps:
            self._end()

    def _begin(self) -> None:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.start()

    def _end(self) -> None:
        self.bar.close()
        if DEVICE == "cuda":
            self.peak_mib = (torch.cuda.max_memory_allocated() - self.before) / 2**20
            return
        self.profiler.stop()
        current = highest = 0
        for event in self.profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                current += event.nbytes()
                highest = max(highest, current)
        self.peak_mib = highest / 2**20

    def __str__(self) -> str:
        steps = [b - a for a, b in zip(self.times[1:-2], self.times[2:-1], strict=True)]
        ms = statistics.median(steps) * 1e3  # without the first, which compiles
        return f"{ms:8.1f} ms a step, {self.peak_mib:8.1f} MiB above what is held between steps"
