"""On a GPU: large tensors, streams, threads, no waiting for the device, no large allocation."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.problems import CASES, Spec, build
from torch_streamkl import attention_kl, linear_kl
from torch_streamkl.runtime import devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IMPLS = ("triton", "hopper")
BF16 = torch.bfloat16


def skip_unless_it_runs(impl: str) -> None:
    if impl == "hopper" and not devices.gpu_of(torch.device("cuda")).is_hopper:
        pytest.skip("needs a GPU of compute capability 9.0")


def inputs(*shape: int, seed: int = 0, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=BF16).requires_grad_(grad)
        for _ in range(4)
    ]


def step(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Values, and the gradients of their sum."""
    value = attention_kl(*tensors, **options)
    return [value.detach(), *torch.autograd.grad(value.sum(), tensors)]


# ---------------------------------------------------------------------------------- large tensors
@pytest.mark.parametrize("impl", IMPLS)
def test_offsets_past_two_billion_elements(impl: str) -> None:
    """The last heads of q and k lie after 2^31 elements; alone they give the same."""
    skip_unless_it_runs(impl)
    rows, dim = 64, 64
    heads = 2**31 // (rows * dim) + 8  # of one tensor: 4.3 GB in bfloat16
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free memory")
    large = torch.zeros(1, heads, rows, dim, device="cuda", dtype=BF16)
    assert large.numel() > 2**31
    large[:, -8:].normal_()
    keys = torch.randn(1, heads, rows, dim, device="cuda", dtype=BF16)
    with torch.no_grad():
        whole = attention_kl(large, keys, keys, large, impl=impl)
        tail = [x[:, -8:].contiguous() for x in (large, keys, keys, large)]
        alone = attention_kl(*tail, impl=impl)
    torch.testing.assert_close(whole[:, -8:], alone, rtol=1e-5, atol=1e-5)


def test_gradients_past_two_billion_elements() -> None:
    rows, dim = 64, 64
    heads = 2**31 // (rows * dim) + 8
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free memory")
    q = torch.randn(1, heads, rows, dim, device="cuda", dtype=BF16)
    k = torch.randn(1, heads, rows, dim, device="cuda", dtype=BF16)
    teacher = torch.randn(1, heads, rows, dim, device="cuda", dtype=BF16)
    q.requires_grad_(), k.requires_grad_()
    value = attention_kl(q, k, teacher, teacher, impl="triton")
    dq, dk = torch.autograd.grad(value.sum(), (q, k))
    tail = [x[:, -8:].detach().contiguous() for x in (q, k)]
    leaves = [x.requires_grad_() for x in tail]
    alone = attention_kl(*leaves, teacher[:, -8:], teacher[:, -8:], impl="triton")
    for found, expected in zip((dq, dk), torch.autograd.grad(alone.sum(), leaves), strict=True):
        torch.testing.assert_close(found[:, -8:], expected, rtol=1e-2, atol=1e-3)


