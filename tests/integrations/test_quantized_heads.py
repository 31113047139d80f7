"""Teachers and students with quantized LM heads: by plain code, and by torchao as installed.

A weight that the graph dequantizes is an operand like any other. torchao's tensor subclasses
compute products inside of themselves: the report says so, and that ``weight.dequantize()`` fuses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from torch_streamkl.fx_passes import backend

TOKENS, HIDDEN, TEACHER_HIDDEN, VOCAB, GROUP = 9, 16, 32, 48, 8


def made(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def operands() -> list[Tensor]:
    """Hidden states of the quantized side, and of the other one with its head."""
    sizes = (TOKENS, TEACHER_HIDDEN), (TOKENS, HIDDEN), (VOCAB, HIDDEN)
    return [made(*size, seed=i) for i, size in enumerate(sizes, 1)]


def kl(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


# ------------------------------------------------------------------------ plain code
def quantized(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = weight.abs().amax(1, keepdim=True) / largest
    return (weight / scale).round().to(dtype) if dtype == torch.int8 else (
        (weight / scale).to(dtype)
    ), scale  # fmt: skip


def before_the_product(x: Tensor, w8: Tensor, scale: Tensor) -> Tensor:
    return x @ (w8.to(x.dtype) * scale).T


def after_the_product(x: Tensor, w8: Tensor, scale: Tensor) -> Tensor:
    return (x @ w8.to(x.dtype).T) * scale.squeeze(1)


def by_groups(x: Tensor, w8: Tensor, scale: Tensor) -> Tensor:
    groups = w8.to(x.dtype).unflatten(1, (-1, GROUP)) * scale.view(-1, 1, 1)
    return F.linear(x, groups.flatten(1))


SPELLINGS = {
    "before_the_product": (before_the_product, {"linear_kl"}),
    "after_the_product": (after_the_product, {"row_program"}),
    "by_groups": (by_groups, {"linear_kl", "attention_kl"}),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("side", ["teacher", "student"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_weight_that_the_graph_dequantizes(spelling: str, side: str, dtype: torch.dtype) -> None:
    logits, kinds = SPELLINGS[spelling]
    w8, scale = quantized(made(VOCAB, TEACHER_HIDDEN, seed=0), dtype)
    x, y, w = operands()

    def program(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        of_x, of_y = logits(x, w8, scale), y @ w.T
        return kl(of_y, of_x) if side == "teacher" else kl(of_x, of_y)

    for z in (y, w) if side == "teacher" else (x,):
        z.requires_grad_()
    outcome = compare(program, [x, y, w, scale]).check_fused(1)
    assert outcome.kinds <= kinds, outcome.report


# ------------------------------------------------------------------------ torchao
def head(config: str) -> Any:
    ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    if not hasattr(ao, config):
        pytest.skip(f"this torchao has no {config}")
    linear = nn.Linear(TEACHER_HIDDEN, VOCAB, bias=False)
    linear.weight.data.copy_(made(VOCAB, TEACHER_HIDDEN, seed=0))
    ao.quantize_(linear, getattr(ao, config)())
    return linear


def step_of(linear: Any, side: str, spelling: str) -> Any:
    def logits(x: Tensor) -> Tensor:
        made: Tensor = (
            linear(x) if spelling == "the module" else F.linear(x, linear.weight.dequantize())
        )
        return made.float()

    def step(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        if side == "student":
            return kl(logits(x), (y @ w.T).float())
        with torch.no_grad():
            t = logits(x)
        return kl((y @ w.T).float(), t)

    return step


def run_both(step: Any, side: str) -> tuple[list[list[Tensor]], Any]:
    results = []
    with backend.collected() as report:
        for run in (step, compile_rewritten(step, inner="aot_eager")):
            x, y, w = operands()
            leaves = [y, w] if side == "teacher" else [x]
            for z in leaves:
                z.requires_grad_()
            loss = run(x, y, w)
            loss.backward()
            results.append([loss.detach(), *(z.grad for z in leaves if z.grad is not None)])
    return results, report


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "side"),
    every(
        3,
        [
            (c, s)
            for c in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
            for s in ("teacher", "student")
        ],
    ),
)
def test_torchao_weights(config: str, side: str) -> None:
    linear = head(config)
    results, report = run_both(step_of(linear, side, "the module"), side)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)  # nothing has changed
    (site,) = report.sites
    name = type(linear.weight).__name__
    assert f"computed by a tensor subclass, {name}" in site.reason, str(report)
    assert "weight.dequantize()) fuses" in site.hint, str(report)
    results, report = run_both(step_of(linear, side, "dequantized"), side)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)
    assert [(x.fused, x.kind) for x in report.sites] == [(True, "linear_kl")], str(report)
    assert report.num_remaining == 0, str(report)


@pytest.mark.filterwarnings("ignore")
def test_torchao_activations_that_are_quantized_too() -> None:
    """Its integers are no product of the hidden states: the code stays as it is."""
    linear = head("Int8DynamicActivationInt8WeightConfig")
    results, report = run_both(step_of(linear, "teacher", "the module"), "teacher")
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)
    (site,) = report.sites
    assert "computed by a tensor subclass, Int8Tensor" in site.reason, str(report)
