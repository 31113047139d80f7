"""Divergence expressions: derivatives against autograd, coefficients, texts, limits."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from bench.offline import record_launches
from torch_streamkl.attention import ops
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.program.divergence_forms import Bilinear, bilinear
from torch_streamkl.program.divergences import (
    DIVERGENCES,
    Functional,
    derivative,
    evaluate,
    named,
    parse,
    render,
)
from torch_streamkl.program.identities import LOG_P, LOG_S

EXPRESSIONS = (
    *DIVERGENCES.values(),
    named("js", 0.3).text,
    named("forward_kl", student_eps=1e-3, teacher_clamp=1e-2).text,
    "P*P/(S+0.5)",
    "P/(S*S+0.1)-S/(P+0.2)",
    "sqrt(P*S)",
    "exp(0.5*logP+0.25*logS)",
    "max(P,0.2)*min(logS,-0.7)",
    "where(ge(logP,-1.0),P*logS,S)",
    "abs(P-2.0*S)*logP",
    "logaddexp(logP,logS)*S",
    "log(P+S)*P",
)


def variables(log_p: Tensor, log_s: Tensor) -> dict[str, Tensor]:
    return {"P": log_p.exp(), "S": log_s.exp(), "logP": log_p, "logS": log_s}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_derivatives(text: str) -> None:
    logs = [(torch.rand(200, dtype=torch.float64) * -4).requires_grad_() for _ in range(2)]
    expr = parse(text)
    value = evaluate(expr, variables(*logs)).expand(200)
    expected = torch.autograd.grad(value.sum(), logs, allow_unused=True)
    plain = [x.detach() for x in logs]
    for variable, wanted in zip((LOG_P, LOG_S), expected, strict=True):
        found = evaluate(derivative(expr, variable), variables(*plain)).expand(200)
        wanted = torch.zeros_like(found) if wanted is None else wanted
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_text_is_read_back(text: str) -> None:
    expr = parse(text)
    assert parse(render(expr)) is expr
    assert Functional.of(render(expr)).text == render(expr)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("P*(logP-logS)", Bilinear(tt=1.0, ts=-1.0)),
        ("2.0*P*(logP-logS)+P*logP-0.5*S", Bilinear(tt=3.0, ts=-2.0, s=-0.5)),
        ("(P+S)*(logP-logS)/4.0", Bilinear(tt=0.25, ts=-0.25, st=0.25, ss=-0.25)),
        ("(P+P)*logS", Bilinear(ts=2.0)),
        ("(logP-logS)*(P-S)+(P-S)*(logP-logS)", Bilinear(tt=2.0, ts=-2.0, st=-2.0, ss=2.0)),
        ("0.0-P*logS", Bilinear(ts=-1.0)),
        # a product whose terms meet
        ("(logP+1.0)*(P-P*logP)+P*logP*logP", Bilinear(t=1.0)),
        ("P*P*logS", None),
        ("P/S", None),
    ],
)
def test_coefficients(text: str, expected: Bilinear | None) -> None:
    assert bilinear(parse(text)) == expected


def test_limits_of_js_are_the_two_kls() -> None:
    for beta, name in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        assert named("js", beta).text == named(name).text


def test_known_values() -> None:
    p, s = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.5], [0.25, 0.75]))
    at = variables(p.log(), s.log())
    kl = float((p * (p / s).log()).sum())
    back = float((s * (s / p).log()).sum())
    mean = (p + s) / 2
    js = float(0.5 * ((p * (p / mean).log()).sum() + (s * (s / mean).log()).sum()))
    expected = {"forward_kl": kl, "reverse_kl": back, "jeffreys": kl + back, "js": js, "tv": 0.25,
                "cross_entropy": float(-(p * s.log()).sum())}  # fmt: skip
    for name, value in expected.items():
        assert float(evaluate(named(name).expr, at).sum()) == pytest.approx(value)


def test_simplified_constants() -> None:
    for (a, b), op in itertools.product(((3.0, 2.0), (-1.5, 0.25)), "+-*/"):
        assert parse(f"{a}{op}{b}").value == eval(f"{a}{op}{b}")


@pytest.mark.parametrize("text", ["sqrt(S)*sqrt(P)", "sqrt(P)*S", "sqrt(S)-2*sqrt(S)*sqrt(P)"])
def test_roots_of_probabilities_have_gradients_at_a_masked_key(text: str) -> None:
    """Where the probability is 0 so is its root, and what flows back."""
    masked = torch.full((3,), -torch.inf, dtype=torch.float64)
    for variable in (LOG_P, LOG_S):
        found = evaluate(derivative(parse(text), variable), variables(masked, masked))
        torch.testing.assert_close(found, torch.zeros_like(masked))


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_derivatives_of_js(beta: float) -> None:
    """Its own terms: what the mixture's logarithm adds to both derivatives cancels."""
    js = named("js", beta)
    assert js.mixture is not None
    logs = (torch.rand(2, 300, dtype=torch.float64) * -30).unbind()
    for variable, given in ((LOG_S, js.student_grad), (LOG_P, js.teacher_grad)):
        assert "exp" not in render(given).replace("logaddexp", "")
        expected = evaluate(derivative(js.expr, variable), variables(*logs))
        torch.testing.assert_close(evaluate(given, variables(*logs)), expected)


