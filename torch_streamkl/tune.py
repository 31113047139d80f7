"""Finds the fastest launches of the attention kernels for your shapes, on this machine's GPU.

    python -m torch_streamkl.tune --heads 32 --kv-heads 8 --head-dim 128 --seqlen 8192 --causal

Candidates first run in other processes (``--jobs`` of them, which also compile in parallel). A
candidate is skipped if it does not compile, does not fit, hangs, or gives other results than the
default launch. The fastest of the rest is timed against the default once more. The winners go to a
JSON file (runtime/launch_table.py) that later processes load.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.attention import heuristics, limits, ops
from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.kernels.tiles import TritonLaunch
from torch_streamkl.runtime import launch_table
from torch_streamkl.runtime.devices import device_name
from torch_streamkl.runtime.launch_table import (
    KERNELS,
    LaunchKey,
    LaunchTable,
    MeasuredLaunch,
)

TIMED_MS = 60.0  # of device time for a candidate
LEAST_GAIN = 1.02  # over the default; less is noise
ROUNDS = 5  # of the fastest against the default
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Two tiles of scores stay in registers: fewer a thread leave the multiprocessor idle, more spill.
# In full float32 there is no tensor core, and the operands are in registers, too.
BLOCKS = {2: (32, 64, 128), 4: (16, 32, 64)}  # by bytes of an element
SCORES_PER_THREAD = {2: (16, 64), 4: (2, 16)}

EPILOG = """\
example:
  python -m torch_streamkl.tune --heads 32 --kv-heads 8 --head-dim 128 --seqlen 8192 --causal

It takes a few minutes for each --seqlen. It needs a CUDA GPU, which nothing else should
use meanwhile. Later processes find the file by themselves.
"""

Timer = Callable[[Callable[[], Any]], float]  # milliseconds of a call


@dataclass(frozen=True)
class Shape:
    """Describes a problem to tune for."""

    batch: int
    num_heads: int
    num_kv_heads: int
    student_head_dim: int
    teacher_head_dim: int
    seqlen: int
    is_causal: bool
    dtype: str
    device: str

    def problem(self) -> AttentionProblem:
        """Returns random inputs, the same ones every time."""
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(heads: int, head_dim: int) -> Tensor:
            shape = (self.batch, heads, self.seqlen, head_dim)
            x = torch.randn(shape, generator=generator, device=self.device)
            return x.to(DTYPES[self.dtype])

        sides = [
            (normal(self.num_heads, dim), normal(self.num_kv_heads, dim))
            for dim in (self.student_head_dim, self.teacher_head_dim)
        ]
        return ops.problem_of(
            *sides[0], *sides[1],
            student_scale=self.student_head_dim**-0.5, teacher_scale=self.teacher_head_dim**-0.5,
            window_right=0 if self.is_causal else None,
        )[0]  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """Holds the outcome of one launch. runtime_ms is infinite if the launch was skipped."""

    kernel: str
    launch: TritonLaunch | None  # None is the kernel for Hopper
    runtime_ms: float
    remark: str = ""


class Workload:
    """Holds one shape on the device: its kernels, and the results of the default launches."""

    def __init__(self, shape: Shape) -> None:
        self.problem = replace(shape.problem(), impl="triton")
        self.device = device_name(self.problem.device)
        with launch_table.replaced(launch_table.new_table(self.device)):  # the defaults
            self.defaults = {k: heuristics.triton_launch(self.problem, k) for k in KERNELS}
            self.value, self.stats = ops.forward(self.problem)
        self.grad = torch.ones_like(self.value)

    def key(self, kernel: str) -> LaunchKey:
        return heuristics.launch_key(self.problem, kernel)

    def run(self, kernel: str) -> tuple[Tensor, ...]:
        """Returns the results of a kernel, as the launchers choose its tiles."""
        return self._run("triton", kernel)

    def run_hopper(self, kernel: str) -> tuple[Tensor, ...]:
        return self._run("hopper", kernel)

    def _run(self, impl: str, kernel: str) -> tuple[Tensor, ...]:
        problem = replace(self.problem, impl=impl)
        if kernel == "forward":
            value, stats = ops.forward(problem)
            return value, _finite(stats.student), _finite(stats.teacher)
        needs_grad = (kernel == "dq", kernel == "dk", False, False)
        grads = ops.backward(problem, self.stats, self.grad, needs_grad)
        return tuple(g for g in grads if g is not None)

    def table(self, kernel: str, tiles: TritonLaunch) -> LaunchTable:
        """Returns a table that makes the launchers choose these tiles."""
        entry = measured(self.key(kernel), tiles, 1.0, 1.0)
        return launch_table.new_table(self.device).updated((entry,))


def _finite(stats: Tensor) -> Tensor:
    lse, delta = stats.unbind(0)
    return torch.stack((lse.nan_to_num(neginf=0.0), delta), -1)


def measured(
    key: LaunchKey, tiles: TritonLaunch, runtime_ms: float, default_ms: float
) -> MeasuredLaunch:
    """Makes a table's entry of a measurement."""
    sizes = (tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages)
    return MeasuredLaunch(key, "triton", *sizes, runtime_ms, default_ms)


