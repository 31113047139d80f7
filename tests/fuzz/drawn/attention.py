"""Random calls of `attention_kl` and `attention_kl_varlen`."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.fuzz.drawn import formulas
from tests.fuzz.drawn.judge import Drawn
from tests.support.subgraphs import _as_written
from torch_streamkl import attention_kl, attention_kl_varlen
from torch_streamkl.attention import interface, ops, query_tiles, torch_scores
from torch_streamkl.cpu import compiled

INF = math.inf
KINDS = ("forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "js", "tv")


class Source:
    """Random choices and tensors of a seed.

    ``fixed`` makes those that kernels are compiled for. With ``structures`` it is the same for
    every seed that has the same remainder: those calls share their compiled kernels, and differ in
    values, layouts, lengths, masks, weights, gradients and reductions.
    """

    def __init__(self, seed: int, structures: int | None = None) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.fixed: Source = self if structures is None else Source(seed % structures)
        self.is_structured = structures is not None

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def one_of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def whole(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def flags(self, *shape: int, p: float = 0.7) -> Tensor:
        return torch.rand(shape, generator=self.generator) < p

    def broadcast(self, shape: tuple[int, ...], least: int = 0) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        first = self.whole(0, len(shape) - least) if self.chance(0.5) else 0
        return tuple(n if self.chance(0.6) else 1 for n in shape[first:])

    def extreme(self, x: Tensor) -> Tensor:
        """Some elements far down: at -200, at -1e5 or excluded."""
        for value in (-INF, -200.0, -1e5):
            if self.chance(0.4):
                x = x.masked_fill(self.flags(*x.shape, p=0.25), value)
        return x

    def divergence(self) -> dict[str, Any]:
        """A divergence and its guards."""
        fixed = self.fixed
        chosen: dict[str, Any] = {"divergence": fixed.one_of(*KINDS)}
        if chosen["divergence"] == "js":
            chosen["beta"] = fixed.one_of(0.0, 0.1, 0.5, 0.7, 1.0)
        if chosen["divergence"] != "tv" and fixed.chance(0.3):
            for side in ("student", "teacher"):
                chosen[f"{side}_eps"] = fixed.one_of(0.0, 0.0, 1e-6, 1e-2, 1.0)
                chosen[f"{side}_clamp"] = fixed.one_of(0.0, 0.0, 1e-9, 2e-2, 1.0)
        if fixed.chance(0.3):
            chosen["temperature"] = self.one_of(0.5, 2.0, 3.7)
        return chosen


def draw(seed: int, device: str = "cpu", structures: int | None = None) -> Drawn:
    """The call of a seed, the same on every run."""
    s = Source(seed, structures)
    fixed = s.fixed
    layout = fixed.one_of("bhnd", "bnhd", "packed")
    if s.is_structured and layout != "packed":
        layout = s.one_of("bhnd", "bnhd")
    dtype = fixed.one_of(
        torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16
    )
    if device == "interpreter":  # whose products of bfloat16 are of its bits
        dtype = fixed.one_of(torch.float32, torch.float16)
    elif device != "cpu":
        dtype = fixed.one_of(torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
    head_mean = fixed.chance(0.4)
    heads, student_kv = _heads(fixed)
    teacher_heads = heads * (fixed.whole(1, 4) if head_mean else 1)
    teacher_kv = fixed.one_of(*(n for n in range(1, teacher_heads + 1) if teacher_heads % n == 0))
    is_large = device not in ("cpu", "interpreter")
    dims = (64, 128) if is_large else (1, 3, 8, 16, 17)
    options: dict[str, Any] = s.divergence() | {"dtype": dtype, "reduction": "none"}
    if head_mean:
        options["head_reduction"] = "mean"
    if s.chance(0.4):
        options["reduction"] = s.one_of("mean", "sum", "batchmean")
    batch, n, m, lengths = _sizes(s, is_large)
    if layout == "packed":
        batch, n, m = 1, sum(x for x, _ in lengths), sum(x for _, x in lengths)
    tensors = {}
    size = s.one_of(0.3, 1.0, 1.0, 5.0, 20.0)
    for side, of_q, of_k in (
        ("student", heads, student_kv),
        ("teacher", teacher_heads, teacher_kv),
    ):
        d = fixed.one_of(*dims)
        tensors[f"{side}_q"] = _laid_out(s, s.normal(batch, of_q, n, d) * size, layout, dtype)
        tensors[f"{side}_k"] = _laid_out(s, s.normal(batch, of_k, m, d), layout, dtype)
    full = (batch, heads, n, m)
    _add_transforms(s, tensors, options, (heads, teacher_heads))
    if layout == "packed":
        for i, name in enumerate("qk"):
            ends = torch.tensor([0, *(x[i] for x in lengths)], dtype=torch.int32).cumsum(0)
            options[f"cu_seqlens_{name}"] = ends.int()
            options[f"max_seqlen_{name}"] = max(1, *(x[i] for x in lengths))
        if s.chance(0.3):
            options["row_mask"] = s.flags(*s.broadcast((heads, n)))
    else:
        options["layout"] = layout
        _add_masks(s, options, full, teacher_heads, dtype)
        if head_mean and fixed.chance(0.3) and batch * n * m:
            options["teacher_lse"] = _known_lse(tensors, options, layout)
    trained = tuple(name for name in tensors if s.chance(0.8))
    blocks = {"elements": s.one_of(16, 64, 300, 2**18), "keys": s.one_of(3, 7, 512)}
    return Drawn("attention", seed, dtype, tensors, options, trained, blocks)


def _sizes(s: Source, is_large: bool) -> tuple[int, int, int, list[tuple[int, int]]]:
    """Batch, queries, keys, and queries and keys of packed sequences."""
    longest = (300, 500) if is_large else (9, 17)
    batch = s.whole(1, 3)
    lengths = [(s.whole(0, longest[0]), s.whole(0, longest[1])) for _ in range(s.whole(1, 4))]
    if s.is_structured:  # one of three pairs of sizes: kernels know multiples of 16
        sizes = [[s.fixed.whole(1, x) for x in longest] for _ in range(3)]
        n, m = s.one_of(*sizes)
    else:
        n, m = (s.whole(1, longest[0]), s.whole(1, longest[1]))
    if s.chance(0.05):
        batch, n, m = s.one_of((0, n, m), (batch, 0, m), (batch, n, 0))
    return batch, n, m, lengths


def _heads(s: Source) -> tuple[int, int]:
    heads = s.one_of(1, 2, 3, 4, 6, 8, 12)
    return heads, s.one_of(*(n for n in range(1, heads + 1) if heads % n == 0))


def _laid_out(s: Source, x: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """[batch, heads, rows, dim] as the call takes it, over one of several strides."""
    if layout == "packed":
        x = x[0].transpose(0, 1)
    elif layout == "bnhd":
        x = x.transpose(1, 2)
    x = x.contiguous()
    if s.chance(0.2):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.to(dtype)


def _add_transforms(
    s: Source, tensors: dict[str, Tensor], options: dict[str, Any], heads: tuple[int, int]
) -> None:
    """What makes scores of dot products, apart from masks and biases."""
    fixed = s.fixed
    for side, count in zip(("student", "teacher"), heads, strict=True):
        q = tensors[f"{side}_q"]
        if s.chance(0.3):
            tensors[f"{side}_scale"] = 0.2 + s.normal(*s.broadcast(tuple(q.shape))).abs()
        elif s.chance(0.3):
            options[f"{side}_scale"] = s.one_of(0.1, 0.7, -0.4)
        else:
            options[f"{side}_scale"] = q.shape[-1] ** -0.5
        if fixed.chance(0.2):
            options[f"{side}_softcap"] = s.one_of(1.5, 20.0)
        if fixed.chance(0.2):
            options[f"{side}_alibi_slopes"] = s.normal(count).abs() * s.one_of(0.1, 1.0)
        if fixed.chance(0.25):
            sink = s.normal(count) * s.one_of(1.0, 30.0)
            hidden = s.flags(count, p=0.2 if s.chance(0.2) else 0.0)
            sink = sink.to(torch.promote_types(q.dtype, torch.float32))
            tensors[f"{side}_sink"] = sink.masked_fill(hidden, -INF)
    if fixed.chance(0.3):
        options["is_causal"] = True
    if fixed.chance(0.3):
        options["window"] = (fixed.one_of(None, 0, 1, 4), fixed.one_of(None, 0, 2, 5))


def _add_masks(
    s: Source,
    options: dict[str, Any],
    full: tuple[int, int, int, int],
    teacher_heads: int,
    dtype: torch.dtype,
) -> None:
    fixed = s.fixed
    batch, heads, n, m = full
    kind = fixed.one_of("bool", "additive", "biases", None, None)
    if kind == "bool":
        options["attn_mask"] = s.flags(*fixed.broadcast(full, least=2))
    elif kind == "additive":
        shape = fixed.broadcast(full, least=2)
        if len(shape) > 2 and teacher_heads != heads:
            shape = (*shape[:-3], 1, *shape[-2:])
        options["attn_mask"] = s.extreme(s.normal(*shape)).to(dtype)
    elif kind == "biases":
        for side, count in (("student", heads), ("teacher", teacher_heads)):
            if fixed.chance(0.7):
                bias = s.extreme(s.normal(*fixed.broadcast((batch, count, n, m), least=2)))
                options[f"{side}_bias"] = bias.to(fixed.one_of(dtype, torch.float32))
    if fixed.chance(0.25):
        lengths = [s.whole(0, m) for _ in range(batch)]
        options["key_lengths"] = torch.tensor(
            lengths, dtype=fixed.one_of(torch.int32, torch.int64)
        )
    if s.chance(0.3):
        options["row_mask"] = s.flags(*s.broadcast((batch, heads, n)))


def _known_lse(tensors: dict[str, Tensor], options: dict[str, Any], layout: str) -> Tensor:
    named = {name: x.double() for name, x in tensors.items()}
    if "teacher_scale" in named:
        named["teacher_q"] = named["teacher_q"] * named["teacher_scale"]
        named["teacher_q"] = named["teacher_q"].to(options["dtype"]).double()
    if layout == "bnhd":
        named |= {f"teacher_{x}": named[f"teacher_{x}"].transpose(1, 2) for x in "qk"}
    wide = torch.float64 if options["dtype"] == torch.float64 else torch.float32
    return formulas.teacher_lse(named, options).to(wide)


def formula(call: Drawn, given: dict[str, Tensor], naive: bool) -> Tensor:
    """The right value of a call."""
    options = call.options
    rows = formulas.attention_rows(given, options, call.compute, naive)
    num = rows.shape[0]
    if options.get("cu_seqlens_q") is not None:
        rows, num = rows[0], len(options["cu_seqlens_q"]) - 1
    if options.get("row_mask") is not None:
        rows = torch.where(options["row_mask"], rows, 0.0)
    match options["reduction"]:
        case "mean":
            return rows.mean()
        case "sum":
            return rows.sum()
        case "batchmean":
            return rows.sum() / num
    return rows


def run(call: Drawn, given: dict[str, Tensor], impl: str) -> Tensor:
    """What an implementation makes of a call; "compiled" is the CPU's in compiled graphs."""
    device = given["student_q"].device
    options = {
        name: x.to(device) if isinstance(x, Tensor) else x
        for name, x in call.options.items()
        if name != "dtype"
    }
    function = attention_kl_varlen if "cu_seqlens_q" in options else attention_kl
    return function(**given, **options, impl="auto" if impl == "compiled" else impl)