@pytest.mark.parametrize(
    "text",
    [
        "P*(logP-logaddexp(logP,logS))",
        "0.5*(P*(logP-logaddexp(logP-0.1,logS-0.1)))+0.5*(S*(logS-logaddexp(logP-0.1,logS-0.1)))",
        named("js", student_clamp=1e-6).text,
    ],
)
def test_what_is_no_mixture(text: str) -> None:
    functional = Functional.of(text)
    assert functional.mixture is None
    assert functional.student_grad == derivative(functional.expr, LOG_S)


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        (named("tv").text, 0.5),
        ("abs(S-P)", 1.0),
        ("abs(P-S)+P", None),
        ("abs(P-0.5*S)", None),
        ("0*abs(P-S)", None),
    ],
)
def test_what_is_a_variation(text: str, factor: float | None) -> None:
    functional = Functional.of(text)
    assert functional.variation == factor
    if factor is not None:
        logs = (torch.rand(2, 300, dtype=torch.float64) * -30).unbind()
        value, h, g = functional.sums(variables(*logs))
        torch.testing.assert_close(h + g, value)  # the third of the sums is not kept


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (named("forward_kl", student_eps=1e-8, teacher_eps=1e-6).text, (1e-6, 1e-8, True)),
        (named("reverse_kl", student_eps=1e-8, teacher_eps=1e-6).text, (1e-8, 1e-6, False)),
        (named("forward_kl", student_eps=1e-8).text, None),
        ("P*(log(S+0.1)-log(P+0.1))", None),
        ("P*(log(P+0.1)-log(P+0.2))", None),
        ("P*(log(P+1e-20)-log(S+1e-20))", None),  # their product is too small
    ],
)
def test_what_is_a_quotient_of_lifted_probabilities(
    text: str, found: tuple[float, float, bool] | None
) -> None:
    functional = Functional.of(text)
    quotient = functional.quotient
    assert (quotient and astuple(quotient)) == found
    if quotient is not None:
        logs = (torch.rand(2, 300, dtype=torch.float64) * -30).unbind()
        value, h, g = functional.sums(variables(*logs))
        own, other = (x.exp() for x in (logs if quotient.by_teacher else logs[::-1]))
        of_own, of_other = (g, h) if quotient.by_teacher else (h, g)
        # NOTE [Sums of known functionals] in attention/hopper/second_pass.py
        e, f = quotient.own_eps, quotient.other_eps
        torch.testing.assert_close(value + own - own * e / (own + e), of_own)
        torch.testing.assert_close(own * f / (other + f) - own, of_other)


@pytest.mark.parametrize(
    ("text", "jumps"),
    [
        (DIVERGENCES["tv"], True),
        ("min(P,S)", True),
        ("where(ge(logP,logS),P,S)", True),
        (named("js").text, False),
        (named("forward_kl", student_clamp=1e-2).text, False),  # by no more than 0.01
    ],
)
def test_what_is_compiled_without_contraction(text: str, jumps: bool) -> None:
    """Forward and backward must agree on which of P and S is larger: runtime.launch.APART."""
    functional = Functional.of(text)
    assert functional.has_jumps == jumps
    with record_launches("sm_90") as launches:
        tensors = [torch.empty(1, 1, 64, 64, device="cuda") for _ in range(4)]
        problem, _ = problem_of(*tensors, functional=functional.text, impl="triton")
        _, stats = ops.forward(problem)
        ops.backward(problem, stats, torch.empty(1, 1, 64, device="cuda"), [True] * 4)
    assert {x.options["enable_fp_fusion"] for x in launches} == {not jumps}
