"""Runs the examples of docs/guide/row-programs.md and naive code, at any size and dtype."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_streamkl
from torch_streamkl.rows import torch_impl
from torch_streamkl.rows.problem import RowProblem

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "row-programs.md"
SCALE = 0.4


def examples() -> dict[str, Any]:
    """The functions of the page."""
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, scope)
    return scope


EXAMPLES = examples()


def example(name: str, impl: str, **options: Any) -> Callable[..., Tensor]:
    """An example with another implementation, and further arguments."""
    scope = dict(EXAMPLES)
    scope["row_program"] = functools.partial(torch_streamkl.row_program, impl=impl, **options)
    function = EXAMPLES[name]
    return FunctionType(
        function.__code__, scope, name, function.__defaults__, function.__closure__
    )


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    heads: int = 4
    rows: int = 7
    keys: int = 9
    dim: int = 5
    spread: float = 1.0  # of the scores


@dataclass
class Case:
    """Tensors by name, and the naive code on them."""

    tensors: dict[str, Any]
    naive: Callable[..., Tensor]


def _leaves(shapes: dict[str, tuple[int, ...]], sizes: Sizes) -> dict[str, Tensor]:
    made = {}
    for name, shape in shapes.items():
        # not contiguous before the last dimension
        x = torch.randn(*shape[:-2], 2 * shape[-2], shape[-1], dtype=torch.float64)
        made[name] = (x[..., ::2, :] * math.sqrt(sizes.spread)).detach().requires_grad_()
    return made


def _two_maps(sizes: Sizes) -> dict[str, Any]:
    b, h, n, m, d = sizes.batch, sizes.heads, sizes.rows, sizes.keys, sizes.dim
    x = _leaves(
        {"tq": (b, h, n, d), "tk": (b, max(h // 2, 1), m, d), "sq": (b, h, n, d + 1),
         "sk": (b, h, m, d + 1)},
        sizes,
    )  # fmt: skip
    return {"teacher": (x["tq"], x["tk"]), "student": (x["sq"], x["sk"]), "scale": SCALE}


def _hidden(x: Tensor) -> float:
    """The score of an excluded key: of no probability, and a number in every dtype."""
    return max(-1e9, torch.finfo(x.dtype).min / 2)


def _scores(pair: tuple[Tensor, Tensor], scale: float, causal: bool = True) -> Tensor:
    q, k = pair
    x = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if not causal:
        return x
    keep = torch.ones(x.shape[-2:], dtype=torch.bool).tril(x.shape[-1] - x.shape[-2])
    return x.masked_fill(~keep, _hidden(x))


def _attention(name: str) -> Callable[[Sizes], Case]:
    def build(sizes: Sizes) -> Case:
        return Case(_two_maps(sizes), NAIVE[name])

    return build


def _xlog_ratio(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.where(p == 0, 0.0, p * torch.where(p == 0, 0.0, log_p - log_q)).sum(-1)


def _forward_kl(teacher: Any, student: Any, scale: float) -> Tensor:
    p, s = _scores(teacher, scale).log_softmax(-1), _scores(student, scale).log_softmax(-1)
    return _xlog_ratio(p.exp(), p, s)


def _js(teacher: Any, student: Any, scale: float) -> Tensor:
    p, s = _scores(teacher, scale).log_softmax(-1), _scores(student, scale).log_softmax(-1)
    m = 0.3 * p.exp() + 0.7 * s.exp()
    m = torch.where(m == 0, 1.0, m).log()
    return 0.3 * _xlog_ratio(p.exp(), p, m) + 0.7 * _xlog_ratio(s.exp(), s, m)


def _alpha_beta(teacher: Any, student: Any, scale: float) -> Tensor:
    log_p, log_s = (_scores(x, scale).log_softmax(-1) for x in (teacher, student))
    mixed = (0.5 * (0.75 * log_p).exp() + 0.25 * (0.75 * log_s).exp()) / 0.75
    return (mixed - (0.5 * log_p + 0.25 * log_s).exp()).sum(-1) / 0.125


def _mse_of_probabilities(teacher: Any, student: Any, scale: float) -> Tensor:
    p, s = (_scores(x, scale, causal=False).softmax(-1) for x in (teacher, student))
    return F.mse_loss(p, s, reduction="none").sum(-1)


def _mse_of_scores(teacher: Any, student: Any, scale: float, bias: Tensor) -> Tensor:
    t, s = (_scores(x, scale, causal=False) + bias for x in (teacher, student))
    t, s = torch.where(t <= -1e2, 0.0, t), torch.where(s <= -1e2, 0.0, s)
    return F.mse_loss(t, s, reduction="none").sum(-1)


def _mse_of_scores_case(sizes: Sizes) -> Case:
    tensors = _two_maps(sizes)
    bias = torch.zeros(sizes.batch, 1, 1, sizes.keys, dtype=torch.float64)
    bias[..., -1] = -1e4
    return Case({**tensors, "bias": bias}, _mse_of_scores)


def _weighted(teacher: Any, student: Any, scale: float, weight: Tensor) -> Tensor:
    w = weight[:, None, None]
    p, s = (_scores(x, scale).softmax(-1) * w for x in (teacher, student))
    p, s = p / (p.sum(-1, keepdim=True) + 1e-9), s / (s.sum(-1, keepdim=True) + 1e-9)
    unused = (p == 0) | (s == 0)
    p, s = torch.where(unused, 1.0, p), torch.where(unused, 1.0, s)
    return (p * (p.log() - s.log())).sum(-1)


def _weighted_case(sizes: Sizes) -> Case:
    weight = torch.rand(sizes.batch, sizes.keys, dtype=torch.float64) + 0.1
    weight[:, 1::3] = 0.0
    return Case({**_two_maps(sizes), "weight": weight}, _weighted)


def _indexer(attention: Any, index: Any, weight: Tensor, scale: float) -> Tensor:
    teacher = _scores(attention, scale).softmax(-1).sum(1)
    teacher = teacher / teacher.sum(-1, keepdim=True)
    q, k = index
    scores = (weight[..., None] * (q @ k.mT).relu()).sum(1)
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - q.shape[2])
    student = scores.masked_fill(~keep, _hidden(scores)).softmax(-1)
    return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).sum(-1)


def _indexer_case(sizes: Sizes) -> Case:
    b, n, m, d = sizes.batch, sizes.rows, sizes.keys, sizes.dim
    x = _two_maps(sizes)
    made = _leaves({"iq": (b, 3, n, d), "ik": (b, 1, m, d), "w": (1, b, 3, n)}, sizes)
    tensors = {
        "attention": x["teacher"],
        "index": (made["iq"], made["ik"]),
        "weight": made["w"].detach()[0].requires_grad_(),
        "scale": SCALE,
    }
    return Case(tensors, _indexer)


def _blocks(teacher: Any, student: Any, scale: float) -> Tensor:
    p, s = (_scores(x, scale).softmax(-1).sum(1) for x in (teacher, student))
    p, s = (torch.stack([y.sum(-1) for y in x.split(4, -1)], -1) for x in (p, s))
    p, s = (x / x.sum(-1, keepdim=True) for x in (p, s))
    return (p * ((p + 1e-10).log() - (s + 1e-10).log())).sum(-1)


def _heads(sizes: Sizes) -> dict[str, Any]:
    b, n, v, d = sizes.batch, sizes.rows, sizes.keys, sizes.dim
    x = _leaves({"th": (b, n, d), "tw": (v, d), "sh": (b, n, d + 2), "sw": (v, d + 2)}, sizes)
    return {"teacher": (x["th"], x["tw"]), "student": (x["sh"], x["sw"])}


def _ids(sizes: Sizes) -> Tensor:
    k = max(1, sizes.keys // 2)
    order = torch.rand(sizes.batch, sizes.rows, sizes.keys).argsort(-1)
    return order[..., :k]


def _labels(sizes: Sizes) -> Tensor:
    return torch.randint(sizes.keys, (sizes.batch, sizes.rows))


def _logits(pair: tuple[Tensor, Tensor]) -> Tensor:
    return F.linear(*pair)


def _ghost(teacher: Any, student: Any, ids: Tensor) -> Tensor:
    log_p, log_s = _logits(teacher).log_softmax(-1), _logits(student).log_softmax(-1)
    chosen = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, ids, True)
    kl = torch.where(chosen, log_p.exp() * (log_p - log_s), 0.0).sum(-1)
    p, s = (torch.where(chosen, 0.0, x.exp()).sum(-1) for x in (log_p, log_s))
    empty = p == 0  # with one vocabulary entry, nothing is left
    p, s = torch.where(empty, 1.0, p), torch.where(empty, 1.0, s)
    return kl + p * (p.log() - s.log())


def _cached(student: Any, ids: Tensor, log_p: Tensor) -> Tensor:
    log_s = _logits(student).log_softmax(-1).gather(-1, ids)
    return (log_p.exp() * (log_p - log_s)).sum(-1)


def _cached_case(sizes: Sizes) -> Case:
    ids = _ids(sizes)
    log_p = torch.randn(ids.shape, dtype=torch.float64).log_softmax(-1).detach().requires_grad_()
    tensors = {"student": _heads(sizes)["student"], "ids": ids, "log_p": log_p}
    return Case(tensors, _cached)


def _policy(policy: Any, labels: Tensor, reference_log_p: Tensor, advantage: Tensor) -> Tensor:
    log_s = _logits(policy).log_softmax(-1)
    log_p = log_s.gather(-1, labels[..., None])[..., 0]
    entropy = -_xlog_ratio(log_s.exp(), log_s, torch.zeros_like(log_s))
    difference = reference_log_p - log_p
    return -advantage * log_p + 0.1 * (difference.exp() - difference - 1) - 0.1 * entropy


def _policy_case(sizes: Sizes) -> Case:
    rows = (sizes.batch, sizes.rows)
    tensors = {
        "policy": _heads(sizes)["student"],
        "labels": _labels(sizes),
        "reference_log_p": -torch.rand(rows, dtype=torch.float64),
        "advantage": torch.randn(rows, dtype=torch.float64),
    }
    return Case(tensors, _policy)


def _dkd(teacher: Any, student: Any, labels: Tensor) -> Tensor:
    t, s = _logits(teacher) / 4.0, _logits(student) / 4.0
    hit = F.one_hot(labels, t.shape[-1]).bool()
    p, q = (x.softmax(-1) for x in (t, s))
    a, b = (x.masked_fill(hit, _hidden(x)).log_softmax(-1) for x in (t, s))
    others = _xlog_ratio(a.exp(), a, b)
    not_p, not_q = (torch.where(hit, 0.0, x).sum(-1) for x in (p, q))
    p, q = (torch.where(hit, x, 0.0).sum(-1) for x in (p, q))
    return (p * (p / q).log() + not_p * (not_p / not_q).log() + 8 * others) * 16


NAIVE: dict[str, Callable[..., Tensor]] = {
    "forward_kl": _forward_kl,
    "js": _js,
    "alpha_beta": _alpha_beta,
    "mse_of_probabilities": _mse_of_probabilities,
    "blocks_of_keys": _blocks,
}
CASES: dict[str, Callable[[Sizes], Case]] = {
    **{name: _attention(name) for name in NAIVE},
    "mse_of_scores": _mse_of_scores_case,
    "weighted_keys": _weighted_case,
    "indexer": _indexer_case,
    "top_k_with_ghost": lambda z: Case({**_heads(z), "ids": _ids(z)}, _ghost),
    "cached_top_k": _cached_case,
    "policy_loss": _policy_case,
    "z_loss": lambda z: Case(
        {"head": _heads(z)["student"]}, lambda head: _logits(head).logsumexp(-1) ** 2
    ),
    "dkd": lambda z: Case({**_heads(z), "labels": _labels(z)}, _dkd),
}


def leaves(tensors: dict[str, Any]) -> list[Tensor]:
    """Everything that requires a gradient."""
    found = []
    for x in tensors.values():
        for each in x if isinstance(x, tuple) else (x,):
            if isinstance(each, Tensor) and each.requires_grad:
                found.append(each)
    return found


def value_and_gradients(function: Callable[..., Tensor], case: Case) -> list[Tensor]:
    """The rows, and the gradients of their weighted sum to every leaf."""
    rows = function(**case.tensors)
    weight = torch.linspace(-1.0, 2.0, rows.numel(), dtype=rows.dtype, device=rows.device)
    inputs = leaves(case.tensors)
    loss = (rows * weight.view(rows.shape)).sum()
    return [rows.detach(), *torch.autograd.grad(loss, inputs)]


def cast(case: Case, dtype: torch.dtype, device: str = "cpu") -> Case:
    """The same problem in another dtype, its values rounded, and on another device."""

    def one(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(one(each) for each in x)
        if not isinstance(x, Tensor):
            return x
        if not x.is_floating_point():
            return x.to(device)
        return x.detach().to(device, dtype).requires_grad_(x.requires_grad)

    return Case({name: one(x) for name, x in case.tensors.items()}, case.naive)


def check_errors(
    name: str, impl: str, dtype: torch.dtype, sizes: Sizes | None = None, device: str = "cpu"
) -> None:
    """Values and gradients err by at most twice what naive code in the same dtype does.

    Naive code in float32 can be lucky on a small problem: a few roundings are allowed next to it.
    """
    torch.manual_seed(1)
    sizes = sizes or Sizes(rows=33, keys=65, dim=16)
    case = cast(CASES[name](sizes), dtype)
    truth = value_and_gradients(case.naive, cast(case, torch.float64))
    naive = value_and_gradients(case.naive, case)
    got = value_and_gradients(example(name, impl), cast(case, dtype, device))
    for i, (a, b, exact) in enumerate(zip(got, naive, truth, strict=True)):
        size = float(exact.abs().max())
        rounding = torch.finfo(torch.float32).eps * 8 * size
        if i:  # gradients are of the inputs' dtype
            rounding += torch.finfo(dtype).eps * size
        error = float((a.cpu().double() - exact).abs().max())
        finite = b.isfinite()  # naive code overflows in float16
        assert finite.any()
        assert error <= 2 * float((b.double() - exact)[finite].abs().max()) + rounding, (name, i)


def recorded(name: str, sizes: Sizes) -> RowProblem:
    """The problem that an example makes of its tensors."""
    seen: list[RowProblem] = []
    original = torch_impl.forward

    def spy(problem: RowProblem, is_differentiated: bool) -> Any:
        seen.append(problem)
        return original(problem, is_differentiated)

    with mock.patch.object(torch_impl, "forward", spy):
        EXAMPLES[name](**CASES[name](sizes).tensors)
    return seen[0]
