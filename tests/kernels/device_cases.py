"""A step of every operator and strategy, as a function of a seed and a device.

test_other_devices.py runs them while another device is the current one, test_replayed_launches.py
with and without recorded launches, and both of them and test_launches.py, of a few rows, on a CPU
in Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.problems import CASES, Spec, build
from torch_streamkl import checks, linear_kl, row_program
from torch_streamkl.rows import op
from torch_streamkl.runtime import capture, replay

Results = list[Tensor]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """``step(seed, device)`` gives values and gradients."""

    step: Callable[[int, str], Results]
    is_recorded: bool | None  # whether calls that repeat issue recorded launches, if it matters
    is_exact: bool = True  # whether it gives the same bits on every run


def normal(seed: int, device: str, *shapes: tuple[int, ...], dtype: Any = None) -> list[Tensor]:
    """The same numbers on every device; the interpreter multiplies no bfloat16."""
    make, usual = torch.Generator().manual_seed(seed), torch.float32 if device == "cpu" else BF16
    return [torch.randn(shape, generator=make).to(device, dtype or usual) for shape in shapes]


def weighted(value: Tensor, inputs: list[Tensor]) -> Results:
    """A value, and the gradients of its sum with another weight for each entry."""
    weight = torch.linspace(0.5, 2.0, value.numel(), device=value.device).view(value.shape)
    return [value.detach(), *torch.autograd.grad((value * weight).sum(), inputs)]


# ------------------------------------------------------------------------------------ attention_kl
def _attention(spec: Spec, impl: str, more: dict[str, Any], seed: int, device: str) -> Results:
    call = build(replace(spec, seed=seed)).to(device=device)
    call.options.update(more)
    return list(call.value_and_gradients(impl).values())


def attention(spec: Spec, impl: str = "triton", **more: Any) -> Case:
    step = functools.partial(_attention, spec, impl, more)
    is_exact = more.get("deterministic", True)
    is_simple = impl != "hopper" or spec == replace(HOPPER, is_causal=spec.is_causal)
    # a scale that is a tensor is no constant of a recording
    return Case(step, spec.student_scale != "tensor" if is_simple else None, is_exact)


# of every sequence of launches
PORTABLE = [
    "forward_kl", "js", "clamp_reached", "varlen_causal", "gqa", "gqa_few_queries", "head_mean",
    "split_keys", "bias", "key_lengths", "mask_bool", "sink", "scale_tensor",
]  # fmt: skip
HOPPER = Spec(
    batch=2, heads=4, student_kv_heads=2, teacher_kv_heads=2, dtype=BF16, student_dim=128,
    teacher_dim=128, seqlen_q=300, seqlen_k=517,
)  # fmt: skip
MEANS = Spec(
    batch=2, heads=2, teacher_heads=6, teacher_kv_heads=2, student_dim=64, teacher_dim=128,
    dtype=BF16, is_causal=True, seqlen_q=300, seqlen_k=517,
)  # fmt: skip
HOPPER_FORMS: dict[str, tuple[Spec, dict[str, Any]]] = {
    "full": (HOPPER, {}),
    "causal": (replace(HOPPER, is_causal=True), {}),
    "window": (replace(HOPPER, window=(100, 0)), {}),
    "js": (replace(HOPPER, divergence="js"), {}),
    "mask": (replace(HOPPER, mask="bool"), {}),
    "additive": (replace(HOPPER, mask="additive"), {}),
    "key_lengths": (replace(HOPPER, key_lengths=True), {}),
    "wide": (replace(HOPPER, student_dim=256, teacher_dim=192), {}),
    "few_rows": (replace(HOPPER, seqlen_q=1, seqlen_k=4096), {}),
    "varlen": (replace(HOPPER, packed=((300, 300), (129, 500)), is_causal=True), {}),
    "head_mean": (MEANS, {}),
    "any_order": (replace(HOPPER, student_dim=64, teacher_dim=64), {"deterministic": False}),
}
ATTENTION = {
    **{f"triton-{name}": attention(CASES[name]) for name in PORTABLE},
    **{f"hopper-{k}": attention(spec, "hopper", **x) for k, (spec, x) in HOPPER_FORMS.items()},
    "auto": attention(replace(HOPPER, seqlen_q=2048, seqlen_k=2048, batch=1), "auto"),
}


# --------------------------------------------------------------------------------------- linear_kl
TRAINED = ("student_hidden", "student_weight")
BOTH = (*TRAINED, "teacher_hidden", "teacher_weight")


def _linear(
    sizes: tuple[int, int, int], trained: tuple[str, ...], options: dict[str, Any], seed: int,
    device: str,
) -> Results:  # fmt: skip
    tokens, vocab, teacher_vocab = sizes if device != "cpu" else (3, 40, 40)
    options = dict(options)
    shapes = ((tokens, 64), (vocab, 64), (tokens, 48), (teacher_vocab, 48), (vocab,), (tokens,))
    *heads, bias, weight = normal(seed, device, *shapes)
    given: dict[str, Any] = dict(zip(BOTH, heads, strict=True))
    if options.pop("extras", False):
        labels = torch.arange(tokens, device=device) * 7 % vocab
        given |= {"student_bias": bias, "labels": labels, "row_weight": weight.float().abs()}
        trained = (*trained, "student_bias")
    for name in trained:
        given[name].requires_grad_()
    value = linear_kl(**given, **options, impl="triton")
    return weighted(value, [given[name] for name in trained])


def linear(
    sizes: tuple[int, int, int] = (200, 1000, 1000),
    trained: tuple[str, ...] = TRAINED,
    **options: Any,
) -> Case:
    return Case(functools.partial(_linear, sizes, trained, options), is_recorded=False)


LINEAR = {
    "mean": linear(reduction="mean"),
    "rows": linear(),
    "recompute": linear(reduction="mean", strategy="recompute"),
    "frozen_weight": linear(trained=TRAINED[:1], reduction="mean"),
    "frozen_hidden": linear(trained=TRAINED[1:], reduction="sum"),
    "both_sides": linear(trained=BOTH, reduction="mean"),
    "labels": linear((200, 1000, 900), reduction="mean", extras=True, temperature=2.0),
    "labels_of_rows": linear((200, 1000, 900), extras=True, hard_weight=0.5),
    "js": linear(reduction="mean", divergence="js", student_softcap=5.0),
    "chunks": linear((6000, 32000, 32000), reduction="mean"),
    "blocks": linear((2000, 16000, 16000), max_workspace_mib=32),
}


# ------------------------------------------------------------------------------------- row_program
def _maps(function: Callable[[Any], Any], seed: int, device: str, **options: Any) -> Results:
    b, h, m, n, d = (2, 4, 130, 150, 64) if device != "cpu" else (1, 4, 13, 21, 8)
    shapes = ((b, h, m, d), (b, h, n, d), (b, h, m, d), (b, 2, n, d), (b, h, m))
    tq, tk, sq, sk, w = normal(seed, device, *shapes)
    inputs = [sq.requires_grad_(), sk.requires_grad_(), w.float().requires_grad_()]
    dots = {"t": (tq, tk), "s": (sq, sk)}
    value = row_program(function, dots=dots, rows={"w": inputs[2]}, is_causal=True, **options)
    return weighted(value, inputs)


def squares(e: Any) -> Any:
    difference = (e.t * 0.125).softmax("key") - (e.s * 0.125).softmax("key")
    return (difference * difference).sum("key") * e.w


def indexer(e: Any) -> Any:
    p = (e.t * 0.125).softmax("key").sum("head")
    p = p / p.sum("key")
    s = (e.w * (e.s * 0.125).relu()).sum("head").log_softmax("key")
    return (p * ((p + 1e-10).log() - s)).sum("key")


def forward_kl(e: Any) -> Any:
    p, s = (e.t * 0.125).log_softmax("key"), (e.s * 0.125).log_softmax("key")
    return (p.exp() * (p - s)).sum("key") * e.w


def ghost(e: Any) -> Any:
    """Of the teacher's ids, and of all others together."""
    p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
    kl = torch.where(e.top, p.exp() * (p - s), 0.0).sum("key")
    rest_p = torch.where(e.top, 0.0, p.exp()).sum("key")
    rest_s = torch.where(e.top, 0.0, s.exp()).sum("key")
    return kl + rest_p * (rest_p.log() - rest_s.log())


