"""A drawn call: its tensors and options, what it should give, and who computes that.

Tolerances are computed, as in tests/support/tolerances.py: twice what the formula in the call's
own precision is off by, and a few roundings of what each result is a difference of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.fuzz.drawn import formulas
from tests.fuzz.drawn.formulas import AmbiguousError

Results = dict[str, Tensor]


@dataclass
class Drawn:
    """One call; ``tensors`` are those that may have a gradient, by the names of arguments."""

    kind: str  # "attention" or "linear"
    seed: int
    dtype: torch.dtype  # of the student's operands
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    trained: tuple[str, ...]  # tensors with a gradient
    blocks: dict[str, int] = field(default_factory=dict)  # sizes of blocks in plain torch

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def num_rows(self) -> int:
        q = self.tensors[f"student_{_OPERANDS[self.kind][0]}"]
        return math.prod(q.shape[:-1])

    def __str__(self) -> str:
        def shown(x: Any) -> str:
            if not isinstance(x, Tensor):
                return repr(x)
            grad = ", grad" if x.requires_grad else ""
            return f"{str(x.dtype)[6:]}{list(x.shape)}{grad}"

        given = {**self.tensors, **{k: x for k, x in self.options.items() if x is not None}}
        listed = ", ".join(f"{name}={shown(x)}" for name, x in given.items())
        return f"{self.kind} call {self.seed}: {listed}; blocks {self.blocks}"


Formula = Callable[[dict[str, Tensor], bool], Tensor]  # of tensors, and whether to be naive


def leaves(call: Drawn, dtype: torch.dtype | None, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors, in one precision if that is given, with their gradients to be."""
    made = {}
    for name, x in call.tensors.items():
        # strides are kept: layouts are drawn as well
        copied = x.detach().clone(memory_format=torch.preserve_format)
        copied = copied.to(device) if dtype is None else copied.to(device, dtype)
        made[name] = copied.requires_grad_(name in call.trained)
    return made


def upstream(call: Drawn, value: Tensor, left_out: Tensor) -> Tensor:
    """The gradient of the value: random, and 0 in rows that are infinite or left out."""
    generator = torch.Generator().manual_seed(call.seed)
    grad = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return grad.masked_fill(~value.detach().double().cpu().isfinite() | left_out, 0.0)


def _undecided(masks: list[Tensor], value: Tensor) -> Tensor:
    """Which elements of a value rounding decides; packed sequences come one after another."""
    undecided = torch.cat(masks, dim=-1)
    if not undecided.any():
        return torch.zeros(value.shape, dtype=torch.bool)
    if undecided.numel() != value.numel():  # they are in a sum
        raise AmbiguousError
    return undecided.view(value.shape)


def results(call: Drawn, given: dict[str, Tensor], value: Tensor, grad: Tensor) -> Results:
    """The value, and the gradients to the trained tensors."""
    found = {"value": value.detach()}
    # an infinite sum has no gradient to compare
    if value.requires_grad and (value.ndim or bool(grad != 0)):
        inputs = {name: given[name] for name in call.trained}
        grads = torch.autograd.grad(
            value, list(inputs.values()), grad.to(value.device, value.dtype), allow_unused=True
        )
        for (name, x), g in zip(inputs.items(), grads, strict=True):
            found[name] = torch.zeros_like(x) if g is None else g
            if g is not None:
                assert g.dtype == x.dtype and g.shape == x.shape, f"{name}: {g.dtype} {g.shape}"
    return found


@dataclass
class Truth:
    """What a call gives, and by how much an implementation may differ."""

    results: Results
    atol: dict[str, float]
    grad: Tensor
    undecided: Tensor  # elements of the value that may be infinite or not


