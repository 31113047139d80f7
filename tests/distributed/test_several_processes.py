"""Training on several devices: what wraps a module must not keep its losses from being fused.

Under DistributedDataParallel Dynamo splits graphs between the layers, whose maps are compared at
the end (fx_passes/ddp.py). The hooks of fully_shard break graphs, which a backend cannot mend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_flatten

import torch_streamkl
from tests.support import quick
from tests.support.covering import every
from tests.support.distilled_step import HEADS, WIDTH, Step, gradients
from tests.support.hard_programs import PROGRAMS, make_inputs
from tests.support.ranks import start
from tests.support.subgraphs import inductor_without_code
from torch_streamkl.distributed import trace_fully_shard
from torch_streamkl.fx_passes import backend, ddp

if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch._dynamo.backends.distributed import DDPOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SEQLEN = 12
FIRST_BUCKET, SMALL_BUCKETS = 100, 0.0001  # bytes, MiB: every layer is in a bucket of its own


@contextmanager
def process_group(store: Path, rank: int = 0, world_size: int = 1, device: str = "cpu") -> Any:
    given = torch.distributed.FileStore(str(store), world_size)
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=given,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=2),  # a rank that waits for another is an error, not a hang
    )
    try:
        yield
        if world_size > 1:
            torch.distributed.barrier()  # nobody closes connections that another still reads
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch._dynamo.reset()
    with process_group(tmp_path / "store"):
        yield


@pytest.fixture
def small_buckets(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", FIRST_BUCKET)


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


def step_and_input(dtype: torch.dtype = torch.float64) -> tuple[Step, Tensor]:
    torch.manual_seed(0)
    return Step().to(dtype), torch.randn(3, SEQLEN, WIDTH, dtype=dtype)


def expected_gradients(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    step, x = step_and_input(dtype)
    step(x).backward()
    return gradients(step)


# torch 2.11 alone, backend="eager", raises: the split compiles each part on tensors of symbolic
# sizes, of which its `linear` without gradients asks numel()
# torch 2.15 alone, on a CPU, raises in every graph that its split cuts: parts have meta tensors
CAN_SPLIT = TorchVersion(torch.__version__) < "2.15"
CAN_RUN_EAGER_PARTS = TorchVersion(torch.__version__) >= "2.13"


def in_small_buckets(step: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(step, bucket_cap_mb=SMALL_BUCKETS)


def as_expected(step: nn.Module, expected: list[Tensor]) -> None:
    for got, wanted in zip(gradients(step), expected, strict=True):
        limit = 64 * torch.finfo(wanted.dtype).eps
        torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("inner", "dynamic"),
    [("aot_eager", False), ("eager" if CAN_RUN_EAGER_PARTS else "aot_eager", True)],
)
def test_maps_of_different_buckets(
    small_buckets: None, graphs: list[bool], inner: str, dynamic: bool
) -> None:
    step, x = step_and_input()
    options = {"streamkl.strict": True, "streamkl.inner": inner}
    # dynamic: the scale of the scores is a number that Dynamo reads from an input of the graph
    module = in_small_buckets(step)
    compiled = torch.compile(module, backend="streamkl", options=options, dynamic=dynamic)
    with backend.collected() as report:
        compiled(x).backward()
    assert len(graphs) > 2
    assert all(graphs)
    # with dynamic shapes Dynamo may begin again, after the first graph was reported
    assert report.num_fused == len(report.sites) == (4 if dynamic and inner != "eager" else 2)
    as_expected(step, expected_gradients())


class Shifted(nn.Module):
    """A program after parameters that are added to its inputs."""

    def __init__(self, program: Any, inputs: list[Tensor]) -> None:
        super().__init__()
        self.program = program
        self.shifts = nn.ParameterList(
            nn.Parameter(x.new_zeros(x.shape[-1])) for x in inputs if x.is_floating_point()
        )

    def forward(self, *inputs: Tensor) -> Any:
        shifts = iter(self.shifts)
        return self.program(*[x + next(shifts) if x.is_floating_point() else x for x in inputs])


# these write to inputs, which autograd has saved after a shift: torch refuses them, us or not
REFUSED = {
    "view_of_leaf_modified", "setitem_on_leaf", "leaf_written_as_out", "leaf_activated_in_place",
    "input_modified_later", "row_weights_modified_later",
}  # fmt: skip


@pytest.mark.parametrize("name", every(9, [name for name in PROGRAMS if name not in REFUSED], 8))
def test_hard_programs_are_split(small_buckets: None, name: str) -> None:
    def run(chosen: str, options: dict[str, Any] | None = None) -> list[Tensor | None]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in make_inputs()]
        shifted = Shifted(PROGRAMS[name].fn, inputs)
        module = in_small_buckets(shifted)
        results, _ = tree_flatten(torch.compile(module, backend=chosen, options=options)(*inputs))
        tensors = [x for x in results if isinstance(x, Tensor)]
        sums = [x.double().sum() for x in tensors if x.requires_grad]
        if sums:
            torch.stack(sums).sum().backward()
        return [*tensors, *(p.grad for p in shifted.parameters())]

    plain, ours = run("aot_eager"), run("streamkl", {"streamkl.inner": "aot_eager"})
    assert [x is None for x in ours] == [x is None for x in plain]
    for a, b in zip(ours, plain, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_explain_a_wrapped_module(small_buckets: None, graphs: list[bool]) -> None:
    step, x = step_and_input()
    report = torch_streamkl.explain(in_small_buckets(step), x)
    assert len(graphs) > 2
    assert (report.num_fused, len(report.sites)) == (2, 2)


def test_maps_of_different_buckets_inside_inductor(small_buckets: None) -> None:
    """Inductor gets the parts; its passes do not, as the whole was rewritten before."""
    step, x = step_and_input(torch.float32)
    module = in_small_buckets(step)
    with (
        inductor_without_code(),
        torch_streamkl.enable(strict=True),
        backend.collected() as report,
    ):
        torch.compile(module)(x).backward()
    assert (report.num_fused, len(report.sites)) == (2, 2)
    as_expected(step, expected_gradients(torch.float32))


@pytest.mark.skipif(not CAN_SPLIT, reason="this torch cannot split the graph")
def test_strict_sees_maps_of_another_graph(
    small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the split cannot be wrapped, as in another torch, the report names the setting."""
    options = torch_streamkl.inductor_options(strict=True)
    split = DDPOptimizer.compile_fn.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(DDPOptimizer, "compile_fn", split)
    step, x = step_and_input()
    module = in_small_buckets(step)
    with (
        pytest.raises(Exception, match="not made in this graph") as error,
        backend.collected() as report,
    ):
        torch.compile(module, options=options)(x)
    assert "optimize_ddp = False" in str(error.value)
    assert ddp.NOTE in report.notes


