"""Defines cases that ranks share: a vocabulary, a sequence, or batches of data-parallel training.

A provider's problem is this rank's part. Its gradients are compared with those of the case's first
provider on the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from bench.case import Build, Case, Inputs, Loss, Problem, random_tensors
from bench.measure import MIB, usual_dtype
from bench.providers import named
from bench.steps import OBJECTIVES, PAIRS, LlamaStep, random_ids
from torch_streamkl import attention_kl, linear_kl
from torch_streamkl.distributed import (
    attention_kl_context_parallel,
    shard_sequence,
    trace_fully_shard,
)
from torch_streamkl.distributed.summed_gradient import with_summed_gradient

Part = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class SharedCase(Case):
    """Problems of this rank by provider, made when asked for."""

    sizes: str = ""
    make: tuple[tuple[str, Callable[[], Problem]], ...] = ()
    interleaves: bool = True  # all providers' steps fit side by side

    family = "shared"
    is_shared = False
    is_exact = False
    usual = ()

    @property
    def fits_together(self) -> bool:  # type: ignore[override]
        return self.interleaves

    def shape(self) -> str:
        return self.sizes

    def problem(self, device: torch.device, sets: int = 1) -> Problem:
        return Problem(device, lambda: torch.zeros(()), [])  # providers make their own

    def own(self) -> dict[str, Build]:
        return {name: lambda case, problem, make=make: make() for name, make in self.make}


def _problem(
    loss: Loss, inputs: Sequence[Tensor], part: Part = list, received_mib: float | None = None
) -> Callable[[], Problem]:
    """The gradients of the first two tensors, of which ``part`` takes those of this rank."""

    def make() -> Problem:
        mine: Inputs = tuple(x.detach().requires_grad_(i < 2) for i, x in enumerate(inputs))
        more = {} if received_mib is None else {"received_mib": received_mib}
        whole = [mine]
        return Problem(
            mine[0].device, lambda *x: _whole(loss(*x)), whole,
            part=lambda gradients: part([_whole(g) for g in gradients]), more=more,
        )  # fmt: skip

    return make


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def vocabulary(mesh: DeviceMesh, device: torch.device) -> SharedCase:
    """LM heads of a Qwen 7B student and a 32B teacher whose vocabulary entries ranks share."""
    sizes = (8192, 3584, 5120, 152064) if device.type == "cuda" else (64, 32, 48, 512)
    tokens, width, teacher_width, vocab = sizes
    dtype = usual_dtype(device)
    shapes = [(tokens, width), (vocab, width), (tokens, teacher_width), (vocab, teacher_width)]
    scales = (1.0, 2 * width**-0.5, 1.0, 2 * teacher_width**-0.5)
    whole = random_tensors(shapes, device, dtype, scales=scales, learning=0)
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    mine = slice(vocab // size * rank, vocab // size * (rank + 1))
    shards = tuple(x[mine] if i % 2 else x for i, x in enumerate(whole))
    dtensors = [
        DTensor.from_local(x, mesh, [Shard(0) if i % 2 else Replicate()], run_check=False)
        for i, x in enumerate(shards)
    ]

    def of_vocab(gradients: list[Tensor]) -> list[Tensor]:
        return [gradients[0], gradients[1][mine]]

    def naive(x: Tensor, w: Tensor, t: Tensor, u: Tensor) -> Tensor:
        log_s = F.linear(x, w).float().log_softmax(-1)
        log_t = F.linear(t, u).float().log_softmax(-1)
        return (log_t.exp() * (log_t - log_s)).sum() / tokens

    def ours(*x: Tensor, **options: Any) -> Tensor:
        return linear_kl(*x, reduction="mean", **options)

    away = (size - 1) / size / MIB  # by arithmetic: what a rank's collectives receive
    d_hidden = 2 * tokens * width * dtype.itemsize * away
    make = {
        "one GPU": _problem(ours, whole, of_vocab),
        "streamkl": _problem(
            partial(ours, group=group), shards, received_mib=24 * size * tokens * away + d_hidden
        ),
        "five all-reduces": _problem(
            lambda *x: kl_of_shards(*x, group).mean(), shards,
            received_mib=40 * tokens * away + d_hidden,
        ),
        "DTensor": _problem(
            naive, dtensors, of_vocab, received_mib=8 * tokens * vocab * away + d_hidden
        ),
    }  # fmt: skip
    shape = f"{tokens} tokens, widths {width} and {teacher_width}, {vocab} vocabulary entries"
    return SharedCase("vocabulary", sizes=shape, make=tuple(make.items()))


def kl_of_shards(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, group: Any
) -> Tensor:
    """As other libraries do it: the shards' logits in memory, one all-reduce after the other."""
    shared = with_summed_gradient(hidden, group.group_name)
    value: Tensor = _KlOfShards.apply(
        F.linear(shared, weight), F.linear(teacher_hidden, teacher_weight), group
    )
    return value


class _KlOfShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, t: Tensor, group: Any) -> Tensor:
        (log_s, log_t) = (_log_softmax(x.float(), group) for x in (s, t))
        p = log_t.exp()
        value = (p * (log_t - log_s)).sum(-1)
        distributed.all_reduce(value, group=group)
        ctx.dtype = s.dtype
        ctx.save_for_backward(p, log_s)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        p, log_s = ctx.saved_tensors
        return ((log_s.exp() - p) * grad[:, None]).to(ctx.dtype), None, None


