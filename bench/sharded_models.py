"""Defines training steps of models that ranks share: DistributedDataParallel and FSDP2.

Each rank has a batch of its own. Gradients are compared with those of the case's first provider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench import heads
from bench.case import Loss, Problem
from bench.costs import Cost, all_gather, all_reduce
from bench.measure import MIB, usual_dtype
from bench.providers import with_streamkl
from bench.sharded import SharedCase
from bench.steps import OBJECTIVES, PAIRS, LlamaStep, Pair, build, random_ids
from torch_streamkl import linear_topk_kl
from torch_streamkl.distributed import trace_fully_shard

TINY = Pair("tiny-llama-pair", 32, 64, 4, 2, 96, (64,))
DEEP = 4.0  # roundings: two of the loss's gradients, two of everything before it


def pair_of(device: torch.device) -> Pair:
    """Returns a pair to measure; on a CPU one that shows that a case runs."""
    return PAIRS["cuda"] if device.type == "cuda" else TINY


def compiled(loss: Loss, backend: str, device: torch.device, **options: Any) -> Loss:
    """Compiles for a GPU. On a CPU graphs run as AOTAutograd gives them: nothing is measured."""
    on_gpu = device.type == "cuda"
    if backend == "streamkl":
        small = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0.0}
        return with_streamkl(loss, **options, **({} if on_gpu else small))
    if not on_gpu:
        return torch.compile(loss, backend="aot_eager", dynamic=False)
    return torch.compile(loss, options=options or None, dynamic=False)


def local(gradients: list[Any]) -> list[Tensor]:
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


# ----------------------------------------------------------------------- maps of every layer
class Distillation(nn.Module):
    """The loss of a Llama pair as a module with the student's parameters."""

    def __init__(self, device: torch.device, objective: str) -> None:
        super().__init__()
        step = LlamaStep("pair", pair=pair_of(device), objective=objective)
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
    vocab = pair_of(device).vocabulary
    ids = random_ids(vocab, 1, context, device, seed=distributed.get_rank())
    return Problem(device, wrap(module), [(ids,)], module, part=local)


def _pair_mib(device: torch.device) -> float:
    """MiB of the parameters of a pair's student, but its head."""
    pair = pair_of(device)
    kv = pair.hidden_size * pair.num_kv_heads // pair.num_heads
    layer = pair.hidden_size * (2 * pair.hidden_size + 2 * kv + 3 * pair.intermediate_size)
    number = pair.student_layers * layer + pair.vocabulary * pair.hidden_size
    return number * usual_dtype(device).itemsize / MIB


def ddp(mesh: DeviceMesh, device: torch.device, context: int = 0) -> SharedCase:
    """A Llama pair under DistributedDataParallel."""
    context = context or (4096 if device.type == "cuda" else 64)
    ids_of = [device.index] if device.type == "cuda" else None

    def wrapped(provider: str, module: Distillation) -> Loss:
        inner = DistributedDataParallel(module, ids_of)
        return inner if provider == "eager" else compiled(inner, provider, device)

    names = ("eager", "inductor", "streamkl")
    make = {
        p: partial(_of_pair, device, OBJECTIVES[0], context, partial(wrapped, p)) for p in names
    }
    costs = dict.fromkeys(names, Cost(all_reduce(_pair_mib(device), mesh.size())))
    return SharedCase(
        "ddp", sizes=f"KL of attention, {context} tokens a rank", make=tuple(make.items()),
        costs=costs, interleaves=False, roundings=DEEP,
    )  # fmt: skip


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
                    layer.compile(dynamic=False, backend=_layers_backend(device))
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        if not provider.startswith("traced"):
            return module
        trace_fully_shard(module)
        trace_fully_shard(teacher)  # the step does not hold it as a module
        backend, _, bucketed = provider.partition(", ")[2].partition(", ")
        on_gpu = device.type == "cuda"
        return compiled(module, backend, device, **(BUCKETED if bucketed and on_gpu else {}))

    # the comparison that is asked for comes first: each of these compiles for half a minute
    names = (
        "traced, streamkl", "FSDP2, compiled layers", "traced, streamkl, bucketed",
        "traced, inductor",
    )  # fmt: skip
    make = {
        name: partial(_of_pair, device, "attention", context, partial(wrapped, name))
        for name in names
    }
    return SharedCase(
        "layers", sizes=f"{context} tokens a rank", make=tuple(make.items()), interleaves=False,
        roundings=DEEP,
    )  # fmt: skip


