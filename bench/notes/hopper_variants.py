"""Experiments on an H200 (torch 2.11, Triton 3.6): launches of the Hopper forward, tiles of the portable kernels.

    OUT=... python bench/notes/hopper_variants.py [--only hopper|sweep|fp32] [--seconds 260]

Each launch of the forward is compiled and checked in a process of its own with a time limit (a deadlock costs that, no
more), then those that are right are timed in turns in one process a head_dim. The portable sweep uses torch_streamkl.tune.
JSON goes to $OUT after every step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from torch_streamkl.launch import HOPPER_LAUNCHES, HopperLaunch

DEVICE, HEADS, SEQLEN, JOBS = "cuda", 32, 8192, 14
TIMING_SECONDS = 60  # of the process that times one head_dim
ROUNDS = 5  # of timings of the forward, after one that is not kept
SHAPES = ((128, True), (128, False), (64, True), (64, False))


def launch_of(mode: str, registers: str, groups: int, slots: int, *options: str, keys: int = 64):
    return HopperLaunch(
        block_m=64,
        block_n=keys,
        pairs=mode == "pairs",
        q_in_registers=registers,
        groups=groups,
        slots=slots,
        one_barrier=ONE in options,
        late_release=LATE in options,
        after_issue=NO_PAUSE not in options,
    )


ONE, LATE, NO_PAUSE = "one barrier", "late release", "no after_issue"
# by head_dim; for sm_90 all compile without a serialised wgmma and at most 32 bytes of stack (Triton 3.6 and 3.9)
FORWARD = {
    64: [
        launch_of("pairs", "none", 2, 4),
        launch_of("pairs", "none", 2, 4, ONE),
        launch_of("pairs", "none", 2, 4, ONE, NO_PAUSE),
        launch_of("pairs", "none", 2, 4, ONE, LATE),
        launch_of("pairs", "none", 2, 4, ONE, LATE, NO_PAUSE),
        launch_of("pairs", "none", 2, 8, ONE, LATE),
        launch_of("pairs", "other", 2, 4, ONE),
        launch_of("pairs", "weight", 2, 4, ONE, LATE),
        launch_of("halves", "both", 2, 4, ONE, LATE),
        launch_of("halves", "both", 3, 2, NO_PAUSE),
        launch_of("halves", "both", 3, 4, NO_PAUSE),
        launch_of("halves", "both", 3, 4, ONE, NO_PAUSE),
        launch_of("halves", "both", 3, 4, ONE, LATE, NO_PAUSE),
        launch_of("halves", "other", 3, 4, ONE),
        launch_of("halves", "other", 3, 4, ONE, NO_PAUSE),
        launch_of("halves", "other", 3, 4, ONE, LATE, NO_PAUSE),
        launch_of("halves", "weight", 3, 4, ONE, NO_PAUSE),
        launch_of("halves", "none", 3, 4, ONE, NO_PAUSE),
        launch_of("halves", "none", 3, 4, ONE, LATE, NO_PAUSE),
        launch_of("pairs", "none", 3, 4, ONE, LATE, keys=32),
        launch_of("pairs", "none", 3, 8, ONE, NO_PAUSE, keys=32),
    ],
    128: [
        launch_of("pairs", "none", 2, 4),
        launch_of("pairs", "none", 2, 4, ONE),
        launch_of("pairs", "none", 2, 4, ONE, LATE),
        launch_of("pairs", "other", 2, 4, ONE),
        launch_of("pairs", "other", 2, 4, ONE, LATE),
        launch_of("pairs", "other", 2, 4, ONE, NO_PAUSE),
        launch_of("pairs", "weight", 2, 4, ONE, LATE),
        launch_of("halves", "both", 2, 4),
        launch_of("halves", "both", 2, 4, ONE),
        launch_of("halves", "both", 2, 4, ONE, LATE),
        launch_of("halves", "both", 2, 4, ONE, LATE, NO_PAUSE),
        launch_of("halves", "weight", 2, 4, ONE),
        launch_of("halves", "other", 2, 4, ONE),
        launch_of("halves", "none", 3, 4, ONE, LATE, NO_PAUSE),
        launch_of("halves", "other", 3, 4, ONE, NO_PAUSE),
        launch_of("pairs", "none", 3, 4, ONE, LATE, keys=32),
        launch_of("pairs", "other", 3, 4, ONE, keys=32),
    ],
}


# --------------------------------------------------------------------------------------------- forward
def candidates_of(head_dim: int) -> dict[str, HopperLaunch]:
    """Launches of the Hopper forward by name, the default first."""
    found = {"default": HOPPER_LAUNCHES[head_dim]}
    for launch in FORWARD[head_dim]:
        if launch not in found.values():
            found[describe(launch)] = launch
    return found


def describe(launch: HopperLaunch) -> str:
    """As "pairs, q none, 2 groups, 4 slots, one barrier, late release"."""
    words = [
        "pairs" if launch.pairs else "halves",
        f"q {launch.q_in_registers}",
        f"{launch.groups} groups",
        f"{launch.slots} slots",
    ]
    if launch.block_n != 64:
        words.insert(0, f"{launch.block_n} keys")
    words += [ONE] * launch.one_barrier + [LATE] * launch.late_release
    words += [NO_PAUSE] * (not launch.after_issue)
    return ", ".join(words)


def forward(launch: HopperLaunch, problem):
    from torch_streamkl.kernels import hopper_attention

    saved = hopper_attention.hopper_launch
    hopper_attention.hopper_launch = lambda _: launch
    try:
        return hopper_attention.forward(problem)
    finally:
        hopper_attention.hopper_launch = saved


def problem_of(
    head_dim, causal, n, m=0, heads=32, batch=1, seed=0, divergence="forward_kl", size=1.0
):
    import torch

    from torch_streamkl.functional import DIVERGENCES
    from torch_streamkl.ops import problem_of as build

    g = torch.Generator(DEVICE).manual_seed(seed)
    shapes = [(batch, heads, size, head_dim) for size in (n, m or n, n, m or n)]
    x = [torch.randn(s, generator=g, device=DEVICE).to(torch.bfloat16) for s in shapes]
    x[0], x[2] = x[0] * size, x[2] * size
    scale = head_dim**-0.5
    return build(
        *x,
        functional=DIVERGENCES[divergence],
        student_scale=scale,
        teacher_scale=scale,
        window_right=0 if causal else None,
    )[0]


def truth(problem):
    """Value, lse (log2 units) of student and teacher in float64, naive."""
    import torch

    q_s, k_s, q_t, k_t = (
        x.double()
        for x in (problem.student.q, problem.student.k, problem.teacher.q, problem.teacher.k)
    )
    n, m = q_s.shape[2], k_s.shape[2]
    s = q_s @ k_s.transpose(-1, -2) * problem.student.scale
    t = q_t @ k_t.transpose(-1, -2) * problem.teacher.scale
    if problem.window_right is not None:
        mask = torch.ones(n, m, dtype=torch.bool, device=DEVICE).tril(m - n)
        s, t = s.masked_fill(~mask, -torch.inf), t.masked_fill(~mask, -torch.inf)
    log_s, log_t = s.log_softmax(-1), t.log_softmax(-1)
    p, r = log_t.exp(), log_s.exp()
    if problem.functional.bilinear.has_teacher_moment:
        value = torch.where(p > 0, p * (log_t - log_s), 0.0).sum(-1)
    else:
        value = torch.where(r > 0, r * (log_s - log_t), 0.0).sum(-1)
    return value, s.logsumexp(-1) / math.log(2), t.logsumexp(-1) / math.log(2)


def check(name: str, head_dim: int) -> dict:
    """Errors on small sizes, and one run of what will be timed (which leaves its kernel in the cache)."""
    import torch

    launch = candidates_of(head_dim)[name]
    worst = {"value": 0.0, "lse": 0.0}
    # sizes whose kernels Triton specialises as those of 8192, one odd size, and scores that need the second launch
    sizes = [
        (2048, 2048, False, 1.0),
        (2048, 2048, True, 1.0),
        (200, 333, True, 1.0),
        (2048, 2048, False, 60.0),
    ]
    for n, m, causal, size in sizes:
        p = problem_of(head_dim, causal, n, m, heads=16, seed=n, size=size)
        poison = torch.full((5, 1, 16, n), math.nan, device=DEVICE)
        del poison
        value, stats = forward(launch, p)
        expected = truth(p)
        found = (value, stats.student_lse, stats.teacher_lse)
        for key, x, y in zip(("value", "lse", "lse"), found, expected):
            error = ((x.double() - y).abs() / y.abs().clamp_min(1.0)).max().item()
            worst[key] = max(worst[key], error if error == error else math.inf)
    for causal in (False, True):
        p = problem_of(head_dim, causal, SEQLEN)
        value, _ = forward(launch, p)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        worst[f"finite {causal}"] = bool(value.isfinite().all())
    return worst


def event_ms(call, repeats=5):
    import torch

    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(repeats):
        call()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / repeats


def cudnn_call(head_dim, causal):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        torch.randn(1, 32, 8192, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def time_all(names: list[str], head_dim: int) -> None:
    """Prints one JSON line a causality: medians of interleaved rounds."""
    from torch_streamkl.kernels import attention

    launches = candidates_of(head_dim)
    for causal in (True, False):
        problems = [problem_of(head_dim, causal, SEQLEN, seed=seed) for seed in range(2)]
        calls = {name: (lambda p, x=launches[name]: forward(x, p)) for name in names}
        calls["portable"] = attention.forward
        library = cudnn_call(head_dim, causal)
        calls["cudnn attention"] = lambda _: library()
        times = {name: [] for name in calls}
        for number in range(ROUNDS + 1):
            p = problems[number % 2]
            for name, call in calls.items():
                taken = event_ms(lambda: call(p))
                if number:
                    times[name].append(taken)
        flop = 4 * 32 * 8192**2 * head_dim / (2 if causal else 1)
        result = {
            name: {
                "ms": statistics.median(t),
                "low": min(t),
                "high": max(t),
                "tflops": flop / statistics.median(t) * 1e-9,
            }
            for name, t in times.items()
        }
        print(json.dumps({"head_dim": head_dim, "causal": causal, "times": result}), flush=True)


# --------------------------------------------------------------------------------------------- portable sweep
def function_text(text: str, name: str) -> str:
    start = text.index(f"@triton.jit\ndef {name}(")
    stop = text.find("\n\n\n", start)
    return text[start:] if stop < 0 else text[start:stop]


def replaced_in(text: str, changes: list[tuple[str, str]]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def transposed_dk(text: str) -> str:
    """Scores with keys as rows: dS^T is the register operand of the dK matmul, and nothing is transposed on the way."""
    import re

    tile = replaced_in(
        function_text(text, "gradient_tile"),
        [
            ("def gradient_tile(", "def gradient_tile_t("),
            ("rows.offs[:, None]", "rows.offs[None, :]"),
            ("offs_n[None, :]", "offs_n[:, None]"),
            ("tl.dot(rows.qs, ks_trans", "tl.dot(ks_trans, tl.trans(rows.qs)"),
            ("tl.dot(rows.qt, kt_trans", "tl.dot(kt_trans, tl.trans(rows.qt)"),
            ("lse_t[:, None]", "lse_t[None, :]"),
            ("lse_s[:, None]", "lse_s[None, :]"),
            ("key_sum[:, None]", "key_sum[None, :]"),
        ],
    )
    over = function_text(text, "dk_over")
    new_over = replaced_in(
        over,
        [
            ("gradient_tile(", "gradient_tile_t("),
            ("tl.trans((d * grad[:, None]).to(q.dtype)), q", "(d * grad[None, :]).to(q.dtype), q"),
        ],
    )
    kernel = function_text(text, "dk_kernel")
    new_kernel, count = re.subn(r"(k[st]_trans = )tl\.trans\(\n\s*(.*)\n\s*\)", r"\1\2", kernel)
    assert count == 2, count
    return text.replace(over, tile + "\n\n\n" + new_over).replace(kernel, new_kernel)


def module_of(name: str, text: str):
    """A module with this text, from a file: Triton reads the source of its functions."""
    folder = Path(tempfile.gettempdir()) / "streamkl_variants"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    if not path.exists() or path.read_text() != text:
        partial = folder / f"{name}.{os.getpid()}"
        partial.write_text(text)
        partial.replace(path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


class Backward:
    """attention_backward as it is, or a variant of it, in the launcher."""

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def __enter__(self):
        from torch_streamkl.kernels import attention, attention_backward, plans

        plans.clear_plans()
        self.saved, attention.bwd = attention.bwd, attention_backward
        self.precision = plans.dot_precision
        if self.variant in ("ieee", "tf32x3"):
            plans.dot_precision = lambda _: self.variant
        if self.variant == "transposed":
            text = transposed_dk(Path(attention_backward.__file__).read_text())
            attention.bwd = module_of("backward_transposed", text)

    def __exit__(self, *_):
        from torch_streamkl.kernels import attention, plans

        attention.bwd, plans.dot_precision = self.saved, self.precision
        plans.clear_plans()


def first_run(variant, shape, kernel, tiles):
    from torch_streamkl import tune

    with Backward(variant):
        return tune._first_run(shape, kernel, tiles)


def first_runs(work, jobs, seconds):
    """Why each (shape, variant, kernel, tiles) cannot run, or "", in the order of the work."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    stop = time.time() + seconds
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    futures = [
        pool.submit(first_run, variant, shape, kernel, tiles)
        for shape, variant, kernel, tiles in work
    ]
    found = []
    for future in futures:
        try:
            found.append(future.result(timeout=max(0.1, stop - time.time())))
        except Exception as error:
            found.append(f"first run: {type(error).__name__} {error}"[:100])
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((pool._processes or {}).values()):
        process.terminate()
    return found