def candidates(default: TritonLaunch, element_bytes: int) -> list[TritonLaunch]:
    """Returns the default first, then every tile whose scores fit registers."""
    default = replace(default, num_splits=1)
    low, high = SCORES_PER_THREAD[element_bytes]
    others = [
        TritonLaunch(block_m, block_n, num_warps, num_stages)
        for block_m in BLOCKS[element_bytes]
        for block_n in BLOCKS[element_bytes]
        for num_warps in (4, 8)
        for num_stages in (1, 2, 3)
        if low <= block_m * block_n // (32 * num_warps) <= high
    ]
    return [default, *(x for x in others if x != default)]


# ------------------------------------------------------------------------------- one kernel
def tune_kernel(
    workload: Workload,
    kernel: str,
    launches: Iterable[tuple[TritonLaunch, str]],
    timer: Timer,
) -> tuple[list[Trial], MeasuredLaunch]:
    """Times launches, each with why it cannot run or "", the default first; returns what
    is to be kept.
    """
    trials: list[Trial] = []
    expected: tuple[Tensor, ...] = ()
    for tiles, refusal in launches:
        show(f"{kernel} {describe(tiles)}")
        with launch_table.replaced(workload.table(kernel, tiles)):
            call = functools.partial(workload.run, kernel)
            trials.append(_trial(kernel, tiles, call, expected, refusal, timer))
            if trials[0].remark:
                raise RuntimeError(f"the default launch of {kernel} failed: {trials[0].remark}")
            expected = expected or call()
    default = trials[0]
    best = min(trials, key=lambda trial: trial.runtime_ms)
    if best is not default:
        best, default = _decide(workload, kernel, best, default, timer)
    if limits.hopper_limit(workload.problem) is None:
        call = functools.partial(workload.run_hopper, kernel)
        trials.append(_trial(kernel, None, call, expected, "", timer))
    assert best.launch is not None
    key = workload.key(kernel)
    return trials, measured(key, best.launch, best.runtime_ms, default.runtime_ms)


def with_implementation(
    entries: list[MeasuredLaunch], hopper: list[Trial]
) -> list[MeasuredLaunch]:
    """Returns the entries with the implementation that is faster in all their kernels together.

    One implementation computes both passes, so that training pays for the sum; the forward's entry
    names it. ``hopper`` are the trials of the kernels for Hopper, none where they cannot run.
    """
    portable_ms = sum(entry.runtime_ms for entry in entries)
    hopper_ms = sum(trial.runtime_ms for trial in hopper)
    forward = [trial.runtime_ms for trial in hopper if trial.kernel == "forward"]
    if not forward:
        return entries
    print(f"together: {hopper_ms:.4f} ms for Hopper, {portable_ms:.4f} ms portable", flush=True)
    if hopper_ms >= portable_ms:
        return entries
    return [
        replace(entry, implementation="hopper", runtime_ms=forward[0])
        if entry.key.kernel == "forward"
        else entry
        for entry in entries
    ]


def _trial(
    kernel: str,
    tiles: TritonLaunch | None,
    call: Callable[[], tuple[Tensor, ...]],
    expected: tuple[Tensor, ...],
    refusal: str,
    timer: Timer,
) -> Trial:
    if refusal:
        return Trial(kernel, tiles, math.inf, refusal)
    poisoned = [torch.full_like(x, math.nan) for x in expected]
    del poisoned  # the next results lie in memory that holds NaN
    try:
        found = call()
        error = largest_error(found, expected)
        if not error <= 1.0:
            return Trial(kernel, tiles, math.inf, f"differs from the default ({error:.1e})")
        return Trial(kernel, tiles, timer(call))
    except Exception as error:  # a launch that cannot run is a result; the others go on
        return Trial(kernel, tiles, math.inf, first_line(error))


