"""Experiments on an H200 (torch 2.11, Triton 3.6) with the portable kernels.

    OUT=... python bench/notes/portable_variants.py [--only sweep|fp32] [--seconds 260]

Tiles, dK with keys as rows, float32. Launches are compiled and run once in parallel processes,
then torch_streamkl.tune times those that can run. JSON goes to $OUT after every kernel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from torch_streamkl import attention_kl, launch_table, tune
from torch_streamkl.kernels import attention, attention_backward, plans
from torch_streamkl.tiles import TritonLaunch

DEVICE, HEADS, SEQLEN, JOBS = "cuda", 32, 8192, 14
SHAPES = ((128, True), (128, False), (64, True), (64, False))  # head_dim, is_causal
FP32_HEADS, FP32_SEQLEN = 8, 4096


# --------------------------------------------------------------------------------------- variants
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
    """Scores with keys as rows: dS^T is the register operand of the dK matmul.

    Nothing is transposed on the way.
    """
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


def module_of(name: str, text: str) -> ModuleType:
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


class Launch(NamedTuple):
    """A candidate: what would be launched on which problem."""

    shape: tune.Shape
    variant: str  # "" is the kernel as it is
    kernel: str
    tiles: TritonLaunch


class Backward:
    """attention_backward as it is, or a variant of it, in the launcher."""

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def __enter__(self) -> None:
        plans.clear_plans()
        self.saved, attention.bwd = attention.bwd, attention_backward
        self.precision = plans.dot_precision
        if self.variant in ("ieee", "tf32x3"):
            plans.dot_precision = lambda _: self.variant
        if self.variant == "transposed":
            text = transposed_dk(Path(attention_backward.__file__).read_text())
            attention.bwd = module_of("backward_transposed", text)

    def __exit__(self, *_: object) -> None:
        attention.bwd, plans.dot_precision = self.saved, self.precision
        plans.clear_plans()


def first_run(variant: str, shape: tune.Shape, kernel: str, tiles: TritonLaunch) -> str:
    with Backward(variant):
        return tune._first_run(shape, kernel, tiles)


def first_runs(work: list[Launch], jobs: int, seconds: float) -> list[str]:
    """Why each launch cannot run, or "", in the order of the work."""
    stop = time.time() + seconds
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(first_run, x.variant, x.shape, x.kernel, x.tiles) for x in work]
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


# ------------------------------------------------------------------------------------- candidates
ANY = 0  # head_dim
# Of the sweep by variant, kernel and head_dim: (block_m, block_n, num_warps) and their num_stages.
# What spilled more than 300 bytes or did not fit when compiled for sm_90 is not here.
SWEEP_TILES = {
    ("", "dk"): {
        ANY: {
            (64, 64, 4): (1, 2, 3),
            (32, 64, 4): (1, 3),
            (32, 128, 8): (1, 3),
            (128, 64, 8): (1, 2),
        },
        128: {(64, 32, 4): (1,)},
        64: {(64, 128, 8): (1, 3)},
    },
    ("transposed", "dk"): {
        ANY: {
            (64, 64, 4): (1, 3),
            (32, 64, 4): (1, 2, 3),
            (32, 128, 8): (1, 2, 3),
            (64, 128, 8): (1, 3),
            (64, 64, 8): (3,),
        },
        128: {},
        64: {(64, 128, 8): (2,), (32, 128, 4): (1, 3)},
    },
    ("", "dq"): {
        ANY: {
            (64, 64, 4): (1, 2, 3),
            (64, 32, 4): (1, 2, 3),
            (64, 128, 4): (2, 3),
            (128, 32, 8): (2, 3),
            (128, 64, 8): (1, 2, 3),
            (128, 128, 8): (2,),
        },
        128: {},
        64: {(128, 128, 8): (1,), (128, 64, 4): (2,)},
    },
    ("", "forward"): {
        ANY: {
            (64, 32, 4): (2, 3),
            (64, 64, 4): (1, 2, 3),
            (64, 128, 4): (1, 2),
            (128, 32, 8): (2, 3),
            (128, 64, 8): (2, 3),
            (128, 128, 8): (1, 2),
        },
        128: {},
        64: {(128, 64, 4): (2,)},
    },
}
# Of float32 by precision and kernel: (block_m, block_n, num_warps, num_stages) at a head_dim.
FP32_TILES = {
    ("ieee", "forward"): {
        64: [(32, 32, 4, 1), (32, 32, 8, 1), (64, 32, 8, 1)],
        128: [(32, 32, 8, 1), (16, 32, 4, 1)],
    },
    ("ieee", "dq"): {
        64: [(32, 32, 4, 1), (32, 32, 8, 1), (64, 32, 8, 1)],
        128: [(32, 32, 8, 1), (16, 32, 4, 1)],
    },
    ("ieee", "dk"): {
        64: [(32, 32, 4, 1), (32, 32, 8, 1), (32, 64, 8, 1), (16, 32, 4, 1)],
        128: [(32, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1)],
    },
    ("tf32x3", "forward"): {
        64: [(64, 32, 4, 1), (64, 64, 4, 1), (64, 32, 4, 2), (128, 64, 8, 1)],
        128: [(64, 32, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)],
    },
    ("tf32x3", "dq"): {
        64: [(64, 32, 4, 1), (64, 64, 4, 1), (64, 32, 4, 2)],
        128: [(64, 32, 4, 1), (64, 32, 8, 1), (32, 32, 4, 1)],
    },
    ("tf32x3", "dk"): {
        64: [(64, 64, 4, 1), (32, 64, 4, 1), (32, 64, 8, 1), (32, 32, 4, 1)],
        128: [(32, 64, 8, 1), (32, 64, 4, 1), (32, 32, 8, 1), (32, 32, 4, 1)],
    },
}
Tiles = dict[tuple[str, str], dict[int, list[tuple[int, int, int, int]]]]


def sweep_tiles() -> Tiles:
    """SWEEP_TILES in the form of FP32_TILES."""
    return {
        kind: {
            head_dim: [
                (*sizes, stages)
                for tiles in (by_head_dim[ANY], by_head_dim[head_dim])
                for sizes, all_stages in tiles.items()
                for stages in all_stages
            ]
            for head_dim in (64, 128)
        }
        for kind, by_head_dim in SWEEP_TILES.items()
    }


def work_of(shapes: list[tune.Shape], tiles: Tiles) -> list[Launch]:
    """The launches of each shape, variant and kernel, the default first."""
    work: list[Launch] = []
    for shape in shapes:
        defaults = tune.Workload(shape).defaults
        for (variant, kernel), by_head_dim in tiles.items():
            candidates = (TritonLaunch(*sizes) for sizes in by_head_dim[shape.student_head_dim])
            chosen = dict.fromkeys([replace(defaults[kernel], num_splits=1), *candidates])
            work += [Launch(shape, variant, kernel, x) for x in chosen]
    return work


# ----------------------------------------------------------------------------------------- trials
Ready = dict[tuple[str, str], list[tuple[TritonLaunch, str]]]  # with why they cannot run, or ""


def compiled(work: list[Launch], what: str, deadline: float) -> dict[tune.Shape, Ready]:
    """The work after its first runs, by shape, variant and kernel."""
    start = time.time()
    refusals = first_runs(work, JOBS, deadline - time.time())
    print(
        f"{len(work)} {what} compiled in {time.time() - start:.0f} s, "
        f"{sum(map(bool, refusals))} refused",
        flush=True,
    )
    ready: dict[tune.Shape, Ready] = {}
    for item, refusal in zip(work, refusals, strict=True):
        kinds = ready.setdefault(item.shape, {})
        kinds.setdefault((item.variant, item.kernel), []).append((item.tiles, refusal))
    return ready


def compare_with_the_kernel_as_it_is(workload: tune.Workload, variant: str, kernel: str) -> None:
    defaults = launch_table.new_table(workload.device)
    with Backward(""), launch_table.replaced(defaults):
        expected = workload.run(kernel)
    with Backward(variant):
        error = tune.largest_error(workload.run(kernel), expected)
    print(
        f"{variant} {kernel} against the kernel as it is: {error:.2e} of what is allowed",
        flush=True,
    )


def timed(
    workload: tune.Workload,
    variant: str,
    kernel: str,
    launches: list[tuple[TritonLaunch, str]],
) -> tuple[list[tune.Trial], launch_table.MeasuredLaunch] | None:
    """Trials and the entry to keep; where that fails, None, and why is printed."""
    try:
        if variant == "transposed":
            compare_with_the_kernel_as_it_is(workload, variant, kernel)
        with Backward(variant):
            return tune.tune_kernel(workload, kernel, launches, tune.device_timer)
    except Exception as error:
        print(f"{variant} {kernel}: {type(error).__name__} {error}"[:300], flush=True)
        return None


def record_of(trials: list[tune.Trial], **what: Any) -> dict[str, Any]:
    return {**what, "trials": [[tune.describe(t.launch), t.runtime_ms, t.remark] for t in trials]}


def save(out: Path, results: Any) -> None:
    out.write_text(json.dumps(results, indent=1).replace("Infinity", "null"))


def sweep(out: Path, deadline: float) -> None:
    shapes = [
        tune.Shape(1, HEADS, HEADS, head_dim, head_dim, SEQLEN, causal, "bfloat16", DEVICE)
        for head_dim, causal in SHAPES
    ]
    results = []
    ready = compiled(work_of(shapes, sweep_tiles()), "launches", deadline)
    for shape, kinds in ready.items():
        print(f"\n{shape}", flush=True)
        workload = tune.Workload(shape)
        for (variant, kernel), launches in kinds.items():
            found = timed(workload, variant, kernel, launches)
            if found is None:
                continue
            trials, entry = found
            print(variant, tune.table_text(trials), flush=True)
            what = {"shape": str(shape), "variant": variant, "kernel": kernel}
            results.append(record_of(trials, **what, kept=entry.as_json()))
            save(out, results)


# ---------------------------------------------------------------------------------------- float32
def fp32_errors() -> dict[str, dict[str, float]]:
    """Largest error of a row against float64, relative to it: eager float32, both precisions."""
    found: dict[str, dict[str, float]] = {}
    for head_dim in (64, 128):
        generator = torch.Generator(DEVICE).manual_seed(3)
        x = [
            torch.randn(1, 4, SEQLEN // 8, head_dim, generator=generator, device=DEVICE)
            for _ in range(4)
        ]

        def results(tensors: list[torch.Tensor], impl: str) -> tuple[torch.Tensor, ...]:
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
            for a, b in zip(got, exact, strict=True):
                a, b = (t.double().unsqueeze(-1) if t.ndim == 3 else t.double() for t in (a, b))
                size = b.norm(dim=-1)
                errors.append(
                    ((a - b).norm(dim=-1) / torch.maximum(size, size.square().mean().sqrt()))
                    .max()
                    .item()
                )
            found[f"{name} D={head_dim}"] = dict(zip(("value", "dq", "dk"), errors, strict=True))
            print(
                f"float32 {name} D={head_dim}: " + ", ".join(f"{e:.2e}" for e in errors),
                flush=True,
            )
    return found


def fp32(out: Path, deadline: float) -> None:
    shapes = [
        tune.Shape(1, FP32_HEADS, FP32_HEADS, dim, dim, FP32_SEQLEN, False, "float32", DEVICE)
        for dim in (64, 128)
    ]
    results: dict[str, Any] = {"errors": {}, "trials": []}
    ready = compiled(work_of(shapes, FP32_TILES), "float32 launches", deadline)
    try:
        results["errors"] = fp32_errors()
    except Exception as error:
        print(f"float32 errors: {type(error).__name__} {error}"[:300], flush=True)
    for shape, kinds in ready.items():
        dim = shape.student_head_dim
        # its results are what candidates are compared with: not for tf32x3's errors
        workload = tune.Workload(shape)
        for (variant, kernel), launches in kinds.items():
            default_refusal = launches[0][1]
            if default_refusal:  # the default tiles of ieee need not fit tf32x3
                print(f"{variant} {kernel}: the default {default_refusal}", flush=True)
                launches = [item for item in launches if not item[1]]
            found = timed(workload, variant, kernel, launches) if launches else None
            if found is None:
                continue
            trials, _ = found
            flop = {"forward": 4, "dq": 6, "dk": 6}[kernel] * FP32_HEADS * FP32_SEQLEN**2 * dim
            best = min(t.runtime_ms for t in trials)
            print(
                f"D={dim} {variant} {tune.table_text(trials)}\n"
                f"  best {flop / best * 1e-9:.1f} TFLOP/s",
                flush=True,
            )
            results["trials"].append(record_of(trials, dim=dim, variant=variant, kernel=kernel))
            save(out, results)


# ---------------------------------------------------------------------------------------- the run
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("sweep", "fp32"))
    parser.add_argument("--seconds", type=float, default=260.0)
    options = parser.parse_args()
    tune.TIMED_MS, tune.ROUNDS = 25.0, 3  # less than the tuner's: there are many launches
    started = time.time()
    out = Path(os.environ.get("OUT", "."))
    deadline = started + options.seconds
    if options.only in (None, "sweep"):
        sweep(out / "portable_sweep.json", deadline)
        print(f"sweep done after {time.time() - started:.0f} s", flush=True)
    if options.only is None and time.time() > deadline - 60:
        print("no time left for float32: run it with --only fp32", flush=True)
    elif options.only in (None, "fp32"):
        fp32(out / "fp32_sweep.json", deadline)
        print(f"fp32 done after {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