# (block_m, block_n, num_warps): stages. What spilled more than 300 bytes or did not fit when compiled for sm_90 is not here.
TILES = {
    ("dk", 128): {
        (64, 64, 4): (1, 2, 3),
        (32, 64, 4): (1, 3),
        (32, 128, 8): (1, 3),
        (128, 64, 8): (1, 2),
        (64, 32, 4): (1,),
    },
    ("dk", 64): {
        (64, 64, 4): (1, 2, 3),
        (32, 64, 4): (1, 3),
        (32, 128, 8): (1, 3),
        (64, 128, 8): (1, 3),
        (128, 64, 8): (1, 2),
    },
    ("dk transposed", 128): {
        (64, 64, 4): (1, 3),
        (32, 64, 4): (1, 2, 3),
        (32, 128, 8): (1, 2, 3),
        (64, 128, 8): (1, 3),
        (64, 64, 8): (3,),
    },
    ("dk transposed", 64): {
        (64, 64, 4): (1, 3),
        (32, 64, 4): (1, 2, 3),
        (32, 128, 8): (1, 2, 3),
        (64, 128, 8): (1, 2, 3),
        (64, 64, 8): (3,),
        (32, 128, 4): (1, 3),
    },
    ("dq", 128): {
        (64, 64, 4): (1, 2, 3),
        (64, 32, 4): (1, 2, 3),
        (64, 128, 4): (2, 3),
        (128, 32, 8): (2, 3),
        (128, 64, 8): (1, 2, 3),
        (128, 128, 8): (2,),
    },
    ("dq", 64): {
        (64, 64, 4): (1, 2, 3),
        (64, 32, 4): (1, 2, 3),
        (64, 128, 4): (2, 3),
        (128, 32, 8): (2, 3),
        (128, 64, 8): (1, 2, 3),
        (128, 128, 8): (1, 2),
        (128, 64, 4): (2,),
    },
    ("forward", 128): {
        (64, 32, 4): (2, 3),
        (64, 64, 4): (1, 2, 3),
        (64, 128, 4): (1, 2),
        (128, 32, 8): (2, 3),
        (128, 64, 8): (2, 3),
        (128, 128, 8): (1, 2),
    },
    ("forward", 64): {
        (64, 32, 4): (2, 3),
        (64, 64, 4): (1, 2, 3),
        (64, 128, 4): (1, 2),
        (128, 32, 8): (2, 3),
        (128, 64, 8): (2, 3),
        (128, 128, 8): (1, 2),
        (128, 64, 4): (2,),
    },
}


