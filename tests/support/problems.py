"""Distillation calls as values: a `Spec` says what a call looks like, `build` makes its tensors.

`CASES` names one spec for every feature. Every implementation is tested on all of them, and the
feature table in the README is made from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torch_streamkl import attention_kl, attention_kl_varlen
from torch_streamkl.attention import ops
from torch_streamkl.divergences.names import functional_text

INPUTS = ("student_q", "student_k", "teacher_q", "teacher_k")
OPTIONS = (  # that a spec has as the operator's argument has it
    "divergence", "beta", "student_eps", "teacher_eps", "student_clamp", "teacher_clamp",
    "temperature", "student_scale", "teacher_scale", "student_softcap", "teacher_softcap",
    "is_causal", "window", "reduction",
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One call. Broadcast shapes are four flags: which of batch, heads, rows, keys are present."""

    batch: int = 1
    heads: int = 1
    teacher_heads: int = 0  # 0 is the student's; more of them are averaged
    student_kv_heads: int = 0  # 0 is one for every head
    teacher_kv_heads: int = 0
    seqlen_q: int = 19
    seqlen_k: int = 37
    student_dim: int = 16
    teacher_dim: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "bhnd"
    strides: str = "contiguous"  # "contiguous", "transposed" or "padded"
    divergence: str = "forward_kl"
    beta: float = 0.5
    student_eps: float = 0.0
    teacher_eps: float = 0.0
    student_clamp: float = 0.0
    teacher_clamp: float = 0.0
    temperature: float = 1.0
    student_scale: float | str | None = None  # "tensor" is a learned scale
    teacher_scale: float | None = None
    student_softcap: float | None = None
    teacher_softcap: float | None = None
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: str | None = None  # "bool", "additive" or "filled" (a finite value where False)
    mask_shape: tuple[bool, bool, bool, bool] = (True, False, True, True)
    mask_density: float = 0.7
    padding: str | None = None  # keys that a mask removes besides: "left", "right" or "both"
    key_lengths: bool = False
    row_mask: bool = False
    student_bias: tuple[bool, bool, bool, bool] | None = None
    teacher_bias: tuple[bool, bool, bool, bool] | None = None
    student_alibi: bool = False
    teacher_alibi: bool = False
    student_sink: bool = False
    teacher_sink: bool = False
    known_lse: bool = False
    packed: tuple[tuple[int, int], ...] | None = None  # (rows, keys) of each sequence
    reduction: str = "none"
    score_size: float = 1.0  # standard deviation of q
    seed: int = 0

    @property
    def num_teacher_heads(self):
        return self.teacher_heads or self.heads

    @property
    def head_mean(self):
        return bool(self.teacher_heads)


@dataclass
class Call:
    """Tensors and options of one call, and where its values and gradients come from."""

    spec: Spec
    tensors: dict[str, Tensor]  # differentiable
    options: dict[str, Any]
    fill: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype=None, device=None):
        """The same call with other tensors; options that are tensors keep their dtype."""

        def move(x):
            return x.to(device) if isinstance(x, Tensor) and device is not None else x

        tensors = {
            name: _moved(x.detach(), dtype, device).requires_grad_(x.requires_grad)
            for name, x in self.tensors.items()
        }
        options = {name: move(x) for name, x in self.options.items()}
        return replace(self, tensors=tensors, options=options, extra=dict(self.extra))

    def run(self, impl):
        """The value of the operator."""
        if self.fill is not None:
            return _run_filled(self, impl)
        function = attention_kl if self.spec.packed is None else attention_kl_varlen
        return function(**self.tensors, **self.options, impl=impl)

    def value_and_gradients(self, impl):
        return value_and_gradients(self, lambda call: call.run(impl))


def value_and_gradients(call, function):
    """Value, and gradients for a random gradient of the value, of a function of a call."""
    value = function(call)
    generator = torch.Generator().manual_seed(call.spec.seed + 1)
    weight = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    inputs = {name: x for name, x in call.tensors.items() if x.requires_grad}
    grads = torch.autograd.grad(
        value, list(inputs.values()), weight.to(value.device, value.dtype), allow_unused=True
    )
    results = {"value": value.detach()}
    for (name, x), grad in zip(inputs.items(), grads, strict=True):
        results[name] = torch.zeros_like(x) if grad is None else grad
    return results


