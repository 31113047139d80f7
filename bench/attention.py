"""Defines attention cases: a divergence of attention maps by shape, mask and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import Build, Case, Inputs, Loss, Problem, as_wide, random_tensors
from bench.measure import Unavailable, usual_dtype
from torch_streamkl import attention_kl, attention_kl_varlen, row_program

PIECE_ELEMENTS = 2**27  # scores of one side in a piece of the gate: 1 GiB in float64
GATE_ELEMENTS = 2**31  # beyond that the gate looks at one group of heads
TOKENS = 8192  # of a batch of shorter sequences
WINDOW = 1024  # keys that a row of the window mask sees
LENGTH = 0.75  # of the keys that key_lengths admits
BLOCK = 128  # queries and keys of a block that "blocks" admits or not
PACKED = (3 / 8, 5 / 16, 3 / 16, 1 / 8)  # of the tokens in each packed sequence
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GUARD, CLAMP = 1e-8, 1e-12
DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "js": {"divergence": "js"},
    "tv": {"divergence": "tv"},
    "eps": {"student_eps": GUARD, "teacher_eps": GUARD},
    "clamps": {"student_clamp": CLAMP, "teacher_clamp": CLAMP},
}
MASKS = (
    "none", "causal", "window", "boolean", "additive", "key lengths", "alibi", "packed", "blocks",
)  # fmt: skip
Mask = tuple[Tensor | None, Tensor | None]  # what is hidden, and what is added to both sides


# -------------------------------------------------------------------- losses, as people write them
def _scores(q: Tensor, k: Tensor, softcap: float | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)
    scores = as_wide(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def naive(
    sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, *more: Tensor, divergence: str = "forward_kl",
    mask: Callable[[Tensor], Mask] | None = None, softcap: float | None = None,
    head_mean: bool = False,
) -> Tensor:  # fmt: skip
    """A divergence of two materialised attention maps, the mean over rows in nats."""
    maps = []
    for q, k in ((sq, sk), (tq, tk)):
        scores = _scores(q, k, softcap)
        hidden, bias = mask(scores) if mask else (None, None)
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        maps.append(scores)
    if divergence == "forward_kl":
        teacher = maps[1].softmax(-1)
        teacher = teacher.mean(1, keepdim=True) if head_mean else teacher
        return F.kl_div(maps[0].log_softmax(-1), teacher, reduction="none").sum(-1).mean()
    s, p = (x.softmax(-1) for x in maps)
    return _OF_PROBABILITIES[divergence](p, s, *(x.to(s.dtype) for x in more)).sum(-1).mean()


def _js(p: Tensor, s: Tensor) -> Tensor:
    tiny = torch.finfo(p.dtype).tiny  # of hidden keys
    mixture = ((p + s) / 2).clamp_min(tiny).log()
    return 0.5 * sum(x * (x.clamp_min(tiny).log() - mixture) for x in (p, s))


def _guarded(p: Tensor, s: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    return p * (of(p).log() - of(s).log())


def _weighted(p: Tensor, s: Tensor, weight: Tensor) -> Tensor:
    """Weights of keys after the softmax, renormalised."""
    p, s = (x * weight for x in (p, s))
    p, s = (x / (x.sum(-1, keepdim=True) + 1e-6) for x in (p, s))
    return p * ((p + 1e-6).log() - (s + 1e-6).log())


_OF_PROBABILITIES: dict[str, Callable[..., Tensor]] = {
    "js": _js,
    "tv": lambda p, s: 0.5 * (p - s).abs(),
    "eps": partial(_guarded, of=lambda x: x + GUARD),
    "clamps": partial(_guarded, of=lambda x: x.clamp_min(CLAMP)),
    "squares": lambda p, s: (p - s) ** 2,
    "weighted": _weighted,
}


def causal(scores: Tensor, offset: int = 0) -> Mask:
    """Hides keys after a query; the last query is aligned with the last key."""
    n, m = scores.shape[-2:]
    shape = torch.ones(n, m, dtype=torch.bool, device=scores.device)
    return shape.triu(1 + m - n + offset), None


@dataclass(frozen=True)
class Heads:
    """Attention heads of one side."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        shared = "" if self.num_kv_heads == self.num_heads else f" ({self.num_kv_heads} kv)"
        return f"{self.num_heads} heads{shared} of {self.head_dim}"


