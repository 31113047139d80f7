"""What a reader found in the stages after the analysis: each program stands for its class."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.comparing import Outcome, compare
from tests.support.covering import every
from tests.support.losses import rows_of_kl as rows
from torch_streamkl.fx_passes.planning.profitability import why_ids_are_left
from torch_streamkl.program.graph import Axis
from torch_streamkl.rows.program import COLUMNS

WITHOUT_CHECK = {"streamkl.verify": "never"}


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Two trained tensors, and others."""
    make = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=make).requires_grad_(i < 2) for i, shape in enumerate(shapes)
    ]


def maps() -> list[Tensor]:
    return tensors((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 5, 4), (2, 2, 7, 4))


def heads(*others: tuple[int, ...]) -> list[Tensor]:
    return tensors((6, 4), (12, 4), (6, 5), (12, 5), *others)


def judge(program: Callable[..., object], inputs: list[Tensor], sites: int = 1) -> Outcome:
    outcome = compare(program, inputs, inner="aot_eager", options=WITHOUT_CHECK).check()
    assert outcome.num_fused == sites, str(outcome.report)
    return outcome


# ------------------------------------------------------ from the rows of an LM head to their sum
BEHIND_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "their square by name": lambda r, _: torch.mul(r, other=r).sum(),
    "their square, all by name": lambda r, _: torch.mul(input=r, other=r).sum(),
    "their quotient by name": lambda r, _: torch.div(r, other=r).sum(),
    "weights by name": lambda r, m: torch.mul(r, other=m).sum(),
    "a transpose by name": lambda r, m: (
        r.view(2, 3).transpose(dim0=0, dim1=1) * m.view(3, 2)
    ).sum(),
    "a permutation by name": lambda r, m: (
        torch.permute(r.view(2, 3), dims=(1, 0)) * m.view(3, 2)
    ).sum(),
    "a sum by name": lambda r, m: torch.sum(input=r * m),
}


@pytest.mark.parametrize("name", every(2, BEHIND_ROWS))
def test_arguments_by_name_behind_the_rows(name: str) -> None:
    def step(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, m: Tensor) -> Tensor:
        return BEHIND_ROWS[name](rows(h @ w.T, ht @ wt.T), m)

    judge(step, heads((6,)))


def test_weights_that_change_before_the_sum() -> None:
    def step(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, m: Tensor) -> Tensor:
        weighted = rows(h @ w.T, ht @ wt.T) * m
        m.data.zero_()  # which autograd does not see
        return weighted.sum().detach()

    judge(step, heads((6,)))


def test_weights_that_change_before_the_backward() -> None:
    def step(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, m: Tensor) -> Tensor:
        total = (rows(h @ w.T, ht @ wt.T).unsqueeze(0) * m).sum()
        m.data.zero_()
        return total

    judge(step, heads((6,)))


# ---------------------------------------------------------------------- biases of parts of
# vocabulary entries
@pytest.mark.parametrize(("shape", "sites"), [((3, 1), 0), ((4,), 0), ((3, 4), 1)])
def test_bias_of_groups_of_words(shape: tuple[int, ...], sites: int) -> None:
    def step(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, c: Tensor) -> Tensor:
        logits = (h @ w.T).view(6, 3, 4) + c
        return rows(logits.reshape(6, 12), ht @ wt.T).sum()

    judge(step, heads(shape), sites)


# -------------------------------------------------------------- operations that return their input
def test_what_returns_its_input_stands_behind_the_site() -> None:
    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, x: Tensor) -> Tensor:
        bias, s, t = x.exp(), q @ k.mT, qt @ kt.mT
        first = rows(s + bias, t + bias).sum()
        again = bias.contiguous()  # the same tensor, defined after the first loss
        return first + rows(2 * s + again, t + again).sum()

    judge(step, [*maps(), *tensors((1,), (1,), (5, 7))[2:]], sites=2)


def test_out_without_gradient() -> None:
    def step(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, m: Tensor) -> Tensor:
        with torch.no_grad():
            weighted = torch.empty_like(m)
            torch.mul(rows(h @ w.T, ht @ wt.T), m, out=weighted)
        return weighted.sum()

    assert not compare(step, heads((6,)), options=WITHOUT_CHECK).check().report.failures


# ------------------------------------------------------------------------------ layout in memory
def by_einsum(q: Tensor, k: Tensor) -> Tensor:
    """[batch, queries, heads, keys], of which heads are the batch of the matmul."""
    return torch.einsum("bhnd,bhmd->bnhm", q, k).contiguous()


LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view": lambda s, t: rows(s, t).view(-1),
    "view with keepdim": lambda s, t: (
        F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
        .sum(-1, keepdim=True)
        .view(2, 10)
    ),
    "as_strided": lambda s, t: rows(s, t).as_strided((3,), (2,)),
    "permuted": lambda s, t: rows(s.permute(2, 1, 0, 3), t.permute(2, 1, 0, 3)).sum(0),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_the_rows(name: str, dynamic: bool) -> None:
    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        return LAYOUTS[name](by_einsum(q, k), by_einsum(qt, kt))

    outcome = compare(step, maps(), inner="aot_eager", dynamic=dynamic, options=WITHOUT_CHECK)
    assert outcome.check().num_fused == 1, str(outcome.report)


