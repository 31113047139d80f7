"""What is compared: every way to compute a case's loss that a user could choose.

A provider builds, for one case, a callable ``loss(student 1, student 2, teacher 1, teacher 2)``
that returns a scalar whose gradient autograd gives. A callable from outside plugs in as
``--provider module:function``: ``function(case)`` returns such a loss or raises `Unavailable`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import cuda_graphs
from bench.cases import AttentionCase, Case, LinearCase
from bench.measure import Unavailable

Loss = Callable[..., Tensor]
Build = Callable[..., Loss]
CHUNK_TOKENS = 1024  # of the checkpointed chunks, for LM heads
CHUNK_QUERIES = 512  # and for attention


@dataclass(frozen=True)
class Provider:
    """One way to compute the loss."""

    name: str
    build: Callable[[Case], Loss]
    color: str  # fixed, so that all pictures agree
    families: tuple[str, ...] = ("attention", "linear")
    devices: tuple[str, ...] = ("cpu", "cuda")
    quick: bool = True  # part of --quick
    graphs: bool = False  # replays CUDA graphs, which keep memory from the others: by name only
    note: str = field(default="", compare=False)


PROVIDERS: list[Provider] = []


def _provider(name: str, color: str, note: str, **more: Any) -> Callable[[Build], Build]:
    """The function below builds its loss."""

    def add(build: Build) -> Build:
        PROVIDERS.append(Provider(name, build, color, note=note, **more))
        return build

    return add


ON_GPU: dict[str, Any] = {"devices": ("cuda",), "quick": False}
OF_HEADS: dict[str, Any] = {"families": ("linear",), "quick": False}


@_provider("eager", "#7f7f7f", "the naive code")
def _eager(case: Case) -> Loss:
    return case.naive()


@_provider("inductor", "#1f77b4", "torch.compile of the naive code")
def _inductor(case: Case, **options: Any) -> Loss:
    return torch.compile(case.naive(), dynamic=False, fullgraph=True, options=options or None)


_provider("auto_chunker", "#17becf", "Inductor with auto_chunker", **OF_HEADS)(
    partial(_inductor, **{"auto_chunker.enable": True})
)


@_provider("checkpoint", "#bcbd22", "chunks of tokens or queries, checkpointed, eager")
def _checkpoint(case: Case) -> Loss:
    from torch.utils.checkpoint import checkpoint

    naive = case.naive()
    block = CHUNK_TOKENS if case.family == "linear" else CHUNK_QUERIES

    def loss(*inputs: Tensor) -> Tensor:
        parts = [
            checkpoint(naive, *piece, use_reentrant=False) * share
            for piece, share in case.pieces(inputs, block)
        ]
        return torch.stack(parts).sum()

    return loss


@_provider(
    "liger_fused", "#ff7f0e", "LigerFusedLinearJSD, beta=0",
    families=("linear",), devices=("cuda",),
)  # fmt: skip
def _liger_fused(case: Case) -> Loss:
    module = _liger(case, "transformers", "LigerFusedLinearJSD")(jsd_beta=0.0)
    return lambda *inputs: module(*inputs, None)


@_provider("liger_chunked", "#8c564b", "LigerFusedLinearJSDLoss, beta=0", **OF_HEADS)
def _liger_chunked(case: Case) -> Loss:
    assert isinstance(case, LinearCase)
    module = _liger(case, "chunked_loss", "LigerFusedLinearJSDLoss")(
        beta=0.0, weight_hard_loss=0.0, weight_soft_loss=1.0
    )
    tokens = case.tokens

    def loss(*inputs: Tensor) -> Tensor:
        labels = torch.zeros(tokens, dtype=torch.long, device=inputs[0].device)
        return module(*inputs, labels)

    return loss


def _liger(case: Case, module: str, name: str) -> Any:
    if case.softcap is not None:
        raise Unavailable("Liger has no softcap in its distillation losses")
    try:
        return getattr(importlib.import_module(f"liger_kernel.{module}"), name)
    except ImportError as error:
        raise Unavailable(f"liger_kernel is not installed ({error})") from error


def with_streamkl(loss_of: Loss, **options: Any) -> Loss:
    """Compiled with our backend; a KL that stays as it is would be an error, not a slow result."""
    options = {"streamkl.strict": True, **options}
    return torch.compile(loss_of, dynamic=False, backend="streamkl", options=options)


def with_graphs(loss_of: Loss) -> Loss:
    """The same with CUDA graphs; torch.compile takes a mode or options."""
    mode: dict[str, Any] = torch._inductor.list_mode_options("reduce-overhead")
    return cuda_graphs.marked(with_streamkl(loss_of, **mode))


@_provider("streamkl", "#d62728", 'the naive code, torch.compile(backend="streamkl")')
def _streamkl_backend(case: Case) -> Loss:
    return with_streamkl(case.naive())


@_provider("direct", "#9467bd", "attention_kl or linear_kl called by hand")
def _direct(case: Case, **more: Any) -> Loss:
    """The operators called by hand, with more options."""
    import torch_streamkl

    options: dict[str, Any] = {"reduction": "mean", **more}
    if case.softcap is not None:
        options |= {"student_softcap": case.softcap, "teacher_softcap": case.softcap}
    if isinstance(case, LinearCase):
        if not hasattr(torch_streamkl, "linear_kl"):
            raise Unavailable("this torch_streamkl has no linear_kl")
        return lambda *inputs: torch_streamkl.linear_kl(*inputs, **options)
    options["is_causal"] = case.is_causal
    if case.head_mean:
        options["head_reduction"] = "mean"
    return lambda *inputs: torch_streamkl.attention_kl(*inputs, **options)


_provider(
    "direct-recompute", "#c5b0d5", 'linear_kl called by hand with strategy="recompute"', **OF_HEADS
)(partial(_direct, strategy="recompute"))
_provider(
    "direct-200-mib", "#e377c2", "linear_kl called by hand with max_workspace_mib=200", **OF_HEADS
)(partial(_direct, max_workspace_mib=200))


@_provider(
    "any-order", "#2ca25f", "attention_kl called by hand with deterministic=False",
    families=("attention",), **ON_GPU,
)  # fmt: skip
def _any_order(case: Case) -> Loss:
    assert isinstance(case, AttentionCase)
    if case.head_mean or case.softcap is not None:
        raise Unavailable("gradients of this case are summed in one order only")
    return _direct(case, deterministic=False)


@_provider(
    "inductor-graphs", "#1f77b4",
    'torch.compile(mode="reduce-overhead") of the naive code: CUDA graphs', graphs=True, **ON_GPU,
)  # fmt: skip
def _inductor_graphs(case: Case) -> Loss:
    return cuda_graphs.inductor(case.naive())


@_provider(
    "streamkl-graphs", "#d62728", 'backend="streamkl" with the options of mode="reduce-overhead"',
    graphs=True, **ON_GPU,
)  # fmt: skip
def _streamkl_graphs(case: Case) -> Loss:
    return with_graphs(case.naive())


OUTSIDE_COLORS = ("#2ca02c", "#e377c2", "#000000")


def outside(specification: str, position: int = 0) -> Provider:
    """The provider of ``module:function``."""
    module, colon, name = specification.partition(":")
    if not colon or not name:
        raise ValueError(f"an outside provider is named module:function, got {specification!r}")
    build = getattr(importlib.import_module(module), name)
    return Provider(
        specification, build, OUTSIDE_COLORS[position % len(OUTSIDE_COLORS)], note="from outside"
    )


def choose(names: list[str], outsiders: list[str], quick: bool = False) -> list[Provider]:
    """Providers by name (without names all but CUDA graphs), then those from outside."""
    known = {p.name: p for p in PROVIDERS}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise ValueError(f"providers are {', '.join(known)}, got {', '.join(unknown)}")
    usual = [p for p in PROVIDERS if not p.graphs and (p.quick or not quick)]
    chosen = [known[n] for n in names] if names else usual
    return chosen + [outside(spec, i) for i, spec in enumerate(outsiders)]


def color_of(name: str) -> str:
    """The fixed colour of a provider, with and without CUDA graphs the same."""
    plain = name.removesuffix("-graphs")
    return next((p.color for p in PROVIDERS if p.name == plain), OUTSIDE_COLORS[0])
