"""trace_fully_shard on two processes: what FSDP2 computes, as one graph in which losses fuse."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint, device_mesh
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.distilled_step import WIDTH, Step
from tests.support.ranks import (
    Rank,
    keeping_graphs,
    on_ranks,
    on_two_ranks,
    run_check,
    same_error,
)
from torch_streamkl.distributed import trace_fully_shard
from torch_streamkl.fx_passes import backend

SEQLEN = 12


class Tied(nn.Module):
    """A step whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.step = Step()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.step(x) + self.head(x).square().mean()


def sharded(
    me: Rank,
    make: Any = Step,
    dtype: torch.dtype = torch.float64,
    mesh: Any = None,
    **options: Any,
) -> nn.Module:
    """A model with fully_shard on every layer, the same on every rank."""
    torch.manual_seed(0)
    model = make().to(me.device, dtype)
    mesh = mesh or me.mesh
    step = model.step if hasattr(model, "step") else model
    for layer in (*step.student.layers, *step.teacher.layers):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(
    me: Rank, model: nn.Module, step: Any, dtype: torch.dtype = torch.float64, backwards: int = 1
) -> tuple[list[Tensor], list[float]]:
    """How two optimizer steps on this rank's batches changed whole parameters, and the losses."""
    torch.manual_seed(1 + me.rank)
    before = [p.detach().full_tensor().clone() for p in model.parameters()]
    # where gradients are rounded: AdamW's first steps have a gradient's sign, however small it is
    make = torch.optim.AdamW if dtype == torch.float64 else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for _ in range(backwards):
            x = torch.randn(3, SEQLEN, WIDTH).to(me.device, dtype)
            loss = step(x)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for parameter, state in optimizer.state.items():
        assert isinstance(parameter, DTensor)
        if "exp_avg" in state:
            assert state["exp_avg"].placements == parameter.placements
    after = [p.detach().full_tensor() for p in model.parameters()]
    return [a - b for a, b in zip(after, before, strict=True)], losses


def compiled(model: nn.Module) -> Any:
    options = {"streamkl.inner": "aot_eager", "streamkl.strict": True}
    return torch.compile(model, backend="streamkl", options=options, fullgraph=True)


def compare(
    me: Rank, limit: float = 1e-9, make: Any = Step, backwards: int = 1, **options: Any
) -> None:
    dtype = torch.float32 if "mp_policy" in options else torch.float64
    model = sharded(me, make, dtype, **options)
    expected, losses = trained(me, model, model, dtype, backwards)
    model = trace_fully_shard(sharded(me, make, dtype, **options))
    with backend.collected() as report:
        got, traced_losses = trained(me, model, compiled(model), dtype, backwards)
    assert report.num_fused == len(report.sites) == 2
    torch.testing.assert_close(traced_losses, losses, rtol=limit, atol=limit)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= limit * b.norm(), (a - b).norm() / b.norm()


@on_ranks
def the_same_steps_as_fsdp2(me: Rank) -> None:
    """With tied weights and accumulated gradients."""
    compare(me, make=Tied, backwards=2)


@on_ranks
def mixed_precision(me: Rank) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare(me, limit=0.02, mp_policy=policy)


@on_ranks
def hybrid_sharding(me: Rank) -> None:
    """With four ranks, two replicas of two shards: gradients are means over both dimensions."""
    shape, names = (2, 2) if me.size == 4 else (me.size, 1), ("replicate", "shard")
    compare(me, mesh=device_mesh.init_device_mesh(me.device.type, shape, mesh_dim_names=names))


@on_ranks
def collectives_of_a_graph(me: Rank) -> None:
    """Parameters and gradients travel in the dtypes of the policy, and the loss has that of it.

    With reshard_after_forward no whole parameter is kept for the backward.
    """
    # six matrices a side; the backward reads those of the student's second layer; casts of the
    # input and of the loss are graphs of their own
    for reshards, gathers, reduce_dtype, travels in (
        (False, [0, 12, 0, 0], torch.float32, torch.float32),
        (True, [0, 12, 0, 3], None, torch.bfloat16),
    ):  # fmt: skip
        torch._dynamo.reset()
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float64
        )
        options = {"mp_policy": policy, "reshard_after_forward": reshards}
        model = trace_fully_shard(sharded(me, dtype=torch.float32, **options))
        graphs: list[torch.fx.GraphModule] = []
        step = torch.compile(model, backend=keeping_graphs(graphs), fullgraph=True)
        loss = step(torch.randn(3, SEQLEN, WIDTH, device=me.device))
        loss.backward()
        assert loss.dtype == torch.float64
        assert all(p.grad.dtype == torch.float32 for p in model.student.parameters())
        for name, dtype in (("all_gather", torch.bfloat16), ("reduce_scatter", travels)):
            nodes = [node for graph in graphs for node in graph.graph.nodes]
            found = {node.meta["val"].dtype for node in nodes if name in str(node.target)}
            assert found == {dtype}, (name, found)
        counted = [
            sum("all_gather_into_tensor" in str(node.target) for node in graph.graph.nodes)
            for graph in graphs
        ]
        assert counted == gathers, reshards


@on_ranks
def checkpoints(me: Rank) -> None:
    """Training goes on from what torch.distributed.checkpoint saved, bit by bit."""
    folder: list[Any] = [tempfile.mkdtemp() if me.rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    path = Path(folder[0]) / "checkpoint"

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = trace_fully_shard(sharded(me))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, compiled(model)

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        names = "model_state_dict", "optim_state_dict"
        return dict(zip(names, get_state_dict(model, optimizer), strict=True))

    def train(optimizer: torch.optim.Optimizer, step: Any, seed: int) -> None:
        torch.manual_seed(seed + me.rank)
        step(torch.randn(3, SEQLEN, WIDTH).to(me.device, torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    model, optimizer, step = make()
    train(optimizer, step, 1)
    checkpoint.save(state(model, optimizer), checkpoint_id=path)
    train(optimizer, step, 11)
    fresh, fresh_optimizer, fresh_step = make()
    loaded = state(fresh, fresh_optimizer)
    checkpoint.load(loaded, checkpoint_id=path)
    set_state_dict(fresh, fresh_optimizer, **loaded)
    train(fresh_optimizer, fresh_step, 11)
    for p, expected in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.detach().to_local(), expected.detach().to_local())


@on_ranks
def modules_that_are_refused(me: Rank) -> None:
    same_error(me, lambda: trace_fully_shard(nn.Linear(2, 2)), "fully_shard", "Linear")
    model = trace_fully_shard(sharded(me))
    for name, given in (
        ("set_requires_gradient_sync", (False,)), ("unshard", ()),
        ("set_gradient_divide_factor", (2.0,)),
    ):  # fmt: skip
        same_error(me, functools.partial(getattr(model, name), *given), name)
    model.set_requires_gradient_sync(True)  # as it is
    for setter, value in (
        ("set_gradient_divide_factor", 4.0),
        ("set_requires_gradient_sync", False),
    ):
        other = sharded(me)
        getattr(other.student.layers[0], setter)(value)
        same_error(me, lambda other=other: trace_fully_shard(other), f"{setter}({value})")


@on_ranks
def modules_stay_modules(me: Rank) -> None:
    """They can be cast, and containers sliced."""
    model = trace_fully_shard(sharded(me)).float()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    model(torch.randn(3, SEQLEN, WIDTH, device=me.device)).backward()
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(me.device)
    part = trace_fully_shard(fully_shard(layers, mesh=me.mesh))[:2]
    assert type(part) is nn.Sequential and len(part) == 2


@pytest.mark.slow  # two ranks have each of the dimensions
def test_on_four_ranks() -> None:
    run_check(__name__, "hybrid_sharding", 4)


test_on_two_ranks = on_two_ranks(__name__)