def truth_of(call: Drawn, formula: Formula, *, of_kernels: bool = False) -> Truth:
    """Raises AmbiguousError where rounding decides.

    ``of_kernels``: those for attention have log-sum-exps in float32. Where a value takes a second
    pass, all probabilities of a row are off by half a unit of it, and so is the row.
    """
    exact_given = leaves(call, torch.float64)
    formulas.Undecided.clear()
    value = formula(exact_given, False)
    undecided = _undecided(formulas.Undecided.value, value)
    grad = upstream(call, value, undecided | _undecided(formulas.Undecided.gradient, value))
    largest_lse = formulas.Undecided.largest_lse
    exact = results(call, exact_given, value, grad)
    naives = [_naive(call, formula, grad)]
    if call.dtype.itemsize == 2:
        with mock.patch.object(formulas.GradientRounded, "is_worst", True):
            naives.append(_naive(call, formula, grad))
    for x in (*exact.values(), *(x for naive in naives for x in naive.values())):
        if bool(x.isnan().any()) and x is not exact["value"]:
            raise AmbiguousError
    accumulation = torch.finfo(call.compute).eps
    scores = max(_largest_score(call, side) for side in ("student", "teacher"))
    scores = max(scores, largest_lse)
    size_of_value = _largest(exact["value"])
    atol = {}
    for name, want in exact.items():
        own = accumulation if name == "value" else torch.finfo(call.tensors[name].dtype).eps
        error = 0.0
        for naive in naives:
            finite = want.isfinite() & naive[name].isfinite()
            error = max(error, _largest((naive[name].double() - want)[finite]))
        size = _largest(want)
        if name == "value":
            inner = (scores + _largest_row(call, formula)) * _sum_of_rows(call)
            if of_kernels and _takes_two_passes(call):
                inner *= 1.0 + size
        elif name == "row_weight":
            inner, terms = _of_rows(call, formula, grad, scores)
            size += terms * (1.0 + call.num_rows / 2)  # they and their sums may be rounded
        else:
            inner = _partner(call, name) * (1.0 + size_of_value) * max(1.0, _largest(grad))
        units = 8.0 + (0.0 if name in ("value", "row_weight") else scores)
        if name != "value" and 4 * size > torch.finfo(call.tensors[name].dtype).max:
            raise AmbiguousError
        atol[name] = 2 * error + 2 * size * own + units * accumulation * (inner + size)
        if name.endswith("_scale") or (call.kind == "linear" and name.endswith("_bias")):
            # of gradients to queries or logits, which are rounded
            atol[name] += torch.finfo(call.dtype).eps / 2 * inner
    return Truth(exact, atol, grad, undecided)


def _naive(call: Drawn, formula: Formula, grad: Tensor) -> Results:
    given = leaves(call, call.compute)
    return results(call, given, formula(given, True), grad)


def _of_rows(call: Drawn, formula: Formula, grad: Tensor, scores: float) -> tuple[float, float]:
    """Of a gradient to row weights: what rounding the rows makes of it, and its largest sum.

    The gradient to a weight is a sum of per-row values, which may cancel, and which the result,
    where the weight is 0, says nothing of.
    """
    given = leaves(call, torch.float64)
    shape = call.tensors["student_hidden"].shape[:-1]
    weight = given["row_weight"].detach().expand(shape).clone().requires_grad_()
    value = formula({**given, "row_weight": weight}, False)
    (terms,) = torch.autograd.grad(value, weight, grad.to(value.dtype))
    terms = terms.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = _largest(terms.sum_to_size(call.tensors["row_weight"].shape))
    return scores * max(1.0, _largest(grad)) * (call.num_rows + 1.0), largest


def _takes_two_passes(call: Drawn) -> bool:
    options = call.options
    guards = [options.get(f"{s}_{x}") for s in ("student", "teacher") for x in ("eps", "clamp")]
    is_pointwise = options["divergence"] in ("js", "tv") or any(guards)
    is_mean = options.get("head_reduction") is not None
    return call.kind == "attention" and (is_pointwise or is_mean)


