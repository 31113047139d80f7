"""Every kernel once under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

    python -m bench.sanitize                      # on a machine with a GPU and the tool
    python -m bench.sanitize --tools racecheck --cases hopper

Each case runs in a process of its own under the tool, several at a time. The exit status is 1
where one complained, and 2 where the tool is not installed. The record is docs/sanitizer.md.

NOTE [What racecheck does not follow]
In the Hopper kernels a warp writes to shared memory, its threads meet (bar.warp.sync), one of them
arrives at an mbarrier, and other warps wait there before they read. That is ordered, but racecheck
follows the thread that arrived and not those that it met. So the program `_control` does nothing
else, is right, and is run first: where racecheck complains of it, it cannot judge the Hopper
kernels, and they are listed as not judged. That all their arrivals stand behind such a meeting is
checked in the compiled code (tests/test_offline_compile.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from torch_streamkl import attention_kl, attention_kl_varlen, linear_kl

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# cuBLAS reads the padding between the rows of a matrix, and uses none of it
NOT_OURS = [
    argument
    for name in ("at::", "nvjet", "cutlass", "gemm", "cublas", "splitK")
    for argument in ("--kernel-name-exclude", f"kernel_substring={name}")
]
PLACES = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda/compute-sanitizer/compute-sanitizer",
)


def _attention(impl: str, head_dim: int = 64, keys: int = 200, **options: object) -> None:
    heads = 4 if "head_reduction" in options else 2
    shapes = ((2, 150), (2, keys), (heads, 150), (heads, keys))
    tensors = [
        torch.randn(1, h, n, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h, n in shapes
    ]
    value = attention_kl(*tensors, impl=impl, **options)  # type: ignore[arg-type]
    torch.autograd.grad(value.sum(), tensors)


def _hopper_forms(**options: object) -> None:
    """Key lengths of a batch, another head_dim and other key heads on each side."""
    shapes = ((4, 300, 64), (1, 500, 64), (4, 300, 128), (2, 500, 128))
    tensors = [
        torch.randn(2, h, n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h, n, dim in shapes
    ]
    lengths = torch.tensor([333, 0], device="cuda", dtype=torch.int32)
    value = attention_kl(*tensors, impl="hopper", key_lengths=lengths, **options)  # type: ignore[arg-type]
    torch.autograd.grad(value.sum(), tensors)


def _hopper_packed() -> None:
    offsets = torch.tensor([0, 200, 201, 501], device="cuda", dtype=torch.int32)
    tensors = [
        torch.randn(501, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(4)
    ]
    value = attention_kl_varlen(
        *tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=300, max_seqlen_k=300,
        is_causal=True, impl="hopper",
    )  # fmt: skip
    torch.autograd.grad(value.sum(), tensors)


def _few_queries(divergence: str) -> None:
    q = torch.randn(1, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 1, 5000, 64, device="cuda", dtype=torch.bfloat16)
    attention_kl(q, k, q, k, impl="triton", divergence=divergence)


def _linear(divergence: str, strategy: str) -> None:
    tensors: list[Tensor] = [
        torch.randn(n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (100, 3001, 100, 3001)
    ]
    labels = torch.randint(0, 3001, (100,), device="cuda")
    loss = linear_kl(
        *tensors, divergence=divergence, strategy=strategy, labels=labels, reduction="mean"
    )
    torch.autograd.grad(loss, tensors)


def _control() -> None:
    from bench.sanitize_control import hand_over

    x = torch.randn(64, device="cuda")
    assert torch.equal(hand_over(x), x)


CONTROL = "control"
# Together they launch every kernel of torch_streamkl/kernels.
CASES: dict[str, Callable[[], None]] = {
    CONTROL: _control,
    "forward, dq, dk": lambda: _attention("triton", is_causal=True),
    "two passes": lambda: _attention("triton", divergence="js", window=(70, 3)),
    "clamped": lambda: _attention("triton", student_clamp=1e-2),
    "head_dim 256": lambda: _attention("triton", head_dim=256),
    "split keys": lambda: _few_queries("forward_kl"),
    "split keys, two passes": lambda: _few_queries("js"),
    "head mean": lambda: _attention("triton", head_reduction="mean", is_causal=True),
    "rows of logits": lambda: _linear("forward_kl", "recompute"),
    "rows of logits, two passes": lambda: _linear("js", "forward"),
    "hopper": lambda: _attention("hopper", is_causal=True),
    "hopper, head_dim 128": lambda: _attention("hopper", head_dim=128, keys=1100),
    "hopper, clamped": lambda: _attention("hopper", student_clamp=1e-2, teacher_clamp=1e-2),
    "hopper, lengths": lambda: _hopper_forms(is_causal=True),
    "hopper, window": lambda: _hopper_forms(window=(150, 3)),
    "hopper, packed": _hopper_packed,
    "hopper, any order": lambda: _attention("hopper", deterministic=False, keys=4096),
}


def find_tool() -> str | None:
    """Where compute-sanitizer is."""
    found = shutil.which("compute-sanitizer")
    return found or next((x for x in PLACES if Path(x).exists()), None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--cases", nargs="+", help="whose names hold one of these words")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        CASES[options.inside]()
        torch.cuda.synchronize()
        return 0
    tool = find_tool()
    if tool is None or not torch.cuda.is_available():
        print("needs a GPU and compute-sanitizer, which the CUDA toolkit brings", file=sys.stderr)
        return 2
    hopper = torch.cuda.get_device_capability() == (9, 0)
    names = [
        name for name in CASES
        if (hopper or ("hopper" not in name and name != CONTROL))
        and (name == CONTROL or options.cases is None or any(w in name for w in options.cases))
    ]  # fmt: skip
    jobs = [(kind, name) for kind in options.tools for name in names]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {job: pool.submit(_run, tool, *job) for job in jobs}
        verdicts = [_report(kind, name, runs) for kind, name in jobs]
    return int("FAILED" in verdicts)


def _report(kind: str, name: str, runs: dict[tuple[str, str], Future[str]]) -> str:
    """Print what became of a case."""
    output = runs[kind, name].result()
    blind = kind == "racecheck" and "hopper" in name and bool(runs[kind, CONTROL].result())
    verdict = "clean" if not output else "not judged" if blind or name == CONTROL else "FAILED"
    print(f"| {kind} | {name} | {verdict} |", flush=True)
    if verdict == "FAILED":
        print(output[-3000:], flush=True)
    return verdict


def _run(tool: str, kind: str, name: str) -> str:
    """What the tool says of a case; empty where it finds nothing."""
    # the allocator would hide what is read beyond a tensor's end
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--tool", kind, "--error-exitcode", "9", *NOT_OURS,
               sys.executable, "-m", "bench.sanitize", "--inside", name]  # fmt: skip
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    return (run.stdout + run.stderr or "no output") if run.returncode else ""


if __name__ == "__main__":
    raise SystemExit(main())
