"""Defines problems that ranks share: a vocabulary, or a sequence.

A provider's problem is this rank's part. Its gradients are compared with those of the case's first
provider on the same ranks. `sharded_models.py` has training steps of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from bench.heads import QWEN, HeadCase
from bench.measure import MIB, usual_dtype
from torch_streamkl import attention_kl, linear_kl
from torch_streamkl.distributed import attention_kl_context_parallel, shard_sequence
from torch_streamkl.distributed.summed_gradient import with_summed_gradient

Part = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class SharedCase(Case):
    """Problems of this rank by provider, made when asked for."""

    sizes: str = ""
    make: dict[str, Callable[[], Problem]] = field(default_factory=dict, hash=False)
    costs: dict[str, Cost] = field(default_factory=dict, hash=False)
    fits_together: bool = True  # type: ignore[misc]
    roundings: float = 2.0  # of the dtype, that two providers may differ by

    family = "shared"
    is_shared = False
    is_exact = False

    def shape(self) -> str:
        return self.sizes

    def problem(self, device: torch.device, sets: int = 1) -> Problem:
        return Problem(device, lambda: torch.zeros(()), [])  # providers make their own

    def own(self) -> dict[str, Build]:
        return {name: lambda case, problem, make=make: make() for name, make in self.make.items()}

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
        return Problem(
            mine[0].device, lambda *x: whole(loss(*x)), [mine],
            part=lambda gradients: part([whole(g) for g in gradients]),
        )  # fmt: skip

    return make


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(gradients: Sequence[Any]) -> list[Tensor]:
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def _slice(size: int, num: int, index: int) -> slice:
    return slice(size // num * index, size // num * (index + 1))


# -------------------------------------------------------------------------------------- vocabulary
def _head(device: torch.device, tokens: int) -> tuple[HeadCase, Inputs, float]:
    """A Qwen 7B student and a 32B teacher, or something small; MiB of hidden states' gradients."""
    head = HeadCase("", "", tokens or 64, 512, 32, 48)
    if device.type == "cuda":
        head = replace(QWEN, tokens=tokens or QWEN.tokens)
    hidden, *others = head.problem(device).sets[0][:4]
    return head, (hidden, *others), hidden.nbytes / MIB


def _sizes(head: HeadCase) -> str:
    widths = f"widths {head.student_width} and {head.teacher_width}"
    return f"{head.tokens} tokens, {widths}, {head.vocabulary} vocabulary entries"


def _label(name: str, tokens: int) -> str:
    """With the tokens where they are not as many as usual."""
    return name if tokens in (0, QWEN.tokens) else f"{name} {tokens}"


def vocabulary(mesh: DeviceMesh, device: torch.device, tokens: int = 0) -> SharedCase:
    """LM heads of a Qwen 7B student and a 32B teacher whose vocabulary entries ranks share."""
    head, inputs, hidden_mib = _head(device, tokens)
    size, group = mesh.size(), mesh.get_group()
    mine = _slice(head.vocabulary, size, mesh.get_local_rank())
    shards = [x[mine] if i % 2 else x for i, x in enumerate(inputs)]
    dtensors = [
        DTensor.from_local(x.detach(), mesh, [Shard(0) if i % 2 else Replicate()], run_check=False)
        for i, x in enumerate(shards)
    ]

    def of_vocab(gradients: list[Tensor]) -> list[Tensor]:
        return [gradients[0], gradients[1][mine]]

    def naive(x: Tensor, w: Tensor, t: Tensor, u: Tensor) -> Tensor:
        log_s, log_t = (F.linear(*y).float().log_softmax(-1) for y in ((x, w), (t, u)))
        return (log_t.exp() * (log_t - log_s)).sum() / head.tokens

    make = {
        ONE_GPU: _problem(_mean_kl, inputs, of_vocab),
        "streamkl": _problem(partial(_mean_kl, group=group), shards),
        "five all-reduces": _problem(lambda *x: kl_of_shards(*x, group).mean(), shards),
        "DTensor": _problem(naive, dtensors, of_vocab),
    }
    d_hidden = all_reduce(hidden_mib, size)
    states, logits = (x * head.tokens / MIB for x in (24 * size, 8 * head.vocabulary))
    costs = {
        "streamkl": Cost(all_gather(states, size) + d_hidden, d_hidden, waits=1),
        "five all-reduces": Cost(all_reduce(20 * head.tokens / MIB, size) + d_hidden),
        "DTensor": Cost(all_gather(logits, size) + d_hidden),
    }
    return SharedCase(_label("vocabulary", tokens), sizes=_sizes(head), make=make, costs=costs)


