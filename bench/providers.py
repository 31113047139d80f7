"""Defines what is compared: every way to compute a case's loss that a user could choose.

A provider builds, from a case and a problem with naive code, another loss of the same inputs, or
a problem of its own. Options are written behind its name: ``direct[strategy=recompute]``.
"""

from __future__ import annotations

import ast
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench import cuda_graphs
from bench.attention import AttentionCase
from bench.case import Case, Loss, Problem, Unavailable, random_tensors
from bench.heads import BETAS

CHUNK = 512  # tokens or queries, as in verl's formulation
CHUNK_V = 2048  # vocabulary entries of Nitrobrew's chunks


@dataclass(frozen=True)
class Provider:
    """One way to compute the loss."""

    name: str
    build: Callable[..., Loss | Problem]  # of a case, its problem, and options
    note: str = field(default="", compare=False)
    families: tuple[str, ...] = ()  # of cases; none: all
    needs_gpu: bool = False
    usual: bool = True  # where no provider is named
    graphs: bool = False  # replays CUDA graphs, which keep memory from the others

    def of(self, case: Case, problem: Problem) -> Problem:
        """Builds the problem, or raises `Unavailable`."""
        if self.families and case.family not in self.families:
            raise Unavailable(f"has no form for {case.family}")
        if self.needs_gpu and problem.device.type != "cuda":
            raise Unavailable(f"does not run on {problem.device.type}")
        built = self.build(case, problem)
        return built if isinstance(built, Problem) else replace(problem, loss=built)


PROVIDERS: list[Provider] = []
HEADS: dict[str, Any] = {"families": ("heads",), "usual": False}
ATTENTION: dict[str, Any] = {"families": ("attention",), "usual": False}
GRAPHS: dict[str, Any] = {"needs_gpu": True, "usual": False, "graphs": True}
OURS = ("heads", "attention")


def _provider(name: str, note: str, **more: Any) -> Callable[[Any], Any]:
    def add(build: Callable[..., Loss | Problem]) -> Callable[..., Loss | Problem]:
        PROVIDERS.append(Provider(name, build, note, **more))
        return build

    return add


@_provider("eager", "the naive code")
def _eager(case: Case, problem: Problem) -> Loss:
    return problem.loss


@_provider("inductor", "torch.compile of the naive code")
def _inductor(case: Case, problem: Problem, **options: Any) -> Loss:
    return torch.compile(problem.loss, dynamic=False, options=options or None)


def with_streamkl(loss_of: Loss, **options: Any) -> Loss:
    """Compiles with our backend; a KL that stays as it is would be an error, not a slow result."""
    from torch_streamkl.fx_passes.backend import streamkl  # its name is known when it is installed

    options = {"streamkl.strict": True, **options}
    return torch.compile(loss_of, dynamic=False, backend=streamkl, options=options)


@_provider("streamkl", 'the naive code, torch.compile(backend="streamkl")')
def _streamkl(case: Case, problem: Problem, **options: Any) -> Loss:
    return with_streamkl(problem.loss, **options)


@_provider("direct", "attention_kl or linear_kl called by hand", families=OURS)
def _direct(case: Case, problem: Problem, **options: Any) -> Loss:
    return case.direct(options)


@_provider("program", "row_program called by hand", usual=False, families=OURS)
def _program(case: Case, problem: Problem, **options: Any) -> Loss:
    return case.program(options)


@_provider("checkpoint", "chunks of tokens or queries, checkpointed", usual=False, families=OURS)
def _checkpoint(case: Case, problem: Problem) -> Loss:
    def loss(*inputs: Tensor) -> Tensor:
        parts = [
            checkpoint(naive, *piece, use_reentrant=False) * share
            for naive, piece, share in case.pieces(inputs, CHUNK)
        ]
        return torch.stack(parts).sum()

    return loss


# ------------------------------------------------------------------------------------------- peers
def _beta(case: Any, library: str) -> float:
    """The generalised JS that a library computes, or why it has none."""
    if case.loss not in BETAS:
        raise Unavailable(f"{library} has no such loss")
    if case.softcap is not None and library != "TRL":
        raise Unavailable(f"{library} has no softcap in its distillation losses")
    return BETAS[case.loss]