def test_logits_past_two_billion_elements() -> None:
    """18,000 tokens of 130,000 vocabulary entries: more logits than an int32 counts."""
    tokens, vocab, width = 18_000, 130_000, 16
    assert tokens * vocab > 2**31
    tensors = [
        torch.randn(n, width, device="cuda", dtype=BF16) for n in (tokens, vocab, tokens, vocab)
    ]
    with torch.no_grad():
        whole = linear_kl(*tensors, max_workspace_mib=16384)
        tail = [tensors[0][-8:], tensors[1], tensors[2][-8:], tensors[3]]
        torch.testing.assert_close(whole[-8:], linear_kl(*tail), rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------- streams and threads
@pytest.mark.parametrize("impl", IMPLS)
def test_many_streams(impl: str) -> None:
    skip_unless_it_runs(impl)
    cases = [inputs(1, 4, 300 + 64 * i, 64, seed=i) for i in range(8)]
    expected = [step(tensors, impl=impl, is_causal=True) for tensors in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    found: list[list[Tensor]] = []
    for _ in range(5):
        found.clear()
        for stream, tensors in zip(streams, cases, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(step(tensors, impl=impl, is_causal=True))
        torch.cuda.synchronize()
        for x, y in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_many_threads(impl: str) -> None:
    """Threads that launch the same kernels for the first time together, each on its stream."""
    skip_unless_it_runs(impl)
    cases = [inputs(1, 2, 200 + 8 * i, 128, seed=i) for i in range(8)]
    results: dict[int, list[Tensor]] = {}
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(cases))

    def work(index: int) -> None:
        try:
            barrier.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    results[index] = step(cases[index], impl=impl, divergence="reverse_kl")
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # a thread's errors reach nobody by themselves
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for index, tensors in enumerate(cases):
        expected = step(tensors, impl=impl, divergence="reverse_kl")
        assert all(torch.equal(a, b) for a, b in zip(results[index], expected, strict=True))


# --------------------------------------------------------------------------------- host and device
def without_waiting(call: Callable[[], Any]) -> None:
    """Run once so that everything is compiled, then where waiting for the device is an error."""
    call()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("name", CASES)
def test_attention_does_not_wait_for_the_device(name: str) -> None:
    spec = CASES[name]
    if spec.student_scale == "tensor":
        spec = replace(spec, student_scale=None)  # whose value the host reads: said in the docs
    call = build(replace(spec, dtype=BF16)).to(device="cuda")
    inputs = [x for x in call.tensors.values() if x.requires_grad]

    def run() -> None:
        value = call.run("triton")
        torch.autograd.grad(value, inputs, torch.ones_like(value), allow_unused=True)

    without_waiting(run)


def test_hopper_does_not_wait_for_the_device() -> None:
    skip_unless_it_runs("hopper")
    tensors = inputs(2, 4, 500, 128)
    without_waiting(lambda: step(tensors, impl="hopper", is_causal=True))


@pytest.mark.parametrize("strategy", ["forward", "recompute"])
def test_linear_does_not_wait_for_the_device(strategy: str) -> None:
    tensors = [torch.randn(n, 64, device="cuda", dtype=BF16) for n in (300, 5000, 300, 5000)]
    leaves = [x.requires_grad_() for x in tensors]

    def run() -> None:
        loss = linear_kl(*leaves, reduction="mean", strategy=strategy)
        torch.autograd.grad(loss, leaves)

    without_waiting(run)


@pytest.mark.parametrize(
    "name", ["js", "clamp_reached", "head_mean", "varlen_causal", "gqa", "sink"]
)
def test_cuda_graph(name: str) -> None:
    """Captured and replayed on other numbers, a call has the bits of an ordinary one."""
    call = build(replace(CASES[name], dtype=BF16)).to(device="cuda")
    leaves = [x for x in call.tensors.values() if x.requires_grad]

    def run() -> list[Tensor]:
        value = call.run("triton")
        return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]

    assert all(torch.equal(a, b) for a, b in replayed(run, leaves))


def replayed(
    step: Callable[[], list[Tensor]], leaves: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a captured step computes on other numbers, next to an ordinary one."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    return zip(captured, step(), strict=True)


def largest_allocation(call: Callable[[], Any]) -> int:
    """Bytes of the largest block that the allocator gave out in a call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        call()
        torch.cuda.synchronize()
        (history, *_) = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [entry["size"] for entry in history if entry["action"] == "alloc"]
    assert sizes, "nothing was recorded"
    return max(sizes)


MEMORY_CASES = {
    "plain": Spec(),
    "causal": Spec(is_causal=True),
    "js": Spec(divergence="js"),
    "clamped": Spec(student_clamp=1e-9),
    "key_lengths": Spec(key_lengths=True),
    "gqa": Spec(heads=4, student_kv_heads=1, teacher_kv_heads=2),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", MEMORY_CASES)
def test_no_allocation_of_all_pairs(name: str, impl: str) -> None:
    skip_unless_it_runs(impl)
    length = 4096
    spec = MEMORY_CASES[name]
    spec = replace(
        spec, seqlen_q=length, seqlen_k=length, student_dim=64, teacher_dim=64, dtype=BF16
    )
    call = build(spec).to(device="cuda")
    leaves = list(call.tensors.values())

    def run() -> None:
        value = call.run(impl)
        torch.autograd.grad(value.sum(), leaves)

    assert largest_allocation(run) < length * length  # a byte a pair would be that much


# ------------------------------------------------------------------------- what a machine may lack
FIRST_CALLS = """
import torch
from torch_streamkl import attention_kl, linear_kl

x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
plain = attention_kl(x, x, x, x, impl="torch")
assert plain.isfinite().all()
for call in (attention_kl, linear_kl):
    tensors = [x] * 4 if call is attention_kl else [x[0, 0]] * 4
    try:
        call(*tensors)
    except RuntimeError as error:
        print(error)
"""


def test_without_a_c_compiler(tmp_path: Path) -> None:
    """One clear error from each first call; a Triton that needs no compiler just runs."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX")}
    environment |= {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = done.stdout.splitlines()
    assert len(errors) in (0, 2)
    assert all("takes a C compiler" in line and "impl='torch'" in line for line in errors)


# ------------------------------------------------------------------ a check leaves nothing after
def test_gradients_after_a_check_of_attention() -> None:
    """NOTE [cuDNN's attention is not run in checks] in validation/isolation.py."""
    x = torch.randn(4, 128, 4 * 64, device="cuda", dtype=BF16)
    weights = [torch.randn(4 * 64, 4 * 64, device="cuda", dtype=BF16) / 16 for _ in range(6)]
    lengths = torch.tensor([128, 100, 90, 70], device="cuda")
    keep = (torch.arange(128, device="cuda") < lengths[:, None])[:, None, None]

    def heads(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).view(4, 128, 4, 64).transpose(1, 2)

    def step(*given: Tensor) -> Tensor:
        q, k, v, qt, kt, o = given
        scores = (heads(x, q) @ heads(x, k).mT * 0.125).masked_fill(~keep, -1e9)
        teacher = (heads(x, qt) @ heads(x, kt).mT * 0.125).masked_fill(~keep, -1e9)
        p = scores.softmax(-1)
        out = (p @ heads(x, v)).transpose(1, 2).reshape(4, 128, 4 * 64) @ o
        log_p = p.float().clamp_min(1e-12).log()
        # eager's gradient to a target is NaN where it is 0
        target = teacher.float().softmax(-1).detach()
        kl = torch.nn.functional.kl_div(log_p, target, reduction="sum")
        return out.float().square().mean() + kl / x.shape[0]

    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        given = [w.detach().requires_grad_() for w in weights]
        q, k, v, _, _, o = given
        return list(torch.autograd.grad(call(*given), (q, k, v, o)))

    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}  # the fused attention
    compiled = torch.compile(step, backend="streamkl", options=options)
    for got, expected in zip(gradients(compiled), gradients(step), strict=True):
        assert (got - expected).norm() <= 0.05 * expected.norm()
