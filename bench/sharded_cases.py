"""Cases of `bench.several_gpus`: a batch for every rank, or a problem that ranks share.

A case gives steps by provider: each runs forward and backward of this rank's part and returns the
loss and this rank's part of the gradients, to be compared with those of the case's first provider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from bench.measure import MIB, usual_dtype
from bench.models import PAIRS, LlamaStep, random_ids
from bench.steps import PROVIDERS
from torch_streamkl import attention_kl, linear_kl
from torch_streamkl.distributed import (
    attention_kl_context_parallel,
    shard_sequence,
    trace_fully_shard,
)
from torch_streamkl.distributed.summed_gradient import with_summed_gradient

Step = Callable[[], tuple[Tensor, list[Tensor]]]


@dataclass
class Case:
    """Steps of one problem by provider, made when asked for."""

    name: str
    shape: dict[str, int]
    make: dict[str, Callable[[], Step]]
    # of a rank and step, by arithmetic: what its collectives receive
    received_mib: dict[str, float] = field(default_factory=dict)
    interleaves: bool = True  # all providers' steps fit side by side


# Inductor's own passes that join collectives and move them away from who waits for them
BUCKETED: dict[str, Any] = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "reorder_for_compute_comm_overlap": True,
}


def _step_of(
    loss_of: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    part: Callable[[list[Tensor]], list[Tensor]] = lambda gradients: gradients,
) -> Callable[[], Step]:
    """The gradients of the first two tensors, of which ``part`` takes those of this rank."""

    def make() -> Step:
        inputs = [x.detach().requires_grad_(i < 2) for i, x in enumerate(tensors)]

        def step() -> tuple[Tensor, list[Tensor]]:
            for x in inputs[:2]:
                x.grad = None
            loss = loss_of(*inputs)
            loss.backward()
            return _whole(loss.detach()), part([_whole(x.grad) for x in inputs[:2]])

        return step

    return make


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def vocabulary(mesh: DeviceMesh, device: torch.device) -> Case:
    """LM heads of a Qwen 7B student and a 32B teacher whose vocabulary entries ranks share."""
    sizes = (8192, 3584, 5120, 152064) if device.type == "cuda" else (64, 32, 48, 512)
    num_tokens, width, teacher_width, vocab_size = sizes
    dtype = usual_dtype(device)
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, device=device, dtype=dtype, generator=generator)
        return x.mul_(scale)

    hidden, teacher_hidden = randn(num_tokens, width), randn(num_tokens, teacher_width)
    weight = randn(vocab_size, width, scale=2 * width**-0.5)
    teacher_weight = randn(vocab_size, teacher_width, scale=2 * teacher_width**-0.5)
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    vocab = slice(vocab_size // size * rank, vocab_size // size * (rank + 1))
    whole = (hidden, weight, teacher_hidden, teacher_weight)
    shards = (hidden, weight[vocab], teacher_hidden, teacher_weight[vocab])
    rows, cut = [Replicate()], [Shard(0)]
    dtensors = [
        DTensor.from_local(x, mesh, placements, run_check=False)
        for x, placements in zip(shards, (rows, cut, rows, cut), strict=True)
    ]

    def of_vocab(gradients: list[Tensor]) -> list[Tensor]:
        return [gradients[0], gradients[1][vocab]]

    def naive(x: Tensor, w: Tensor, t: Tensor, u: Tensor) -> Tensor:
        log_s = F.linear(x, w).float().log_softmax(-1)
        log_t = F.linear(t, u).float().log_softmax(-1)
        return (log_t.exp() * (log_t - log_s)).sum() / num_tokens

    ours = 24 * (size - 1) * num_tokens
    d_hidden_bytes = 2 * num_tokens * width * dtype.itemsize * (size - 1) / size
    return Case(
        "vocabulary",
        {"tokens": num_tokens, "student width": width, "teacher width": teacher_width,
         "vocab": vocab_size},
        {
            "one GPU": _step_of(lambda *x: linear_kl(*x, reduction="mean"), whole, of_vocab),
            "streamkl": _step_of(lambda *x: linear_kl(*x, reduction="mean", group=group), shards),
            "five all-reduces": _step_of(lambda *x: kl_of_shards(*x, group).mean(), shards),
            "DTensor": _step_of(naive, dtensors, of_vocab),
        },
        {
            "streamkl": (ours + d_hidden_bytes) / MIB,
            "five all-reduces": (5 * 8 * num_tokens * (size - 1) / size + d_hidden_bytes) / MIB,
            "DTensor": (8 * num_tokens * vocab_size * (size - 1) / size + d_hidden_bytes) / MIB,
        },
    )  # fmt: skip


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


def sequence(mesh: DeviceMesh, device: torch.device, num_rows: int = 65536) -> Case:
    """Causal attention maps of 32 heads whose rows ranks share."""
    on_gpu = device.type == "cuda"
    heads, kv_heads, head_dim = (32, 8, 128) if on_gpu else (4, 2, 16)
    num_rows = num_rows if on_gpu else 128
    dtype = usual_dtype(device)
    generator = torch.Generator(device).manual_seed(0)
    whole = [
        torch.randn(1, h, num_rows, head_dim, device=device, dtype=dtype, generator=generator)
        for h in (heads, kv_heads, heads, kv_heads)
    ]

    def of_rank(tensors: list[Tensor]) -> list[Tensor]:
        return [shard_sequence(x, mesh) for x in tensors]

    parts = of_rank(whole)

    def alone(*x: Tensor) -> Tensor:
        return attention_kl(*x, is_causal=True, reduction="mean")

    def shared(method: str) -> Callable[[], Step]:
        options: dict[str, Any] = {"is_causal": True, "reduction": "mean", "method": method}
        return _step_of(lambda *x: attention_kl_context_parallel(*x, mesh=mesh, **options), parts)

    size = mesh.size()
    away = (size - 1) / size * num_rows * head_dim * dtype.itemsize / MIB
    return Case(
        "sequence",
        {"heads": heads, "key heads": kv_heads, "rows": num_rows, "head_dim": head_dim},
        {"one GPU": _step_of(alone, whole, of_rank)}
        | {method: shared(method) for method in ("gather", "heads", "ring")},
        {
            "gather": 3 * kv_heads * away,  # keys of both sides, the student's gradient
            # keys of both sides twice, the student's gradient in float32 once around
            "ring": 4 * kv_heads * away + kv_heads * num_rows * head_dim * 4 / MIB,
            "heads": 3 * (heads + kv_heads) * away / size,
        },
    )


class Distillation(nn.Module):
    """The loss of a Llama pair as a module with the student's parameters."""

    def __init__(self, device: torch.device, objective: str) -> None:
        super().__init__()
        step = LlamaStep(PAIRS[device.type], objective)
        self.student, teacher = step.models(device)
        self.teacher = [teacher]  # no module of this one
        # a head that takes no part has no gradient, which DDP would wait for
        self.student.lm_head.requires_grad_(objective == "attention+logits")
        self._loss_of = step.loss(self.student, teacher)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self._loss_of(ids)
        return loss


