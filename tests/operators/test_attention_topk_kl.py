"""`attention_topk_kl` against a formula of its own, written query by query in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torch_streamkl import attention_topk_kl
from torch_streamkl.attention_topk import torch_impl

LEARNED = ("student_q", "student_k", "student_head_weights")


def given(
    batch: int = 2,
    queries: int = 7,
    keys: int = 9,
    topk: int = 5,
    heads: tuple[int, int, int] = (3, 4, 2),
    dims: tuple[int, int] = (5, 6),
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Heads of the student, the teacher, and its keys; repeated and padded ids, in no order."""
    (own, teacher, of_keys), (dim, teacher_dim) = heads, dims
    tensors = {
        "student_q": torch.randn(batch, own, queries, dim),
        "student_k": torch.randn(batch, keys, dim),
        "student_head_weights": torch.randn(batch, own, queries),
        "teacher_q": torch.randn(batch, teacher, queries, teacher_dim),
        "teacher_k": torch.randn(batch, of_keys, keys, teacher_dim),
    }
    if own == 1:
        del tensors["student_head_weights"]
    ids = torch.randint(-1, keys, (batch, queries, topk))
    ids[0, 0, :] = -1  # a query without a key
    ids[-1, -1, -1] = ids[-1, -1, 0]
    return {**{k: x.to(dtype) for k, x in tensors.items()}, "ids": ids}


