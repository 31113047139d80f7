"""What the examples share: a clock of steps with a progress bar, and the comparison it prints."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import torch_streamkl
from torch_streamkl.fx_passes.backend import collected

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Clock:
    """Call `tick` after every step: the last one is recorded for its memory, not its time."""

    def __init__(self, title: str, num_steps: int) -> None:
        self.num_steps, self.times = num_steps, [time.perf_counter()]
        self.bar = tqdm(total=num_steps, desc=title)
        self.peak_mib = 0.0

    def tick(self) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        self.bar.update()
        done = len(self.times) - 1
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


def compare(train: Callable[[bool, Clock], object]) -> None:
    """Train uncompiled, then compiled with `torch_streamkl.enable`, and print both and the report.

    ``train(compiles, clock)`` trains for ``clock.num_steps`` steps.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="4 or more")
    num_steps = max(parser.parse_args().steps, 4)
    eager, compiled = Clock("uncompiled", num_steps), Clock("streamkl", num_steps)
    train(False, eager)
    with torch_streamkl.enable(), collected() as report:
        train(True, compiled)
    print(f"uncompiled {eager}\nstreamkl   {compiled}\n{report}")