def _largest_row(call: Drawn, formula: Formula) -> float:
    """The largest value of a row that is in a sum, of which cancellation may leave little."""
    if call.options.get("reduction", "none") == "none":
        return 0.0
    with mock.patch.dict(call.options, reduction="none"), torch.no_grad():
        return _largest(formula(leaves(call, torch.float64), False))


def _sum_of_rows(call: Drawn) -> float:
    """What the rounding of a row becomes in a sum of rows, each of which has its own.

    Roundings of n rows, each at most r, with signs that do not depend on each other, sum to more
    than k sqrt(n) r with a probability of at most 2 exp(-k^2 / 2) (Hoeffding): with the 8 units
    that a row is allowed, once in 10^13 calls. A sum that is off in one direction is off by n r,
    and is found.
    """
    if call.options.get("reduction") not in ("sum", "batchmean"):
        return 1.0
    if call.options["reduction"] == "sum":
        return math.sqrt(call.num_rows + 1)
    is_packed = call.options.get("cu_seqlens_q") is not None
    batch = call.tensors[f"student_{_OPERANDS[call.kind][0]}"].shape[0]
    batch = len(call.options["cu_seqlens_q"]) - 1 if is_packed else batch
    return max(1.0, math.sqrt(call.num_rows + 1) / max(batch, 1))


def _largest(x: Tensor) -> float:
    finite = x.detach().double()[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


_OPERANDS = {"attention": ("q", "k"), "linear": ("hidden", "weight")}


def _factor(call: Drawn, side: str) -> float:
    name = "scale" if call.kind == "attention" else "logit_scale"
    scale = call.options.get(f"{side}_{name}")
    if f"{side}_scale" in call.tensors:
        scale = _largest(call.tensors[f"{side}_scale"])
    return abs(1.0 if scale is None else scale) / call.options.get("temperature", 1.0)


def _largest_score(call: Drawn, side: str) -> float:
    """Of keys whose probability is not 0: bound by norms, and by the softcap."""
    a, b = (call.tensors[f"{side}_{x}"].detach().double() for x in _OPERANDS[call.kind])
    if not a.numel() or not b.numel():
        return 1.0
    products = float(a.norm(dim=-1).max() * b.norm(dim=-1).max()) * _factor(call, side)
    return products + math.log(b.shape[0] * b.shape[-2] + 1) + 10.0


def _partner(call: Drawn, name: str) -> float:
    """Size of what a score's gradient is multiplied by and summed over, to be this tensor's."""
    side, what = name.split("_", 1)
    first, second = _OPERANDS[call.kind]
    operands = {x: _largest(call.tensors[f"{side}_{x}"]) for x in (first, second)}
    num_rows = math.prod(call.tensors[f"{side}_{first}"].shape[:-1])
    factor = _factor(call, side)
    if what == first:
        return operands[second] * factor
    if what == second:
        return operands[first] * factor * math.sqrt(num_rows + 1)
    if what == "scale":
        return operands[first] * operands[second] * factor * num_rows
    return factor * num_rows + 1.0  # a bias, a sink


def difference(found: Results, truth: Truth) -> str | None:
    """How results differ from the truth, or None."""
    for name, want in truth.results.items():
        if name not in found:
            return f"{name}: no gradient"
        got = found[name].double().cpu()
        if got.shape != want.shape:
            return f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
        if name == "value":
            want = torch.where(truth.undecided & ~got.isnan(), got, want)
        if not torch.equal(got.isnan(), want.isnan()):
            return f"{name}: {int(got.isnan().sum())} NaN, not {int(want.isnan().sum())}"
        finite = want.isfinite()
        if not torch.equal(got[~finite].nan_to_num(0.5), want[~finite].nan_to_num(0.5)):
            return f"{name}: infinities differ"
        error = _largest_difference(got[finite], want[finite])
        if not error <= truth.atol[name]:
            return f"{name}: off by {error:.3e}, allowed {truth.atol[name]:.3e}"
    return None


def _largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0
