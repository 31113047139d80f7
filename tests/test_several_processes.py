"""Training on several devices: what wraps a module must not keep its losses from being fused.

Under DistributedDataParallel Dynamo splits graphs between the layers, whose maps are compared at
the end (fx_passes/ddp.py). The hooks of fully_shard break graphs, which a backend cannot mend.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

import torch_streamkl
from tests.support.distilled_step import HEADS, WIDTH, Step, gradients
from tests.support.hard_programs import PROGRAMS, make_inputs
from torch_streamkl.fx_passes import backend, ddp
from torch_streamkl.fx_passes.report import Report

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)
SEQLEN = 12
SMALL_BUCKETS = 0.0001  # MiB: every layer is in a bucket of its own


@contextmanager
def process_group(store: Path, rank: int = 0, world_size: int = 1, device: str = "cpu") -> Any:
    given = torch.distributed.FileStore(str(store), world_size)
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl", store=given, rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 100)
    with process_group(tmp_path / "store"):
        yield


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every graph that the backend gets, whether it is a part."""
    seen: list[bool] = []
    asked = ddp.is_part_of_a_rewritten_graph

    def ask() -> bool:
        seen.append(asked())
        return seen[-1]

    monkeypatch.setattr(ddp, "is_part_of_a_rewritten_graph", ask)
    return seen


@contextmanager
def reported() -> Iterator[Report]:
    report = Report()
    observer = report.extend
    backend.REPORTS.append(observer)
    try:
        yield report
    finally:
        backend.REPORTS.remove(observer)


def step_and_input(dtype: torch.dtype = torch.float64) -> tuple[Step, Tensor]:
    torch.manual_seed(0)
    return Step().to(dtype), torch.randn(3, SEQLEN, WIDTH, dtype=dtype)


