"""Defines what is compared: every way to compute a case's loss that a user could choose.

A provider builds, from a case and a problem with naive code, the same problem with its own loss.
Options are written behind its name: ``direct[strategy=recompute]``. A callable from outside is
named ``module:function``: ``function(case)`` returns a loss or raises `Unavailable`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench import cuda_graphs
from bench.attention import AttentionCase
from bench.case import Case, Loss, Problem
from bench.heads import BETAS, HeadCase
from bench.measure import Unavailable

CHUNKS = {"heads": 1024, "attention": 512}  # of tokens or queries, checkpointed
CHUNK_V = 2048  # vocabulary entries of Nitrobrew's chunks


@dataclass(frozen=True)
class Provider:
    """One way to compute the loss."""

    name: str
    build: Callable[..., Problem]  # of a case, its problem, and options
    color: str  # fixed, so that all pictures agree
    families: tuple[str, ...] = ()  # of cases; none: all
    needs_gpu: bool = False
    usual: bool = True  # where no provider is named
    quick: bool = True  # part of --quick
    graphs: bool = False  # replays CUDA graphs, which keep memory from the others
    note: str = field(default="", compare=False)

    def of(self, case: Case, problem: Problem) -> Problem:
        """Builds the problem, or raises `Unavailable`."""
        if self.families and case.family not in self.families:
            raise Unavailable(f"has no form for {case.family}")
        if self.needs_gpu and problem.device.type != "cuda":
            raise Unavailable(f"does not run on {problem.device.type}")
        return self.build(case, problem)


PROVIDERS: list[Provider] = []
HEADS: dict[str, Any] = {"families": ("heads",), "usual": False, "quick": False}
ATTENTION: dict[str, Any] = {"families": ("attention",), "usual": False, "quick": False}
GRAPHS: dict[str, Any] = {"needs_gpu": True, "usual": False, "quick": False, "graphs": True}
OURS = ("heads", "attention")


def _provider(
    name: str, color: str, note: str, **more: Any
) -> Callable[[Callable[..., Problem]], Callable[..., Problem]]:
    def add(build: Callable[..., Problem]) -> Callable[..., Problem]:
        PROVIDERS.append(Provider(name, build, color, note=note, **more))
        return build

    return add


@_provider("eager", "#7f7f7f", "the naive code")
def _eager(case: Case, problem: Problem) -> Problem:
    return problem


@_provider("inductor", "#1f77b4", "torch.compile of the naive code")
def _inductor(case: Case, problem: Problem, **options: Any) -> Problem:
    loss = torch.compile(problem.loss, dynamic=False, options=options or None)
    return replace(problem, loss=loss)


def with_streamkl(loss_of: Loss, **options: Any) -> Loss:
    """Compiles with our backend; a KL that stays as it is would be an error, not a slow result."""
    from torch_streamkl.fx_passes.backend import streamkl  # its name is known when it is installed

    options = {"streamkl.strict": True, **options}
    return torch.compile(loss_of, dynamic=False, backend=streamkl, options=options)


@_provider("streamkl", "#d62728", 'the naive code, torch.compile(backend="streamkl")')
def _streamkl(case: Case, problem: Problem, **options: Any) -> Problem:
    return replace(problem, loss=with_streamkl(problem.loss, **options))


@_provider("direct", "#9467bd", "attention_kl or linear_kl called by hand", families=OURS)
def _direct(case: Case, problem: Problem, **options: Any) -> Problem:
    if not isinstance(case, AttentionCase | HeadCase):
        raise Unavailable("has no such operator")
    more: dict[str, Any] = {}
    if isinstance(case, AttentionCase):
        more["implementation"] = _implementation(case, problem, options.get("impl", "auto"))
    return replace(problem, loss=case.direct(options), more=more)


def _implementation(case: AttentionCase, problem: Problem, impl: str) -> str:
    """Says what computes the case, for masks that decide about it without their contents."""
    from torch_streamkl.attention import heuristics, ops

    known = {"none": {}, "causal": {"window_right": 0}}
    if impl != "auto" or case.mask not in known or case.divergence != "forward_kl":
        return impl
    made = ops.problem_of(*problem.sets[0][:4], head_mean=case.head_mean, **known[case.mask])[0]
    return heuristics.select_implementation(made, impl)


@_provider("checkpoint", "#bcbd22", "chunks of tokens or queries, checkpointed", usual=False,
           quick=False, families=OURS)  # fmt: skip
def _checkpoint(case: Case, problem: Problem) -> Problem:
    from torch.utils.checkpoint import checkpoint

    def loss(*inputs: Tensor) -> Tensor:
        parts = [
            checkpoint(naive, *piece, use_reentrant=False) * share
            for naive, piece, share in case.pieces(inputs, CHUNKS[case.family])
        ]
        return torch.stack(parts).sum()

    return replace(problem, loss=loss)


# ------------------------------------------------------------------------------------------- peers
def _beta(case: Case, library: str) -> float:
    """The generalised JS that a library computes, or why it has none."""
    assert isinstance(case, HeadCase)
    if case.loss not in BETAS:
        raise Unavailable(f"{library} has no such loss")
    if case.softcap is not None and library != "TRL":
        raise Unavailable(f"{library} has no softcap in its distillation losses")
    return BETAS[case.loss]


def _liger(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"liger_kernel.{module}"), name)
    except ImportError as error:
        raise Unavailable(f"liger_kernel is not installed ({error})") from error


@_provider("liger_fused", "#ff7f0e", "Liger's LigerFusedLinearJSD", needs_gpu=True, **HEADS)
def _liger_fused(case: Case, problem: Problem) -> Problem:
    beta = _beta(case, "Liger")
    module = _liger("transformers.fused_linear_jsd", "LigerFusedLinearJSD")(jsd_beta=beta)
    return replace(problem, loss=lambda *x: module(*x[:4], None))


@_provider("liger_chunked", "#8c564b", "Liger's LigerFusedLinearJSDLoss", **HEADS)
def _liger_chunked(case: Case, problem: Problem) -> Problem:
    beta = _beta(case, "Liger")
    module = _liger("chunked_loss.jsd_loss", "LigerFusedLinearJSDLoss")(
        beta=beta, weight_hard_loss=0.0, weight_soft_loss=1.0,
        compiled=problem.device.type == "cuda",
    )  # fmt: skip
    return replace(problem, loss=lambda *x: module(*x[:4], x[6]))


@_provider(
    "liger_kl", "#e377c2", "Liger's LigerFusedLinearKLDivLoss, of the teacher's probabilities",
    needs_gpu=True, **HEADS,
)  # fmt: skip
def _liger_kl(case: Case, problem: Problem) -> Problem:
    if _beta(case, "Liger") != 0.0:
        raise Unavailable("LigerFusedLinearKLDivLoss is a forward KL")
    call = _liger("ops.fused_linear_kl_div", "LigerFusedLinearKLDivFunction").apply

    def loss(x: Tensor, w: Tensor, t: Tensor, u: Tensor, *_: Tensor) -> Tensor:
        with torch.no_grad():
            target = (t @ u.T).softmax(-1)
        value: Tensor = call(x, w, target)
        return value

    return replace(problem, loss=loss)


@_provider("trl", "#17becf", "the kernels of TRL's DistillationTrainer", **HEADS)
def _trl(case: Case, problem: Problem) -> Problem:
    beta, function = _beta(case, "TRL"), _trl_function()
    softcap = case.softcap if isinstance(case, HeadCase) else None

    def loss(x: Tensor, w: Tensor, t: Tensor, u: Tensor, *_: Tensor) -> Tensor:
        rows, _entropy = function.apply(
            x, w, None, t, u, None, beta, 1.0, 1.0, softcap, 1.0, softcap
        )
        return rows.mean()

    return replace(problem, loss=loss)


def _trl_function() -> Any:
    """Imports the file of TRL's kernels alone: its packages want accelerate and datasets."""
    name = "trl.kernels.chunked_divergence"
    if name not in sys.modules:
        found = importlib.util.find_spec("trl")
        if found is None or not found.submodule_search_locations:
            raise Unavailable("trl is not installed")
        folder = found.submodule_search_locations[0]
        stubs = {x: types.ModuleType(x) for x in ("trl", "trl.kernels", "trl.trainer")}
        for x, stub in stubs.items():
            stub.__path__ = ["/".join([folder, *x.split(".")[1:]])]
        utils = stubs["trl.trainer.utils"] = types.ModuleType("trl.trainer.utils")
        utils.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()  # type: ignore
        known = {x: sys.modules[x] for x in stubs if x in sys.modules}
        sys.modules.update(stubs)
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Unavailable(f"TRL's kernels cannot be imported ({error})") from error
        finally:
            for x in stubs:
                del sys.modules[x]
            sys.modules.update(known)
    return sys.modules[name].ChunkedDivergenceFunction