def _decide(
    workload: Workload, kernel: str, best: Trial, default: Trial, timer: Timer
) -> tuple[Trial, Trial]:
    """Times the winner and the default alternately, and returns both."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for times, trial in zip(taken, (best, default), strict=True):
            assert trial.launch is not None
            with launch_table.replaced(workload.table(kernel, trial.launch)):
                times.append(timer(lambda: workload.run(kernel)))
    best = replace(best, runtime_ms=statistics.median(taken[0]))
    default = replace(default, runtime_ms=statistics.median(taken[1]))
    wins = best.runtime_ms * LEAST_GAIN <= default.runtime_ms
    return (best if wins else default), default


def largest_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Returns the largest error of a row, relative to the error that another order of the same
    sums explains.

    That is two roundings of the results' dtype, and 1e-4 where they are float32.
    """
    worst = 0.0
    for x, y in zip(found, expected, strict=True) if expected else ():
        x, y = (z.unsqueeze(-1) if z.ndim == 3 else z for z in (x, y))
        allowed = max(2 * torch.finfo(y.dtype).eps, 1e-4)
        x, y = x.float(), y.float()
        size = y.norm(dim=-1)
        error = (x - y).norm(dim=-1) / torch.maximum(size, size.square().mean().sqrt())
        error = torch.where((x == y).all(-1), 0.0, error)
        # NaN is the largest error there is
        worst = max(worst, error.nan_to_num(nan=math.inf).max().item() / allowed)
    return worst


def first_line(error: BaseException) -> str:
    """Returns the first line of an error."""
    text = str(error).strip().split("\n")[0][:100]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def device_timer(call: Callable[[], Any]) -> float:
    """Returns the median milliseconds on the device."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=TIMED_MS, return_mode="median"))


# ------------------------------------------------------------------------------- other processes
def first_runs(
    shape: Shape, work: list[tuple[str, TritonLaunch]], jobs: int
) -> Iterator[tuple[str, TritonLaunch, str]]:
    """Runs each launch: why it cannot run, or ""; compiled in parallel into Triton's cache.

    A launch that breaks its process is one that cannot run, and this process stays whole.
    """
    if jobs == 0:
        yield from ((kernel, tiles, "") for kernel, tiles in work)
        return
    context = multiprocessing.get_context("spawn")
    left = list(work)
    while left:
        with ProcessPoolExecutor(min(jobs, len(left)), mp_context=context) as pool:
            futures = [pool.submit(_first_run, shape, *item) for item in left]
            broken = []
            for item, future in zip(left, futures, strict=True):
                try:
                    yield *item, future.result()
                except BrokenProcessPool:
                    broken.append(item)
        if broken and jobs == 1:  # alone in its process, so it is the one that broke it
            yield *broken.pop(0), "its process ended"
        left, jobs = broken, 1


_workloads: dict[Shape, Workload] = {}


def _first_run(shape: Shape, kernel: str, tiles: TritonLaunch) -> str:
    try:
        if shape not in _workloads:
            _workloads[shape] = Workload(shape)
        workload = _workloads[shape]
        with launch_table.replaced(workload.table(kernel, tiles)):
            workload.run(kernel)
        if workload.grad.is_cuda:
            torch.cuda.synchronize(workload.grad.device)
    except Exception as error:
        if "illegal memory access" in str(error):
            os._exit(1)  # nothing runs in this process any more
        return first_line(error)
    return ""


# ----------------------------------------------------------------------------------------- output
def show(what: str) -> None:
    """Prints the current step to standard error."""
    print(what, file=sys.stderr, flush=True)


def describe(tiles: TritonLaunch | None) -> str:
    """Describes tiles in a table."""
    if tiles is None:
        return "the kernel for Hopper"
    sizes = f"{tiles.block_m} x {tiles.block_n}"
    return f"{sizes}, {tiles.num_warps} warps, {tiles.num_stages} stages"


def table_text(trials: list[Trial]) -> str:
    """Returns the launches of one kernel, the fastest first."""
    default_ms = trials[0].runtime_ms
    lines = [f"{trials[0].kernel:26} {'ms':>9}  against the default"]
    for trial in sorted(trials, key=lambda trial: trial.runtime_ms):
        name = describe(trial.launch)
        if trial.remark:
            lines.append(f"  {name:34} {trial.remark}")
            continue
        remark = "default" if trial is trials[0] else f"{default_ms / trial.runtime_ms:.2f}x"
        lines.append(f"  {name:24} {trial.runtime_ms:9.4f}  {remark}")
    return "\n".join(lines)


def tune(shape: Shape, kernels: list[str], jobs: int, timer: Timer) -> list[MeasuredLaunch]:
    """Times all candidates of a shape, prints the tables, and returns the winners."""
    print(f"{shape}", flush=True)
    workload = Workload(shape)
    element_bytes = DTYPES[shape.dtype].itemsize
    ready: dict[str, list[tuple[TritonLaunch, str]]] = {k: [] for k in kernels}
    work = [(k, x) for k in kernels for x in candidates(workload.defaults[k], element_bytes)]
    for kernel, tiles, refusal in first_runs(shape, work, jobs):
        show(f"first run of {kernel} {describe(tiles)}")
        ready[kernel].append((tiles, refusal))
    entries, hopper = [], []
    for kernel, launches in ready.items():
        default = replace(workload.defaults[kernel], num_splits=1)
        launches.sort(key=lambda item: item[0] != default)  # the default first
        trials, entry = tune_kernel(workload, kernel, launches, timer)
        print(table_text(trials), flush=True)
        entries.append(entry)
        hopper += [trial for trial in trials if trial.launch is None]
    return with_implementation(entries, hopper)


def save(entries: list[MeasuredLaunch], device: str, path: Path) -> None:
    """Add to the file; one of another device or version, or a broken one, is replaced."""
    table = launch_table.new_table(device)
    if path.exists():
        try:
            table = launch_table.load(path, device)
        except ValueError as error:
            print(f"replaced: {error}")
    table.updated(tuple(entries)).save(path)
    launch_table.forget()
    print(f"{len(entries)} launches written to {path}")


def _size(text: str, least: int = 1) -> int:
    """Reads a whole number of at least ``least`` from the command line."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


