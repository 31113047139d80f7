"""Experiments on an H200 (torch 2.11, Triton 3.6): tiles of the portable kernels, dK with keys as rows, float32.

    OUT=... python bench/notes/portable_variants.py [--only sweep|fp32] [--seconds 260]

Launches are compiled and run once in parallel processes, then torch_streamkl.tune times those that can run. JSON goes
to $OUT after every kernel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

DEVICE, HEADS, SEQLEN, JOBS = "cuda", 32, 8192, 14
SHAPES = ((128, True), (128, False), (64, True), (64, False))


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
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("sweep", "fp32"))
    parser.add_argument("--seconds", type=float, default=260.0)
    options = parser.parse_args()
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