def _of_pair(
    device: torch.device,
    objective: str,
    context: int,
    wrapped: Callable[[Distillation], Callable[[Tensor], Tensor]],
) -> Callable[[], Step]:
    """Each rank has a batch of its own."""

    def make() -> Step:
        torch._dynamo.reset()
        module = Distillation(device, objective)
        call = wrapped(module)
        vocab = PAIRS[device.type].vocabulary
        ids = random_ids(vocab, 1, context, device, seed=distributed.get_rank())

        def step() -> tuple[Tensor, list[Tensor]]:
            module.zero_grad(set_to_none=True)
            loss = call(ids)
            loss.backward()
            given: list[Any] = [p.grad for p in module.parameters() if p.grad is not None]
            return loss.detach(), [g.to_local() if isinstance(g, DTensor) else g for g in given]

        return step

    return make


def data_parallel(
    device: torch.device, objective: str, context: int, providers: Sequence[str]
) -> Case:
    """A Llama pair under DistributedDataParallel."""
    ids_of = [device.index] if device.type == "cuda" else None

    def wrapped(provider: str, module: Distillation) -> Callable[[Tensor], Tensor]:
        return PROVIDERS[provider](DistributedDataParallel(module, ids_of))

    make = {p: _of_pair(device, objective, context, partial(wrapped, p)) for p in providers}
    name = f"DistributedDataParallel, KL of {objective}"
    return Case(name, {"tokens of a rank": context}, make, interleaves=False)


def layers(mesh: DeviceMesh, device: torch.device) -> Case:
    """A Llama pair under FSDP2, sharded at every layer."""
    context = 4096 if device.type == "cuda" else 64

    def wrapped(provider: str, module: Distillation) -> Callable[[Tensor], Tensor]:
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
    make = {name: _of_pair(device, "attention", context, partial(wrapped, name)) for name in names}
    return Case("layers", {"tokens of a rank": context}, make, interleaves=False)