def candidates(kernel: str, head_dim: int, default):
    from torch_streamkl.launch import TritonLaunch

    default = replace(default, num_splits=1)
    found = [TritonLaunch(*t, n) for t, stages in TILES[kernel, head_dim].items() for n in stages]
    return [default, *(x for x in found if x != default)]


def sweep(out: Path, deadline: float) -> None:
    from torch_streamkl import tune

    tune.TIMED_MS = 25.0
    tune.ROUNDS = 3
    results = []
    kinds = [("", "dk"), ("transposed", "dk"), ("", "dq"), ("", "forward")]
    work = []
    for head_dim, causal in SHAPES:
        shape = tune.Shape(1, HEADS, HEADS, head_dim, head_dim, SEQLEN, causal, "bfloat16", DEVICE)
        defaults = tune.Workload(shape).defaults
        work += [
            (shape, v, k, x)
            for v, k in kinds
            for x in candidates(k + " transposed" * bool(v), head_dim, defaults[k])
        ]
    start = time.time()
    refusals = first_runs(work, JOBS, deadline - time.time())
    print(
        f"{len(work)} launches compiled in {time.time() - start:.0f} s, {sum(map(bool, refusals))} refused",
        flush=True,
    )
    for shape in dict.fromkeys(item[0] for item in work):
        workload = tune.Workload(shape)
        ready: dict = {kind: [] for kind in kinds}
        for (its_shape, variant, kernel, tiles), refusal in zip(work, refusals):
            if its_shape == shape:
                ready[variant, kernel].append((tiles, refusal))
        print(f"\n{shape}", flush=True)
        for (variant, kernel), launches in ready.items():
            try:
                with Backward(variant):
                    if variant:  # checked against the kernel as it is
                        with (
                            Backward(""),
                            tune.launch_table.replaced(
                                tune.launch_table.new_table(workload.device)
                            ),
                        ):
                            expected = workload.run(kernel)
                        found = workload.run(kernel)
                        error = tune.largest_error(found, expected)
                        print(
                            f"{variant} {kernel} against the kernel as it is: {error:.2e} of what is allowed",
                            flush=True,
                        )
                    trials, entry = tune.tune_kernel(workload, kernel, launches, tune.device_timer)
            except Exception as error:
                print(f"{variant} {kernel}: {type(error).__name__} {error}"[:300], flush=True)
                continue
            print(variant, tune.table_text(trials), flush=True)
            results.append(
                {
                    "shape": str(shape),
                    "variant": variant,
                    "kernel": kernel,
                    "kept": entry.as_json(),
                    "trials": [[tune.describe(t.launch), t.runtime_ms, t.remark] for t in trials],
                }
            )
            out.write_text(json.dumps(results, indent=1).replace("Infinity", "null"))


