"""Defines training steps of models that ranks share: DistributedDataParallel and FSDP2.

Each rank has a batch of its own. Gradients are compared with those of the case's first provider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench import heads
from bench.case import Loss, Problem
from bench.costs import Cost, all_gather, all_reduce
from bench.measure import MIB, usual_dtype
from bench.providers import with_streamkl
from bench.sharded import SharedCase, local
from bench.steps import LLAMAS, Llama, LlamaStep, frozen, random_ids
from torch_streamkl import linear_topk_kl
from torch_streamkl.distributed import trace_fully_shard

# On a CPU, models that show that a case runs.
TINY = Llama("tiny-llama", 32, 64, 2, 4, 2, 96)
OF_1B = {
    "cuda": (Llama("llama-3.2-1b", 2048, 8192, 16, 32, 8, 128256),
             Llama("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128256)),
    "cpu": (Llama("small", 32, 64, 2, 4, 2, 256), Llama("small-teacher", 48, 96, 2, 4, 2, 256)),
}  # fmt: skip
CONTEXTS = {"cuda": 4096, "cpu": 64}
LAYERS_BACKEND = {"cuda": "inductor", "cpu": "aot_eager"}


def compiled(loss: Loss, backend: str, device: torch.device) -> Loss:
    """Compiles for a GPU. On a CPU graphs run as AOTAutograd gives them: nothing is measured."""
    if backend == "streamkl":
        small = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0.0}
        return with_streamkl(loss, **({} if device.type == "cuda" else small))
    return torch.compile(loss, backend=LAYERS_BACKEND[device.type], dynamic=False)


def shard_layers(model: Any, device: torch.device, mesh: DeviceMesh, compiles: bool) -> None:
    """Applies FSDP2 to every layer."""
    for layer in model.layers:
        if compiles:
            layer.compile(dynamic=False, backend=LAYERS_BACKEND[device.type])
        fully_shard(layer, mesh=mesh)


def _case(
    label: str, shape: str, names: Sequence[str], make: Callable[[str], Problem],
    received_mib: float | None = None,
) -> SharedCase:  # fmt: skip
    def problem(name: str) -> Problem:
        torch._dynamo.reset()
        return make(name)

    # roundings: two of the loss's gradients, two of everything before it
    return SharedCase(
        label, sizes=shape, make={name: partial(problem, name) for name in names},
        costs={} if received_mib is None else dict.fromkeys(names, Cost(received_mib)),
        fits_together=False, roundings=4.0,
    )  # fmt: skip


# ----------------------------------------------------------------------- maps of every layer
class Distillation(nn.Module):
    """The loss of a Llama pair as a module with the student's parameters."""

    def __init__(self, student: Llama, device: torch.device, context: int) -> None:
        super().__init__()
        step = LlamaStep("pair", student=student, seqlen=context)
        self.student, teacher = step.models(device)
        self.teacher = [teacher]  # no module of this one
        # a head that takes no part has no gradient, which DDP would wait for
        self.student.lm_head.requires_grad_(False)
        self._loss_of = step.loss_of(self.student, teacher)

    def forward(self, ids: Tensor) -> Tensor:
        return self._loss_of(ids)


def _of_pair(
    label: str, device: torch.device, context: int, names: tuple[str, ...],
    wrap: Callable[[str, Distillation], Loss], received_mib: Callable[[Llama], float] | None,
) -> SharedCase:  # fmt: skip
    """A pair's step, of which each rank has a batch of its own."""
    student = LLAMAS["cuda"] if device.type == "cuda" else TINY
    context = context or CONTEXTS[device.type]

    def problem(provider: str) -> Problem:
        module = Distillation(student, device, context)
        ids = random_ids(student.vocabulary, 1, context, device, seed=distributed.get_rank())
        return Problem(device, wrap(provider, module), [(ids,)], module, part=local)

    received = None if received_mib is None else received_mib(student)
    return _case(label, f"{context} tokens a rank", names, problem, received)


def ddp(mesh: DeviceMesh, device: torch.device, context: int = 0) -> SharedCase:
    """A Llama pair under DistributedDataParallel."""

    def wrapped(provider: str, module: Distillation) -> Loss:
        ids = [device.index] if device.type == "cuda" else None
        inner = DistributedDataParallel(module, ids)
        return inner if provider == "eager" else compiled(inner, provider, device)

    def received(student: Llama) -> float:
        return all_reduce(student.num_parameters * usual_dtype(device).itemsize / MIB, mesh.size())

    return _of_pair("ddp", device, context, ("eager", "inductor", "streamkl"), wrapped, received)


