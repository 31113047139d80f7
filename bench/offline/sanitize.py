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
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
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


def _attention(
    impl: str,
    head_dim: int = 64,
    *,
    batch: int = 1,
    heads: tuple[int, int, int, int] = (2, 2, 2, 2),
    queries: int = 150,
    keys: int = 200,
    teacher_dim: int = 0,
    lengths: tuple[int, ...] = (),
    has_backward: bool = True,
    call: Callable[..., Tensor] = attention_kl,
    limits: dict[str, float] | None = None,
    **options: Any,
) -> None:
    """Heads of queries and keys of the student, then of the teacher; limits of the launches."""
    dims = (head_dim, head_dim, teacher_dim or head_dim, teacher_dim or head_dim)
    tensors = [
        _random(batch, h, n, dim)
        for h, n, dim in zip(heads, (queries, keys) * 2, dims, strict=True)
    ]
    if lengths:
        options["key_lengths"] = _lengths(*lengths)
    with contextlib.ExitStack() as stack:
        for name, value in (limits or {}).items():
            module = hopper_tiles if hasattr(hopper_tiles, name) else heuristics
            stack.enter_context(mock.patch.object(module, name, value))
        with torch.set_grad_enabled(has_backward):
            value = call(*tensors, impl=impl, **options)
        if has_backward:
            torch.autograd.grad(value.sum(), tensors)