def test_a_compiler_that_cannot_be_read_is_not_ours(
    small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of torch that moved does not keep other people's programs from being compiled."""
    torch_streamkl.inductor_options()

    def moved(compiler: object) -> Any:
        raise AttributeError("module 'torch' has no attribute '_TorchCompileInductorWrapper'")

    step, x = step_and_input()
    module = in_small_buckets(step)
    wrapped = DDPOptimizer.compile_fn
    monkeypatch.setattr(DDPOptimizer, "compile_fn", wrapped.__wrapped__)
    ddp.rewrite_before_split(moved, backend.rewrite_and_report)
    torch.testing.assert_close(torch.compile(module, backend="eager")(x), module(x))


def test_other_backends_are_split_as_ever(small_buckets: None, graphs: list[bool]) -> None:
    step, x = step_and_input()
    module = in_small_buckets(step)
    parts: list[torch.fx.GraphModule] = []

    def other(gm: torch.fx.GraphModule, _: object) -> Any:
        parts.append(gm)
        return gm.forward

    with backend.collected() as report:
        torch.compile(module, backend=other)(x)
    assert len(parts) > 2
    assert not graphs
    assert not report.sites


def test_one_graph_is_rewritten_once(one_process: None, graphs: list[bool]) -> None:
    step, x = step_and_input()
    with torch._dynamo.config.patch(optimize_ddp=False), backend.collected() as report:
        module = DistributedDataParallel(step)
        torch.compile(module, backend="streamkl", options={"streamkl.inner": "eager"})(x)
    assert graphs == [False]
    assert (report.num_fused, len(report.sites)) == (2, 2)


@pytest.mark.parametrize("by_layer", [False, True])
def test_fully_shard(one_process: None, by_layer: bool) -> None:
    step, x = step_and_input()
    mesh = init_device_mesh("cpu", (1,))
    if by_layer:
        for layer in step.student.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(step, mesh=mesh)
    with backend.collected() as report:
        options = {"streamkl.inner": "aot_eager"}
        torch.compile(step, backend="streamkl", options=options)(x).backward()
    as_expected(step, expected_gradients())
    if not by_layer:
        assert (report.num_fused, len(report.sites)) == (2, 2)
        return
    assert report.num_fused == 0
    assert any("not made in this graph" in site.reason for site in report.sites)
    assert any("fully_shard" in site.hint for site in report.sites)
    assert {tuple(x.shape) for x in report.remaining} == {(3, HEADS, SEQLEN, SEQLEN)}


class Logits(nn.Module):
    """A step on logits: each model as a whole, or both bodies before both LM heads."""

    def __init__(self, bodies_first: bool) -> None:
        super().__init__()
        self.bodies_first = bodies_first
        self.subgraphs = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 96, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.bodies_first:
            s, t = self.subgraphs[0](x), self.subgraphs[1](x)
            s, t = self.heads[0](s), self.heads[1](t)
        else:
            s = self.heads[0](self.subgraphs[0](x))
            t = self.heads[1](self.subgraphs[1](x))
        target = t.softmax(-1)
        return F.kl_div(s.log_softmax(-1), target, reduction="none").sum(-1).mean()


@pytest.mark.parametrize("how", ["bodies_first", "model_by_model", "traced"])
def test_logits_under_fully_shard_on_every_layer(one_process: None, how: str) -> None:
    """LM heads of the outermost module meet in its last graph if no layer runs between them."""
    mesh = init_device_mesh("cpu", (1,))
    x = torch.randn(3, SEQLEN, WIDTH, dtype=torch.float64)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Logits(how == "bodies_first").double()

    plain = make()
    plain(x).backward()
    step = make()
    for body in step.subgraphs:
        for layer in body:
            fully_shard(layer, mesh=mesh)
    fully_shard(step, mesh=mesh)
    if how == "traced":
        trace_fully_shard(step)
    with backend.collected() as report:
        options = {"streamkl.inner": "aot_eager"}
        torch.compile(step, backend="streamkl", options=options)(x).backward()
    as_expected(step, gradients(plain))
    assert (report.num_fused, len(report.sites)) == (int(how != "model_by_model"), 1)
    if how == "model_by_model":
        hint = report.sites[0].hint
        assert "both bodies run before both LM heads" in hint
        assert "trace_fully_shard" in hint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        wanted = (t @ t.mT).softmax(-1)
        log_probabilities = (self.q(x) @ self.k(x).mT).log_softmax(-1)
        return F.kl_div(log_probabilities, wanted, reduction="none").sum(-1).mean()


class Pair(nn.Module):
    """Modules that have a loss each: nothing is compared across buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.first(x, t) + self.second(x, t)


def test_losses_of_a_bucket_each(small_buckets: None) -> None:
    x, t = torch.randn(2, 2, 2, 9, 8)
    module = in_small_buckets(Pair())
    module(x, t).backward()
    expected = [g.clone() for g in gradients(module)]
    module.zero_grad()
    options = {"streamkl.inner": "aot_eager"}
    with backend.collected() as report:
        torch.compile(module, backend="streamkl", options=options)(x, t).backward()
    assert report.num_fused == 2 and not report.failures
    as_expected(module, expected)


# ---------------------------------------------------------------------------- several processes
def _one_of_two(rank: int, folder: str, device: str) -> None:
    """Gradients of a rank's own batch, reduced over both ranks, compiled and not."""
    torch.set_num_threads(1)
    quick.sites_are_fused_whatever_their_size()
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = FIRST_BUCKET
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
    start(_one_of_two, (str(tmp_path), device), 2, device)
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
