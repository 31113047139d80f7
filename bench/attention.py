"""Defines attention cases: a divergence of attention maps by shape, mask and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import Case, Inputs, Loss, as_wide, blocks, mean_of, random_tensors
from bench.measure import usual_dtype
from torch_streamkl import attention_kl, attention_kl_varlen, row_program

PIECE_ELEMENTS = 2**27  # scores of one side in a piece of the gate: 1 GiB in float64
GATE_ELEMENTS = 2**31  # beyond that the gate looks at one group of heads
TOKENS = 8192  # of a batch of shorter sequences
WINDOW = 1024  # keys that a row of the window mask sees
LENGTH = 0.75  # of the keys that key_lengths admits
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
MASKS = ("none", "causal", "window", "boolean", "additive", "key lengths", "alibi", "packed")
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
    return _guarded(p, s, lambda x: x + 1e-6)


_OF_PROBABILITIES: dict[str, Callable[..., Tensor]] = {
    "js": _js,
    "tv": lambda p, s: 0.5 * (p - s).abs(),
    "eps": partial(_guarded, of=lambda x: x + GUARD),
    "clamps": partial(_guarded, of=lambda x: x.clamp_min(CLAMP)),
    "squares": lambda p, s: (p - s) ** 2,
    "weighted": _weighted,
}


def causal(scores: Tensor) -> Mask:
    """Hides keys after a query; the last query is aligned with the last key."""
    n, m = scores.shape[-2:]
    return torch.ones(n, m, dtype=torch.bool, device=scores.device).triu(1 + m - n), None


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


PROGRAMS = {"forward_kl": _kl_of, "squares": _squares_of, "weighted": _weighted_of}


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

    family = "attention"

    @property
    def rows(self) -> int:
        return self.queries or self.seqlen

    @property
    def label(self) -> str:
        of = "" if self.divergence == "forward_kl" else f", {self.divergence}"
        if not self.in_matrix:
            return f"{self.name} B={self.batch} N={self.seqlen}{of}"
        s, t = self.student, self.teacher
        dims = f"{s.head_dim}" + f" from {t.head_dim}" * (t.head_dim != s.head_dim)
        kv = f" ({s.num_kv_heads})" * (s.num_kv_heads != s.num_heads)
        if t.num_kv_heads != s.num_kv_heads:
            kv = f" ({s.num_kv_heads} from {t.num_kv_heads})"
        size = f"{self.rows} x " * bool(self.queries) + f"{self.seqlen}"
        what = f"{self.mask}{of.replace(',', '')} {self.dtype}"
        return f"{dims} {what} {self.batch} x {s.num_heads}{kv} x {size}"

    @property
    def section(self) -> str:
        return "matrix" if self.in_matrix else self.family

    @property
    def sweep(self) -> tuple[str, int]:
        return f"{self.name} B={self.batch}", self.seqlen

    def shape(self) -> str:
        sides = f"student {self.student}, teacher {self.teacher}"
        return sides + (", causal" if self.mask == "causal" else "")

    # ----------------------------------------------------------------------------------- inputs
    def dtype_on(self, device: torch.device) -> torch.dtype:
        return DTYPES[self.dtype] if self.dtype else usual_dtype(device)

    def _inputs(self, device: torch.device, seed: int) -> Inputs:
        shapes = [
            (self.batch, heads, n, side.head_dim)
            for side in (self.student, self.teacher)
            for heads, n in ((side.num_heads, self.rows), (side.num_kv_heads, self.seqlen))
        ]
        made = random_tensors(shapes, device, self.dtype_on(device), seed)
        if self.divergence != "weighted":
            return made
        generator = torch.Generator(device).manual_seed(seed)
        return *made, torch.rand(self.seqlen, generator=generator, device=device) + 0.5

    def naive(self, first: int = 0, last: int = 0) -> Loss:
        """The loss of some rows, on the first keys where they are causal."""
        mask: Any = causal if self.mask == "causal" else None
        if self.mask not in ("none", "causal"):
            mask = partial(self._masked, first=first, last=last or self.rows)
        more = {"softcap": self.softcap, "head_mean": self.head_mean}
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

    @property
    def packed_lengths(self) -> list[int]:
        return [int(self.rows * share) for share in PACKED]

    # -------------------------------------------------------------------------------- providers
    def direct(self, options: dict[str, Any]) -> Loss:
        if self.divergence not in DIVERGENCES:
            return super().direct(options)
        given = {**DIVERGENCES[self.divergence], **options}
        if self.softcap is not None:
            given |= {"student_softcap": self.softcap, "teacher_softcap": self.softcap}
        if self.head_mean:
            given["head_reduction"] = "mean"
        if self.mask == "packed":
            lengths = self.packed_lengths
            given |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
            starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            return mean_of(partial(self._packed, starts), is_causal=True, **given)
        masks: dict[torch.device, dict[str, Any]] = {}  # made at the first call

        def call(*x: Tensor, **more: Any) -> Tensor:
            device = x[0].device
            mask = masks.get(device) or masks.setdefault(device, self.options(device))
            return attention_kl(*x[:4], **mask, **more)

        return mean_of(call, **given)

    def _packed(self, starts: Tensor, *x: Tensor, **given: Any) -> Tensor:
        offsets = starts.to(x[0].device, non_blocking=True)
        tokens = (y[0].transpose(0, 1) for y in x)
        return attention_kl_varlen(*tokens, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **given)

    def program(self, options: dict[str, Any]) -> Loss:
        if self.divergence not in PROGRAMS or self.mask not in ("none", "causal"):
            return super().program(options)
        scaled = partial(PROGRAMS[self.divergence], scale=self.student.head_dim**-0.5)

        def call(*inputs: Tensor, **given: Any) -> Tensor:
            sq, sk, tq, tk, *weight = inputs
            keys = {"keys": {"w": weight[0][None, None]}} if weight else {}
            dots = {"t": (tq, tk), "s": (sq, sk)}
            return row_program(scaled, dots=dots, is_causal=self.mask == "causal", **keys, **given)

        return mean_of(call, **options)

    # --------------------------------------------------------------------------------- arithmetic
    def pairs(self) -> float:
        """Pairs of query and key of a head: masked ones count where their tiles are not skipped.

        None, boolean, additive and alibi: all. Causal: half. Window: the band. Key lengths: the
        admitted keys. Packed: half of every sequence's.
        """
        everything, width = float(self.rows) * self.seqlen, min(WINDOW, self.seqlen)
        counted = {
            "causal": everything / 2, "window": self.rows * width - width * width / 2,
            "key lengths": everything * LENGTH,
            "packed": sum(n * n / 2 for n in self.packed_lengths),
        }  # fmt: skip
        return counted.get(self.mask, everything)

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
        widest = max(sq.shape[1], tq.shape[1])
        block = block or max(1, PIECE_ELEMENTS // (widest * self.seqlen))
        for b in range(self.batch):
            for rows, share in blocks(self.rows, block):
                hidden_after = self.rows - rows.stop if self.mask == "causal" else 0
                of_q = (slice(b, b + 1), slice(None), rows)
                of_k = (slice(b, b + 1), slice(None), slice(self.seqlen - hidden_after))
                piece = (sq[of_q], sk[of_k], tq[of_q], tk[of_k], *more)
                yield self.naive(rows.start, rows.stop), piece, share / self.batch

    def gated(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Everything, or in large cases one group of heads.

        Its rows do not depend on the other heads: its gradients are the whole's up to the number
        of groups.
        """
        groups = self.num_groups
        if groups == 1:
            return tuple(tensors)
        return tuple(x[:, : max(1, x.shape[1] // groups)] if x.ndim == 4 else x for x in tensors)

    @property
    def num_groups(self) -> int:
        scores = max(self.student.num_heads, self.teacher.num_heads) * self.rows * self.seqlen
        if self.batch * scores <= GATE_ELEMENTS or self.head_mean:
            return 1
        return min(self.student.num_kv_heads, self.teacher.num_kv_heads)

    @property
    def gate_scale(self) -> float:  # type: ignore[override]
        return 1.0 / self.num_groups