def parser() -> argparse.ArgumentParser:
    """Makes the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_streamkl.tune",
        description=(__doc__ or "").split("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--batch", type=_size, default=1, help="sequences in a batch (default 1)")
    add("--heads", type=_size, default=32, help="query heads of both sides (default 32)")
    add("--kv-heads", type=_size, help="key heads of both sides (default: as many as --heads)")
    add("--head-dim", type=_size, default=128, help="head_dim of the student (default 128)")
    add("--teacher-head-dim", type=_size, help="head_dim of the teacher (default: the student's)")
    add(
        "--seqlen", type=_size, nargs="+", default=[8192], metavar="N",
        help="queries and keys of a sequence; several lengths are tuned one by one (default 8192)",
    )  # fmt: skip
    add("--causal", action="store_true", help="tune for is_causal=True (default: without a mask)")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="default: bfloat16")
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="default: all")
    add(
        "--jobs", type=functools.partial(_size, least=0), default=min(8, os.cpu_count() or 1),
        help="processes that compile and try launches first; 0 for none",
    )  # fmt: skip
    add(
        "--out", type=Path,
        help=f"default: what {launch_table.VARIABLE} names, or a file in your cache directory",
    )  # fmt: skip
    return parser


def main(arguments: list[str] | None = None, timer: Timer = device_timer) -> int:
    """Runs the command line."""
    of_command_line = parser()
    options = of_command_line.parse_args(arguments)
    if options.heads % (options.kv_heads or options.heads):
        of_command_line.error(
            f"--heads must be a multiple of --kv-heads, got {options.heads} and {options.kv_heads}"
        )
    if options.out is not None and options.out.is_dir():  # found before it is written to
        of_command_line.error(f"--out must be a file, got the folder {options.out}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    entries: list[MeasuredLaunch] = []
    for seqlen in options.seqlen:
        shape = Shape(
            options.batch, options.heads, options.kv_heads or options.heads,
            options.head_dim, options.teacher_head_dim or options.head_dim,
            seqlen, options.causal, options.dtype, device,
        )  # fmt: skip
        limit = limits.triton_limit(replace(shape, seqlen=1).problem())
        if limit is not None:
            print(f"the attention kernel {limit}: nothing to tune", file=sys.stderr)
            return 1
        entries += tune(shape, options.kernels, options.jobs, timer)
    name = device_name(torch.device(device))
    save(entries, name, options.out or launch_table.table_path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