def _run_filled(call, impl):
    # masked_fill with a finite value is a meaning of the operator that only the rewrite uses
    spec, t = call.spec, call.tensors
    options = {
        "functional": functional_text(*(getattr(spec, name) for name in OPTIONS[:6])),
        "student_scale": spec.student_dim**-0.5,
        "teacher_scale": spec.teacher_dim**-0.5,
        "mask": call.options["attn_mask"],
        "mask_value": call.fill,
        "head_mean": spec.head_mean,
        "student_sink": t.get("student_sink"),
        "teacher_sink": t.get("teacher_sink"),
    }
    if spec.is_causal:
        options["window_right"] = 0
    args = [t[name] for name in INPUTS]
    if impl == "reference":
        from torch_streamkl.attention import reference

        return reference.attention_kl_rows(ops.problem_of(*args, **options)[0])
    return ops.attention_kl(*args, **options, impl=impl)[0]


def _moved(x, dtype, device):
    """A copy that keeps the strides, gaps included."""
    dtype = dtype or x.dtype
    device = device or x.device
    if x.ndim < 3:
        return x.to(device, dtype, copy=True)
    length = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    # what lies between the rows must never be read
    storage = torch.full((length,), math.nan, dtype=dtype, device=device)
    return storage.as_strided(x.shape, x.stride()).copy_(x)