def layers(mesh: DeviceMesh, device: torch.device, context: int = 0) -> SharedCase:
    """A Llama pair under FSDP2, sharded at every layer."""

    def wrapped(provider: str, module: Distillation) -> Loss:
        (teacher,) = module.teacher
        for model in (module.student, teacher):
            shard_layers(model.model, device, mesh, provider == "FSDP2, compiled layers")
        fully_shard(module, mesh=mesh)
        if not provider.startswith("traced, "):
            return module
        trace_fully_shard(module)
        trace_fully_shard(teacher)  # the step does not hold it as a module
        return compiled(module, provider.removeprefix("traced, "), device)

    # the comparison that is asked for comes first: each of these compiles for half a minute
    names = ("traced, streamkl", "FSDP2, compiled layers", "traced, inductor")
    return _of_pair("layers", device, context, names, wrapped, None)


# ------------------------------------------------------------------------- 1B from 8B, LM heads
class HeadsOutside(nn.Module):
    """A student whose LM head meets the teacher's, or its cached entries, in the outermost module.

    FSDP2 then has both heads' weights whole while the loss is computed, in one graph.
    """

    def __init__(self, loss: Loss, student: Any, teacher: Any = None) -> None:
        super().__init__()
        self.student, self.head = student.model, student.lm_head
        self.teacher = None if teacher is None else teacher.model
        self.teacher_head = None if teacher is None else teacher.lm_head
        self.loss = loss

    def forward(self, ids: Tensor, *cached: Tensor) -> Tensor:
        x = self.student(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        if self.teacher is None or self.teacher_head is None:
            return self.loss(x, self.head.weight, *cached)
        with torch.no_grad():
            t = self.teacher(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        return self.loss(x, self.head.weight, t, self.teacher_head.weight)


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


def of_entries(x: Tensor, w: Tensor, *cached: Tensor) -> Tensor:
    return heads.top(x, w, x, w, *cached)


def fsdp(
    mesh: DeviceMesh, device: torch.device, context: int = 0, is_cached: bool = True
) -> SharedCase:
    """Llama 1B from 8B under FSDP2 at every layer, with a KL of the LM heads."""
    context = context or CONTEXTS[device.type]
    student, teacher = OF_1B[device.type]
    naive = of_entries if is_cached else heads.forward_kl

    def problem(provider: str) -> Problem:
        models: list[Any] = [student.model(device, 1, context, attention="sdpa")]
        if not is_cached:
            models.append(frozen(teacher.model(device, 0, context, attention="sdpa")))
        for model in models:
            shard_layers(model.model, device, mesh, compiles=True)
        loss: Loss = naive
        if provider == "linear_topk_kl":
            loss = partial(linear_topk_kl, reduction="mean")
        elif provider != "eager":
            loss = compiled(naive, provider, device)
        module = fully_shard(HeadsOutside(loss, *models), mesh=mesh)
        rank = distributed.get_rank()
        ids = random_ids(student.vocabulary, 1, context, device, seed=rank)
        cached = entries(student.vocabulary, context, device, rank) if is_cached else ()
        return Problem(device, module, [(ids, *cached)], module, part=local)

    # a layer's parameters are gathered for the forward and for the backward, and its gradients are
    # reduced; the outermost module's (embeddings and head) are kept
    embeddings, head = (x.vocabulary * x.hidden_size for x in (student, teacher))
    gathered = 3 * student.num_parameters + embeddings
    if not is_cached:  # the teacher's layers once, as they have no backward
        gathered += teacher.num_parameters + head
    item, size = usual_dtype(device).itemsize / MIB, mesh.size()
    what = "cached entries" if is_cached else f"live {teacher.name}"
    names = ("eager", "inductor", "streamkl", *["linear_topk_kl"] * is_cached)
    return _case(
        f"fsdp {'cached' if is_cached else 'live'}",
        f"{student.name}, {what}, {context} tokens a rank", names, problem,
        all_gather(gathered * item, size),
    )  # fmt: skip


def fsdp_live(mesh: DeviceMesh, device: torch.device, context: int = 0) -> SharedCase:
    return fsdp(mesh, device, context, is_cached=False)
