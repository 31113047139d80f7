"""Error budgets: twice what the naive code in the same dtype errs by, plus rounding of results.

`truth` is the naive code in float64 on the same (already rounded) inputs. The naive float32 code
can be lucky on a small problem, so an output may also be off by a few units in the last place of
the quantities it is computed from, in the accumulation dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.naive import naive
from tests.support.problems import value_and_gradients


@dataclass(frozen=True)
class Budget:
    truth: dict[str, Tensor]
    atol: dict[str, float]


def budget(call):
    """Truth and the allowed absolute error of every output of a call."""
    truth = value_and_gradients(call.to(torch.float64), naive)
    same = value_and_gradients(call, naive)
    atol = {}
    score_size = max(_score_size(side, call) for side in ("student", "teacher"))
    for name, expected in truth.items():
        got = same[name].double()
        finite = expected.isfinite() & got.isfinite()
        error = float((got - expected)[finite].abs().max()) if finite.any() else 0.0
        size = float(expected[finite].abs().max()) if finite.any() else 0.0
        accumulation = torch.finfo(torch.promote_types(call.spec.dtype, torch.float32)).eps
        output = torch.finfo(call.spec.dtype).eps if name != "value" else accumulation
        inner = _cancelled_size(name, call, float(truth["value"].nan_to_num(0, 0, 0).abs().max()))
        # an exponent is off by the rounding of its score, and with it every probability
        units = 8.0 if name == "value" else 8.0 + score_size
        atol[name] = 2 * error + size * output + units * accumulation * (inner + size)
        atol[name] += _scale_rounding(name, call, inner, truth["value"])
    return Budget(truth, atol)


def _scale_rounding(output, call, inner, values):
    """What the rounding of q * scale to the inputs' dtype costs, where the scale is a tensor.

    Every score of a side is off by at most ``delta``. A divergence moves by at most sum |S - P|
    times that, which for KL(P || S) is at most sqrt(2 KL) delta (Pinsker).
    """
    sides = [s for s in ("student", "teacher") if isinstance(call.options[f"{s}_scale"], Tensor)]
    if not sides:
        return 0.0
    delta = torch.finfo(call.spec.dtype).eps / 2 * sum(_score_size(side, call) for side in sides)
    if output != "value":
        return 2 * delta * inner
    if call.spec.divergence != "forward_kl":
        return 2 * delta * (1.0 + inner)
    return delta * math.sqrt(2 * float(values.nan_to_num(0, 0, 0).abs().max()))


def _cancelled_size(output, call, value):
    """Size of what an output is a difference of: log-sum-exps, or shares of a row's gradient."""
    if output == "value":
        # a log-sum-exp is at most the largest score plus the logarithm of the number of keys
        num_keys = math.log(max(call.tensors["student_k"].shape[:-1]))
        return max(_score_size(side, call) for side in ("student", "teacher")) + num_keys
    if output.endswith("_sink"):
        return 1.0 + value
    side, kind = output.split("_")
    partner = call.tensors[f"{side}_{'k' if kind == 'q' else 'q'}"].detach().double().abs().max()
    return float(partner) * abs(_factor(side, call)) * (1.0 + value)


def _score_size(side, call):
    q, k = (call.tensors[f"{side}_{x}"].detach().double().norm(dim=-1).max() for x in "qk")
    return float(q * k) * abs(_factor(side, call))


def _factor(side, call):
    scale = call.options[f"{side}_scale"]
    head_dim = call.tensors[f"{side}_q"].shape[-1]
    return float(head_dim**-0.5 if scale is None else scale) / call.options["temperature"]


def check(results, allowed):
    """Every output is finite where the truth is and lies within its budget."""
    assert set(results) == set(allowed.truth)
    for name, expected in allowed.truth.items():
        got = results[name].detach().double().cpu()
        assert got.shape == expected.shape, (
            f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        )
        assert not got.isnan().any(), f"{name} has NaN"
        finite = expected.isfinite()
        assert torch.equal(got[~finite], expected[~finite]), f"{name}: infinities differ"
        error = float((got - expected)[finite].abs().max()) if finite.any() else 0.0
        assert error <= allowed.atol[name], (
            f"{name}: error {error:.3e} above the budget {allowed.atol[name]:.3e}"
        )


def check_call(call, impl, device="cpu"):
    """A call by an implementation is as exact as naive code on a CPU."""
    given = call if device == "cpu" else call.to(device=device)
    check(given.value_and_gradients(impl), budget(call))