def _layers_backend(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "aot_eager"


# ------------------------------------------------------------------------- 1B from 8B, LM heads
@dataclass(frozen=True)
class Llama:
    """A decoder's widths and depth; the head has weights of its own."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int

    def model(self, device: torch.device, seed: int, dtype: torch.dtype, context: int) -> Any:
        return build(
            "LlamaForCausalLM", seed, device, dtype, "sdpa",
            vocab_size=self.vocab, hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size, num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads, num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=context,  # weights of the head are its own, by default
        )  # fmt: skip

    @property
    def num_parameters(self) -> int:
        kv = self.hidden_size * self.num_kv_heads // self.num_heads
        layer = self.hidden_size * (2 * self.hidden_size + 2 * kv + 3 * self.intermediate_size)
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * layer + 2 * self.vocab * self.hidden_size + norms


LLAMA_1B = Llama("llama-3.2-1b", 2048, 8192, 16, 32, 8, 128256)
LLAMA_8B = Llama("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128256)
SMALL = (Llama("small", 32, 64, 2, 4, 2, 256), Llama("small-teacher", 48, 96, 2, 4, 2, 256))


def student_and_teacher(device: torch.device) -> tuple[Llama, Llama]:
    return (LLAMA_1B, LLAMA_8B) if device.type == "cuda" else SMALL


class HeadsOutside(nn.Module):
    """A student whose LM head meets the teacher's, or its cached entries, in the outermost module.

    FSDP2 then has both heads' weights whole while the loss is computed, in one graph.
    """

    def __init__(self, student: Any, teacher: Any, loss: Loss) -> None:
        super().__init__()
        self.student, self.head = student.model, student.lm_head
        self.teacher, self.teacher_head = (
            (None, None) if teacher is None else (teacher.model, teacher.lm_head)
        )
        self.loss = loss

    def forward(self, ids: Tensor, *cached: Tensor) -> Tensor:
        x = self.student(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        if self.teacher is None or self.teacher_head is None:
            return self.loss(x, self.head.weight, *cached)
        with torch.no_grad():
            t = self.teacher(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        return self.loss(x, self.head.weight, t, self.teacher_head.weight)

    def shard(self, device: torch.device, **options: Any) -> None:
        """Applies FSDP2 to every layer, compiled, and to the rest."""
        for model in (self.student, self.teacher):
            for layer in () if model is None else model.layers:
                layer.compile(dynamic=False, backend=_layers_backend(device))
                fully_shard(layer, **options)
        fully_shard(self, **options)


def entries(vocab: int, tokens: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Returns ids and log-probabilities that a cache of a teacher's top entries could hold."""
    generator = torch.Generator(device).manual_seed(seed)
    top = min(heads.TOP, vocab // 4)
    # ids of a token that differ: one from each of ``top`` ranges
    step = vocab // top
    first = torch.arange(top, device=device) * step
    ids = first + torch.randint(step, (tokens, top), device=device, generator=generator)
    scores = 2 * torch.randn((tokens, top), device=device, generator=generator)
    return ids, scores.log_softmax(-1) + torch.tensor(0.9, device=device).log()


def of_entries(x: Tensor, w: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
    """The KL at a cached teacher's entries, as naive code."""
    return heads.top(x, w, x, w, ids, log_p)


def by_operator(x: Tensor, w: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
    value: Tensor = linear_topk_kl(x, w, ids, log_p, reduction="mean")
    return value


def loss_of(provider: str, is_cached: bool, device: torch.device) -> Loss:
    """Returns the loss of a provider, from hidden states and weights."""
    naive = of_entries if is_cached else heads.forward_kl
    if provider == "linear_topk_kl":
        return by_operator
    return naive if provider == "eager" else compiled(naive, provider, device)


def _fsdp_problem(
    mesh: DeviceMesh, device: torch.device, context: int, is_cached: bool, provider: str
) -> Problem:
    torch._dynamo.reset()
    student, teacher = student_and_teacher(device)
    dtype = usual_dtype(device)
    of_teacher = None
    if not is_cached:
        of_teacher = teacher.model(device, 0, dtype, context).eval().requires_grad_(False)
    module = HeadsOutside(
        student.model(device, 1, dtype, context), of_teacher, loss_of(provider, is_cached, device)
    )
    module.shard(device, mesh=mesh)
    rank = distributed.get_rank()
    inputs: tuple[Tensor, ...] = (random_ids(student.vocab, 1, context, device, seed=rank),)
    if is_cached:
        inputs += entries(student.vocab, context, device, rank)
    return Problem(device, module, [inputs], module, part=local)


def fsdp(
    mesh: DeviceMesh, device: torch.device, context: int = 0, is_cached: bool = True
) -> SharedCase:
    """Llama 1B from 8B under FSDP2 at every layer, with a KL of the LM heads."""
    context = context or (4096 if device.type == "cuda" else 64)
    student, teacher = student_and_teacher(device)
    names: Iterable[str] = ("eager", "inductor", "streamkl")
    names = (*names, "linear_topk_kl") if is_cached else names
    make = {p: partial(_fsdp_problem, mesh, device, context, is_cached, p) for p in names}
    # a layer's parameters are gathered for the forward and for the backward, and its gradients are
    # reduced; the outermost module's are kept
    item, size = usual_dtype(device).itemsize / MIB, mesh.size()
    kept = 2 * student.vocab * student.hidden_size
    gathered = 3 * student.num_parameters - kept
    if not is_cached:  # the teacher's layers once, as they have no backward
        gathered += teacher.num_parameters
    costs = dict.fromkeys(names, Cost(all_gather(gathered * item, size)))
    what = "cached entries" if is_cached else f"live {teacher.name}"
    return SharedCase(
        f"fsdp {'cached' if is_cached else 'live'}", make=tuple(make.items()), costs=costs,
        sizes=f"{student.name}, {what}, {context} tokens a rank", interleaves=False,
        roundings=DEEP,
    )  # fmt: skip


def fsdp_live(mesh: DeviceMesh, device: torch.device, context: int = 0) -> SharedCase:
    return fsdp(mesh, device, context, is_cached=False)