def expected_gradients(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    step, x = step_and_input(dtype)
    step(x).backward()
    return gradients(step)


@pytest.mark.parametrize(
    ("inner", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_maps_of_different_buckets(
    one_process: None, graphs: list[bool], inner: str, dynamic: bool
) -> None:
    # Inductor of torch 2.11 has no attention in float64 on a CPU
    dtype = torch.float64 if inner == "aot_eager" else torch.float32
    step, x = step_and_input(dtype)
    module = DistributedDataParallel(step, bucket_cap_mb=SMALL_BUCKETS)
    options = {"streamkl.strict": True, "streamkl.inner": inner}
    # dynamic: the scale of the scores is a number that Dynamo reads from an input of the graph
    compiled = torch.compile(module, backend="streamkl", options=options, dynamic=dynamic)
    with reported() as report:
        compiled(x).backward()
    assert len(graphs) > 2
    assert all(graphs)
    # with dynamic shapes Dynamo may begin again, after the first graph was reported
    assert report.num_fused == len(report.sites) == (4 if dynamic else 2)
    if dtype == torch.float32:
        assert not report.remaining
    for got, expected in zip(gradients(step), expected_gradients(dtype), strict=True):
        limit = 64 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


class Shifted(nn.Module):
    """A program behind parameters that are added to its inputs."""

    def __init__(self, program: Any, inputs: list[Tensor]) -> None:
        super().__init__()
        self.program = program
        self.shifts = nn.ParameterList(
            nn.Parameter(x.new_zeros(x.shape[-1])) for x in inputs if x.is_floating_point()
        )

    def forward(self, *inputs: Tensor) -> Any:
        shifts = iter(self.shifts)
        return self.program(*[x + next(shifts) if x.is_floating_point() else x for x in inputs])


@pytest.mark.parametrize("name", PROGRAMS)
def test_hard_programs_are_split(one_process: None, name: str) -> None:
    found: list[list[Tensor | None] | str] = []
    for chosen in ("aot_eager", "streamkl"):
        torch._dynamo.reset()
        inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in make_inputs()]
        shifted = Shifted(PROGRAMS[name].fn, inputs)
        module = DistributedDataParallel(shifted, bucket_cap_mb=SMALL_BUCKETS)
        options = {"streamkl.inner": "aot_eager"} if chosen == "streamkl" else None
        torch.manual_seed(0)
        try:
            results = tree_flatten(torch.compile(module, backend=chosen, options=options)(*inputs))
            tensors = [x for x in results[0] if isinstance(x, Tensor)]
            sums = [x.double().sum() for x in tensors if x.requires_grad]
            if sums:
                torch.stack(sums).sum().backward()
            found.append([*tensors, *(p.grad for p in shifted.parameters())])
        except Exception as error:
            found.append(f"{type(error).__name__}")
    plain, ours = found
    if isinstance(plain, str):
        pytest.skip(f"does not compile under DDP: {plain}")
    assert not isinstance(ours, str), ours
    assert [x is None for x in ours] == [x is None for x in plain]
    for a, b in zip(ours, plain, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_numbers_stay_in_the_parts_of_their_users() -> None:
    """A part of a split graph may return tensors and sizes, not the scale of a far-away loss."""

    def program(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        number = scale.item() * 2.0
        return x * number, x.sin() + number

    graph = torch.fx.Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    item = graph.call_method("item", (scale,))
    number = graph.call_function(operator.mul, (item, 2.0))
    first = graph.call_function(operator.mul, (x, number))
    sine = graph.call_method("sin", (x,))
    second = graph.call_function(operator.add, (sine, number))
    graph.output((first, second))
    for node in (item, number):
        node.meta["example_value"] = 1.5
    ddp._keep_numbers_with_their_users(graph)
    graph.lint()
    order = [str(node.target) for node in graph.nodes if node.op.startswith("call")]
    expected = ["item", "mul", "mul", "sin", "item", "mul", "add"]
    assert [name.split()[-1].strip(">") for name in order] == expected
    inputs = torch.randn(3), torch.tensor(0.7)
    rewritten = torch.fx.GraphModule(torch.nn.Module(), graph)
    for got, wanted in zip(rewritten(*inputs), program(*inputs), strict=True):
        assert torch.equal(got, wanted)


def test_explain_a_wrapped_module(one_process: None, graphs: list[bool]) -> None:
    step, x = step_and_input()
    module = DistributedDataParallel(step, bucket_cap_mb=SMALL_BUCKETS)
    report = torch_streamkl.explain(module, x)
    assert len(graphs) > 2
    assert (report.num_fused, len(report.sites)) == (2, 2)


def test_strict_sees_maps_of_another_graph(one_process: None) -> None:
    step, x = step_and_input()
    module = DistributedDataParallel(step, bucket_cap_mb=SMALL_BUCKETS)
    options = torch_streamkl.inductor_options(strict=True)  # Inductor gets the parts
    with pytest.raises(Exception, match="not made in this graph") as error:
        torch.compile(module, options=options)(x)
    assert "optimize_ddp = False" in str(error.value)


def test_other_backends_are_split_as_ever(one_process: None, graphs: list[bool]) -> None:
    step, x = step_and_input()
    module = DistributedDataParallel(step, bucket_cap_mb=SMALL_BUCKETS)
    parts: list[torch.fx.GraphModule] = []

    def other(gm: torch.fx.GraphModule, _: object) -> Any:
        parts.append(gm)
        return gm.forward

    with reported() as report:
        torch.compile(module, backend=other)(x)
    assert len(parts) > 2
    assert not graphs
    assert not report.sites


def test_one_graph_is_rewritten_once(one_process: None, graphs: list[bool]) -> None:
    step, x = step_and_input()
    with torch._dynamo.config.patch(optimize_ddp=False), reported() as report:
        module = DistributedDataParallel(step)
        torch.compile(module, backend="streamkl", options={"streamkl.inner": "eager"})(x)
    assert graphs == [False]
    assert (report.num_fused, len(report.sites)) == (2, 2)


@pytest.mark.parametrize("by_layer", [False, True])
def test_fully_shard(one_process: None, by_layer: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    step, x = step_and_input()
    mesh = init_device_mesh("cpu", (1,))
    if by_layer:
        for layer in step.student.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(step, mesh=mesh)
    with reported() as report:
        options = {"streamkl.inner": "aot_eager"}
        torch.compile(step, backend="streamkl", options=options)(x).backward()
    for got, expected in zip(gradients(step), expected_gradients(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    if not by_layer:
        assert (report.num_fused, len(report.sites)) == (2, 2)
        return
    assert report.num_fused == 0
    assert any("not made in this graph" in site.reason for site in report.sites)
    assert any("fully_shard" in site.remedy for site in report.sites)
    assert {tuple(x.shape) for x in report.remaining} == {(3, HEADS, SEQLEN, SEQLEN)}


# ---------------------------------------------------------------------------- several processes
def _one_of_two(rank: int, folder: str, device: str) -> None:
    """Gradients of a rank's own batch, reduced over both ranks, compiled and not."""
    torch.set_num_threads(1)
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 100
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    if device == "cuda":
        torch.cuda.set_device(rank)
    with process_group(Path(folder) / "store", rank, 2, device):
        found: dict[str, Any] = {}
        for name in ("eager", "compiled"):
            step, _ = step_and_input(dtype)
            step.to(device)
            torch.manual_seed(1 + rank)
            x = torch.randn(3, SEQLEN, WIDTH, dtype=dtype, device=device)
            ids = [rank] if device == "cuda" else None
            module: nn.Module = DistributedDataParallel(
                step, device_ids=ids, bucket_cap_mb=SMALL_BUCKETS
            )
            if name == "compiled":
                options = {
                    "streamkl.strict": True,
                    "streamkl.inner": "aot_eager" if device == "cpu" else "inductor",
                }
                module = torch.compile(module, backend="streamkl", options=options)
            loss = module(x)
            loss.backward()
            found[name] = (loss.item(), [g.cpu() for g in gradients(step)])
        torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_processes(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.multiprocessing.spawn(_one_of_two, (str(tmp_path), device), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert ranks[0]["eager"][0] != ranks[1]["eager"][0]
    budget = {"rtol": 1e-9, "atol": 1e-12} if device == "cpu" else {"rtol": 0.05, "atol": 1e-3}
    for rank in ranks:
        assert rank["compiled"][0] == pytest.approx(rank["eager"][0], rel=budget["rtol"])
        for got, expected, reduced in zip(
            rank["compiled"][1], rank["eager"][1], ranks[0]["compiled"][1], strict=True
        ):
            torch.testing.assert_close(got, expected, **budget)
            assert torch.equal(got, reduced)