@_provider(
    "nitrobrew", "#2ca02c", "chunks of the vocabulary, as Nitrobrew publishes its method", **HEADS
)
def _nitrobrew(case: Case, problem: Problem) -> Problem:
    beta = _beta(case, "Nitrobrew")
    if beta == 0.5:
        raise Unavailable("Nitrobrew has no JS")
    return replace(problem, loss=lambda *x: _OfChunks.apply(*x[:4], beta == 1.0).mean())


class _OfChunks(torch.autograd.Function):
    """Forward or reverse KL: online sums over chunks of the vocabulary, logits again backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, t: Tensor, u: Tensor, reverse: bool) -> Tensor:
        sides = ((t, u), (x, w)) if not reverse else ((x, w), (t, u))  # the first one weighs
        highs = [torch.full(x.shape[:1], -torch.inf, device=x.device) for _ in sides]
        masses = [torch.zeros_like(highs[0]) for _ in sides]
        gap = torch.zeros_like(highs[0])
        for start in range(0, w.shape[0], CHUNK_V):
            stop = start + CHUNK_V
            logits = [(h @ weight[start:stop].T).float() for h, weight in sides]
            for i, z in enumerate(logits):
                high = torch.maximum(highs[i], z.amax(-1))
                e, old = (z - high[:, None]).exp(), (highs[i] - high).exp()
                masses[i] = masses[i] * old + e.sum(-1)
                if i == 0:
                    gap = gap * old + (e * (logits[0] - logits[1])).sum(-1)
                highs[i] = high
        lses = [high + mass.log() for high, mass in zip(highs, masses, strict=True)]
        value = gap / masses[0] - lses[0] + lses[1]
        ctx.save_for_backward(x, w, t, u, *(lses if reverse else reversed(lses)), value)
        ctx.reverse = reverse
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, t, u, lse_s, lse_t, value = ctx.saved_tensors
        dx, dw = torch.zeros_like(x, dtype=torch.float32), torch.empty_like(w)
        for start in range(0, w.shape[0], CHUNK_V):
            part = slice(start, start + CHUNK_V)
            log_s = (x @ w[part].T).float() - lse_s[:, None]
            log_t = (t @ u[part].T).float() - lse_t[:, None]
            ds = log_s.exp() - log_t.exp()
            if ctx.reverse:
                ds = log_s.exp() * (log_s - log_t - value[:, None])
            ds = (ds * grad[:, None]).to(x.dtype)
            dx += ds @ w[part]
            dw[part] = ds.T @ x
        return dx.to(x.dtype), dw, None, None, None


@_provider("attention", "#000000", "torch's attention, which is no KL: the speed of a shape",
           **ATTENTION)  # fmt: skip
def _attention(case: Case, problem: Problem) -> Problem:
    if not isinstance(case, AttentionCase):
        raise Unavailable("has no such shape")
    return case.attention(problem.device)


@_provider("flex", "#7f3f00", "forward KL by the outputs and log-sum-exps of FlexAttention",
           needs_gpu=True, **ATTENTION)  # fmt: skip
def _flex(case: Case, problem: Problem) -> Problem:
    """Keys as values give the teacher's mean scores of both sides."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    plain = isinstance(case, AttentionCase) and case.mask in ("none", "causal")
    if not plain or (case.divergence, case.softcap, case.head_mean) != ("forward_kl", None, False):
        raise Unavailable("computes an unmasked or causal forward KL")
    n, m = case.rows, case.seqlen
    mask = None
    if case.mask == "causal":
        mask = create_block_mask(
            lambda b, h, i, j: j <= i + m - n, None, None, n, m, device=problem.device
        )
    options: dict[str, Any] = {"block_mask": mask, "return_lse": True, "enable_gqa": True}

    def kl(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
        mean_t, lse_t = flex_attention(tq, tk, tk, **options)
        mean_s, _ = flex_attention(tq, tk, sk, **options)
        _, lse_s = flex_attention(sq, sk, sk, **options)
        gaps = [(q.float() * k.float()).sum(-1) * q.shape[-1] ** -0.5
                for q, k in ((tq, mean_t), (sq, mean_s))]  # fmt: skip
        return (gaps[0] - gaps[1] - lse_t + lse_s).mean()

    return replace(problem, loss=torch.compile(kl, dynamic=False))


@_provider(
    "inductor-graphs", "#1f77b4",
    'torch.compile(mode="reduce-overhead") of the naive code: CUDA graphs', **GRAPHS,
)  # fmt: skip
def _inductor_graphs(case: Case, problem: Problem) -> Problem:
    return replace(problem, loss=cuda_graphs.inductor(problem.loss))


@_provider(
    "streamkl-graphs", "#d62728", 'backend="streamkl" with the options of mode="reduce-overhead"',
    **GRAPHS,
)  # fmt: skip
def _streamkl_graphs(case: Case, problem: Problem) -> Problem:
    mode: dict[str, Any] = torch._inductor.list_mode_options("reduce-overhead")
    return replace(problem, loss=cuda_graphs.marked(with_streamkl(problem.loss, **mode)))


# ------------------------------------------------------------------------------------------ choice
def outside(specification: str) -> Provider:
    """Returns the provider of ``module:function``."""
    module, _, name = specification.partition(":")
    if not name:
        raise ValueError(f"an outside provider is named module:function, got {specification!r}")
    function = getattr(importlib.import_module(module), name)

    def build(case: Case, problem: Problem) -> Problem:
        return replace(problem, loss=function(case))

    return Provider(specification, build, "#000000", note="from outside")


def named(name: str) -> Provider:
    """Returns a provider by its name, with the options behind it."""
    plain, _, rest = name.removesuffix("]").partition("[")
    known = {p.name: p for p in PROVIDERS}
    if plain not in known:
        raise ValueError(f"providers are {', '.join(known)}, got {name}")
    provider = known[plain]
    if not rest:
        return provider
    options: dict[str, Any] = {}
    for option in rest.split(","):
        key, _, text = option.partition("=")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text

    def build(case: Case, problem: Problem) -> Problem:
        return provider.build(case, problem, **options)

    return replace(provider, name=name, build=build)


def of_case(
    case: Case, names: list[str], defaults: tuple[str, ...] = (), quick: bool = False
) -> list[Provider]:
    """Returns a case's providers by name (outside ones too); or the usual ones, and its own."""
    own = {
        name: Provider(name, build, "#444444", note="of one case")
        for name, build in case.own().items()
    }
    if names:
        return [own[n] if n in own else outside(n) if ":" in n else named(n) for n in names]
    if defaults or case.usual is not None:
        return [*(named(n) for n in defaults or case.usual or ()), *own.values()]
    return [*(p for p in PROVIDERS if p.usual and (p.quick or not quick)), *own.values()]


def color_of(name: str) -> str:
    plain = name.partition("[")[0]
    return next((p.color for p in PROVIDERS if p.name == plain), "#444444")
