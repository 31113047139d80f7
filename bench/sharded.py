"""Defines problems that ranks share: a vocabulary, or a sequence.

A provider's problem is this rank's part. Its gradients are compared with those of the case's first
provider on the same ranks. `sharded_models.py` has training steps of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.case import Build, Case, Inputs, Loss, Problem, random_tensors
from bench.costs import CHUNKS, ONE_GPU, Cost, all_gather, all_reduce, all_to_all
from bench.measure import MIB, usual_dtype
from torch_streamkl import attention_kl, linear_kl
from torch_streamkl.distributed import attention_kl_context_parallel, shard_sequence
from torch_streamkl.distributed.summed_gradient import with_summed_gradient

Part = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class SharedCase(Case):
    """Problems of this rank by provider, made when asked for."""

    sizes: str = ""
    make: tuple[tuple[str, Callable[[], Problem]], ...] = ()
    costs: dict[str, Cost] = field(default_factory=dict, hash=False)
    interleaves: bool = True  # all providers' steps fit side by side
    roundings: float = 2.0  # of the dtype, that two providers may differ by

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

    def budget(self, device: torch.device) -> float:
        """Returns what two providers may differ by, relative in norm.

        In bfloat16 each rounds its gradients once, and sums are float32. In float32 itself sums
        of some thousand terms differ by their order.
        """
        dtype = usual_dtype(device)
        order = 1.0 if dtype == torch.bfloat16 else 32.0
        return self.roundings * order * torch.finfo(dtype).eps


def _problem(loss: Loss, inputs: Sequence[Tensor], part: Part = list) -> Callable[[], Problem]:
    """The gradients of the first two tensors, of which ``part`` takes those of this rank."""

    def make() -> Problem:
        mine: Inputs = tuple(x.detach().requires_grad_(i < 2) for i, x in enumerate(inputs))
        whole = [mine]
        return Problem(
            mine[0].device, lambda *x: _whole(loss(*x)), whole,
            part=lambda gradients: part([_whole(g) for g in gradients]),
        )  # fmt: skip

    return make


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


# -------------------------------------------------------------------------------------- vocabulary
@dataclass(frozen=True)
class Head:
    """The sizes of both sides' LM heads."""

    tokens: int
    width: int
    teacher_width: int
    vocab: int

    @staticmethod
    def of(device: torch.device, tokens: int) -> Head:
        """A Qwen 7B student and a 32B teacher, or something small."""
        if device.type == "cuda":
            return Head(tokens or 8192, 3584, 5120, 152064)
        return Head(tokens or 64, 32, 48, 512)

    def tensors(self, device: torch.device) -> Inputs:
        """Hidden states and weight of the student, then of the teacher."""
        widths = (self.width, self.teacher_width)
        shapes = [(size, w) for w in widths for size in (self.tokens, self.vocab)]
        scales = [scale for w in widths for scale in (1.0, 2 * w**-0.5)]
        dtype = usual_dtype(device)
        return random_tensors(shapes, device, dtype, scales=scales, learning=0)

    def hidden_mib(self, device: torch.device) -> float:
        return self.tokens * self.width * usual_dtype(device).itemsize / MIB

    def __str__(self) -> str:
        widths = f"widths {self.width} and {self.teacher_width}"
        return f"{self.tokens} tokens, {widths}, {self.vocab} vocabulary entries"


