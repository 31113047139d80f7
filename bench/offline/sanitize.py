"""Every kernel once under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

    python -m bench.offline.sanitize                      # on a machine with a GPU and the tool
    python -m bench.offline.sanitize --tools racecheck --cases hopper

Each case runs in a process of its own under the tool, several at a time, and says which kernels
it launched. The exit status is 1 where the tool complained or, with all cases, a kernel of ours
was not launched, and 2 where the tool is not installed. The record is docs/evidence/sanitizer.md.

NOTE [What racecheck does not follow]
In the Hopper kernels a warp writes to shared memory, its threads meet (bar.warp.sync), one of them
arrives at an mbarrier, and other warps wait there before they read. That is ordered, but racecheck
follows the thread that arrived and not those that it met. So the program `_control` does nothing
else, is right, and is run first: where racecheck complains of it, it cannot judge the Hopper
kernels, and they are listed as not judged. That all their arrivals stand after such a meeting is
checked in the compiled code (tests/kernels/test_offline_compile.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.offline.cells import OF_VOCAB, Sizes, row_program_of
from torch_streamkl import attention_kl, attention_kl_varlen, linear_kl, row_program
from torch_streamkl.attention import heuristics, hopper_tiles
from torch_streamkl.attention import ops as attention_ops
from torch_streamkl.distributed.shard_rows import num_fields
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear.problem import RowValues
from torch_streamkl.program.divergences import named
from torch_streamkl.rows.triton import source

FOLDERS = ("kernels", "attention.triton", "attention.hopper", "linear.triton", "rows.triton")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# cuBLAS reads the padding between the rows of a matrix, and uses none of it
NOT_OURS = [
    argument
    for name in ("at::", "nvjet", "cutlass", "gemm", "cublas", "splitK")
    for argument in ("--kernel-name-exclude", f"kernel_substring={name}")
]
# where the CUDA toolkit puts the tool, besides what the shell looks through
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


def _random(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Ids of entries, a sparse mask, or what has a gradient: bfloat16, or float32 above 0."""
    if dtype == torch.int64:
        return torch.randint(3001, shape, device="cuda")
    if dtype == torch.bool:
        return torch.rand(shape, device="cuda") > 0.9
    make = torch.rand if dtype == torch.float32 else torch.randn
    return make(shape, device="cuda").to(dtype or torch.bfloat16).requires_grad_()


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def _attention(
    impl: str,
    head_dim: int = 64,
    *,
    batch: int = 1,
    heads: tuple[int, int, int, int] = (2, 2, 2, 2),
    queries: int = 150,
    keys: int = 200,
    teacher_dim: int = 0,
    has_backward: bool = True,
    call: Callable[..., Tensor] = attention_kl,
    limits: dict[str, float] | None = None,
    made: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> None:
    """Heads of queries and keys of the student, then of the teacher; limits of the launches.

    ``made`` makes options that are tensors.
    """
    dims = (head_dim, head_dim, teacher_dim or head_dim, teacher_dim or head_dim)
    sizes = zip(heads, (queries, keys) * 2, dims, strict=True)
    tensors = [_random(batch, h, n, dim) for h, n, dim in sizes]
    with contextlib.ExitStack() as stack:
        for name, limit in (limits or {}).items():
            module = hopper_tiles if hasattr(hopper_tiles, name) else heuristics
            stack.enter_context(mock.patch.object(module, name, limit))
        with torch.set_grad_enabled(has_backward):
            value = call(*tensors, impl=impl, **options, **made())
        if has_backward:
            torch.autograd.grad(value.sum(), tensors)


def _packed(impl: str) -> None:
    offsets = _int32(0, 200, 201, 501)
    tensors = [_random(501, 2, 64) for _ in range(4)]
    value = attention_kl_varlen(
        *tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=300, max_seqlen_k=300,
        is_causal=True, impl=impl,
    )  # fmt: skip
    torch.autograd.grad(value.sum(), tensors)


@contextlib.contextmanager
def _multiplied_by_cpu() -> Iterator[None]:
    """initcheck sees copies, and nothing of what cuBLAS writes (NOT_OURS)."""

    def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        found = torch.matmul(a.detach().cpu(), b.detach().cpu()).to(a.device)
        return found if out is None else out.copy_(found)

    with (
        mock.patch.object(torch, "mm", product),
        mock.patch.object(Tensor, "__matmul__", product),
        mock.patch.object(Tensor, "addmm_", lambda out, a, b: out.add_(a @ b)),
    ):
        yield


def _linear(divergence: str, strategy: str) -> None:
    tensors = [_random(n, 64) for n in (100, 3001, 100, 3001)]
    options = {"divergence": divergence, "strategy": strategy, "reduction": "mean"}
    with _multiplied_by_cpu():
        loss = linear_kl(*tensors, labels=_random(100, dtype=torch.int64), **options)
        torch.autograd.grad(loss, tensors)


def _shards(divergence: str) -> None:
    """What the ranks of a sharded vocabulary launch, one after the other."""
    from torch_streamkl.linear.triton import shards as shard_kernels

    tensors = [_random(n, 64).detach() for n in (100, 3001, 100, 3001)]
    labels, functional = _random(100, dtype=torch.int64), named(divergence).text
    whole = linear_ops.problem_of(*tensors, functional=functional, labels=labels)[0]
    shards = [whole.of_vocab(slice(*cut)) for cut in ((0, 1500), (1500, 3001))]
    with _multiplied_by_cpu():
        logits = [[x.hidden @ x.weight.t() for x in y.heads] for y in shards]
    parts = torch.empty(3, num_fields(whole), 100, device="cuda")
    for shard, pair, part in zip(shards, logits, parts, strict=False):
        shard_kernels.state(shard, *pair, part)
    shard_kernels.empty_state(parts[-1])  # of a rank without entries
    out = RowValues.allocate(whole)
    shard_kernels.merged(whole, parts, 3001, out)
    if whole.functional.bilinear is None:
        for shard, pair in zip(shards, logits, strict=True):
            shard_kernels.sums(shard, *pair, out, torch.empty(3, 100, device="cuda"))


def _row_programs(work: str) -> None:
    """As `bench.offline.matrix` compiles them: plain, then with dense tensors or columns."""
    sizes = Sizes(rows=150, keys=200, heads=4, kv_heads=2, tokens=100, vocab=3001, width=64, top=9)
    for more in (False, True):
        function, given = row_program_of(work, more, 64, sizes, _random)
        tensors = [x for pair in given["dots"].values() for x in pair]
        for kind in ("rows", "keys", "pairs"):
            tensors += [x for x in given.get(kind, {}).values() if x.requires_grad]
        with _multiplied_by_cpu():
            value = row_program(function, is_causal=work not in OF_VOCAB, impl="triton", **given)
            torch.autograd.grad(value.sum(), tensors)


def _portable_forms() -> dict[str, Any]:
    """A dense mask, biases that differ, softcaps, sinks and lengths."""
    bias, sink = torch.randn(2, 2, 150, 200, device="cuda"), torch.randn(2, device="cuda")
    forms = {"bias": (bias, bias), "softcap": (30.0, 20.0), "sink": (sink, sink)}
    given = {f"{side}_{name}": x for name, pair in forms.items()
             for side, x in zip(("student", "teacher"), pair, strict=True)}  # fmt: skip
    mask = ~_random(1, 1, 150, 200, dtype=torch.bool)
    return {**given, "attn_mask": mask, "key_lengths": _int32(111, 0)}


def _of_first_keys(*counts: int) -> dict[str, Any]:
    mask = torch.arange(200) < torch.tensor(counts)[:, None]
    return {"attn_mask": mask[:, None, None].cuda()}


def _hopper_mask() -> dict[str, Any]:
    """A mask for each batch element, with rows that have no key."""
    mask = torch.rand(2, 1, 150, 200, device="cuda") > 0.3
    mask[1, :, :70] = False
    return {"attn_mask": mask}


def _hopper_biases() -> dict[str, Any]:
    """Biases of a head and of all heads, -inf among them, whose rows end between two tiles."""
    one, all_heads = (torch.randn(2, h, 150, 200, device="cuda") for h in (2, 1))
    one[torch.rand_like(one) > 0.7] = -torch.inf
    return {"student_bias": one, "teacher_bias": all_heads}


def _squares(*tensors: Tensor, impl: str) -> Tensor:
    """Squared differences, which the forward sums in one pass."""
    scales = {"student_scale": 0.1, "teacher_scale": 0.1}
    functional = "(P-S)*(P-S)"
    return attention_ops.attention_kl(*tensors, functional=functional, impl=impl, **scales)[0]


def _control() -> None:
    from bench.offline.sanitize_control import hand_over

    x = torch.randn(64, device="cuda")
    assert torch.equal(hand_over(x), x)


CONTROL = "control"
TRITON, HOPPER = (partial(_attention, impl) for impl in ("triton", "hopper"))
TWO_PASSES: dict[str, Any] = {"divergence": "js"}
CAUSAL: dict[str, Any] = {"is_causal": True}
TWO_CAUSAL, TWO_IN_WINDOW = CAUSAL | {"batch": 2}, {"batch": 2, "window": (70, 3)}
FEW_QUERIES: Any = {"heads": (4, 1, 4, 1), "queries": 1, "keys": 5000, "has_backward": False}
# another head_dim and other key heads on each side
FORMS: dict[str, Any] = {
    "batch": 2, "heads": (4, 1, 4, 2), "queries": 300, "keys": 500, "teacher_dim": 128,
    "made": lambda: {"key_lengths": _int32(333, 0)},
}  # fmt: skip
# few rows of many keys: heads become rows, and programs share the keys of a block
FEW_TILES = {"LEAST_TILES_OF_SPLIT": 4}
SPLITS: Any = {"heads": (8, 2, 8, 2), "queries": 60, "keys": 1500, "limits": FEW_TILES}
# a problem so small adds up dQ apart, unless it is told otherwise
ANY_ORDER: dict[str, Any] = {"deterministic": False, "limits": {"ATOMIC_LEAST_FLOP": 0.0}}
HEAD_MEAN: dict[str, Any] = {"heads": (2, 2, 4, 4), "head_reduction": "mean"}
# Together they launch every kernel that is written or generated.
CASES: dict[str, Callable[[], None]] = {
    CONTROL: _control,
    "forward, dq, dk": partial(TRITON, **CAUSAL),
    "two passes": partial(TRITON, **TWO_PASSES, window=(70, 3)),
    "clamped": partial(TRITON, student_clamp=1e-2),
    "head_dim 256": partial(TRITON, 256),
    "split keys": partial(TRITON, **FEW_QUERIES),
    "split keys, two passes": partial(TRITON, **FEW_QUERIES, **TWO_PASSES),
    "head mean": partial(TRITON, **HEAD_MEAN, **CAUSAL),
    "head mean, two passes": partial(TRITON, **HEAD_MEAN, **TWO_PASSES),
    "masks, biases, softcaps, sinks": partial(TRITON, batch=2, made=_portable_forms),
    "padding": partial(TRITON, batch=2, made=partial(_of_first_keys, 70, 0)),
    "packed": partial(_packed, "triton"),
    "rows of logits": partial(_linear, "forward_kl", "recompute"),
    "rows of logits, two passes": partial(_linear, "js", "forward"),
    "vocabulary shards": partial(_shards, "forward_kl"),
    "vocabulary shards, two passes": partial(_shards, "js"),
    "row program": partial(_row_programs, "row program"),
    "row program of heads": partial(_row_programs, "row program of heads"),
    "row program of LM heads": partial(_row_programs, "row program of LM heads"),
    "hopper": partial(HOPPER, **CAUSAL),
    "hopper, head_dim 128": partial(HOPPER, 128, keys=1100),
    "hopper, head_dim 40": partial(HOPPER, 40, keys=1100),
    "hopper, head_dim 96": partial(HOPPER, 96, **TWO_CAUSAL),
    "hopper, clamped": partial(HOPPER, student_clamp=1e-2, teacher_clamp=1e-2),
    "hopper, lengths": partial(HOPPER, **FORMS, **CAUSAL),
    "hopper, window": partial(HOPPER, **FORMS, window=(150, 3)),
    "hopper, packed": partial(_packed, "hopper"),
    "hopper, any order": partial(HOPPER, keys=300, **ANY_ORDER),
    "hopper, mask": partial(HOPPER, batch=2, made=_hopper_mask),
    "hopper, mask, head_dim 128": partial(HOPPER, 128, batch=2, made=_hopper_mask),
    "hopper, two passes": partial(HOPPER, 128, **TWO_PASSES),
    "hopper, steps": partial(HOPPER, 128, **TWO_CAUSAL),
    "hopper, steps, window": partial(HOPPER, **TWO_IN_WINDOW),
    "hopper, wide": partial(HOPPER, 256, **TWO_CAUSAL),
    "hopper, wide, window": partial(HOPPER, 192, **TWO_IN_WINDOW),
    "hopper, biases": partial(HOPPER, 128, **TWO_CAUSAL, made=_hopper_biases),
    "hopper, squares": partial(HOPPER, 128, keys=1100, call=_squares),
    "hopper, shares of dQ": partial(HOPPER, 128, **SPLITS),
    "hopper, head mean": partial(HOPPER, 128, **HEAD_MEAN, **CAUSAL),
}
LAUNCHED = "launched: "  # what a case says last


def written_kernels() -> set[str]:
    """Every kernel that is written in torch_streamkl, by module and name."""
    from triton.runtime.jit import JITFunction

    folders = [importlib.import_module(f"torch_streamkl.{name}") for name in FOLDERS]
    modules = [
        importlib.import_module(f"{folder.__name__}.{info.name}")
        for folder in folders
        for info in pkgutil.iter_modules(folder.__path__)
    ]
    functions = [x for m in modules for x in vars(m).values() if isinstance(x, JITFunction)]
    generated = re.findall(r'"(row_program_\w+)"', Path(source.__file__).read_text())
    written = {_name(x) for x in functions if x.__name__.endswith("_kernel")}
    return written | {f"rows.{name}" for name in generated}


def _name(kernel: Any) -> str:
    """Of a kernel that rows/triton/source.py generates, without the program it is of."""
    if "generated_" in kernel.fn.__module__:
        return f"rows.{kernel.__name__}"
    return f"{kernel.fn.__module__.removeprefix('torch_streamkl.')}.{kernel.__name__}"


def run_case(name: str) -> None:
    """In a process of its own: run a case and print the kernels that it launched."""
    from triton.runtime.jit import JITFunction

    original, seen = JITFunction.run, set()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.add(_name(self))
        return original(self, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", run):
        CASES[name]()
        torch.cuda.synchronize()
    print(LAUNCHED + " ".join(sorted(seen)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    add("--cases", nargs="+", default=[""], help="whose names hold one of these")
    add("--jobs", type=int, default=4, help="processes at a time")
    add("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        run_case(options.inside)
        return 0
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *PLACES))
    tool = shutil.which("compute-sanitizer", path=path)
    if tool is None or not torch.cuda.is_available():
        print("needs a GPU and compute-sanitizer, which the CUDA toolkit brings", file=sys.stderr)
        return 2
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    names = [name for name in CASES if any(part in name for part in options.cases)]
    names = [CONTROL, *(name for name in names if name != CONTROL)] if is_hopper else [
        name for name in names if "hopper" not in name and name != CONTROL
    ]  # fmt: skip
    jobs = [(kind, name) for kind in options.tools for name in names]
    launched: set[str] = set()
    failed = is_blind = False
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda job: _run(tool, *job), jobs)
        for (kind, name), (output, kernels) in zip(jobs, results, strict=True):
            launched |= kernels
            if name == CONTROL:
                is_blind = kind == "racecheck" and bool(output)
            excused = name == CONTROL or (is_blind and "hopper" in name)
            verdict = "clean" if not output else "not judged" if excused else "FAILED"
            print(f"| {kind} | {name} | {verdict} |", flush=True)
            if verdict == "FAILED":
                failed = True
                print(output[-4000:], flush=True)
    missing = sorted(written_kernels() - launched)
    if not is_hopper:
        missing = [x for x in missing if not x.startswith("attention.hopper")]
    if missing:
        print(f"launched by none of these cases: {', '.join(missing)}")
    return int(failed or bool(missing and options.cases == [""]))


def _run(tool: str, kind: str, name: str) -> tuple[str, set[str]]:
    """What the tool says, empty where it finds nothing; the kernels."""
    # the allocator would hide what is read beyond a tensor's end
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--tool", kind, "--error-exitcode", "9", "--print-limit", "1000", *NOT_OURS,
               sys.executable, "-m", "bench.offline.sanitize", "--inside", name]  # fmt: skip
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [x for x in run.stdout.splitlines() if x.startswith(LAUNCHED)]
    launched = set(lines[-1].removeprefix(LAUNCHED).split()) if lines else set()
    said = (run.stdout + run.stderr or "no output") if run.returncode else ""
    return said or ("" if launched else "it launched no kernel"), launched


if __name__ == "__main__":
    raise SystemExit(main())