def _heads(reduction: str, sizes: tuple[int, int], seed: int, device: str) -> Results:
    tokens, vocab = sizes if device != "cpu" else (13, 72)
    shapes = ((tokens, 64), (vocab, 64), (tokens, 48), (vocab, 48))
    h, w, th, tw = (x * 0.3 for x in normal(seed, device, *shapes))
    ids = (torch.arange(tokens * 8).view(tokens, 8) * 37 % vocab).to(device)
    inputs = [h.requires_grad_(), w.requires_grad_()]
    dots, options = {"t": (th, tw), "s": (h, w)}, {"reduction": reduction, "impl": "triton"}
    return weighted(row_program(ghost, dots=dots, columns={"top": ids}, **options), inputs)


def _maps_case(function: Callable[[Any], Any], impl: str = "triton") -> Case:
    return Case(functools.partial(_maps, function, impl=impl), impl == "triton")


ROW_PROGRAMS = {
    "tiles": _maps_case(squares),
    "indexer": _maps_case(indexer),
    "divergence": _maps_case(forward_kl, "auto"),  # runs as attention_kl does
    "heads_mean": Case(functools.partial(_heads, "mean", (200, 1000)), True),
    "heads_rows": Case(functools.partial(_heads, "none", (200, 1000)), True),
    "heads_chunks": Case(functools.partial(_heads, "mean", (6000, 32000)), None),
}


