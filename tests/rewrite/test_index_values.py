"""Masks of index tensors with odd extents and dtypes, and slices past an end, are eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare
from tests.support.covering import every

N, M = 40, 48


def lower(n: int, m: int) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).tril(m - n)


def column(size: int, **options) -> Tensor:
    return torch.arange(size, **options)[:, None]


# masks by name: of n rows and m keys
SLICES = {
    "rows before the first": lambda n, m: lower(n, m)[-64:],
    "the last rows": lambda n, m: torch.ones(64, m, dtype=torch.bool).tril(m - n)[-n:],
    "keys before the first": lambda n, m: lower(n, m)[:, -100:],
    "arange before its first": lambda n, m: (
        torch.arange(n)[-100:, None] + m - n >= torch.arange(m)
    ),
    "stop after the last": lambda n, m: lower(n, m)[:500, :500],
    "start from the end": lambda n, m: torch.arange(n + 3)[-n:, None] + 5 >= torch.arange(m),
    "every other row": lambda n, m: torch.arange(2 * n)[::2, None] >= torch.arange(m),
    "negative numbers": lambda n, m: torch.arange(-n, 0)[:, None] + m >= torch.arange(m),
    "symbolic": lambda n, m: torch.arange(m)[m - n :, None] >= torch.arange(m),
}
EXTENTS_OF_ONE = {
    "tril of one row": lambda n, m: torch.ones(1, m, dtype=torch.bool).tril(20),
    "triu of one row": lambda n, m: torch.ones(1, m, dtype=torch.bool).triu(3),
    "tril of one column": lambda n, m: torch.ones(n, 1, dtype=torch.bool).tril(-3).logical_not(),
    "arange(1)": lambda n, m: column(1) + 20 >= torch.arange(m),
    "arange(1) expanded": lambda n, m: (
        (torch.arange(1).expand(n) + 20)[:, None] >= torch.arange(m)
    ),
    "a slice of one": lambda n, m: torch.arange(n)[7:8, None] + 20 >= torch.arange(m),
    "one key": lambda n, m: torch.arange(n)[:, None] + 1 > torch.arange(1),
    "expanded mask": lambda n, m: torch.ones(1, m, dtype=torch.bool).tril(20).expand(n, m),
    "and a band": lambda n, m: (column(1) + 20 >= torch.arange(m)) & lower(n, m),
}


def dtype_masks(dtype: torch.dtype) -> dict[str, object]:
    return {
        "compared": lambda n, m: column(n, dtype=dtype) + 8 >= torch.arange(m, dtype=dtype),
        "difference": lambda n, m: column(n, dtype=dtype) - torch.arange(m, dtype=dtype) >= -8,
        "mixed": lambda n, m: column(n, dtype=dtype) + 8 >= torch.arange(m),
        "scaled": lambda n, m: column(n, dtype=dtype) * 9 >= torch.arange(m, dtype=dtype) * 9,
        "negated": lambda n, m: -column(n, dtype=dtype) <= -torch.arange(m, dtype=dtype),
        "cast": lambda n, m: column(n).to(dtype) + 8 >= torch.arange(m).to(dtype),
        "summed": lambda n, m: column(n, dtype=dtype) + 200 >= torch.arange(m, dtype=dtype) + 200,
    }


def program(mask):
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        keep = mask(q.shape[2], k.shape[2])
        s = (q @ k.mT * 0.3).masked_fill(~keep, -1e30)
        t = (qt @ kt.mT * 0.3).masked_fill(~keep, -1e30)
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)

    return loss


def inputs(n: int = N, m: int = M) -> list[Tensor]:
    sizes = (n, m, n, m)
    return [torch.randn(1, 2, size, 8, requires_grad=i < 2) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", every(2, SLICES))
def test_slices(name: str, dynamic: bool) -> None:
    outcome = compare(program(SLICES[name]), inputs(), dynamic=dynamic).check()
    kind = "row_program" if name == "every other row" else "attention_kl"  # it is no band
    assert outcome.kinds == {kind}, str(outcome.report)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", every(2, EXTENTS_OF_ONE))
def test_extents_of_one(name: str, dynamic: bool) -> None:
    compare(program(EXTENTS_OF_ONE[name]), inputs(), dynamic=dynamic).check()


@pytest.mark.parametrize("name", every(2, dtype_masks(torch.int64)))
@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.bfloat16, False), (torch.uint8, False), (torch.int8, True), (torch.bfloat16, True)],
    ids=str,
)
def test_dtypes(dtype: torch.dtype, name: str, dynamic: bool) -> None:
    compare(program(dtype_masks(dtype)[name]), inputs(264, 272), dynamic=dynamic).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_exact_dtypes_are_known(dtype: torch.dtype) -> None:
    outcome = compare(program(dtype_masks(dtype)["compared"]), inputs()).check()
    assert "masked" not in outcome.report.sites[0].form


@pytest.mark.parametrize("dynamic", [False, True])
def test_scores_from_before_the_first(dynamic: bool) -> None:
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        keep = lower(q.shape[2], k.shape[2])
        s = (q @ k.mT).masked_fill(~keep, -1e30).narrow(2, -16, 16)
        t = (qt @ kt.mT).masked_fill(~keep, -1e30)[:, :, -16:]
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)

    compare(loss, inputs(), dynamic=dynamic).check()


def test_scores_sliced_from_far_before_the_first() -> None:
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = (q @ k.mT)[:, :, -100:], (qt @ kt.mT)[:, :, -50:]
        s, t = s.masked_fill(~lower(N, M), -1e30), t.masked_fill(~lower(N, M), -1e30)
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)

    outcome = compare(loss, inputs()).check()
    assert outcome.num_fused == 1, str(outcome.report)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", ["where", "masked_fill", "add"])
@pytest.mark.parametrize("kind", ["index", "tensor"])
def test_a_mask_that_enlarges_the_scores(way: str, kind: str, dynamic: bool) -> None:
    """One query row under a mask of many rows: the result is no longer the scores."""

    def masked(x: Tensor, keep: Tensor) -> Tensor:
        if way == "where":
            return torch.where(keep, x, -1e9)
        if way == "masked_fill":
            return x.masked_fill(~keep, -1e9)
        return x + torch.zeros(keep.shape).masked_fill(~keep, -1e30)

    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, given: Tensor) -> Tensor:
        rows = torch.arange(k.shape[2])
        keep = rows[:, None] >= rows if kind == "index" else given
        s, t = masked(q @ k.mT, keep), masked(qt @ kt.mT, keep)
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)

    given = torch.ones(3, 2, 1, M) > 0
    given[1, :, :, M // 2 :] = False
    q, k, qt, kt = (x[:1] for x in inputs(1, M))
    leaves = [x.detach().requires_grad_(i < 2) for i, x in enumerate((q, k, qt, kt))]
    compare(loss, [*leaves, given], dynamic=dynamic).check()


@pytest.mark.parametrize(
    ("value", "cast"), [(-1e9, torch.float16), (0.1, torch.bfloat16), (-1e5, torch.float16)]
)
def test_values_of_masks_are_rounded(value: float, cast: torch.dtype) -> None:
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        keep = lower(N, M)
        added = torch.zeros(N, M).masked_fill(~keep, value).to(cast)
        s, t = q @ k.mT + added, qt @ kt.mT + added
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1).mean()

    compare(loss, inputs()).check()