def formula(
    tensors: dict[str, Tensor],
    *,
    student_scale: float,
    teacher_scale: float,
    last_key: Any = None,
    first_key: Any = None,
    lse: Tensor | None = None,
) -> Tensor:
    """One value a query, [batch, seqlen_q]; ``last_key(i)`` is the last one that query i sees."""
    x, values = tensors, []
    group = x["teacher_q"].shape[1] // x["teacher_k"].shape[1]
    for b, rows in enumerate(x["ids"].tolist()):
        for i, own in enumerate(rows):
            chosen = [j for j in own if j >= 0]
            if last_key is not None:
                chosen = [j for j in chosen if j <= last_key(i)]
            if first_key is not None:
                chosen = [j for j in chosen if j >= first_key(i)]
            if not chosen:
                values.append(x["student_q"].new_zeros(()))
                continue
            p = 0
            for h, q in enumerate(x["teacher_q"][b, :, i]):
                score = x["teacher_k"][b, h // group][chosen] @ q * teacher_scale
                p = p + (score.softmax(-1) if lse is None else (score - lse[b, h, i]).exp())
            p = p / p.sum()
            s = x["student_k"][b][chosen] @ x["student_q"][b, :, i].T * student_scale
            if "student_head_weights" in x:
                s = s.relu() * x["student_head_weights"][b, :, i]
            s = s.sum(-1)
            values.append((p * (p.log() - s.log_softmax(-1))).sum())
    return torch.stack(values).view(x["ids"].shape[:2])


def leaves(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    floats = {k: x.to(dtype or x.dtype) for k, x in tensors.items() if x.is_floating_point()}
    mine = {k: x.detach().requires_grad_(k in LEARNED) for k, x in floats.items()}
    return {**mine, "ids": tensors["ids"]}


def outcome(value: Tensor, mine: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
    (value * grad).sum().backward()
    return [value.detach(), *(mine[name].grad for name in LEARNED if name in mine)]


def check(tensors: dict[str, Tensor], options: dict[str, Any], **of_formula: Any) -> None:
    """Values and gradients of all implementations of a CPU."""
    exact = leaves(tensors)
    own, teacher = (tensors[f"{side}_q"].shape[-1] ** -0.5 for side in ("student", "teacher"))
    scales = {
        "student_scale": 1.0 if "student_head_weights" in tensors else own,
        "teacher_scale": teacher,
        **{k: x for k, x in options.items() if k.endswith("_scale")},
    }
    truth = formula(exact, **scales, **of_formula)
    grad = torch.rand(truth.shape, dtype=torch.float64)
    want = outcome(truth, exact, grad)
    for impl in ("torch", "reference"):
        mine = leaves(tensors)
        value = attention_topk_kl(**mine, impl=impl, **options)
        for got, expected in zip(outcome(value, mine, grad), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("heads", [(3, 4, 2), (1, 1, 1), (4, 6, 1)])
def test_heads_and_scales(heads: tuple[int, int, int]) -> None:
    tensors = given(heads=heads)
    check(tensors, {})
    check(tensors, {"student_scale": -0.7, "teacher_scale": 1.3})
    with_head = {**tensors, "student_k": tensors["student_k"].unsqueeze(1)}
    value = attention_topk_kl(**with_head)
    assert torch.equal(value, attention_topk_kl(**tensors))


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 9), (9, 4)])
def test_causal(queries: int, keys: int) -> None:
    """Aligned to the last key; with more queries than keys, the first ones see none."""
    tensors = given(queries=queries, keys=keys)
    check(tensors, {"is_causal": True}, last_key=lambda i: i + keys - queries)


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed(is_causal: bool) -> None:
    """Ids are positions among all keys; those of another sequence do not count."""
    starts_q, starts_k = [0, 3, 3, 7], [0, 4, 6, 9]
    tensors = given(batch=1, topk=9)

    def sequence(i: int) -> int:
        return max(s for s in range(3) if starts_q[s] <= i)

    def last_key(i: int) -> int:
        s = sequence(i)
        hidden = starts_q[s + 1] - 1 - i if is_causal else 0
        return starts_k[s + 1] - 1 - hidden

    exact = leaves(tensors)
    truth = formula(
        exact, student_scale=1.0, teacher_scale=6**-0.5,
        last_key=last_key, first_key=lambda i: starts_k[sequence(i)],
    )  # fmt: skip
    want = outcome(truth, exact, torch.arange(7.0))
    for impl in ("torch", "reference"):
        mine = leaves(tensors)
        flat = {
            name: x[0] if name in ("ids", "student_k") else x[0].transpose(0, 1)
            for name, x in mine.items()
        }
        offsets = {
            f"cu_seqlens_{side}": torch.tensor(starts, dtype=torch.int32)
            for side, starts in (("q", starts_q), ("k", starts_k))
        }
        value = attention_topk_kl(**flat, **offsets, is_causal=is_causal, impl=impl)
        assert value.shape == (7,)
        got = outcome(value, mine, torch.arange(7.0))
        torch.testing.assert_close(got[0], want[0][0])
        torch.testing.assert_close(got[1:], want[1:])


def test_known_log_sum_exps() -> None:
    """Over all keys, as dense attention has them: heads count by their mass at the chosen ones."""
    tensors = given()
    keys = tensors["teacher_k"].repeat_interleave(2, 1)
    lse = (tensors["teacher_q"] @ keys.mT * 6**-0.5).logsumexp(-1)
    check(tensors, {"teacher_lse": lse}, lse=lse)
    value = attention_topk_kl(**tensors, teacher_lse=lse + 1e6)  # no probability is left
    assert torch.equal(value, torch.zeros_like(value))


def check_nearly_no_probability(impl: str) -> None:
    """Of a smallest number, one over it is infinite: such a row is one without probability."""
    tensors = given(dtype=torch.float32)
    tensors["ids"].clamp_(min=0)
    keys = tensors["teacher_k"].repeat_interleave(2, 1)
    lse = (tensors["teacher_q"] @ keys.mT * 6**-0.5).logsumexp(-1)
    for shift in (80.0, 92.0, 98.0, 102.0):
        exact, mine = leaves(tensors, torch.float64), leaves(tensors)
        options = {"teacher_lse": lse + shift}
        want = outcome(
            attention_topk_kl(**exact, **options, impl="reference"), exact, torch.ones(())
        )
        got = outcome(attention_topk_kl(**mine, **options, impl=impl), mine, torch.ones(()))
        for x, truth in zip(got, want, strict=True):
            truth = truth if shift == 80.0 else torch.zeros_like(truth)
            torch.testing.assert_close(x.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_a_teacher_of_nearly_no_probability(impl: str) -> None:
    check_nearly_no_probability(impl)


def test_layout_and_strides() -> None:
    """Tensors of [batch, seqlen, heads, head_dim], cut from larger ones; int32 ids."""
    tensors = given()
    exact = leaves(tensors)
    want = outcome(formula(exact, student_scale=1.0, teacher_scale=6**-0.5), exact, torch.ones(()))
    mine = leaves(tensors)
    swapped = {
        name: torch.stack([x, x], -2)[..., 0, :].transpose(1, 2) if x.ndim == 4 else x
        for name, x in mine.items()
    }
    swapped["student_head_weights"] = swapped["student_head_weights"].transpose(1, 2)
    swapped["ids"] = torch.stack([mine["ids"].int()] * 2, -1)[..., 0]
    value = attention_topk_kl(**swapped, layout="bnhd")
    torch.testing.assert_close(outcome(value, mine, torch.ones(())), want)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_rows_that_do_not_count(reduction: str) -> None:
    """Also those of infinite queries, and of ids out of range."""
    tensors = given()
    counted = torch.tensor([True, True, False, True, True, False, True])
    exact = leaves(tensors)
    rows = formula(exact, student_scale=1.0, teacher_scale=6**-0.5)
    rows = torch.where(counted, rows, 0.0)
    count = {"none": 1, "sum": 1, "mean": 10, "batchmean": 2}[reduction]
    want = outcome(rows if reduction == "none" else rows.sum() / count, exact, torch.ones(()))
    with torch.no_grad():
        tensors["student_q"][:, :, ~counted] = math.inf
        tensors["teacher_q"][:, :, ~counted] = math.nan
        tensors["ids"][:, ~counted] = 10**6
    mine = leaves(tensors)
    value = attention_topk_kl(**mine, row_mask=counted, reduction=reduction)
    torch.testing.assert_close(outcome(value, mine, torch.ones(())), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    """At most twice the error of naive code in the same dtype, and a rounding."""
    tensors = given(queries=20, keys=40, topk=16, heads=(4, 4, 1), dims=(16, 16), dtype=dtype)
    ways: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
        "truth": lambda x: formula(x, student_scale=1.0, teacher_scale=0.25),
        "naive": naive_code,
        "ours": lambda x: attention_topk_kl(**x),
    }
    results = {}
    for name, way in ways.items():
        mine = leaves(tensors, torch.float64 if name == "truth" else dtype)
        results[name] = outcome(way(mine), mine, torch.ones(()))
    for ours, naive, want in zip(*(results[x] for x in ("ours", "naive", "truth")), strict=True):
        errors = [(x.double() - want).abs().max() for x in (ours, naive)]
        assert errors[0] <= 2 * errors[1] + 2 * torch.finfo(ours.dtype).eps * want.abs().max()


def naive_code(x: dict[str, Tensor]) -> Tensor:
    """Scores of all keys in float32, of which those of the chosen ones are taken."""
    exists = x["ids"] >= 0
    ids = x["ids"].clamp_min(0)
    t = (x["teacher_q"] @ x["teacher_k"].mT).float() * x["teacher_q"].shape[-1] ** -0.5
    t = t.gather(-1, ids[:, None].expand(-1, t.shape[1], -1, -1))
    p = t.masked_fill(~exists[:, None], -1e30).softmax(-1).mean(1)
    own = (x["student_q"] @ x["student_k"][:, None].mT).float().relu()
    own = (own * x["student_head_weights"].float()[..., None]).sum(1).gather(-1, ids)
    log_s = own.masked_fill(~exists, -1e30).log_softmax(-1)
    return torch.where(exists, torch.special.xlogy(p, p) - p * log_s, 0.0).sum(-1) * exists.any(-1)


def test_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query at a time has the same result."""
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 1)
    check(given(), {})


# ------------------------------------------------------------------------ as an operator


def test_products() -> None:
    """The teacher's scores twice in the forward; a product for each gradient of q and k."""
    tensors = leaves(given())
    own, teacher = 2 * 2 * 7 * 5 * 3 * 5, 2 * 2 * 7 * 5 * 4 * 6
    lse = torch.zeros(2, 4, 7)
    for options, scores in (({}, 2 * teacher), ({"teacher_lse": lse}, teacher)):
        with FlopCounterMode(display=False) as counter:
            value = attention_topk_kl(**tensors, **options)
        assert counter.get_total_flops() == own + scores
        with FlopCounterMode(display=False) as counter:
            value.sum().backward()
        assert counter.get_total_flops() == 3 * own + teacher


def test_what_is_kept_for_the_backward() -> None:
    """Besides its inputs, numbers of queries and heads: nothing of queries times keys."""
    mine = leaves(given(queries=16, keys=64, topk=32))
    kept: list[int] = []
    inputs = {x.data_ptr() for x in mine.values()}

    def keep(x: Tensor) -> Tensor:
        if x.data_ptr() not in inputs:
            kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attention_topk_kl(**mine, is_causal=True)
    assert sum(kept) <= 2 * 16 * (3 + 4 + 2)  # statistics, log-sum-exps, ranges of keys


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("size", ["batch", "queries", "keys"])
def test_no_batch_no_query_and_no_key(size: str, impl: str) -> None:
    tensors = given()
    tensors["ids"].fill_(-1)
    for name, x in tensors.items():
        is_key = name.endswith("_k")
        if size == "batch":
            tensors[name] = x[:0]
        elif size == "keys" and is_key:
            tensors[name] = x[..., :0, :]
        elif size == "queries" and not is_key:
            tensors[name] = x[:, :0] if name == "ids" else x[:, :, :0]
    mine = leaves(tensors)
    value = attention_topk_kl(**mine, impl=impl)
    assert torch.equal(value, torch.zeros_like(value))
    value.sum().backward()
    for name in LEARNED:
        assert not mine[name].grad.any()


def test_vmap_is_refused() -> None:
    tensors = given()
    with pytest.raises(NotImplementedError, match="vmap over attention_topk_kl"):
        torch.vmap(lambda q: attention_topk_kl(**{**tensors, "student_q": q}))(
            tensors["student_q"].unsqueeze(0)
        )
