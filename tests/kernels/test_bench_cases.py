"""Names the operator that each case of bench becomes, and the kernels that compute it.

    python -m tests.kernels.test_bench_cases    # writes bench_cases.txt: read what has changed

A case that another operator or another kernel computes has another speed: whoever changes it
measures it. Operators are those of the naive code on a CPU, at the sizes of ``--quick``. Kernels
are chosen from metadata alone: fake tensors on a device that looks like a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from bench import attention, suites
from bench.attention import AttentionCase
from bench.case import Case
from bench.offline import looks_like
from torch_streamkl.attention import heuristics, hopper_tiles, ops
from torch_streamkl.fx_passes import backend

DOCUMENT = Path(__file__).parent / "bench_cases.txt"
NAIVE = ("matrix", "programs", "compiled", "peers", "chosen")
TARGETS = ("sm_90", "sm_80")


class IndexedByViews(TorchFunctionMode):
    """Indexes a GPU's fake tensors by views: torch without CUDA refuses to index them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, places = args
        dim = 0
        for at in places if isinstance(places, tuple) else (places,):
            if at is None:
                x = x.unsqueeze(dim)
            elif isinstance(at, int):
                x = x.select(dim, at)
                continue
            dim += 1
        return x


class NoGenerator:
    """Stands for a generator of random numbers on a device that is not there."""

    def __init__(self, device: object = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...


def operators_of(case: Case) -> str:
    torch._dynamo.reset()
    problem = case.problem(torch.device("cpu"))
    options = {"streamkl.min_mib": 0.0, "streamkl.verify": "never", "streamkl.inner": "eager"}
    with backend.collected() as report:
        torch.compile(problem.loss, backend="streamkl", dynamic=False, options=options)(
            *problem.sets[0]
        )
    found = [site.kind if site.fused else f"not fused: {site.reason}" for site in report.sites]
    return ", ".join(found) or "nothing"


def quick_cases() -> dict[str, Case]:
    return {
        f"{name}: {case.label}": case
        for name in NAIVE
        for case in suites.SUITES[name].build("cpu", True)
        if getattr(case, "mask", "none") in ("none", "causal")
    }


def _empty(
    shapes: list[tuple[int, ...]], device: torch.device, dtype: torch.dtype, *_: Any
) -> list[Tensor]:
    return [torch.empty(n, device=device, dtype=dtype) for n in shapes]


def _there(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), device=device, dtype=x.dtype)


def kernels_of(case: AttentionCase, target: str) -> str:
    """The implementation of the forward and of the gradients, with the tiles of the forward."""
    problems: list[Any] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found = ops.SPEC.problem(*args, **kwargs)
        problems.append(found)
        return found, found.impl

    of_a_cpu = AttentionCase.options

    def of_a_gpu(self: AttentionCase, device: torch.device) -> dict[str, Any]:
        made = of_a_cpu(self, torch.device("cpu"))
        return {n: _there(x, device) if isinstance(x, Tensor) else x for n, x in made.items()}

    with (
        FakeTensorMode(),
        IndexedByViews(),
        looks_like(target),
        mock.patch.object(attention, "random_tensors", _empty),
        mock.patch.object(AttentionCase, "options", of_a_gpu),
        mock.patch.object(torch, "Generator", NoGenerator),
        mock.patch.object(ops, "problem_of", recorded),
        torch.no_grad(),
    ):
        device = torch.device("cuda")
        case.direct({})(*case._inputs(device, 0))
        (problem,) = problems[:1]
        forward, backward = (
            heuristics.select_implementation(problem, "auto", is_backward)
            for is_backward in (False, True)
        )
        tiles: Any = (
            hopper_tiles.hopper_launch(problem)
            if forward == "hopper"
            else heuristics.triton_launch(problem, "forward")
        )
        return f"{forward}, gradients {backward}; {tiles.block_m} x {tiles.block_n}"


def gpu_cases() -> dict[str, AttentionCase]:
    return {
        f"{name}: {case.label}": case
        for name in ("matrix", "usual", "short")
        for case in suites.SUITES[name].build("cuda", False)
        if isinstance(case, AttentionCase)
    }


def lines() -> Iterator[str]:
    yield "# operators of naive code"
    for name, case in quick_cases().items():
        yield f"{name} | {operators_of(case)}"
    for target in TARGETS:
        yield f"# kernels on {target}"
        for name, of_gpu in gpu_cases().items():
            yield f"{name} | {kernels_of(of_gpu, target)}"


def pinned(section: str) -> dict[str, str]:
    part = DOCUMENT.read_text().split(f"# {section}\n")[1].split("\n# ")[0]
    return dict(line.split(" | ") for line in part.strip().splitlines())


def test_the_operators_of_naive_code_are_those_that_were_measured() -> None:
    found = {name: operators_of(case) for name, case in quick_cases().items()}
    assert found == pinned("operators of naive code")


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_are_those_that_were_measured(target: str) -> None:
    found = {name: kernels_of(case, target) for name, case in gpu_cases().items()}
    assert found == pinned(f"kernels on {target}")


if __name__ == "__main__":
    DOCUMENT.write_text("\n".join(lines()) + "\n")