def _log_softmax(x: Tensor, group: Any) -> Tensor:
    high = x.amax(-1, keepdim=True)
    distributed.all_reduce(high, distributed.ReduceOp.MAX, group=group)
    x = x - high
    mass = x.exp().sum(-1, keepdim=True)
    distributed.all_reduce(mass, group=group)
    return x - mass.log()


def sequence(mesh: DeviceMesh, device: torch.device, num_rows: int = 65536) -> SharedCase:
    """Causal attention maps of 32 heads whose rows ranks share."""
    on_gpu = device.type == "cuda"
    heads, kv, dim = (32, 8, 128) if on_gpu else (4, 2, 16)
    num_rows = num_rows if on_gpu else 128
    dtype = usual_dtype(device)
    shapes = [(1, h, num_rows, dim) for h in (heads, kv, heads, kv)]
    whole = random_tensors(shapes, device, dtype, learning=0)

    def of_rank(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [shard_sequence(x, mesh) for x in tensors]

    parts = of_rank(whole)
    options: dict[str, Any] = {"is_causal": True, "reduction": "mean"}

    def shared(method: str) -> Loss:
        return partial(attention_kl_context_parallel, mesh=mesh, method=method, **options)

    away = (mesh.size() - 1) / mesh.size() * num_rows * dim * dtype.itemsize / MIB
    received = {
        "gather": 3 * kv * away,  # keys of both sides, the student's gradient
        "heads": 3 * (heads + kv) * away / mesh.size(),
        # keys of both sides twice, the student's gradient in float32 once around
        "ring": 4 * kv * away + kv * num_rows * dim * 4 / MIB,
    }
    make = {"one GPU": _problem(partial(attention_kl, **options), whole, of_rank)}
    make |= {m: _problem(shared(m), parts, received_mib=mib) for m, mib in received.items()}
    shape = f"{heads} heads, {kv} key heads, {num_rows} rows, head_dim {dim}"
    return SharedCase("sequence", sizes=shape, make=tuple(make.items()))


class Distillation(nn.Module):
    """The loss of a Llama pair as a module with the student's parameters."""

    def __init__(self, device: torch.device, objective: str) -> None:
        super().__init__()
        step = LlamaStep("pair", pair=PAIRS[device.type], objective=objective)
        self.student, teacher = step.models(device)
        self.teacher = [teacher]  # no module of this one
        # a head that takes no part has no gradient, which DDP would wait for
        self.student.lm_head.requires_grad_(objective == "attention+logits")
        self._loss_of = step.loss_of(self.student, teacher)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self._loss_of(ids)
        return loss


Wrap = Callable[[Distillation], Loss]


def _of_pair(device: torch.device, objective: str, context: int, wrap: Wrap) -> Problem:
    """Each rank has a batch of its own."""
    torch._dynamo.reset()
    module = Distillation(device, objective)
    vocab = PAIRS[device.type].vocabulary
    ids = random_ids(vocab, 1, context, device, seed=distributed.get_rank())

    def local(gradients: list[Tensor]) -> list[Tensor]:
        return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]

    return Problem(device, wrap(module), [(ids,)], module, part=local)


def ddp(mesh: DeviceMesh, device: torch.device, context: int = 0) -> SharedCase:
    """A Llama pair under DistributedDataParallel."""
    context = context or (4096 if device.type == "cuda" else 64)
    ids_of = [device.index] if device.type == "cuda" else None

    def wrapped(provider: str, module: Distillation) -> Loss:
        inner = Problem(device, DistributedDataParallel(module, ids_of), [])
        return named(provider).build(Case("ddp"), inner).loss

    make = {
        p: partial(_of_pair, device, OBJECTIVES[0], context, partial(wrapped, p))
        for p in ("eager", "inductor", "streamkl")
    }
    sizes = f"KL of attention, {context} tokens a rank"
    return SharedCase("ddp", sizes=sizes, make=tuple(make.items()), interleaves=False)


# Inductor's own passes that join collectives and move them away from who waits for them
BUCKETED: dict[str, Any] = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "reorder_for_compute_comm_overlap": True,
}


def layers(mesh: DeviceMesh, device: torch.device, context: int = 0) -> SharedCase:
    """A Llama pair under FSDP2, sharded at every layer."""
    context = context or (4096 if device.type == "cuda" else 64)

    def wrapped(provider: str, module: Distillation) -> Loss:
        (teacher,) = module.teacher
        for model in (module.student, teacher):
            for layer in model.model.layers:
                if provider == "FSDP2, compiled layers":
                    layer.compile(dynamic=False)
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        if not provider.startswith("traced"):
            return module
        trace_fully_shard(module)
        trace_fully_shard(teacher)  # the step does not hold it as a module
        backend, _, bucketed = provider.partition(", ")[2].partition(", ")
        options: dict[str, Any] = {"streamkl.strict": True} if backend == "streamkl" else {}
        options |= BUCKETED if bucketed else {}
        return torch.compile(
            module, backend=backend, options=options, dynamic=False, fullgraph=True
        )

    # the comparison that is asked for comes first: each of these compiles for half a minute
    names = (
        "traced, streamkl", "FSDP2, compiled layers", "traced, streamkl, bucketed",
        "traced, inductor",
    )  # fmt: skip
    make = {
        name: partial(_of_pair, device, "attention", context, partial(wrapped, name))
        for name in names
    }
    sizes = f"{context} tokens a rank"
    return SharedCase("layers", sizes=sizes, make=tuple(make.items()), interleaves=False)


CASES = {"vocabulary": vocabulary, "sequence": sequence, "layers": layers, "ddp": ddp}