@contextlib.contextmanager
def running(impl: str) -> Iterator[None]:
    """Inside, the operators run the implementation, forward and backward."""
    if impl != "compiled":
        yield
        return
    direct = mock.patch.object(interface.direct, "attention_kl", _compiled)
    with direct, mock.patch.object(compiled, "find", _as_written):
        yield


def _compiled(tensors: tuple[Any, ...], bound: Any) -> Tensor:
    value: Tensor = _Compiled.apply(tensors, bound.options, *ops.differentiable(tensors))
    return value


class _Compiled(torch.autograd.Function):
    """The operators as compiled graphs call them, bodies as they are written."""

    @staticmethod
    def forward(ctx: Any, tensors: Any, options: Any, *inputs: Any) -> Tensor:
        value, student_stats, teacher_stats = ops.run_compiled_forward(*tensors, *options)
        ctx.saved = (student_stats, teacher_stats, *tensors)
        ctx.options = options
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def gradients(wanted: Any, grad: Tensor, *saved: Any) -> Any:
            given = (grad, *saved[:2], list(wanted), *saved[2:])
            return ops.compiled_gradients(*given, *ctx.options)

        needs = ctx.needs_input_grad[2:]
        found = ops.gradients(grad.contiguous(), needs, ctx.saved, ctx.options, gradients)
        return None, None, *found


@contextlib.contextmanager
def small_blocks(call: Drawn) -> Iterator[None]:
    """Plain torch cuts the call's blocks as large problems are cut."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (torch_scores, "STREAMING_BLOCK_ELEMENTS", call.blocks["elements"]),
            (torch_scores, "STREAMING_MAX_KEYS", call.blocks["keys"]),
            (query_tiles, "QUERY_TILE_ELEMENTS", call.blocks["elements"]),
            (query_tiles, "LEAST_QUERIES", 2),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield
