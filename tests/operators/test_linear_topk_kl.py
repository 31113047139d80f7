"""`linear_topk_kl` against a formula of its own, written token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torch_streamkl import linear_kl, linear_topk_kl
from torch_streamkl.linear.problem import Head
from torch_streamkl.program.divergences import named
from torch_streamkl.topk import chunks, sparse
from torch_streamkl.topk.problem import Places, TopkProblem

TAILS = ("none", "bucket", "renormalize")
DIVERGENCES = ("forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "tv", "js")
NAMES = ("hidden", "weight", "bias")


def kl(p: Tensor, s: Tensor) -> Tensor:
    return (p * (p.log() - s.log())).sum()


def distance(divergence: str, p: Tensor, s: Tensor, beta: float) -> Tensor:
    if divergence == "js" and beta in (0.0, 1.0):  # as in GKD
        divergence = "reverse_kl" if beta else "forward_kl"
    m = beta * p + (1 - beta) * s
    return {
        "forward_kl": lambda: kl(p, s),
        "reverse_kl": lambda: kl(s, p),
        "cross_entropy": lambda: -(p * s.log()).sum(),
        "jeffreys": lambda: kl(p, s) + kl(s, p),
        "tv": lambda: 0.5 * (p - s).abs().sum(),
        "js": lambda: beta * kl(p, m) + (1 - beta) * kl(s, m),
    }[divergence]()


def formula(
    tensors: dict[str, Tensor],
    ids: Tensor,
    log_probs: Tensor,
    *,
    tail: str = "none",
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """One value a token, from sets of vocabulary ids."""
    logits = tensors["hidden"] @ tensors["weight"].T
    if "bias" in tensors:
        logits = logits + tensors["bias"]
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    every = (logits / temperature).softmax(-1)
    values = []
    for row, own, logs in zip(every, ids.tolist(), log_probs.double(), strict=True):
        kept = [i for i, x in enumerate(own) if x >= 0 and logs[i] > -math.inf]
        named = [own[i] for i in kept]
        s, p = row[named], logs[kept].exp()
        if tail == "renormalize" and kept:
            s, p = s / s.sum(), p / p.sum()
        rest = [j for j in range(len(row)) if j not in named]
        if tail == "bucket" and rest:
            s = torch.cat([s, row[rest].sum()[None]])
            p = torch.cat([p, (1 - p.sum()).clamp_min(1e-7)[None]])
        values.append(distance(divergence, p, s, beta))
    return torch.stack(values)


def entries(num_tokens: int, vocab: int, k: int, padding: bool = True) -> tuple[Tensor, Tensor]:
    """Ids in no order, with padding of both kinds."""
    ids = torch.stack([torch.randperm(vocab)[:k] for _ in range(num_tokens)])
    log_probs = (2 * torch.randn(num_tokens, vocab)).log_softmax(-1).gather(1, ids)
    if padding:
        ids[0, k // 2] = -1
        log_probs[num_tokens // 2, 0] = -math.inf
        ids[-1] = -100
    return ids, log_probs


def head(
    num_tokens: int = 7, width: int = 9, vocab: int = 53, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    sizes = {"hidden": (num_tokens, width), "weight": (vocab, width), "bias": (vocab,)}
    return {name: torch.randn(size).to(dtype) for name, size in sizes.items()}


def leaves(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {k: x.to(dtype or x.dtype).detach().requires_grad_() for k, x in tensors.items()}


def outcome(value: Tensor, inputs: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
    (value * grad).sum().backward()
    return [value.detach(), *(x.grad for x in inputs.values())]


def check(
    tensors: dict[str, Tensor], ids: Tensor, log_probs: Tensor, impl: str, **options: Any
) -> None:
    """Value per token, and a weighted sum with gradients in the forward."""
    grad = torch.rand(len(ids), dtype=torch.float64)
    exact, mine, summed = (leaves(tensors) for _ in range(3))
    truth = outcome(formula(exact, ids, log_probs, **options), exact, grad)
    value = linear_topk_kl(**mine, ids=ids, log_probs=log_probs, impl=impl, **options)
    total = linear_topk_kl(
        **summed, ids=ids, log_probs=log_probs, impl=impl, reduction="sum", row_weight=grad,
        **options,
    )  # fmt: skip
    torch.testing.assert_close(total, (truth[0] * grad).sum())
    of_sum = outcome(total, summed, torch.ones((), dtype=torch.float64))
    for got, also, want in zip(outcome(value, mine, grad)[1:], of_sum[1:], truth[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(also, want, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(value.detach(), truth[0], rtol=1e-9, atol=1e-11)


@settings(max_examples=50)
@given(st.data())
def test_any_call(data: st.DataObject) -> None:
    """Independent draws of every option; ids may stand twice, or be all ids."""
    draw = data.draw
    num_tokens, width, vocab = (
        draw(st.sampled_from(x)) for x in ([1, 2, 7, 33], [1, 7], [2, 53, 65])
    )
    k = draw(st.integers(1, min(vocab, 6)))
    torch.manual_seed(draw(st.integers(0, 99)))
    tensors = head(num_tokens, width, vocab)
    if draw(st.booleans()):
        del tensors["bias"]
    if draw(st.booleans()):
        tensors["weight"] = tensors["weight"].T.contiguous().T
    ids, log_probs = entries(num_tokens, vocab, k, padding=draw(st.booleans()))
    options = {
        "tail": draw(st.sampled_from(TAILS)),
        "divergence": draw(st.sampled_from(DIVERGENCES)),
        "temperature": draw(st.sampled_from([1.0, 0.5, 2.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.7])),
        "softcap": draw(st.sampled_from([None, 2.0])),
    }
    if options["divergence"] == "js":
        options["beta"] = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    if options["tail"] != "bucket" and k > 2 and draw(st.booleans()):
        ids[:, 2], log_probs = ids[:, 0], log_probs - 1.0
    if options["tail"] == "renormalize" and draw(st.booleans()):
        log_probs = 3 * torch.randn(num_tokens, k)  # logits
    check(tensors, ids, log_probs, draw(st.sampled_from(["torch", "reference"])), **options)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", TAILS)
def test_tails_and_divergences(tail: str, divergence: str) -> None:
    check(head(), *entries(7, 53, 5), "torch", tail=tail, divergence=divergence)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_scale_of_0_makes_all_entries_equal(impl: str, softcap: float | None) -> None:
    """Also next to logits that a tail bucket hides by -inf."""
    for tail in TAILS:
        check(head(), IDS, LOGS, impl, tail=tail, logit_scale=0.0, softcap=softcap)


@pytest.mark.parametrize("tail", TAILS)
def test_bounded_memory(tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of tokens, and in the backward of the vocabulary, in a workspace of 1 MiB."""
    tensors, given = head(100, 4, 3000), entries(100, 3000, 5)
    sizes: list[int] = []

    def buffer(*args: Any) -> Tensor:
        made = original(*args)
        sizes.append(made.numel() * made.element_size())
        return made

    original = chunks.logits_buffer
    monkeypatch.setattr(chunks, "logits_buffer", buffer)
    mine, exact = leaves(tensors), leaves(tensors)
    for reduction in ("none", "mean"):
        value = linear_topk_kl(
            **mine, ids=given[0], log_probs=given[1], tail=tail, max_workspace_mib=1,
            reduction=reduction,
        )  # fmt: skip
        value.sum().backward()
    truth = formula(exact, *given, tail=tail)
    (truth.sum() + truth.mean()).backward()
    for name in NAMES:
        torch.testing.assert_close(mine[name].grad, exact[name].grad)
    assert max(sizes, default=0) <= 2**20
    assert bool(sizes) == (tail != "renormalize")  # which makes no row of logits


@pytest.mark.parametrize("tail", TAILS)
def test_tokens_that_do_not_count(tail: str) -> None:
    """Also those whose logits are huge, and whose entries are no entries."""
    tensors, (ids, log_probs) = head(), entries(7, 53, 5)
    counted = torch.tensor([True, False, True, True, False, True, True])
    exact = leaves(tensors)
    truth = formula(exact, ids, log_probs, tail=tail)[counted].mean()
    truth.backward()
    with torch.no_grad():
        tensors["hidden"][~counted] *= 1e30
        ids[1], log_probs[4] = 10**6, math.nan
    for impl, reduction in (("torch", "mean"), ("torch", "none")):
        mine = leaves(tensors)
        value = linear_topk_kl(
            **mine, ids=ids, log_probs=log_probs, tail=tail, row_mask=counted,
            reduction=reduction, impl=impl,
        )  # fmt: skip
        value = value if reduction == "mean" else value.sum() / 5
        value.backward()
        torch.testing.assert_close(value, truth)
        torch.testing.assert_close(mine["weight"].grad, exact["weight"].grad)
        kept = torch.where(counted[:, None], exact["hidden"].grad, 0.0)
        torch.testing.assert_close(mine["hidden"].grad, kept)


@pytest.mark.parametrize("tail", TAILS)
def test_leading_dimensions_and_log_probs(tail: str) -> None:
    tensors, (ids, log_probs) = head(12), entries(12, 53, 5)
    tensors["hidden"] = torch.randn(2, 9, 6, dtype=torch.float64).mT  # not contiguous
    shape = (2, 6, 5)
    value, log_s = linear_topk_kl(
        **tensors,
        ids=ids.int().view(shape),
        log_probs=log_probs.view(shape),
        tail=tail,
        return_log_probs=True,
    )
    flat = {**tensors, "hidden": tensors["hidden"].reshape(12, 9)}
    torch.testing.assert_close(value.flatten(), formula(flat, ids, log_probs, tail=tail))
    every = F.linear(*(flat[name] for name in NAMES)).log_softmax(-1)
    want = every.gather(1, ids.clamp_min(0))
    want = want.masked_fill((ids < 0) | (log_probs == -math.inf), -math.inf)
    if tail == "renormalize":
        want = want - want.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
    assert value.shape == (2, 6) and log_s.shape == (2, 6, 5)
    torch.testing.assert_close(log_s.view(12, 5), want)


def test_every_id_leaves_no_tail() -> None:
    tensors = head(3, 4, 6)
    log_probs, ids = torch.randn(3, 6).log_softmax(-1).topk(6)
    check(tensors, ids, log_probs, "torch", tail="bucket", divergence="jeffreys")


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
def test_tails_of_tiny_probability(divergence: str) -> None:
    """The student's tail has 1e-12: 1 minus the sum of the others would be rounding in float32."""
    tensors = head(3, 4, 40)
    tensors["hidden"] *= 0.01
    ids, log_probs = entries(3, 40, 5, padding=False)
    tensors["bias"].fill_(-30.0)
    tensors["bias"][ids[0]] = 0.0
    ids, log_probs = ids[:1].expand(3, 5), log_probs.log_softmax(-1)
    options: dict[str, Any] = {"tail": "bucket", "divergence": divergence}
    exact, mine = leaves(tensors), leaves(tensors, torch.float32)
    truth = formula(exact, ids, log_probs, **options)
    truth.sum().backward()
    value = linear_topk_kl(**mine, ids=ids, log_probs=log_probs, **options, reduction="sum")
    value.backward()
    torch.testing.assert_close(value.double(), truth.sum(), rtol=1e-5, atol=1e-6)
    for name in NAMES:
        want = exact[name].grad
        torch.testing.assert_close(mine[name].grad.double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_cached_logits_of_any_size_keep_their_digits(divergence: str, impl: str) -> None:
    ids, logits = entries(6, 53, 5)
    logits = logits.float() + 1e4
    options: dict[str, Any] = {"tail": "renormalize", "divergence": divergence}
    tensors, ones = head(6, dtype=torch.float32), torch.ones(6)
    exact, mine = leaves(tensors, torch.float64), leaves(tensors)
    truth = outcome(formula(exact, ids, logits.double() - 1e4, **options), exact, ones)
    value = linear_topk_kl(**mine, ids=ids, log_probs=logits, impl=impl, **options)
    for found, want in zip(outcome(value, mine, ones), truth, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tail", TAILS)
def test_low_precision(tail: str, dtype: torch.dtype) -> None:
    """At most twice the error of the naive code in the same dtype, and a rounding; peaked rows."""
    tensors, (ids, log_probs) = head(40, 16, 101, dtype), entries(40, 101, 6)
    with torch.no_grad():
        tensors["hidden"][3] *= 30.0
    options: dict[str, Any] = {"tail": tail, "divergence": "js"}
    given: dict[str, Any] = {"ids": ids, "log_probs": log_probs, **options}
    ways: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
        "truth": lambda x: formula(x, **given).mean(),
        "naive": lambda x: naive_code(x, ids, log_probs, tail).mean(),
        "rows": lambda x: linear_topk_kl(**x, **given).mean(),
        "mean": lambda x: linear_topk_kl(**x, **given, reduction="mean"),
    }
    results = {}
    for name, way in ways.items():
        mine = leaves(tensors, torch.float64 if name == "truth" else dtype)
        results[name] = outcome(way(mine), mine, torch.ones(()))
    for i, want in enumerate(results["truth"]):
        naive = (results["naive"][i].double() - want).abs().max()
        size = want.abs().max()
        for name in ("rows", "mean"):
            error = (results[name][i].double() - want).abs().max()
            eps = torch.finfo(results[name][i].dtype).eps
            assert error <= 2 * naive + 2 * eps * (1 + size), (name, i, error, naive)


def naive_code(tensors: dict[str, Tensor], ids: Tensor, log_probs: Tensor, tail: str) -> Tensor:
    """Trainers' code: logits in the models' dtype, all else in float32."""
    logits = (tensors["hidden"] @ tensors["weight"].T).float() + tensors["bias"].float()
    exists = (ids >= 0) & (log_probs > -math.inf)
    log_s = logits.log_softmax(-1).gather(1, ids.clamp_min(0)).masked_fill(~exists, -1e4)
    log_t = log_probs.float().masked_fill(~exists, -1e4)
    if tail == "renormalize":
        log_s, log_t = log_s.log_softmax(-1), log_t.log_softmax(-1)
    if tail == "bucket":
        log_s, log_t = (
            torch.cat([x, torch.log(-torch.expm1(x.logsumexp(-1, True).clamp_max(-1e-7)))], -1)
            for x in (log_s, log_t)
        )
        exists = F.pad(exists, (0, 1), value=True)
    p, s = log_t.exp(), log_s.exp()
    log_m = torch.logaddexp(log_t, log_s) - math.log(2.0)
    terms = 0.5 * (p * (log_t - log_m) + s * (log_s - log_m))
    return torch.where(exists, terms, 0.0).sum(-1)


# ------------------------------------------------------------------------ as an operator

IDS, LOGS = torch.arange(5).expand(7, 5), torch.full((7, 5), -2.0)


def test_products() -> None:
    """Logits once, and a product for each gradient; of renormalised losses k entries a token."""
    tensors, (ids, log_probs) = head(64, 32, 500), entries(64, 500, 5)
    del tensors["bias"]
    product = 2 * 64 * 32 * 500
    expected = {("none", "mean"): 3, ("bucket", "mean"): 3, ("bucket", "none"): 4}
    expected[("renormalize", "mean")] = 3 * 5 / 500
    for (tail, reduction), count in expected.items():
        mine = leaves(tensors)
        with FlopCounterMode(display=False) as counter:
            value = linear_topk_kl(
                **mine, ids=ids, log_probs=log_probs, tail=tail, reduction=reduction
            )
            value.sum().backward()
        assert counter.get_total_flops() == count * product, (tail, reduction)


def test_no_token() -> None:
    tensors = leaves({**head(), "hidden": torch.zeros(0, 9, dtype=torch.float64)})
    ids, log_probs = IDS[:0], LOGS[:0]
    for tail in TAILS:
        given: dict[str, Any] = {**tensors, "ids": ids, "log_probs": log_probs, "tail": tail}
        assert linear_topk_kl(**given).shape == (0,)
        assert linear_topk_kl(**given, return_log_probs=True)[1].shape == ids.shape
        total = linear_topk_kl(**given, reduction="sum")
        total.backward()
        assert total == 0 and linear_topk_kl(**given, reduction="mean").isnan()
        assert not tensors["weight"].grad.any()


def test_weights_of_tokens_learn() -> None:
    factor = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 1.0, 3.0]).double().requires_grad_()
    tensors = leaves(head())
    rows = linear_topk_kl(**tensors, ids=IDS, log_probs=LOGS).detach()
    total = linear_topk_kl(**tensors, ids=IDS, log_probs=LOGS, row_weight=factor, reduction="sum")
    total.backward()
    torch.testing.assert_close(factor.grad, rows)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_weights_of_tokens_that_do_not_count(impl: str, reduction: str) -> None:
    """They may be infinite: 0 times infinity is no 0."""
    counted = torch.arange(7) > 2
    factor = torch.where(counted, 0.5, torch.tensor([math.inf, math.nan, -math.inf, 1, 1, 1, 1]))
    hidden, weight, _ = head().values()
    calls = [
        lambda **x: linear_topk_kl(hidden, weight, IDS, LOGS, **x),
        lambda **x: linear_kl(hidden, weight, hidden.cos(), weight.sin(), **x),
    ]
    for call in calls:
        given = {"row_mask": counted, "impl": impl, "reduction": reduction}
        learned = factor.requires_grad_()
        value = call(**given, row_weight=learned)
        torch.testing.assert_close(value, call(**given) * 0.5)
        (grad,) = torch.autograd.grad(value.sum(), learned)
        assert not grad[~counted].any()
        assert grad[counted].isfinite().all()


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_bias_hides_the_tail(divergence: str, impl: str) -> None:
    """As it hides the padding of a vocabulary: the rest is all that the student has."""
    every, ids, log_probs = head(vocab=5), torch.arange(3).expand(7, 3), torch.randn(7, 3)
    log_probs = log_probs.log_softmax(-1) - 0.1
    every["bias"][3:] = -math.inf
    part = {name: x if name == "hidden" else x[:3] for name, x in every.items()}
    outcomes = []
    for tensors in (leaves(every), leaves(part)):
        value = linear_topk_kl(
            **tensors, ids=ids, log_probs=log_probs, tail="bucket", divergence=divergence,
            impl=impl,
        )  # fmt: skip
        found = outcome(value, tensors, torch.ones(()))
        assert not any(x[3:].any() for x in found[2:])
        outcomes.append([*found[:2], *(x[:3] for x in found[2:])])
    torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    ("divergence", "expected"),
    [("forward_kl", math.inf), ("reverse_kl", 0.0), ("tv", 0.5), ("js", 0.5 * math.log(2))],
)
def test_a_bias_hides_all_entries(divergence: str, expected: float, impl: str) -> None:
    """The student has no probability to divide among them."""
    tensors = leaves(head(num_tokens=1))
    with torch.no_grad():
        tensors["bias"][:3] = -math.inf
    value = linear_topk_kl(
        **tensors, ids=torch.arange(3)[None], log_probs=-torch.ones(1, 3, dtype=torch.float64),
        tail="renormalize", divergence=divergence, impl=impl,
    )  # fmt: skip
    torch.testing.assert_close(value, torch.tensor([expected], dtype=torch.float64))
    if math.isfinite(expected):
        grads = torch.autograd.grad(value.sum(), list(tensors.values()))
        assert not any(g.any() for g in grads)


def test_logits_of_entries_without_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, bfloat16 copies the weight rows of some tokens at a time."""
    head = Head(torch.randn(11, 6), torch.randn(29, 6))
    ids = torch.randint(0, 29, (11, 4))
    problem = TopkProblem(head, ids, torch.zeros(11, 4), named("forward_kl"), "renormalize")
    monkeypatch.setattr(sparse, "COPIED_BYTES", 200)  # two tokens
    expected = (head.weight[ids] * head.hidden[:, None]).sum(-1)
    torch.testing.assert_close(sparse._logits_by_tokens(problem, Places.of(problem)), expected)
