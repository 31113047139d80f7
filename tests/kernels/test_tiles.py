"""Launches by limits: what every GPU is given, without compiling, and what was measured stays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.offline import TARGETS, looks_like
from torch_streamkl import attention_kl, linear_kl
from torch_streamkl.attention import heuristics, limits, ops
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.fx_passes.reporting import execution
from torch_streamkl.kernels import tiles
from torch_streamkl.kernels.tiles import Operands, TritonLaunch
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear import problem as linear_problem
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.program.divergences import DIVERGENCES, Functional
from torch_streamkl.runtime import devices

CUDA = torch.device("cuda")
HEAD_DIMS = (32, 64, 128, 256)
DTYPES = {"half": (2, False), "tf32": (4, False), "fp32": (4, True)}
KERNELS = ("forward", "dq", "dk")


def operands(head_dim: int, dtype: str) -> Operands:
    return Operands((head_dim, head_dim), *DTYPES[dtype])


@pytest.mark.parametrize("target", TARGETS)
def test_every_choice_fits(target: str) -> None:
    with looks_like(target):
        gpu = devices.gpu_of(CUDA)
    assert gpu.shared_bytes == TARGETS[target].shared_bytes
    for head_dim, dtype, kernel in itertools.product(HEAD_DIMS, DTYPES, KERNELS):
        if target == "sm_75" and (dtype == "tf32" or (dtype == "half" and head_dim > 128)):
            continue  # refused by limits.triton_limit
        given = operands(head_dim, dtype)
        chosen = tiles.default_launch(kernel, given, gpu)
        assert tiles.shared_bytes(chosen, kernel, given, gpu) <= gpu.shared_bytes


# What was measured on an H200 (bench/notes/portable_kernels.md), or follows it.
OF_HOPPER = {
    ("half", 32): [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)],
    ("half", 64): [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)],
    ("half", 128): [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)],
    ("half", 256): [(64, 32, 4, 1), (64, 32, 4, 1), (32, 64, 4, 1)],
    **{(d, n): [(64, 32, 4, 2)] * 3 for d in ("fp32", "tf32") for n in (32, 64)},
    **{(d, n): [(32, 32, 8, 1)] * 3 for d in ("fp32", "tf32") for n in (128, 256)},
    # 32 rows spilled 1.6 KB, and took 412 instructions for a pair where these take 274
    ("tf32", 256): [(16, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)],
}


@pytest.mark.parametrize(("dtype", "head_dim"), OF_HOPPER)
def test_measured_choices_stay(dtype: str, head_dim: int) -> None:
    with looks_like("sm_90"):
        gpu = devices.gpu_of(CUDA)
    given = operands(head_dim, dtype)
    chosen = [tiles.default_launch(kernel, given, gpu) for kernel in KERNELS]
    assert chosen == [TritonLaunch(*x) for x in OF_HOPPER[dtype, head_dim]]


@pytest.mark.parametrize(
    ("of", "target", "dtype", "head_dim", "kernel", "expected"),
    [
        ("row_program", "sm_90", "fp32", 256, "dq", (16, 32, 8, 1)),
        ("row_program", "sm_90", "half", 128, "forward", (64, 64, 4, 2)),
        ("row_program", "sm_120", "half", 128, "forward", (64, 32, 4, 2)),
        ("row_program", "sm_120", "half", 64, "forward", (64, 64, 4, 2)),
        ("row_program", "sm_80", "half", 256, "forward", (32, 64, 8, 1)),
        ("row_program", "sm_86", "fp32", 32, "dk", (32, 64, 4, 1)),
        # larger tiles take 100 KiB of 99
        ("row_program", "sm_86", "half", 256, "dk", (32, 32, 4, 1)),
        ("head_mean", "sm_90", "fp32", 256, "forward", (16, 16, 8, 1)),  # reads the mean
        ("head_mean", "sm_90", "fp32", 256, "lse", (32, 32, 8, 1)),
        ("head_mean", "sm_90", "tf32", 256, "forward", (32, 32, 8, 1)),
        ("head_mean", "sm_90", "tf32", 256, "mean", (32, 32, 8, 1)),
        # small tiles where the large ones do not fit
        ("default", "sm_120", "fp32", 256, "dq", (16, 16, 8, 1)),
        ("default", "sm_120", "fp32", 128, "dq", (32, 32, 8, 1)),
    ],
)
def test_choices(
    of: str, target: str, dtype: str, head_dim: int, kernel: str, expected: tuple[int, ...]
) -> None:
    with looks_like(target):
        gpu = devices.gpu_of(CUDA)
    choose = getattr(tiles, f"{of}_launch")
    assert choose(kernel, operands(head_dim, dtype), gpu) == TritonLaunch(*expected)


def problem(dtype: torch.dtype, head_dim: int = 64) -> AttentionProblem:
    with FakeTensorMode():
        x = torch.empty(1, 1, 64, head_dim, dtype=dtype, device="cuda")
    return problem_of(x, x, x, x)[0]


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "reason"),
    [
        ("sm_75", torch.bfloat16, 64, "takes bfloat16 from compute capability 8.0 on, got sm_75"),
        ("sm_75", torch.float16, 192, "takes float16 of head_dim up to 128 on sm_75, got 192"),
        ("sm_75", torch.float16, 128, None),
        ("gfx90a", torch.bfloat16, 256, None),
    ],
)
def test_what_a_gpu_cannot_run_goes_to_the_blocks(
    target: str,
    dtype: torch.dtype,
    head_dim: int,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices.warn_once.cache_clear()
    p = problem(dtype, head_dim)
    with looks_like(target), caplog.at_level("WARNING", logger="torch_streamkl"):
        chosen = heuristics.select_implementation(p, "auto")
        assert chosen == ("triton" if reason is None else "torch")
        if reason is not None:
            assert reason in caplog.text
            with pytest.raises(NotImplementedError, match=reason):
                heuristics.select_implementation(p, "triton")


def test_the_report_says_why_a_gpu_runs_blocks() -> None:
    def call(target: str, operator: Any, dtype: torch.dtype) -> str:
        graph, nodes = torch.fx.Graph(), []
        with FakeTensorMode() as mode:
            shape = (1, 1, 8, 64) if operator is ops.attention_kl else (8, 64)
            for name in "abcd":
                nodes.append(graph.placeholder(name))
                nodes[-1].meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
            result = graph.call_function(operator, tuple(nodes))
            result.meta |= {execution.SITE: "site", "val": (nodes[0].meta["val"],)}
        with looks_like(target):
            return execution.how_sites_run(graph, mode, is_compiled=True)["site"]

    devices.warn_once.cache_clear()
    attention, vocab = ops.attention_kl, linear_ops.linear_kl
    limit = "(the kernel takes bfloat16 from compute capability 8.0 on, got sm_75 of (7, 5))"
    assert call("sm_75", attention, torch.bfloat16).endswith(f"queries and keys {limit}")
    for kernels in (call("sm_80", attention, torch.bfloat16), call("sm_75", vocab, torch.float16)):
        assert kernels.startswith("as Triton kernels")
    assert "plain torch (the kernel takes float16," in call("sm_80", vocab, torch.float64)


def test_a_gpu_below_the_least(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TARGETS["sm_75"].properties, "minor", 0)
    devices.warn_once.cache_clear()
    with FakeTensorMode():
        x = torch.empty(8, 16, dtype=torch.float16, device="cuda")
    head = linear_problem.Head(x, x)
    kl = Functional.of(DIVERGENCES["forward_kl"])
    p = linear_problem.LinearProblem(head, head, kl)
    least = "needs compute capability 7.5 or above, got sm_75 of (7, 0)"
    with looks_like("sm_75"), caplog.at_level("WARNING", logger="torch_streamkl"):
        assert str(limits.triton_limit(problem(torch.float16))).startswith(least)
        assert linear_ops.row_functions(p, "auto") is linear_rows
        assert "needs compute capability 7.5 or above" in caplog.text
        with pytest.raises(NotImplementedError, match=r"got sm_75 of \(7, 0\)"):
            linear_ops.row_functions(p, "triton")


@pytest.fixture
def broken_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU is there, and Triton finds no compiler to build what speaks to its driver."""
    from triton.runtime.driver import DriverConfig

    def refuse(_: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC.\nMore.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(DriverConfig, "active", property(refuse))
    devices.require_driver.cache_clear()
    yield
    devices.require_driver.cache_clear()


NO_COMPILER = r"takes a C compiler .* impl='torch'.* RuntimeError: Failed to find C compiler"


@pytest.mark.usefixtures("broken_driver")
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_a_driver_without_a_compiler(impl: str) -> None:
    p = problem(torch.bfloat16)
    with looks_like("sm_90"):
        for _ in range(2):  # every call says so, not the first alone
            with pytest.raises(RuntimeError, match=NO_COMPILER) as error:
                heuristics.select_implementation(p, impl)
            assert "\n" not in str(error.value)
        assert heuristics.select_implementation(p, "torch") == "torch"


@pytest.mark.usefixtures("broken_driver")
def test_tensors_on_a_cpu_need_no_driver() -> None:
    q, k = torch.randn(2, 1, 2, 5, 4).requires_grad_().unbind()
    heads = [torch.randn(5, 4), torch.randn(7, 4)] * 2
    attention_kl(q, k, k.detach(), q.detach(), reduction="mean").backward()
    assert linear_kl(*heads, reduction="mean").item() == pytest.approx(0.0, abs=1e-6)


def test_a_capability_of_amd_is_not_hoppers() -> None:
    with looks_like("gfx90a"):
        gpu = devices.gpu_of(CUDA)
        assert (gpu.is_hip, gpu.capability) == (True, (9, 0))
        assert not gpu.is_hopper
        limit = limits.hopper_limit(problem(torch.bfloat16))
    assert limit is not None and limit.startswith("needs an NVIDIA GPU")


@pytest.mark.parametrize(
    ("target", "precision"),
    [("sm_75", "ieee"), ("sm_80", "tf32"), ("gfx90a", "ieee"), ("gfx942", "tf32"),
     ("gfx950", "ieee")],
)  # fmt: skip
def test_tf32_where_matrix_units_take_it(target: str, precision: str) -> None:
    """Triton refuses the others: "input_precision must be one of ..."."""
    with FakeTensorMode():
        x, half = (torch.empty(8, device="cuda", dtype=t) for t in (torch.float32, torch.half))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with looks_like(target):
            assert devices.dot_precision(x) == precision
            assert devices.dot_precision(half) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