@dataclass(frozen=True)
class AttentionCase(Case):
    """The maps of one layer of a student and a teacher."""

    student: Heads = Heads(1, 1, 64)
    teacher: Heads = Heads(1, 1, 64)
    batch: int = 1
    seqlen: int = 0  # keys, and queries where `queries` is 0
    mask: str = "causal"
    divergence: str = "forward_kl"
    dtype: str = ""
    queries: int = 0
    softcap: float | None = None
    head_mean: bool = False  # the target is the mean of the teacher's heads
    in_matrix: bool = False  # of `matrix`, whose labels name every option
    has_programs: bool = False

    family = "attention"
    axis = "sequence length"

    @property
    def rows(self) -> int:
        return self.queries or self.seqlen

    @property
    def label(self) -> str:
        if not self.in_matrix:
            of = "" if self.divergence == "forward_kl" else f", {self.divergence}"
            return f"{self.name} B={self.batch} N={self.seqlen}{of}"
        dims, (s, t) = f"{self.student.head_dim}", (self.student, self.teacher)
        if t.head_dim != s.head_dim:
            dims += f" from {t.head_dim}"
        kv = "" if s.num_kv_heads == s.num_heads == t.num_kv_heads else f" ({s.num_kv_heads})"
        if t.num_kv_heads != s.num_kv_heads:
            kv = f" ({s.num_kv_heads} from {t.num_kv_heads})"
        what = "" if self.divergence == "forward_kl" else f" {self.divergence}"
        size = f"{self.rows} x {self.seqlen}" if self.queries else f"{self.seqlen}"
        heads = f"{self.batch} x {s.num_heads}{kv} x {size}"
        return f"{dims} {self.mask}{what} {self.dtype} {heads}"

    @property
    def section(self) -> str:
        return "matrix" if self.in_matrix else self.family

    @property
    def sweep(self) -> tuple[str, int]:
        return f"{self.name} B={self.batch}", self.seqlen

    def resized(self, size: int) -> Case:
        return replace(self, seqlen=size)

    def shape(self) -> str:
        sides = f"student {self.student}, teacher {self.teacher}"
        return sides + (", causal" if self.mask == "causal" else "")

    # ----------------------------------------------------------------------------------- inputs
    def problem(self, device: torch.device, sets: int = 1) -> Problem:
        return Problem(device, self.naive(device), [self._inputs(device, i) for i in range(sets)])

    def _inputs(self, device: torch.device, seed: int) -> Inputs:
        shapes = [
            (self.batch, heads, n, side.head_dim)
            for side in (self.student, self.teacher)
            for heads, n in ((side.num_heads, self.rows), (side.num_kv_heads, self.seqlen))
        ]
        dtype = DTYPES[self.dtype] if self.dtype else usual_dtype(device)
        made = random_tensors(shapes, device, dtype, seed)
        if self.divergence != "weighted":
            return made
        generator = torch.Generator(device).manual_seed(seed)
        return *made, torch.rand(self.seqlen, generator=generator, device=device) + 0.5

    def naive(self, device: torch.device, first: int = 0, last: int = 0) -> Loss:
        """The loss of some rows, on the first keys where they are causal."""
        more = {"softcap": self.softcap, "head_mean": self.head_mean}
        mask: Any = causal if self.mask == "causal" else None
        if self.mask not in ("none", "causal"):
            mask = partial(self._masked, first=first, last=last or self.rows)
        return partial(naive, divergence=self.divergence, mask=mask, **more)

    def _masked(self, scores: Tensor, first: int, last: int) -> Mask:
        """The mask of rows of all keys."""
        device, m = scores.device, self.seqlen
        options = self.options(device)
        if "attn_mask" in options:
            mask = options["attn_mask"][first:last]
            return (~mask, None) if mask.dtype == torch.bool else (None, mask.to(scores.dtype))
        i = torch.arange(first, last, device=device)[:, None] + m - self.rows
        j = torch.arange(m, device=device)
        if self.mask == "window":
            return (j > i) | (j < i - WINDOW + 1), None
        if self.mask == "key lengths":
            return j >= int(m * LENGTH), None
        if self.mask == "packed":
            ends = torch.tensor(self.packed_lengths, device=device).cumsum(0)
            sequence = [torch.searchsorted(ends, x, right=True) for x in (i.contiguous(), j)]
            return (j > i) | (sequence[0] != sequence[1]), None
        slopes = options["student_alibi_slopes"].to(scores.dtype)[: scores.shape[1], None, None]
        return None, -slopes * (i - j).abs()

    def options(self, device: torch.device) -> dict[str, Any]:
        """What `attention_kl` is told about the mask."""
        n, m = self.rows, self.seqlen
        generator = torch.Generator(device).manual_seed(1)
        match self.mask:
            case "causal":
                return {"is_causal": True}
            case "window":
                return {"window": (WINDOW - 1, 0)}
            case "boolean":
                mask = torch.rand(n, m, generator=generator, device=device) < 0.5
                mask[:, 0] = True
                return {"attn_mask": mask}
            case "blocks":
                mask = self.blocks().to(device).repeat_interleave(BLOCK, 0)
                return {"attn_mask": mask.repeat_interleave(BLOCK, 1)}
            case "additive":
                bias = torch.randn(n, m, generator=generator, device=device)
                return {"attn_mask": bias.to(DTYPES[self.dtype])}
            case "key lengths":
                lengths = torch.full((self.batch,), int(m * LENGTH), dtype=torch.int32)
                return {"key_lengths": lengths.to(device)}
            case "alibi":
                slopes = 2.0 ** -torch.linspace(1, 8, self.student.num_heads, device=device)
                return {"student_alibi_slopes": slopes, "teacher_alibi_slopes": slopes}
        return {}

    def blocks(self) -> Tensor:
        """Which blocks the mask "blocks" admits: half of them, and those on the diagonal."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.rows // BLOCK, self.seqlen // BLOCK)
        return torch.rand(shape, generator=generator).fill_diagonal_(0.0) < 0.5

    @property
    def packed_lengths(self) -> list[int]:
        return [int(self.rows * share) for share in PACKED]

    def direct(self, options: dict[str, Any]) -> Loss:
        """The operator called by hand."""
        given: dict[str, Any] = {**DIVERGENCES[self.divergence], **options}
        if self.softcap is not None:
            given |= {"student_softcap": self.softcap, "teacher_softcap": self.softcap}
        if self.head_mean:
            given["head_reduction"] = "mean"
        if self.mask != "packed":
            masks: dict[torch.device, dict[str, Any]] = {}  # made at the first call

            def call(*x: Tensor) -> Tensor:
                device = x[0].device
                mask = masks.get(device) or masks.setdefault(device, self.options(device))
                return attention_kl(*x[:4], reduction="mean", **mask, **given)

            return call
        lengths = self.packed_lengths
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        of: dict[str, Any] = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}

        def packed(*x: Tensor) -> Tensor:
            offsets = starts.to(x[0].device, non_blocking=True)
            return attention_kl_varlen(
                *(y[0].transpose(0, 1) for y in x), cu_seqlens_q=offsets, cu_seqlens_k=offsets,
                is_causal=True, reduction="mean", **of, **given,
            )  # fmt: skip

        return packed

    # --------------------------------------------------------------------------------- arithmetic
    def pairs(self) -> float:
        """Pairs of query and key of a head: masked ones count where their tiles are not skipped.

        None, boolean, additive and alibi: all. Causal: half. Window: the band. Key lengths and
        blocks: the admitted keys. Packed: half of every sequence's.
        """
        everything = float(self.rows) * self.seqlen
        match self.mask:
            case "causal":
                return everything / 2
            case "window":
                width = min(WINDOW, self.seqlen)
                return float(self.rows) * width - width * width / 2
            case "key lengths":
                return everything * LENGTH
            case "blocks":
                return float(self.blocks().sum()) * BLOCK * BLOCK
            case "packed":
                return sum(n * n / 2.0 for n in self.packed_lengths)
        return everything

    def flops(self) -> tuple[float, float]:
        """Forward: the score matmuls. Backward: those again, and the student's dq and dk."""
        each = 2.0 * self.batch * self.pairs()
        student, teacher = (
            each * side.num_heads * side.head_dim for side in (self.student, self.teacher)
        )
        return student + teacher, 3 * student + teacher

    # --------------------------------------------------------------------------------------- gate
    def pieces(
        self, inputs: Inputs, block: int | None = None
    ) -> Iterator[tuple[Loss, Inputs, float]]:
        """Blocks of queries, and the keys they see."""
        sq, sk, tq, tk, *more = inputs
        batch, rows = sq.shape[0], sq.shape[2]
        widest = max(sq.shape[1], tq.shape[1])
        block = min(rows, block or max(1, PIECE_ELEMENTS // (widest * self.seqlen)))
        for b in range(batch):
            for first in range(0, rows, block):
                last = min(first + block, rows)
                keys = self.seqlen - rows + last if self.mask == "causal" else self.seqlen
                of_q = (slice(b, b + 1), slice(None), slice(first, last))
                of_k = (slice(b, b + 1), slice(None), slice(keys))
                piece = (sq[of_q], sk[of_k], tq[of_q], tk[of_k], *more)
                share = (last - first) / (batch * rows)
                yield self.naive(sq.device, first, last), piece, share

    def gated(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Everything, or in large cases one group of heads.

        Its rows do not depend on the other heads: its gradients are the whole's up to the number
        of groups.
        """
        if self.num_groups == 1:
            return tuple(tensors)
        return tuple(
            x[:, : max(1, x.shape[1] // self.num_groups)] if x.ndim == 4 else x for x in tensors
        )

    @property
    def num_groups(self) -> int:
        scores = max(self.student.num_heads, self.teacher.num_heads) * self.rows * self.seqlen
        if self.batch * scores <= GATE_ELEMENTS or self.head_mean:
            return 1
        return min(self.student.num_kv_heads, self.teacher.num_kv_heads)

    @property
    def gate_scale(self) -> float:  # type: ignore[override]
        return 1.0 / self.num_groups

    # ---------------------------------------------------------------------------------- providers
    def own(self) -> dict[str, Build]:
        if not self.has_programs:
            return {}
        of = PROGRAMS[self.divergence]
        found: dict[str, Build] = {}
        for name, impl in (("program", "auto"), ("program, its own kernels", "triton")):
            options: dict[str, Any] = {"is_causal": self.mask == "causal", "impl": impl}
            loss = partial(_program, of, weighted=self.divergence == "weighted", **options)
            found[name] = lambda case, problem, loss=loss: replace(problem, loss=loss)
        return found

    def attention(self, device: torch.device) -> Problem:
        """Torch's attention (cuDNN's on CUDA) with the teacher's heads: full or causal.

        A backward is five matmuls, as everyone counts; a forward is two.
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        on_gpu = device.type == "cuda"
        backend = SDPBackend.CUDNN_ATTENTION if on_gpu else SDPBackend.FLASH_ATTENTION
        is_causal = self.mask in ("causal", "window", "packed")
        dim = max(self.student.head_dim, self.teacher.head_dim)
        shape = (self.batch, self.teacher.num_heads, self.seqlen, dim)
        dtype = DTYPES[self.dtype] if self.dtype else usual_dtype(device)
        q, k, v, ones = random_tensors([shape] * 4, device, dtype, learning=3)

        def loss(q: Tensor, k: Tensor, v: Tensor, ones: Tensor) -> Tensor:
            # a gradient for the backward without a reduction over the output
            output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            return _Sink.apply(output, ones)

        matmul = 2.0 * math.prod(shape) * self.seqlen * (0.5 if is_causal else 1.0)
        flops = (2 * matmul, 5 * matmul)
        problem = Problem(device, loss, [(q, k, v, ones)], flops=flops, is_judged=False)
        problem.around = partial(sdpa_kernel, backend)
        try:
            problem.step()
        except RuntimeError as error:
            raise Unavailable(f"torch has no such attention here ({error})") from error
        return problem


class _Sink(torch.autograd.Function):
    """Gives a scalar whose gradient with respect to x is ``ones``, at no cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ones: Tensor) -> Tensor:
        ctx.save_for_backward(ones)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


# ------------------------------------------------------------------------------------ row programs
def _kl_of(e: Any, scale: float) -> Any:
    p, s = (e.t * scale).log_softmax("key"), (e.s * scale).log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _squares_of(e: Any, scale: float) -> Any:
    p, s = (e.t * scale).softmax("key"), (e.s * scale).softmax("key")
    return ((p - s) ** 2).sum("key")


def _weighted_of(e: Any, scale: float) -> Any:
    p, s = (e.t * scale).softmax("key") * e.w, (e.s * scale).softmax("key") * e.w
    p, s = p / (p.sum("key") + 1e-6), s / (s.sum("key") + 1e-6)
    return (p * ((p + 1e-6).log() - (s + 1e-6).log())).sum("key")


PROGRAMS: dict[str, Any] = {
    "forward_kl": _kl_of, "squares": _squares_of, "weighted": _weighted_of,
}  # fmt: skip


def _program(of: Any, *inputs: Tensor, weighted: bool, **options: Any) -> Tensor:
    sq, sk, tq, tk, *weight = inputs
    keys = {"keys": {"w": weight[0][None, None]}} if weighted else {}
    scaled, dots = partial(of, scale=sq.shape[-1] ** -0.5), {"t": (tq, tk), "s": (sq, sk)}
    rows: Tensor = row_program(scaled, dots=dots, **keys, **options)
    return rows.mean()
