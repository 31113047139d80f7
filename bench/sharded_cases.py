"""Cases of `bench.several_gpus` in which ranks share a problem: a vocabulary, a sequence, layers.

A case gives steps by provider: each runs forward and backward of this rank's part and returns the
loss and this rank's part of the gradients, to be compared with those of the case's first provider.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.end_to_end import PAIRS, build
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
    received_mib: dict[str, float]
    interleaves: bool = True  # all providers' steps fit side by side


MIB = 2**20
# Inductor's own passes that join collectives and move them away from who waits for them
BUCKETED: dict[str, Any] = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "reorder_for_compute_comm_overlap": True,
}


def vocabulary(mesh: DeviceMesh, device: torch.device) -> Case:
    """LM heads of a Qwen 7B student and a 32B teacher whose words ranks share."""
    on_gpu = device.type == "cuda"
    sizes = (8192, 3584, 5120, 152064) if on_gpu else (64, 32, 48, 512)
    num_tokens, width, teacher_width, num_words = sizes
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, device=device, dtype=dtype, generator=generator)
        return x.mul_(scale)

    hidden, teacher_hidden = randn(num_tokens, width), randn(num_tokens, teacher_width)
    weight = randn(num_words, width, scale=2 * width**-0.5)
    teacher_weight = randn(num_words, teacher_width, scale=2 * teacher_width**-0.5)
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    words = slice(num_words // size * rank, num_words // size * (rank + 1))

    def plain(whole: bool) -> tuple[Tensor, ...]:
        part = slice(None) if whole else words
        return (
            hidden.detach().requires_grad_(),
            weight[part].detach().requires_grad_(),
            teacher_hidden,
            teacher_weight[part],
        )

    def step_of(loss_of: Callable[..., Tensor], whole: bool) -> Callable[[], Step]:
        def make() -> Step:
            inputs = plain(whole)

            def step() -> tuple[Tensor, list[Tensor]]:
                for x in inputs[:2]:
                    x.grad = None
                loss = loss_of(*inputs)
                loss.backward()
                d_hidden, d_weight = (x.grad for x in inputs[:2])
                assert d_hidden is not None and d_weight is not None
                return loss.detach(), [d_hidden, d_weight[words] if whole else d_weight]

            return step

        return make

    def dtensors() -> Step:
        rows, cut = [Replicate()], [Shard(0)]
        x, w, t, u = (
            DTensor.from_local(x, mesh, placements, run_check=False)
            for x, placements in zip(plain(False), (rows, cut, rows, cut), strict=True)
        )
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]

        def step() -> tuple[Tensor, list[Tensor]]:
            for leaf in leaves:
                leaf.grad = None
            log_s = F.linear(leaves[0], leaves[1]).float().log_softmax(-1)
            log_t = F.linear(t, u).float().log_softmax(-1)
            loss = (log_t.exp() * (log_t - log_s)).sum() / num_tokens
            loss.backward()
            d_hidden, d_weight = (leaf.grad.full_tensor() for leaf in leaves)
            return loss.detach().full_tensor(), [d_hidden, d_weight[words]]

        return step

    ours = 24 * (size - 1) * num_tokens
    d_hidden_bytes = 2 * num_tokens * width * dtype.itemsize * (size - 1) / size
    return Case(
        "vocabulary",
        {"tokens": num_tokens, "student width": width, "teacher width": teacher_width,
         "words": num_words},
        {
            "one GPU": step_of(lambda *x: linear_kl(*x, reduction="mean"), whole=True),
            "streamkl": step_of(
                lambda *x: linear_kl(*x, reduction="mean", group=group), whole=False
            ),
            "five all-reduces": step_of(
                lambda x, w, t, u: kl_of_shards(x, w, t, u, group).mean(), whole=False
            ),
            "DTensor": dtensors,
        },
        {
            "streamkl": (ours + d_hidden_bytes) / MIB,
            "five all-reduces": (5 * 8 * num_tokens * (size - 1) / size + d_hidden_bytes) / MIB,
            "DTensor": (8 * num_tokens * num_words * (size - 1) / size + d_hidden_bytes) / MIB,
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
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    whole = [
        torch.randn(1, h, num_rows, head_dim, device=device, dtype=dtype, generator=generator)
        for h in (heads, kv_heads, heads, kv_heads)
    ]
    parts = [shard_sequence(x, mesh) for x in whole]

    def step_of(loss_of: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Step]:
        def make() -> Step:
            inputs = [x.detach().requires_grad_(i < 2) for i, x in enumerate(tensors)]

            def step() -> tuple[Tensor, list[Tensor]]:
                for x in inputs[:2]:
                    x.grad = None
                loss = loss_of(*inputs)
                loss.backward()
                given = [x.grad for x in inputs[:2] if x.grad is not None]
                return loss.detach(), [
                    shard_sequence(g, mesh) if tensors is whole else g for g in given
                ]

            return step

        return make

    def shared(method: str) -> Callable[..., Tensor]:
        return lambda *x: attention_kl_context_parallel(
            *x, mesh=mesh, is_causal=True, reduction="mean", method=method
        )

    size = mesh.size()
    away = (size - 1) / size * num_rows * head_dim * dtype.itemsize / MIB
    return Case(
        "sequence",
        {"heads": heads, "key heads": kv_heads, "rows": num_rows, "head_dim": head_dim},
        {
            "one GPU": step_of(
                lambda *x: attention_kl(*x, is_causal=True, reduction="mean"), whole
            ),
            "gather": step_of(shared("gather"), parts),
            "heads": step_of(shared("heads"), parts),
            "ring": step_of(shared("ring"), parts),
        },
        {
            "gather": 3 * kv_heads * away,  # keys of both sides, the student's gradient
            # keys of both sides twice, the student's gradient in float32 once around
            "ring": 4 * kv_heads * away + kv_heads * num_rows * head_dim * 4 / MIB,
            "heads": 3 * (heads + kv_heads) * away / size,
        },
    )


def layers(mesh: DeviceMesh, device: torch.device, make_step: Callable[..., Any]) -> Case:
    """A Llama pair under FSDP2, sharded at every layer."""
    pair = PAIRS[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    context = 4096 if device.type == "cuda" else 64

    def make(provider: str) -> Callable[[], Step]:
        def made() -> Step:
            torch._dynamo.reset()
            teacher = build(pair, pair.teacher_layers, 0, device, dtype)
            student = build(pair, pair.student_layers, 1, device, dtype)
            teacher.eval().requires_grad_(False)
            student.lm_head.requires_grad_(False)  # the loss is of attention maps
            module = make_step(student, teacher, "attention")
            for model in (student, teacher):
                for layer in model.model.layers:
                    if provider == "FSDP2, compiled layers":
                        layer.compile(dynamic=False)
                    fully_shard(layer, mesh=mesh)
            fully_shard(module, mesh=mesh)
            call: Any = module
            if provider.startswith("traced"):
                trace_fully_shard(module)
                trace_fully_shard(teacher)  # the step does not hold it as a module
                backend, _, bucketed = provider.partition(", ")[2].partition(", ")
                options: dict[str, Any] = (
                    {"streamkl.strict": True} if backend == "streamkl" else {}
                )
                call = torch.compile(
                    module,
                    backend=backend,
                    options=options | (BUCKETED if bucketed else {}),
                    dynamic=False,
                    fullgraph=True,
                )
            generator = torch.Generator(device).manual_seed(mesh.get_local_rank())
            ids = torch.randint(pair.vocabulary, (1, context), device=device, generator=generator)

            def step() -> tuple[Tensor, list[Tensor]]:
                module.zero_grad(set_to_none=True)
                loss = call(ids)
                loss.backward()
                given: list[Any] = [p.grad for p in module.parameters() if p.grad is not None]
                return loss.detach(), [g.to_local() for g in given]

            return step

        return made

    # the comparison that is asked for comes first: each of these compiles for half a minute
    names = (
        "traced, streamkl",
        "FSDP2, compiled layers",
        "traced, streamkl, bucketed",
        "traced, inductor",
    )
    return Case(
        "layers", {"tokens of a rank": context}, {name: make(name) for name in names}, {}, False
    )
