"""What is compared: every way to compute a case's loss that a user could choose.

A provider builds, for one case, a callable ``loss(student 1, student 2, teacher 1, teacher 2)``
that returns a scalar whose gradient autograd gives. A callable from outside plugs in as
``--provider module:function``: ``function(case)`` returns such a loss or raises `Unavailable`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench import cuda_graphs
from bench.cases import AttentionCase, Case, LinearCase

Loss = Callable[..., Tensor]
CHUNK_TOKENS = 1024  # of the checkpointed chunks, for LM heads
CHUNK_QUERIES = 512  # and for attention


class Unavailable(Exception):
    """A provider cannot compute a case: a package is missing, or it has no such form."""


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


def _eager(case: Case) -> Loss:
    return case.naive()


def _inductor(case: Case) -> Loss:
    return torch.compile(case.naive(), dynamic=False, fullgraph=True)


def _auto_chunker(case: Case) -> Loss:
    return torch.compile(
        case.naive(), dynamic=False, fullgraph=True, options={"auto_chunker.enable": True}
    )


def _inductor_graphs(case: Case) -> Loss:
    return cuda_graphs.inductor(case.naive())


def _streamkl_backend(case: Case, **options: Any) -> Loss:
    # strict: a loss that was not fused is an error, not a slow result
    options = {"streamkl.strict": True, **options}
    return torch.compile(case.naive(), dynamic=False, backend="streamkl", options=options)


def _streamkl_graphs(case: Case) -> Loss:
    return cuda_graphs.marked(_streamkl_backend(case, **cuda_graphs.options()))


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


def _direct(case: Case, **more: Any) -> Loss:
    """The operators called by hand, with more options."""
    import torch_streamkl

    if isinstance(case, AttentionCase):
        options: dict[str, Any] = {"is_causal": case.is_causal, "reduction": "mean", **more}
        if case.softcap is not None:
            options |= {"student_softcap": case.softcap, "teacher_softcap": case.softcap}
        if case.head_mean:
            options["head_reduction"] = "mean"
        return lambda *inputs: torch_streamkl.attention_kl(*inputs, **options)
    if not hasattr(torch_streamkl, "linear_kl"):
        raise Unavailable("this torch_streamkl has no linear_kl")
    options = {"reduction": "mean", **more}
    if case.softcap is not None:
        options |= {"student_softcap": case.softcap, "teacher_softcap": case.softcap}
    return lambda *inputs: torch_streamkl.linear_kl(*inputs, **options)


def _any_order(case: Case) -> Loss:
    assert isinstance(case, AttentionCase)
    if case.head_mean or case.softcap is not None:
        raise Unavailable("gradients of this case are summed in one order only")
    return _direct(case, deterministic=False)


def _liger_fused(case: Case) -> Loss:
    _liger_can(case)
    module = _import("liger_kernel.transformers", "LigerFusedLinearJSD")(jsd_beta=0.0)
    return lambda *inputs: module(*inputs, None)


def _liger_chunked(case: Case) -> Loss:
    assert isinstance(case, LinearCase)
    _liger_can(case)
    module = _import("liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss")(
        beta=0.0, weight_hard_loss=0.0, weight_soft_loss=1.0
    )
    tokens = case.tokens

    def loss(*inputs: Tensor) -> Tensor:
        value: Tensor = module(
            *inputs, torch.zeros(tokens, dtype=torch.long, device=inputs[0].device)
        )
        return value

    return loss


def _liger_can(case: Case) -> None:
    if case.softcap is not None:
        raise Unavailable("Liger has no softcap in its distillation losses")


def _import(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Unavailable(f"{module.partition('.')[0]} is not installed ({error})") from error


PROVIDERS = [
    Provider("eager", _eager, "#7f7f7f", note="the naive code"),
    Provider("inductor", _inductor, "#1f77b4", note="torch.compile of the naive code"),
    Provider(
        "auto_chunker",
        _auto_chunker,
        "#17becf",
        ("linear",),
        quick=False,
        note="Inductor with auto_chunker",
    ),
    Provider(
        "checkpoint",
        _checkpoint,
        "#bcbd22",
        note="chunks of tokens or queries, checkpointed, eager",
    ),
    Provider(
        "liger_fused",
        _liger_fused,
        "#ff7f0e",
        ("linear",),
        ("cuda",),
        note="LigerFusedLinearJSD, beta=0",
    ),
    Provider(
        "liger_chunked",
        _liger_chunked,
        "#8c564b",
        ("linear",),
        quick=False,
        note="LigerFusedLinearJSDLoss, beta=0",
    ),
    Provider(
        "streamkl",
        _streamkl_backend,
        "#d62728",
        note='the naive code, torch.compile(backend="streamkl")',
    ),
    Provider("direct", _direct, "#9467bd", note="attention_kl or linear_kl called by hand"),
    Provider(
        "direct-recompute",
        lambda case: _direct(case, strategy="recompute"),
        "#c5b0d5",
        ("linear",),
        quick=False,
        note='linear_kl called by hand with strategy="recompute"',
    ),
    Provider(
        "direct-200-mib",
        lambda case: _direct(case, max_workspace_mib=200),
        "#e377c2",
        ("linear",),
        quick=False,
        note="linear_kl called by hand with max_workspace_mib=200",
    ),
    Provider(
        "any-order",
        _any_order,
        "#2ca25f",
        ("attention",),
        ("cuda",),
        quick=False,
        note="attention_kl called by hand with deterministic=False",
    ),
    Provider(
        "inductor-graphs",
        _inductor_graphs,
        "#1f77b4",
        devices=("cuda",),
        quick=False,
        graphs=True,
        note='torch.compile(mode="reduce-overhead") of the naive code: CUDA graphs',
    ),
    Provider(
        "streamkl-graphs",
        _streamkl_graphs,
        "#d62728",
        devices=("cuda",),
        quick=False,
        graphs=True,
        note='backend="streamkl" with the options of mode="reduce-overhead"',
    ),
]
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