def build(spec):
    """Tensors of a spec, the same on every run."""
    generator = torch.Generator().manual_seed(spec.seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    if spec.packed is None:
        rows, keys, batch = spec.seqlen_q, spec.seqlen_k, spec.batch
    else:
        rows, keys = (sum(n[i] for n in spec.packed) for i in (0, 1))
        batch = 1
    student_kv = spec.student_kv_heads or spec.heads
    teacher_kv = spec.teacher_kv_heads or spec.num_teacher_heads
    shapes = {
        "student_q": (batch, spec.heads, rows, spec.student_dim),
        "student_k": (batch, student_kv, keys, spec.student_dim),
        "teacher_q": (batch, spec.num_teacher_heads, rows, spec.teacher_dim),
        "teacher_k": (batch, teacher_kv, keys, spec.teacher_dim),
    }
    tensors = {}
    for name, shape in shapes.items():
        x = randn(*shape) * (spec.score_size if name.endswith("q") else 1.0)
        x = _laid_out(x.to(spec.dtype), spec)
        tensors[name] = x.requires_grad_()
    options = {name: getattr(spec, name) for name in OPTIONS}
    if spec.student_scale == "tensor":
        options["student_scale"] = torch.tensor(0.3)
    for side, heads in (("student", spec.heads), ("teacher", spec.num_teacher_heads)):
        if getattr(spec, f"{side}_alibi"):
            options[f"{side}_alibi_slopes"] = torch.rand(heads, generator=generator) * 0.3
        if getattr(spec, f"{side}_sink"):
            tensors[f"{side}_sink"] = randn(heads).requires_grad_()
    if spec.row_mask:
        shape = (rows,) if spec.packed is not None else (batch, 1, rows)
        options["row_mask"] = torch.rand(shape, generator=generator) > 0.3
    if spec.head_mean:
        options["head_reduction"] = "mean"
    call = Call(spec, tensors, options)
    if spec.packed is not None:
        lengths = torch.tensor(spec.packed, dtype=torch.int32)
        for index, name in enumerate("qk"):
            offsets = torch.zeros(len(spec.packed) + 1, dtype=torch.int32)
            offsets[1:] = lengths[:, index].cumsum(0)
            options[f"cu_seqlens_{name}"] = offsets
            options[f"max_seqlen_{name}"] = int(lengths[:, index].max())
    else:
        options["layout"] = spec.layout
        _add_masks(spec, call, generator)
    if spec.known_lse:
        from tests.support.naive import teacher_log_sum_exp

        with torch.no_grad():
            options["teacher_lse"] = teacher_log_sum_exp(call.to(torch.float64)).float()
    return call


def _add_masks(spec, call, generator):
    full = (spec.batch, spec.heads, spec.seqlen_q, spec.seqlen_k)

    def shape_of(flags):
        return tuple(n if flag else 1 for n, flag in zip(full, flags, strict=True))

    if spec.mask is not None:
        shape = shape_of(spec.mask_shape)
        admitted = torch.rand(shape, generator=generator) < spec.mask_density
        if spec.padding is not None and shape[-1] > 1:
            admitted &= _not_padding(spec, (*shape[:-1], 1), generator)
        if spec.mask == "additive":
            bias = torch.randn(shape, generator=generator)
            call.options["attn_mask"] = bias.masked_fill(~admitted, -math.inf).to(spec.dtype)
        else:
            call.options["attn_mask"] = admitted
    if spec.mask == "filled":
        call.fill = -3.0
    if spec.key_lengths:
        lengths = torch.randint(0, spec.seqlen_k + 1, (spec.batch,), generator=generator)
        call.options["key_lengths"] = lengths.to(torch.int32)
    for side, heads in (("student", spec.heads), ("teacher", spec.num_teacher_heads)):
        flags = getattr(spec, f"{side}_bias")
        if flags is not None:
            shape = list(shape_of(flags))
            shape[1] = heads if flags[1] else 1
            bias = torch.randn(shape, generator=generator)
            call.options[f"{side}_bias"] = bias.to(spec.dtype)


def _not_padding(spec, shape, generator):
    """Keys of one piece, of any length; ``shape`` is that of its ends."""
    ends = torch.randint(0, spec.seqlen_k + 1, (2, *shape), generator=generator)
    start, stop = ends.sort(0).values
    keys = torch.arange(spec.seqlen_k)
    kept = torch.ones((*shape[:-1], spec.seqlen_k), dtype=torch.bool)
    if spec.padding != "right":
        kept &= keys >= start
    if spec.padding != "left":
        kept &= keys < stop
    return kept


def _laid_out(x, spec):
    """[batch, heads, rows, dim] as the call takes it."""
    padded = spec.strides == "padded"
    if spec.packed is not None:
        x = x[0].transpose(0, 1)
    elif spec.layout == "bnhd":
        x = x.transpose(1, 2)
    x = x.contiguous()
    if spec.strides == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    if padded:
        room = x.new_full((*x.shape[:-1], x.shape[-1] + 8), math.nan)
        x = room[..., : x.shape[-1]].copy_(x)
    return x


LONG = {"seqlen_q": 7, "seqlen_k": 130}
OF_KEYS = {"mask": "bool", "mask_shape": (True, False, False, True), "batch": 3}
PACKED = ((5, 18), (17, 1), (2, 35))

CASES = {
    "forward_kl": Spec(),
    "reverse_kl": Spec(divergence="reverse_kl"),
    "cross_entropy": Spec(divergence="cross_entropy"),
    "jeffreys": Spec(divergence="jeffreys"),
    "js": Spec(divergence="js", beta=0.3),
    "tv": Spec(divergence="tv"),
    "eps": Spec(student_eps=1e-3, teacher_eps=1e-2),
    "clamp_reached": Spec(student_clamp=2e-2, score_size=2.0),
    "clamp_not_reached": Spec(student_clamp=1e-9, teacher_clamp=1e-9),
    "causal": Spec(is_causal=True),
    "causal_more_rows_than_keys": Spec(is_causal=True, seqlen_q=37, seqlen_k=19),
    "window": Spec(window=(7, 3)),
    "window_causal": Spec(window=(9, None), is_causal=True),
    "mask_bool": Spec(mask="bool", batch=2, mask_shape=(True, False, True, True)),
    "mask_bool_per_head": Spec(heads=2, mask="bool", mask_shape=(False, True, True, True)),
    "mask_padding": Spec(mask="bool", batch=2, mask_shape=(True, False, False, True)),
    "mask_padding_right": Spec(**OF_KEYS, mask_density=1.0, padding="right", heads=2, seqlen_k=70),
    "mask_padding_left": Spec(
        **OF_KEYS,
        mask_density=1.0,
        padding="left",
        seqlen_k=70,
        window=(50, 2),
        student_clamp=1e-9,
    ),
    "mask_padding_holes": Spec(**OF_KEYS, mask_density=0.98, padding="both", divergence="js"),
    "mask_additive": Spec(heads=2, mask="additive", mask_shape=(False, True, True, True)),
    "mask_filled": Spec(mask="filled", mask_density=0.2),
    "key_lengths": Spec(batch=2, seed=3, key_lengths=True),
    "row_mask": Spec(row_mask=True),
    "varlen": Spec(heads=2, packed=PACKED),
    "varlen_causal": Spec(packed=PACKED, is_causal=True),
    "varlen_window": Spec(packed=PACKED, window=(4, 2), divergence="js"),
    "softcap": Spec(student_softcap=2.0, teacher_softcap=5.0, score_size=2.0),
    "temperature": Spec(temperature=2.5),
    "temperature_softcap": Spec(temperature=2.5, student_softcap=2.0, score_size=2.0),
    "scale": Spec(student_scale=0.1, teacher_scale=0.7),
    "scale_tensor": Spec(student_scale="tensor"),
    "bias": Spec(
        heads=2, student_bias=(False, True, True, True), teacher_bias=(True, False, False, True)
    ),
    "alibi": Spec(
        heads=2, student_alibi=True, teacher_alibi=True, is_causal=True, temperature=1.5
    ),
    "sink": Spec(heads=2, student_sink=True, teacher_sink=True),
    "sink_student": Spec(student_sink=True, divergence="reverse_kl", is_causal=True),
    "sink_teacher_two_pass": Spec(teacher_sink=True, divergence="js", temperature=2.0),
    "gqa": Spec(heads=4, student_kv_heads=2, teacher_kv_heads=1, seqlen_q=9),
    "mqa": Spec(heads=3, student_kv_heads=1, teacher_kv_heads=3, seqlen_q=9),
    "gqa_few_queries": Spec(
        batch=2,
        heads=6,
        student_kv_heads=2,
        teacher_kv_heads=2,
        seqlen_q=3,
        layout="bnhd",
        mask="bool",
        mask_shape=(True, False, False, True),
        student_bias=(True, False, False, True),
    ),
    "mqa_one_query": Spec(
        heads=5,
        student_kv_heads=1,
        teacher_kv_heads=1,
        seqlen_q=1,
        is_causal=True,
        divergence="js",
        key_lengths=True,
        teacher_softcap=5.0,
    ),
    "mqa_causal": Spec(
        heads=6, student_kv_heads=1, teacher_kv_heads=1, seqlen_q=37, seqlen_k=40, is_causal=True
    ),
    "head_mean": Spec(heads=1, teacher_heads=3),
    "head_mean_groups": Spec(
        heads=2,
        teacher_heads=4,
        teacher_kv_heads=2,
        divergence="reverse_kl",
        is_causal=True,
        seqlen_q=9,
    ),
    "head_mean_guards": Spec(
        heads=1, teacher_heads=2, divergence="jeffreys", teacher_clamp=1e-2, student_eps=1e-3
    ),
    "head_mean_filled": Spec(teacher_heads=2, mask="filled", mask_density=0.2, teacher_sink=True),
    "teacher_lse": Spec(heads=1, teacher_heads=2, known_lse=True, is_causal=True),
    "layout_bnhd": Spec(layout="bnhd", heads=2),
    "strides": Spec(strides="transposed", heads=2),
    "strides_padded": Spec(strides="padded"),
    "head_dims": Spec(student_dim=24, teacher_dim=40),
    "split_keys": Spec(**LONG),
    "split_keys_two_pass": Spec(**LONG, divergence="js", window=(100, None), is_causal=True),
    "split_keys_clamp": Spec(**LONG, student_clamp=3e-3, mask="bool"),
    "split_keys_padding": Spec(**LONG, **OF_KEYS, mask_density=1.0, padding="both"),
    "reduction": Spec(reduction="batchmean", batch=2),
}
