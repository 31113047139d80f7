"""The cases of `bench.attention_matrix`, what each counts and why it may be slow, and the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torch_streamkl import attention_kl, attention_kl_varlen

TOKENS = 8192  # of a batch of shorter sequences
WINDOW = 1024  # keys that a row of the window mask sees
LENGTH = 0.75  # of the keys that key_lengths admits
BLOCK = 128  # queries and keys of a block that "blocks" admits or not
PACKED = (3 / 8, 5 / 16, 3 / 16, 1 / 8)  # of the tokens in each packed sequence
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# divergences other than forward KL, in the place of a mask; "causal clamps" is both
GUARD, CLAMP = 1e-8, 1e-12
DIVERGENCES: dict[str, dict[str, Any]] = {
    "js": {"divergence": "js"},
    "tv": {"divergence": "tv"},
    "eps": {"student_eps": GUARD, "teacher_eps": GUARD},
    "clamps": {"student_clamp": CLAMP, "teacher_clamp": CLAMP},
    "causal clamps": {"student_clamp": CLAMP, "teacher_clamp": CLAMP, "is_causal": True},
}
MASKS = ("none", "causal", "window", "boolean", "additive", "key lengths", "alibi", "packed")


@dataclass(frozen=True)
class Cell:
    """One case, and why it may be slow."""

    student_dim: int
    teacher_dim: int
    mask: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    reason: str = ""
    teacher_kv_heads: int = 0  # 0 is kv_heads

    @property
    def widest(self) -> int:
        return max(self.student_dim, self.teacher_dim)

    @property
    def has_few_rows(self) -> bool:
        return self.seqlen_q < self.seqlen_k

    @property
    def packed_lengths(self) -> list[int]:
        return [int(self.seqlen_q * share) for share in PACKED]

    def pairs(self) -> float:
        """Pairs of query and key of a head: masked ones count where their tiles are not skipped.

        None, boolean, additive and alibi: all. Causal: half. Window: the band. Key lengths and
        blocks: the admitted keys. Packed: half of every sequence's.
        """
        everything = float(self.seqlen_q) * self.seqlen_k
        match self.mask:
            case "causal" | "causal clamps":
                return everything / 2
            case "window":
                width = min(WINDOW, self.seqlen_k)
                return float(self.seqlen_q) * width - width * width / 2
            case "key lengths":
                return everything * LENGTH
            case "blocks":
                return float(self.blocks().sum()) * BLOCK * BLOCK
            case "packed":
                return sum(n * n / 2.0 for n in self.packed_lengths)
        return everything

    def blocks(self) -> Tensor:
        """Which blocks the mask "blocks" admits: half of them, and those on the diagonal."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.seqlen_q // BLOCK, self.seqlen_k // BLOCK)
        return torch.rand(shape, generator=generator).fill_diagonal_(0.0) < 0.5

    def flops(self) -> tuple[float, float]:
        """Forward; student's backward."""
        each = 2.0 * self.pairs() * self.batch * self.heads
        student, teacher = self.student_dim, self.teacher_dim
        return each * (student + teacher), each * (3 * student + teacher)

    def key_bytes(self) -> float:
        width = self.kv_heads * self.student_dim
        width += (self.teacher_kv_heads or self.kv_heads) * self.teacher_dim
        return float(self.batch * self.seqlen_k * DTYPES[self.dtype].itemsize * width)

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """Random q and k of the student, then of the teacher; packed ones as one sequence."""
        generator = torch.Generator(device).manual_seed(0)
        teacher_kv = self.teacher_kv_heads or self.kv_heads
        shapes = [
            (self.batch, heads, n, dim)
            for dim, kv in ((self.student_dim, self.kv_heads), (self.teacher_dim, teacher_kv))
            for heads, n in ((self.heads, self.seqlen_q), (kv, self.seqlen_k))
        ]
        made = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
        return tuple(x.to(DTYPES[self.dtype]).requires_grad_(i < 2) for i, x in enumerate(made))

    def options(self, device: torch.device) -> dict[str, Any]:
        """What `attention_kl` is told about masks."""
        n, m = self.seqlen_q, self.seqlen_k
        generator = torch.Generator(device).manual_seed(1)
        if self.mask in DIVERGENCES:
            return dict(DIVERGENCES[self.mask])
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
                slopes = 2.0 ** -torch.linspace(1, 8, self.heads, device=device)
                return {"student_alibi_slopes": slopes, "teacher_alibi_slopes": slopes}
        return {}


def call_of(cell: Cell, device: torch.device, impl: str) -> Callable[..., Tensor]:
    """Inputs to one value per row, [batch, heads, queries]."""
    options = cell.options(device)
    if cell.mask != "packed":
        return lambda *inputs: attention_kl(*inputs, **options, impl=impl)
    lengths = cell.packed_lengths
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def packed(*inputs: Tensor) -> Tensor:
        value = attention_kl_varlen(
            *(x[0].transpose(0, 1) for x in inputs),
            cu_seqlens_q=offsets, cu_seqlens_k=offsets, is_causal=True, impl=impl,
            max_seqlen_q=max(lengths), max_seqlen_k=max(lengths),
        )  # fmt: skip
        return value[None]

    return packed


# --------------------------------------------------------------------------------------- cases
FEW_TILES = "few tiles of keys a block of rows: what precedes and follows them is not hidden"
OTHER_DIMS = "the portable kernels: those for Hopper take head_dims of 64, 128, 192 and 256"
FULL_FLOAT32 = "float32 in full precision has no tensor core"
MASK_REASONS = {
    "window": "two of the about 17 tiles of a block of rows are at an edge and are not skipped",
    "boolean": "a byte of mask is read and tested for every pair of scores",
    "additive": "a bias is read and added for every score of both sides",
    "alibi": "distance and slope are computed for every score of both sides",
    "js": "two passes: the row's log-sum-exps, then the sums",
    "tv": "two passes: the row's log-sum-exps, then the sums",
    "eps": "two passes: the row's log-sum-exps, then the sums",
    "packed": "sequences of 1024 to 3072: few tiles a block of rows, rows of unequal length",
}


def cell(
    dim: int, mask: str, dtype: str = "bf16", seqlen: int = TOKENS, teacher_dim: int = 0,
    heads: int = 32, kv_heads: int = 0, reason: str = "",
) -> Cell:  # fmt: skip
    if dtype == "fp32":  # fewer heads: as full a GPU, in a quarter of the time
        reason, heads = FULL_FLOAT32, 8
    elif seqlen <= 512:
        reason = FEW_TILES
    else:
        reason = reason or MASK_REASONS.get(mask, "")
    batch = max(1, TOKENS // seqlen)
    dims = (dim, teacher_dim or dim)
    return Cell(*dims, mask, dtype, batch, heads, kv_heads or heads, seqlen, seqlen, reason)


def matrix() -> list[Cell]:
    """Every head_dim, length, mask and dtype, not the full product of them."""
    dims = (64, 128, 32, 96, 192, 256)
    cells = [
        cell(dim, mask, seqlen=seqlen)
        for seqlen in (8192, 512, 2048)
        for dim in dims
        for mask in ("none", "causal")
    ]
    cells += [cell(dim, mask, dtype) for dim in (64, 128) for mask in MASKS for dtype in DTYPES]
    both = ("none", "causal")
    cells += [
        cell(s, mask, teacher_dim=t, reason=reason)
        for s, t, reason in ((64, 128, ""), (32, 64, OTHER_DIMS), (128, 64, ""))
        for mask in both
    ]
    cells += [cell(128, "causal", kv_heads=n) for n in (8, 1)]
    cells += [
        replace(cell(128, mask, kv_heads=n), teacher_kv_heads=m)
        for mask in both
        for n, m in ((8, 32), (32, 8), (8, 4))
    ]
    few = (128, 128, "none", "bf16", 1, 32, 8)
    cells += [Cell(*few, rows, 131072, "bound by memory: see GB/s") for rows in (1, 16, 64)]
    cells += [cell(128, "causal", seqlen=131072, heads=8), cell(128, "blocks")]
    cells += [cell(128, divergence) for divergence in DIVERGENCES]
    cells += [cell(dim, mask, seqlen=32768) for dim in dims for mask in both]
    return list(dict.fromkeys(cells))


# ---------------------------------------------------------------------------------------- gate
def gate(
    cell: Cell, inputs: tuple[Tensor, ...], value: Tensor, grads: tuple[Tensor, Tensor], rows: int
) -> str:
    """Why the results are wrong, or "".

    ``rows`` of a head are compared with float64. The value's error is that of float32 sums; a
    gradient may be off by two roundings of its dtype.
    """
    eps = max(2 * torch.finfo(grads[0].dtype).eps, 1e-4)
    for head in (0, cell.heads - 1):
        some = torch.linspace(0, cell.seqlen_q - 1, min(rows, cell.seqlen_q)).long().tolist()
        for i in some:
            expected, dq = _row(cell, inputs, head, i)
            error = abs(value[0, head, i].item() - expected.item())
            if not error <= 1e-4 * max(1.0, abs(expected.item())):
                return f"value of row {i} of head {head} is off by {error:.1e}"
            found = grads[0][0, head, i].double()
            error = ((found - dq).norm() / dq.norm().clamp_min(1e-30)).item()
            if not (error <= eps or (found - dq).norm() <= 1e-6):
                return f"dQ of row {i} of head {head} is off by {error:.1e}"
    sums = [
        (x.detach().float() * g.float()).sum(dtype=torch.float64).item()
        for x, g in zip(inputs[:2], grads, strict=True)
    ]
    if not abs(sums[0] - sums[1]) <= eps * abs(sums[0]):
        return f"sum(q dQ) = {sums[0]:.6g} but sum(k dK) = {sums[1]:.6g}"
    return ""


def _row(cell: Cell, inputs: tuple[Tensor, ...], head: int, i: int) -> tuple[Tensor, Tensor]:
    """Value and student's dQ of one row of the first batch element, in float64.

    A row alone is the last one: keys after it are left out where masks look at its place.
    """
    device, options = inputs[0].device, cell.options(inputs[0].device)
    first, last = 0, cell.seqlen_k
    position = i + cell.seqlen_k - cell.seqlen_q
    match cell.mask:
        case "causal" | "causal clamps" | "window":
            last = position + 1
        case "boolean" | "blocks" | "additive":
            options["attn_mask"] = options["attn_mask"][i : i + 1]
        case "key lengths":
            options["key_lengths"] = options["key_lengths"][:1]
        case "alibi":
            distance = (position - torch.arange(last, device=device)).abs()
            slope = options["student_alibi_slopes"][head].double()
            options = {"attn_mask": -distance[None] * slope}
        case "packed":
            first = max(x for x in accumulate(cell.packed_lengths, initial=0) if x <= i)
            last = i + 1
    sides = []
    for q, k in (inputs[:2], inputs[2:]):
        key_head = head * k.shape[1] // cell.heads
        keys = k[:1, key_head : key_head + 1, first:last]
        sides += [x.detach().double() for x in (q[:1, head : head + 1, i : i + 1], keys)]
    sides[0].requires_grad_()
    value = attention_kl(*sides, **options, impl="reference")
    return value.sum(), torch.autograd.grad(value.sum(), sides[0])[0].flatten()