# --------------------------------------------------------------------------------------------- float32
FP32_SIZE = (8, 8, 4096)
FP32_TILES = {
    ("ieee", "forward", 64): [(32, 32, 4, 1), (32, 32, 8, 1), (64, 32, 8, 1)],
    ("ieee", "forward", 128): [(32, 32, 8, 1), (16, 32, 4, 1)],
    ("ieee", "dq", 64): [(32, 32, 4, 1), (32, 32, 8, 1), (64, 32, 8, 1)],
    ("ieee", "dq", 128): [(32, 32, 8, 1), (16, 32, 4, 1)],
    ("ieee", "dk", 64): [(32, 32, 4, 1), (32, 32, 8, 1), (32, 64, 8, 1), (16, 32, 4, 1)],
    ("ieee", "dk", 128): [(32, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1)],
    ("tf32x3", "forward", 64): [(64, 32, 4, 1), (64, 64, 4, 1), (64, 32, 4, 2), (128, 64, 8, 1)],
    ("tf32x3", "forward", 128): [(64, 32, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)],
    ("tf32x3", "dq", 64): [(64, 32, 4, 1), (64, 64, 4, 1), (64, 32, 4, 2)],
    ("tf32x3", "dq", 128): [(64, 32, 4, 1), (64, 32, 8, 1), (32, 32, 4, 1)],
    ("tf32x3", "dk", 64): [(64, 64, 4, 1), (32, 64, 4, 1), (32, 64, 8, 1), (32, 32, 4, 1)],
    ("tf32x3", "dk", 128): [(32, 64, 8, 1), (32, 64, 4, 1), (32, 32, 8, 1), (32, 32, 4, 1)],
}