def vocabulary(mesh: DeviceMesh, device: torch.device, tokens: int = 0) -> SharedCase:
    """LM heads of a Qwen 7B student and a 32B teacher whose vocabulary entries ranks share."""
    head = Head.of(device, tokens)
    whole = head.tensors(device)
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    mine = slice(head.vocab // size * rank, head.vocab // size * (rank + 1))
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
        return (log_t.exp() * (log_t - log_s)).sum() / head.tokens

    make = {
        ONE_GPU: _problem(_mean_kl, whole, of_vocab),
        "streamkl": _problem(partial(_mean_kl, group=group), shards),
        "five all-reduces": _problem(lambda *x: kl_of_shards(*x, group).mean(), shards),
        "DTensor": _problem(naive, dtensors, of_vocab),
    }
    d_hidden = all_reduce(head.hidden_mib(device), size)
    states, logits = (x * head.tokens / MIB for x in (24 * size, 8 * head.vocab))
    costs = {
        "streamkl": Cost(all_gather(states, size) + d_hidden, d_hidden, waits=1),
        "five all-reduces": Cost(all_reduce(20 * head.tokens / MIB, size) + d_hidden),
        "DTensor": Cost(all_gather(logits, size) + d_hidden),
    }
    label = "vocabulary" if not tokens or tokens == 8192 else f"vocabulary {tokens}"
    return SharedCase(label, sizes=str(head), make=tuple(make.items()), costs=costs)


def _mean_kl(*x: Tensor, **options: Any) -> Tensor:
    return linear_kl(*x, reduction="mean", **options)


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


# -------------------------------------------------------------------------- mesh of two dimensions
class _Heads(nn.Module):
    """LM heads whose vocabularies are sharded over ``tp``, and whose weights FSDP2 shards."""

    def __init__(self, student: Tensor, teacher: Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        shards = (DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False)
                  for x in (student, teacher))  # fmt: skip
        self.student, self.teacher = (nn.Parameter(x) for x in shards)
        self.teacher.requires_grad_(False)
        self.tp = mesh["tp"]
        fully_shard(self, mesh=mesh["dp"])

    def forward(self, hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
        x, t = (
            DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
            for x in (hidden, teacher_hidden)
        )
        value: Any = linear_kl(x, self.student, t, self.teacher, reduction="mean")
        return value.to_local().clone()  # FSDP2 warns of views


def mesh_shape(num_ranks: int) -> tuple[int, int]:
    """Returns ranks that have tokens of their own, and ranks that share a vocabulary."""
    data_parallel = 2 if num_ranks >= 4 else 1
    return data_parallel, num_ranks // data_parallel


def two_dimensions(mesh: DeviceMesh, device: torch.device, tokens: int = 0) -> SharedCase:
    """The LM heads of `vocabulary` on a mesh of 2 x n: FSDP2 x TP."""
    dp, tp = mesh_shape(mesh.size())
    both = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    head = Head.of(device, tokens)
    x, w, t, u = head.tensors(device)
    my_dp, my_tp = both["dp"].get_local_rank(), both["tp"].get_local_rank()
    rows = slice(head.tokens // dp * my_dp, head.tokens // dp * (my_dp + 1))
    vocab = slice(head.vocab // tp * my_tp, head.vocab // tp * (my_tp + 1))

    def one_gpu() -> Problem:
        made = _problem(_mean_kl, (x, w, t, u))()
        # of the whole weight the part that FSDP2 leaves to this rank
        step = -(-(vocab.stop - vocab.start) // dp)
        start = vocab.start + step * my_dp
        mine = slice(start, min(start + step, vocab.stop))
        made.part = lambda gradients: [gradients[1][mine]]
        return made

    def shared() -> Problem:
        module = _Heads(w[vocab].clone(), u[vocab].clone(), both)

        def local(gradients: list[Any]) -> list[Tensor]:
            return [g.to_local() for g in gradients]

        def mean(*inputs: Tensor) -> Tensor:
            return _MeanOfRanks.apply(module(*inputs), both["dp"].get_group())

        return Problem(device, mean, [(x[rows].clone().requires_grad_(), t[rows])], module,
                       part=local)  # fmt: skip

    weights = (head.width + head.teacher_width, head.width)  # both gathered, one reduced
    weight_mib = sum(weights) * (vocab.stop - vocab.start) * x.dtype.itemsize / MIB
    d_hidden = all_reduce(head.hidden_mib(device) / dp, tp)
    states = all_gather(24 * tp * head.tokens / dp / MIB, tp)
    exposed = all_gather(weight_mib, dp) + d_hidden
    make = {ONE_GPU: one_gpu, "FSDP2 x TP": shared}
    costs = {"FSDP2 x TP": Cost(exposed + states, exposed, waits=1)}
    label = f"mesh {dp} x {tp}" + (f" {tokens}" if tokens not in (0, 8192) else "")
    return SharedCase(label, sizes=str(head), make=tuple(make.items()), costs=costs)


class _MeanOfRanks(torch.autograd.Function):
    """The mean of a loss over data-parallel ranks, to show; FSDP2 averages gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: Any) -> Tensor:
        value = loss.clone()
        distributed.all_reduce(value, group=group)
        return value / group.size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# ---------------------------------------------------------------------------------------- sequence
def sequence(mesh: DeviceMesh, device: torch.device, num_rows: int = 0) -> SharedCase:
    """Causal attention maps of 32 heads whose rows ranks share."""
    size = mesh.size()
    heads, kv, dim = (32, 8, 128) if device.type == "cuda" else (16, 8, 16)
    num_rows = num_rows or (65536 if device.type == "cuda" else 128)
    dtype = usual_dtype(device)
    shapes = [(1, h, num_rows, dim) for h in (heads, kv, heads, kv)]
    whole = random_tensors(shapes, device, dtype, learning=0)

    def of_rank(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [shard_sequence(x, mesh) for x in tensors]

    parts = of_rank(whole)
    options: dict[str, Any] = {"is_causal": True, "reduction": "mean"}

    def shared(method: str) -> Loss:
        return partial(attention_kl_context_parallel, mesh=mesh, method=method, **options)

    head_mib = num_rows * dim * dtype.itemsize / MIB  # of all ranks
    rows_mib = heads * num_rows * 4 / MIB / size  # values of a rank's rows, in float32
    keys, sums = kv * head_mib, kv * head_mib * 4 / dtype.itemsize
    # queries and keys of both sides go, values come back; a gradient of the values goes, and the
    # student's gradients come back
    by_heads = all_to_all((3 * (heads + kv) * head_mib) / size + 2 * rows_mib, size)
    costs = {
        # keys of both sides, the student's gradient
        "gather": Cost(all_gather(3 * keys, size), all_gather(3 * keys, size), 3, CHUNKS),
        "heads": Cost(by_heads, by_heads, waits=8),
        # keys of both sides twice, which computation hides; the student's gradient in float32 once
        # around, of which the last step shows
        "ring": Cost(all_gather(4 * keys, size) + sums, sums / size, 1, CHUNKS),
    }
    make = {ONE_GPU: _problem(partial(attention_kl, **options), whole, of_rank)}
    make |= {method: _problem(shared(method), parts) for method in costs}
    shape = f"{heads} heads, {kv} key heads, {num_rows} rows, head_dim {dim}"
    label = "sequence" if num_rows in (128, 65536) else f"sequence {num_rows}"
    return SharedCase(label, sizes=shape, make=tuple(make.items()), costs=costs)