def test_strides_of_an_output() -> None:
    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        return rows(by_einsum(q, k), by_einsum(qt, kt))

    torch._dynamo.reset()
    options = {"streamkl.inner": "aot_eager", "streamkl.strict": True}
    compiled = torch.compile(step, backend="streamkl", options=options)
    assert compiled(*maps()).stride() == step(*maps()).stride()


def attention_as_it_lies(o: Tensor) -> Tensor:
    return o


def viewed(o: Tensor) -> Tensor:
    return o.view(2, 15, 4)


def heads_merged(o: Tensor) -> Tensor:
    return o.transpose(1, 2).reshape(2, 5, 12)


def heads_merged_and_written(o: Tensor) -> Tensor:
    merged = o.transpose(1, 2).reshape(2, 5, 12)  # a copy of what lies in another order
    merged.add_(1)
    return merged * o.transpose(1, 2).reshape(2, 5, 12)


@pytest.mark.parametrize(
    ("reader", "copies"),
    [
        (attention_as_it_lies, True),
        (viewed, True),
        (heads_merged, False),
        (heads_merged_and_written, True),
    ],
)
def test_layout_of_attention(reader: Callable[[Tensor], Tensor], copies: bool) -> None:
    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> tuple[Tensor, Tensor]:
        q, k, qt, kt = (x.transpose(1, 2) for x in (q, k, qt, kt))
        p = (q @ k.mT).softmax(-1)
        loss = F.kl_div(p.log(), (qt @ kt.mT).softmax(-1), reduction="sum")
        return loss, reader(p @ k)

    judge(step, tensors((2, 5, 3, 4), (2, 7, 3, 4), (2, 5, 3, 4), (2, 7, 3, 4)))


# ---------------------------------------------------------------------- writes inside of a region
def test_checkpointed_code_that_writes_to_an_operand() -> None:
    def body(x: Tensor) -> Tensor:
        return x.mul_(2).sum()

    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        teacher = qt @ kt.mT
        total = checkpoint(body, kt, use_reentrant=False)
        return rows(q @ k.mT, teacher).sum() + total

    judge(step, maps(), sites=0)


def _between(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, t: Tensor) -> Tensor:
    scores, teacher = (q @ k.mT) / t, (qt @ kt.mT) / t
    t.mul_(2)
    return rows(scores, teacher).sum()


def _of_queries(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, t: Tensor) -> Tensor:
    scores = (q * t) @ k.mT
    t.fill_(1.0)
    return rows(scores, qt @ kt.mT).sum()


def _of_the_loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, t: Tensor) -> Tensor:
    weight = t * 1.0
    loss = rows(q @ k.mT, qt @ kt.mT).sum() * weight
    weight.mul_(2)
    return loss


@pytest.mark.parametrize("program", [_between, _of_queries, _of_the_loss])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_number_that_is_written_before_the_backward(program: Any, is_compiled: bool) -> None:
    """Autograd has saved it: eager code raises, and so does the compiled program."""
    if is_compiled:
        torch._dynamo.reset()
        options = {"streamkl.inner": "eager", "streamkl.min_mib": 0}
        program = torch.compile(program, backend="streamkl", options=options)
    inputs = maps()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(*inputs, torch.tensor(0.5)).backward()


def test_a_factor_that_is_infinite_inside_of_a_sum() -> None:
    """Eager code adds inf and -inf; the fused value is the factor times the sum."""

    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, a: Tensor) -> Tensor:
        s, t = q @ k.mT, qt @ kt.mT
        return (a * (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1)))).sum(-1)

    torch._dynamo.reset()
    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0, **WITHOUT_CHECK}
    compiled = torch.compile(step, backend="streamkl", options=options)
    with torch.no_grad():
        for a in (2.0, torch.inf, -torch.inf):
            eager, fused = (f(*maps(), torch.tensor(a)) for f in (step, compiled))
            if a == 2.0:
                assert torch.allclose(eager, fused, rtol=1e-4, atol=1e-5)
            else:
                assert eager.isnan().any() and bool((fused == a).all())


# --------------------------------------------------------------------------------- symbolic sizes
def test_window_of_half_the_keys() -> None:
    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        away = (j > i + 1) | (j <= i - k.shape[2] // 2)
        s, t = ((a @ b.mT).masked_fill(away, -1e9) for a, b in ((q, k), (qt, kt)))
        return rows(s, t).sum()

    outcome = compare(step, maps(), inner="aot_eager", dynamic=True, options=WITHOUT_CHECK)
    assert outcome.check().num_fused == 1, str(outcome.report)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token(num_tokens: int) -> None:
    def step(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
        return rows(h @ w.T, ht @ wt.T).sum()

    outcome = judge(step, tensors((num_tokens, 4), (12, 4), (num_tokens, 5), (12, 5)), num_tokens)
    if not num_tokens:
        assert outcome.reasons == ["the scores have a dimension without entries"]


@pytest.mark.parametrize(
    ("count", "device", "given", "is_left"),
    [(64, "cuda", None, True), (16, "cuda", None, False), (64, "cpu", None, False),
     (64, "cuda", 0.0, False)],
)  # fmt: skip
def test_programs_that_read_many_ids(
    count: int, device: str, given: float | None, is_left: bool
) -> None:
    ids = SimpleNamespace(kind=COLUMNS, dims=((), (), (), (Axis("place", count),)))
    form: Any = SimpleNamespace(captures=[ids])
    assert bool(why_ids_are_left(form, device, given)) == is_left