def _mean_kl(*x: Tensor, **options: Any) -> Tensor:
    return linear_kl(*x, reduction="mean", **options)


def kl_of_shards(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, group: Any
) -> Tensor:
    """As other libraries do it: the shards' logits in memory, one all-reduce after the other."""
    shared = with_summed_gradient(hidden, group.group_name)
    logits = F.linear(shared, weight), F.linear(teacher_hidden, teacher_weight)
    return _KlOfShards.apply(*logits, group)


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
        x, t = (DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
                for x in (hidden, teacher_hidden))  # fmt: skip
        # FSDP2 warns of views
        return _mean_kl(x, self.student, t, self.teacher).to_local().clone()  # type: ignore


def mesh_shape(num_ranks: int) -> tuple[int, int]:
    """Returns ranks that have tokens of their own, and ranks that share a vocabulary."""
    data_parallel = 2 if num_ranks >= 4 else 1
    return data_parallel, num_ranks // data_parallel


def two_dimensions(mesh: DeviceMesh, device: torch.device, tokens: int = 0) -> SharedCase:
    """The LM heads of `vocabulary` on a mesh of 2 x n: FSDP2 x TP."""
    dp, tp = mesh_shape(mesh.size())
    both = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    head, (x, w, t, u), hidden_mib = _head(device, tokens)
    my_dp = both["dp"].get_local_rank()
    rows = _slice(head.tokens, dp, my_dp)
    vocab = _slice(head.vocabulary, tp, both["tp"].get_local_rank())
    num_entries = vocab.stop - vocab.start
    # of the whole weight the part that FSDP2 leaves to this rank
    start = vocab.start + -(-num_entries // dp) * my_dp
    mine = slice(start, min(start + -(-num_entries // dp), vocab.stop))

    def shared() -> Problem:
        module = _Heads(w[vocab].detach().clone(), u[vocab].clone(), both)

        def mean(*inputs: Tensor) -> Tensor:
            return _MeanOfRanks.apply(module(*inputs), both["dp"].get_group())

        inputs = x[rows].detach().clone().requires_grad_(), t[rows]
        return Problem(device, mean, [inputs], module, part=local)

    weights = 2 * head.student_width + head.teacher_width  # both gathered, one reduced
    exposed = all_gather(weights * num_entries * x.dtype.itemsize / MIB, dp)
    exposed += all_reduce(hidden_mib / dp, tp)
    states = all_gather(24 * tp * head.tokens / dp / MIB, tp)
    one_gpu = _problem(_mean_kl, (x, w, t, u), lambda gradients: [gradients[1][mine]])
    make = {ONE_GPU: one_gpu, "FSDP2 x TP": shared}
    costs = {"FSDP2 x TP": Cost(exposed + states, exposed, waits=1)}
    label = _label(f"mesh {dp} x {tp}", tokens)
    return SharedCase(label, sizes=_sizes(head), make=make, costs=costs)


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
    usual, heads, kv, dim = (65536, 32, 8, 128) if device.type == "cuda" else (128, 16, 8, 16)
    n, dtype = num_rows or usual, usual_dtype(device)
    shapes = [(1, h, n, dim) for h in (heads, kv, heads, kv)]
    inputs = random_tensors(shapes, device, dtype, learning=0)

    def of_rank(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [shard_sequence(x, mesh) for x in tensors]

    options: dict[str, Any] = {"is_causal": True, "reduction": "mean"}
    head_mib = n * dim * dtype.itemsize / MIB  # of all ranks
    rows_mib = heads * n * 4 / MIB / size  # values of a rank's rows, in float32
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
    make = {ONE_GPU: _problem(partial(attention_kl, **options), inputs, of_rank)}
    for method in costs:
        call = partial(attention_kl_context_parallel, mesh=mesh, method=method, **options)
        make[method] = _problem(call, of_rank(inputs))
    shape = f"{heads} heads, {kv} key heads, {n} rows, head_dim {dim}"
    label = "sequence" if n == usual else f"sequence {n}"
    return SharedCase(label, sizes=shape, make=make, costs=costs)