def _random(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Ids of a few words, a sparse mask, or what has a gradient: bfloat16, or float32 above 0."""
    if dtype == torch.int64:
        return torch.randint(3001, shape, device="cuda")
    if dtype == torch.bool:
        return torch.rand(shape, device="cuda") > 0.9
    make = torch.rand if dtype == torch.float32 else torch.randn
    return make(shape, device="cuda").to(dtype or torch.bfloat16).requires_grad_()


def _lengths(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def _packed(impl: str) -> None:
    offsets = _lengths(0, 200, 201, 501)
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
    labels = _random(100, dtype=torch.int64)
    with _multiplied_by_cpu():
        loss = linear_kl(
            *tensors, divergence=divergence, strategy=strategy, reduction="mean", labels=labels
        )
        torch.autograd.grad(loss, tensors)


def _shards(divergence: str) -> None:
    """What the ranks of a sharded vocabulary launch, one after the other."""
    from torch_streamkl.linear.triton import shards as shard_kernels

    tensors = [_random(n, 64).detach() for n in (100, 3001, 100, 3001)]
    labels = _random(100, dtype=torch.int64)
    functional = named(divergence).text
    whole = linear_ops.problem_of(*tensors, functional=functional, labels=labels)[0]
    shards = [whole.of_vocab(slice(*cut)) for cut in ((0, 1500), (1500, 3001))]
    with _multiplied_by_cpu():
        logits = [[x.hidden @ x.weight.t() for x in y.heads] for y in shards]
    parts = torch.empty(3, num_fields(whole), 100, device="cuda")
    for shard, pair, part in zip(shards, logits, parts, strict=False):
        shard_kernels.state(shard, *pair, part)
    shard_kernels.empty_state(parts[-1])  # of a rank without words
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
        tensors += [
            x for kind in ("rows", "keys", "pairs") for x in given.get(kind, {}).values()
            if x.requires_grad
        ]  # fmt: skip
        with _multiplied_by_cpu():
            value = row_program(function, is_causal=work not in OF_VOCAB, impl="triton", **given)
            torch.autograd.grad(value.sum(), tensors)


def _portable_forms() -> None:
    """A dense mask, biases that differ, softcaps, sinks and lengths."""
    bias = torch.randn(2, 2, 150, 200, device="cuda")
    _attention(
        "triton", batch=2, attn_mask=~_random(1, 1, 150, 200, dtype=torch.bool),
        student_bias=bias, teacher_bias=bias, student_softcap=30.0, teacher_softcap=20.0,
        student_sink=torch.randn(2, device="cuda"), teacher_sink=torch.randn(2, device="cuda"),
        lengths=(111, 0),
    )  # fmt: skip


def _of_first_keys(*counts: int) -> Tensor:
    return (torch.arange(200) < torch.tensor(counts)[:, None])[:, None, None].cuda()


def _hopper_mask(head_dim: int) -> None:
    """A mask for each batch element, with rows that have no key."""
    mask = torch.rand(2, 1, 150, 200, device="cuda") > 0.3
    mask[1, :, :70] = False
    _attention("hopper", head_dim, batch=2, attn_mask=mask)


def _hopper_biases() -> None:
    """Biases of a head and of all heads, -inf among them, whose rows end between two tiles."""
    one, all_heads = (torch.randn(2, h, 150, 200, device="cuda") for h in (2, 1))
    one[torch.rand_like(one) > 0.7] = -torch.inf
    _attention("hopper", 128, batch=2, student_bias=one, teacher_bias=all_heads, is_causal=True)


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
FEW_QUERIES: Any = {"heads": (4, 1, 4, 1), "queries": 1, "keys": 5000, "has_backward": False}
# another head_dim and other key heads on each side
FORMS: dict[str, Any] = {
    "batch": 2, "heads": (4, 1, 4, 2), "queries": 300, "keys": 500, "teacher_dim": 128,
    "lengths": (333, 0),
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
    "forward, dq, dk": lambda: _attention("triton", is_causal=True),
    "two passes": lambda: _attention("triton", divergence="js", window=(70, 3)),
    "clamped": lambda: _attention("triton", student_clamp=1e-2),
    "head_dim 256": lambda: _attention("triton", head_dim=256),
    "split keys": lambda: _attention("triton", **FEW_QUERIES),
    "split keys, two passes": lambda: _attention("triton", **FEW_QUERIES, divergence="js"),
    "head mean": lambda: _attention("triton", **HEAD_MEAN, is_causal=True),
    "head mean, two passes": lambda: _attention("triton", **HEAD_MEAN, divergence="js"),
    "masks, biases, softcaps, sinks": _portable_forms,
    "padding": lambda: _attention("triton", batch=2, attn_mask=_of_first_keys(70, 0)),
    "packed": lambda: _packed("triton"),
    "rows of logits": lambda: _linear("forward_kl", "recompute"),
    "rows of logits, two passes": lambda: _linear("js", "forward"),
    "shards of words": lambda: _shards("forward_kl"),
    "shards of words, two passes": lambda: _shards("js"),
    "row program": lambda: _row_programs("row program"),
    "row program of heads": lambda: _row_programs("row program of heads"),
    "row program of words": lambda: _row_programs("row program of LM heads"),
    "hopper": lambda: _attention("hopper", is_causal=True),
    "hopper, head_dim 128": lambda: _attention("hopper", head_dim=128, keys=1100),
    "hopper, clamped": lambda: _attention("hopper", student_clamp=1e-2, teacher_clamp=1e-2),
    "hopper, lengths": lambda: _attention("hopper", **FORMS, is_causal=True),
    "hopper, window": lambda: _attention("hopper", **FORMS, window=(150, 3)),
    "hopper, packed": lambda: _packed("hopper"),
    "hopper, any order": lambda: _attention("hopper", keys=300, **ANY_ORDER),
    "hopper, mask": lambda: _hopper_mask(64),
    "hopper, mask, head_dim 128": lambda: _hopper_mask(128),
    "hopper, two passes": lambda: _attention("hopper", head_dim=128, divergence="js"),
    "hopper, steps": lambda: _attention("hopper", 128, batch=2, is_causal=True),
    "hopper, steps, window": lambda: _attention("hopper", batch=2, window=(70, 3)),
    "hopper, wide": lambda: _attention("hopper", 256, batch=2, is_causal=True),
    "hopper, wide, window": lambda: _attention("hopper", 192, batch=2, window=(70, 3)),
    "hopper, biases": _hopper_biases,
    "hopper, squares": lambda: _attention("hopper", 128, keys=1100, call=_squares),
    "hopper, shares of dQ": lambda: _attention("hopper", 128, **SPLITS),
    "hopper, head mean": lambda: _attention("hopper", 128, **HEAD_MEAN, is_causal=True),
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
    return {
        *(_name(x) for x in functions if x.__name__.endswith("_kernel")),
        *(f"rows.{name}" for name in generated),
    }


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
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--cases", nargs="+", help="whose names hold one of these words")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        run_case(options.inside)
        return 0
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *PLACES))
    tool = shutil.which("compute-sanitizer", path=path)
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
        named = {run: job for job, run in runs.items()}
        verdicts = [_report(*named[run], runs) for run in as_completed(named)]
    launched = {x for run in runs.values() for x in run.result()[1]}
    missing = sorted(written_kernels() - launched)
    if not hopper:
        missing = [x for x in missing if not x.startswith("attention.hopper")]
    if missing:
        print(f"launched by none of these cases: {', '.join(missing)}")
    return int("FAILED" in verdicts or bool(missing and not options.cases))


Result = tuple[str, list[str]]  # what the tool says, empty where it finds nothing; the kernels


def _report(kind: str, name: str, runs: dict[tuple[str, str], Future[Result]]) -> str:
    """Print what became of a case."""
    output = runs[kind, name].result()[0]
    blind = kind == "racecheck" and "hopper" in name and bool(runs[kind, CONTROL].result()[0])
    verdict = "clean" if not output else "not judged" if blind or name == CONTROL else "FAILED"
    print(f"| {kind} | {name} | {verdict} |", flush=True)
    if verdict == "FAILED":
        print(_places(output), flush=True)
    return verdict


def _places(output: str) -> str:
    """Which kernels, and lines of ours, the reports name, and how often each."""
    found = Counter(a + b for a, b in re.findall(r"\bat (\S.*?)\+0x\w+( in \S+)?", output))
    return "\n".join(f"{n} x {place}" for place, n in found.most_common(20)) or output[-4000:]


def _run(tool: str, kind: str, name: str) -> Result:
    # the allocator would hide what is read beyond a tensor's end
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--tool", kind, "--error-exitcode", "9", "--print-limit", "1000", *NOT_OURS,
               sys.executable, "-m", "bench.offline.sanitize", "--inside", name]  # fmt: skip
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [x for x in run.stdout.splitlines() if x.startswith(LAUNCHED)]
    launched = lines[-1].removeprefix(LAUNCHED).split() if lines else []
    said = (run.stdout + run.stderr or "no output") if run.returncode else ""
    return said or ("" if launched else "it launched no kernel"), launched


if __name__ == "__main__":
    raise SystemExit(main())