# ------------------------------------------------------------------------- shards of a vocabulary
def _shards(divergence: str, seed: int, device: str) -> Results:
    from tests.kernels.test_shard_kernels import problem, sharded
    from torch_streamkl.linear.triton import shards

    torch.manual_seed(seed)
    labels = torch.tensor([3, -100, 149, 0, 60])
    whole = problem(divergence, device=device, bias=True, labels=labels)
    out, gradients = sharded(whole, shards, [0, 40, 104, 150])
    return [out.value, out.hard, out.statistics, *(x for pair in gradients for x in pair)]


SHARDS = {
    name: Case(functools.partial(_shards, name), is_recorded=False)
    for name in ("forward_kl", "jeffreys", "js")
}
STEPS = {
    f"{operator}-{name}": case
    for operator, cases in (
        ("attention", ATTENTION),
        ("linear", LINEAR),
        ("rows", ROW_PROGRAMS),
        ("shards", SHARDS),
    )
    for name, case in cases.items()
}


# ---------------------------------------------------------------- naive losses that are compiled
def attention_in_a_model(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
    """Runs in a graph that Inductor compiles."""
    sq, sk = F.gelu(sq) * 2.0, torch.tanh(sk) * 2.0
    s, t = sq @ sk.mT * 0.125, tq @ tk.mT * 0.125
    keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    s, t = (x.masked_fill(~keep, -torch.inf) for x in (s, t))
    log_s, log_t = s.log_softmax(-1), t.log_softmax(-1)
    rows = F.kl_div(log_s, log_t, reduction="none", log_target=True)
    return torch.where(keep, rows, 0.0).sum(-1).mean() + (sq * sq).mean()


def squares_of_maps(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
    s, t = sq @ sk.mT * 0.125, tq @ tk.mT * 0.125
    return (s.softmax(-1) - t.softmax(-1)).square().sum(-1).mean()


def head_loss(h: Tensor, w: Tensor, th: Tensor, tw: Tensor) -> Tensor:
    s, t = h @ w.mT, th @ tw.mT
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def head_bounded(h: Tensor, w: Tensor, th: Tensor, tw: Tensor) -> Tensor:
    """No divergence of linear_kl."""
    s, t = (h @ w.mT).log_softmax(-1), (th @ tw.mT).log_softmax(-1)
    return (t.exp() * torch.sigmoid(t - s)).sum(-1).mean()


MAPS = ((2, 4, 192, 64),) * 4
LM_HEADS = ((192, 64), (1000, 64), (192, 48), (1000, 48))
COMPILED: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "attention_in_a_model": (attention_in_a_model, MAPS),
    "maps": (squares_of_maps, MAPS),
    "head": (head_loss, LM_HEADS),
    "head_bounded": (head_bounded, LM_HEADS),
}


def compiled_inputs(name: str, seed: int, device: str) -> list[Tensor]:
    """Of both sides, the student's with gradients."""
    x = normal(seed, device, *COMPILED[name][1], dtype=torch.float32)
    return [each.mul_(0.5).requires_grad_(i < 2) for i, each in enumerate(x)]


def judged(found: Results, eager: Results, exact: Results) -> Iterator[tuple[float, float]]:
    """The error of each result, and what it may be: twice eager's, and a few roundings."""
    for a, b, c in zip(found, eager, exact, strict=True):
        size = float(c.abs().max())
        rounding = 32 * torch.finfo(torch.float32).eps * size
        error, of_eager = (float((x.double() - c).abs().max()) for x in (a, b))
        yield error, 2 * of_eager + rounding


def same(found: Results, expected: Results, case: Case) -> None:
    bits = {"rtol": 0.0, "atol": 0.0} if case.is_exact else {}
    for x, y in zip(found, expected, strict=True):
        assert x.device == y.device
        torch.testing.assert_close(x, y, equal_nan=True, **bits)


# ------------------------------------------------------------------------------------- recordings
def forget() -> None:
    checks._verdicts.clear()
    op._calls.clear()


def watched_replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a recorded program whether it applied."""
    found: list[bool] = []
    record = capture.record

    def watched(*arguments: Any) -> Any:
        outputs, program = record(*arguments)
        if program is None:
            return outputs, None

        def replay(*tensors: Tensor | None) -> Any:
            results = program(*tensors)
            found.append(results is not None)
            return results

        return outputs, replay

    monkeypatch.setattr(capture, "record", watched)
    return found


def unrecorded(
    case: Case, device: str, num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> list[Results]:
    """Steps by the usual launches; a GPU that has not the kernels skips the test."""
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(replay, "RECORDS", False)
        try:
            found = [case.step(seed, device) for seed in range(num_seeds)]
        except NotImplementedError as error:
            pytest.skip(str(error))
    forget()
    return found