def _imported(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Unavailable(f"{module} cannot be imported ({error})") from error


@_provider("liger_fused", "Liger's LigerFusedLinearJSD", needs_gpu=True, **HEADS)
def _liger_fused(case: Case, problem: Problem) -> Loss:
    beta = _beta(case, "Liger")
    made_of = _imported("liger_kernel.transformers.fused_linear_jsd", "LigerFusedLinearJSD")
    module = made_of(jsd_beta=beta)
    return lambda *x: module(*x[:4], None)


@_provider("liger_chunked", "Liger's LigerFusedLinearJSDLoss", **HEADS)
def _liger_chunked(case: Case, problem: Problem) -> Loss:
    beta = _beta(case, "Liger")
    module = _imported("liger_kernel.chunked_loss.jsd_loss", "LigerFusedLinearJSDLoss")(
        beta=beta, weight_hard_loss=0.0, weight_soft_loss=1.0,
        compiled=problem.device.type == "cuda",
    )  # fmt: skip
    return lambda *x: module(*x[:4], x[6])


@_provider(
    "liger_kl", "Liger's LigerFusedLinearKLDivLoss, of the teacher's probabilities",
    needs_gpu=True, **HEADS,
)  # fmt: skip
def _liger_kl(case: Case, problem: Problem) -> Loss:
    if _beta(case, "Liger") != 0.0:
        raise Unavailable("LigerFusedLinearKLDivLoss is a forward KL")
    module = "liger_kernel.ops.fused_linear_kl_div"
    call = _imported(module, "LigerFusedLinearKLDivFunction").apply

    def loss(x: Tensor, w: Tensor, t: Tensor, u: Tensor, *_: Tensor) -> Tensor:
        with torch.no_grad():
            target = (t @ u.T).softmax(-1)
        return call(x, w, target)

    return loss


@_provider("trl", "the kernels of TRL's DistillationTrainer", **HEADS)
def _trl(case: Any, problem: Problem) -> Loss:
    beta, softcap = _beta(case, "TRL"), case.softcap
    call = _imported("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction").apply

    def loss(x: Tensor, w: Tensor, t: Tensor, u: Tensor, *_: Tensor) -> Tensor:
        rows, _entropy = call(x, w, None, t, u, None, beta, 1.0, 1.0, softcap, 1.0, softcap)
        return rows.mean()

    return loss


@_provider("nitrobrew", "chunks of the vocabulary, as Nitrobrew publishes its method", **HEADS)
def _nitrobrew(case: Case, problem: Problem) -> Loss:
    beta = _beta(case, "Nitrobrew")
    if beta == 0.5:
        raise Unavailable("Nitrobrew has no JS")
    return lambda *x: _OfChunks.apply(*x[:4], beta == 1.0).mean()


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


@_provider("attention", "torch's attention, which is no KL: the speed of a shape", **ATTENTION)
def _attention(case: Case, problem: Problem) -> Problem:
    """Computes attention (cuDNN's on CUDA) with the teacher's heads: full or causal.

    A backward is five matmuls, as everyone counts; a forward is two.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not isinstance(case, AttentionCase):
        raise Unavailable("has no such shape")
    device, is_causal = problem.device, case.mask in ("causal", "window", "packed")
    backend = "CUDNN_ATTENTION" if device.type == "cuda" else "FLASH_ATTENTION"
    dim = max(case.student.head_dim, case.teacher.head_dim)
    shape = (case.batch, case.teacher.num_heads, case.seqlen, dim)
    inputs = random_tensors([shape] * 4, device, case.dtype_on(device), learning=3)

    def loss(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return _WithGradient.apply(output, grad)

    matmul = 2.0 * math.prod(shape) * case.seqlen * (0.5 if is_causal else 1.0)
    made = Problem(device, loss, [inputs], flops=(2 * matmul, 5 * matmul), is_judged=False)
    made.around = partial(sdpa_kernel, getattr(SDPBackend, backend))
    try:
        made.step()
    except RuntimeError as error:
        raise Unavailable(f"torch has no such attention here ({error})") from error
    return made


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to x is given, without a reduction over x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


@_provider("flex", "forward KL by the outputs and log-sum-exps of FlexAttention",
           needs_gpu=True, **ATTENTION)  # fmt: skip
def _flex(case: Case, problem: Problem) -> Loss:
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

    return torch.compile(kl, dynamic=False)


@_provider(
    "inductor-graphs", 'torch.compile(mode="reduce-overhead") of the naive code: CUDA graphs',
    **GRAPHS,
)  # fmt: skip
def _inductor_graphs(case: Case, problem: Problem) -> Loss:
    compiled = torch.compile(problem.loss, dynamic=False, mode="reduce-overhead")
    return cuda_graphs.marked(compiled)


@_provider(
    "streamkl-graphs", 'backend="streamkl" with the options of mode="reduce-overhead"', **GRAPHS
)
def _streamkl_graphs(case: Case, problem: Problem) -> Loss:
    mode = torch._inductor.list_mode_options("reduce-overhead")
    return cuda_graphs.marked(with_streamkl(problem.loss, **mode))


# ------------------------------------------------------------------------------------------ choice
def named(name: str) -> Provider:
    """Returns a provider by its name, with the options behind it."""
    plain, _, rest = name.removesuffix("]").partition("[")
    known = {p.name: p for p in PROVIDERS}
    if plain not in known:
        raise ValueError(f"providers are {', '.join(known)}, got {name}")
    options: dict[str, Any] = {}
    for option in rest.split(",") if rest else ():
        key, _, text = option.partition("=")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    provider = known[plain]
    return replace(provider, name=name, build=partial(provider.build, **options))


def of_case(case: Case, names: list[str], usual: tuple[str, ...] | None = None) -> list[Provider]:
    """Returns a case's providers by name; or those that are usual, and its own."""
    own = {name: Provider(name, build, "of one case") for name, build in case.own().items()}
    if names:
        return [own[n] if n in own else named(n) for n in names]
    chosen = [p.name for p in PROVIDERS if p.usual] if usual is None else usual
    return [*map(named, chosen), *own.values()]