def fp32_errors() -> dict:
    """Largest error of a row against float64, relative to the row: eager float32 and both precisions."""
    import torch

    from torch_streamkl import attention_kl

    found: dict = {}
    for head_dim in (64, 128):
        generator = torch.Generator(DEVICE).manual_seed(3)
        x = [
            torch.randn(1, 4, SEQLEN // 8, head_dim, generator=generator, device=DEVICE)
            for _ in range(4)
        ]

        def results(tensors, impl):
            leaves = [t.clone().requires_grad_(i < 2) for i, t in enumerate(tensors)]
            value = attention_kl(*leaves, is_causal=True, impl=impl)
            return (value.detach(), *torch.autograd.grad(value.sum(), leaves[:2]))

        exact = results([t.double() for t in x], "reference")
        runs = {"eager float32": ("reference", "")}
        runs |= {name: ("triton", name) for name in ("ieee", "tf32x3")}
        for name, (impl, variant) in runs.items():
            with Backward(variant):
                got = results(x, impl)
            errors = []
            for a, b in zip(got, exact):
                a, b = (t.double().unsqueeze(-1) if t.ndim == 3 else t.double() for t in (a, b))
                size = b.norm(dim=-1)
                errors.append(
                    ((a - b).norm(dim=-1) / torch.maximum(size, size.square().mean().sqrt()))
                    .max()
                    .item()
                )
            found[f"{name} D={head_dim}"] = dict(zip(("value", "dq", "dk"), errors))
            print(
                f"float32 {name} D={head_dim}: " + ", ".join(f"{e:.2e}" for e in errors),
                flush=True,
            )
    return found


def fp32(out: Path, deadline: float) -> None:
    from torch_streamkl import tune
    from torch_streamkl.launch import TritonLaunch

    tune.TIMED_MS = 25.0
    tune.ROUNDS = 3
    results: dict = {"errors": {}, "trials": []}
    shapes = {
        dim: tune.Shape(1, *FP32_SIZE[:2], dim, dim, FP32_SIZE[2], False, "float32", DEVICE)
        for dim in (64, 128)
    }
    work = []
    for (variant, kernel, dim), tiles in FP32_TILES.items():
        default = replace(tune.Workload(shapes[dim]).defaults[kernel], num_splits=1)
        all_tiles = [default, *(TritonLaunch(*t) for t in tiles)]
        work += [(shapes[dim], variant, kernel, t) for t in dict.fromkeys(all_tiles)]
    start = time.time()
    refusals = first_runs(work, JOBS, deadline - time.time())
    print(f"{len(work)} float32 launches compiled in {time.time() - start:.0f} s", flush=True)
    try:
        results["errors"] = fp32_errors()
    except Exception as error:
        print(f"float32 errors: {type(error).__name__} {error}"[:300], flush=True)
    for dim, shape in shapes.items():
        workload = tune.Workload(
            shape
        )  # its results are what candidates are compared with: not for tf32x3's errors
        for variant, kernel, its_dim in FP32_TILES:
            if its_dim != dim:
                continue
            launches = [
                (t, why)
                for (s, v, k, t), why in zip(work, refusals)
                if (s, v, k) == (shape, variant, kernel)
            ]
            default_why = launches[0][1]
            if default_why:  # the default tiles of ieee need not fit tf32x3
                print(f"{variant} {kernel}: the default {default_why}", flush=True)
                launches = [item for item in launches if not item[1]]
            if not launches:
                continue
            try:
                with Backward(variant):
                    trials, entry = tune.tune_kernel(workload, kernel, launches, tune.device_timer)
            except Exception as error:
                print(f"{variant} {kernel}: {type(error).__name__} {error}"[:300], flush=True)
                continue
            flop = {"forward": 4, "dq": 6, "dk": 6}[kernel] * 8 * 4096**2 * dim
            best = min(t.runtime_ms for t in trials)
            print(
                f"D={dim} {variant} {tune.table_text(trials)}\n  best {flop / best * 1e-9:.1f} TFLOP/s",
                flush=True,
            )
            results["trials"].append(
                {
                    "dim": dim,
                    "variant": variant,
                    "kernel": kernel,
                    "trials": [[tune.describe(t.launch), t.runtime_ms, t.remark] for t in trials],
                }
            )
            out.write_text(json.dumps(results, indent=1).replace("Infinity", "null"))


# --------------------------------------------------------------------------------------------- the run
def hopper(out: Path, deadline: float) -> None:
    """Check in parallel processes, time in one process a head_dim."""
    results: dict = {"checks": {}, "times": []}
    jobs = [(name, dim) for dim in (64, 128) for name in candidates_of(dim)]
    waiting, running = list(jobs), []
    passed: dict[int, list[str]] = {64: [], 128: []}
    while waiting or running:
        while waiting and len(running) < JOBS:
            name, dim = waiting.pop(0)
            process = subprocess.Popen(
                [sys.executable, __file__, "--check", name, "--dim", str(dim)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.append((process, name, dim, time.time()))
        time.sleep(0.2)
        for item in list(running):
            process, name, dim, started = item
            if process.poll() is None:
                if time.time() - started < 75 and time.time() < deadline:
                    continue
                process.kill()
            stdout, stderr = process.communicate()
            running.remove(item)
            lines = stdout.strip().split("\n")
            try:
                found = json.loads(lines[-1])
            except ValueError:
                error = (stderr.strip().split("\n") or [""])[-1][:200]
                found = {"error": error or "no answer in time"}
            results["checks"][f"{name} D={dim}"] = found
            good = found.get("value", math.inf) < 2e-4 and found.get("lse", math.inf) < 2e-4
            if good and found["finite False"] and found["finite True"]:
                passed[dim].append(name)
            print(f"D={dim} {name:65} {found}", flush=True)
            out.write_text(json.dumps(results, indent=1))
    for dim, right in passed.items():
        chosen = [name for name in candidates_of(dim) if name in right]
        if not chosen:
            continue
        command = [sys.executable, __file__, "--time", "|".join(chosen), "--dim", str(dim)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            watchdog = threading.Timer(TIMING_SECONDS, process.kill)
            watchdog.start()
            for line in process.stdout:
                if line.startswith("{"):
                    results["times"].append(json.loads(line))
                    print(times_text(results["times"][-1]), flush=True)
                    out.write_text(json.dumps(results, indent=1))
            watchdog.cancel()
        if process.wait():
            print(f"timing at D={dim} ended with {process.returncode}", flush=True)


def times_text(found: dict) -> str:
    lines = [f"\nD={found['head_dim']} {'causal' if found['causal'] else 'full'}"]
    for name, t in sorted(found["times"].items(), key=lambda item: item[1]["ms"]):
        times = f"{t['ms']:.3f} ms ({t['low']:.3f}-{t['high']:.3f})"
        lines.append(f"  {name:65} {times}  {t['tflops']:.0f} TFLOP/s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check")
    parser.add_argument("--time")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--only", choices=("hopper", "sweep", "fp32"))
    parser.add_argument("--seconds", type=float, default=260.0)
    options = parser.parse_args()
    if options.check:
        print(json.dumps(check(options.check, options.dim)), flush=True)
        return
    if options.time:
        time_all(options.time.split("|"), options.dim)
        return
    started = time.time()
    out = Path(os.environ.get("OUT", "."))
    deadline = started + options.seconds
    if options.only in (None, "hopper"):
        # without --only, the sweep needs the rest
        share = 0.55 if options.only is None else 0.8
        hopper(out / "hopper_variants.json", started + options.seconds * share)
        print(f"hopper done after {time.time() - started:.0f} s", flush=True)
    if options.only is None and time.time() > deadline - 60:
        print("no time left for the sweep: run it with --only sweep", flush=True)
    elif options.only in (None, "sweep"):
        sweep(out / "portable_sweep.json", deadline)
        print(f"sweep done after {time.time() - started:.0f} s", flush=True)
    if options.only == "fp32":
        fp32(out / "fp32_sweep.json", deadline)
        print(f"fp32 done after {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
