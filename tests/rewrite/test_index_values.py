"""Masks of index tensors with odd extents and dtypes, and slices past an end, are eager's."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.losses import rows_of_kl

N, M = 40, 48


def lower(n, m):
    return torch.ones(n, m, dtype=torch.bool).tril(m - n)


def column(size, **options):
    return torch.arange(size, **options)[:, None]


# masks by name: of n rows and m keys
MASKS = {
    "every other row": lambda n, m: torch.arange(2 * n)[::2, None] >= torch.arange(m),
    "rows before the first": lambda n, m: lower(n, m)[-64:],
    "the last rows": lambda n, m: torch.ones(64, m, dtype=torch.bool).tril(m - n)[-n:],
    "keys before the first": lambda n, m: lower(n, m)[:, -100:],
    "stop after the last": lambda n, m: lower(n, m)[:500, :500],
    "start from the end": lambda n, m: torch.arange(n + 3)[-n:, None] + 5 >= torch.arange(m),
    "negative numbers": lambda n, m: torch.arange(-n, 0)[:, None] + m >= torch.arange(m),
    "symbolic": lambda n, m: torch.arange(m)[m - n :, None] >= torch.arange(m),
    # of extent one
    "triu of one row": lambda n, m: torch.ones(1, m, dtype=torch.bool).triu(3),
    "tril of one column": lambda n, m: torch.ones(n, 1, dtype=torch.bool).tril(-3).logical_not(),
    "arange(1) expanded": lambda n, m: (
        (torch.arange(1).expand(n) + 20)[:, None] >= torch.arange(m)
    ),
    "a slice of one": lambda n, m: torch.arange(n)[7:8, None] + 20 >= torch.arange(m),
    "one key": lambda n, m: torch.arange(n)[:, None] + 1 > torch.arange(1),
    "expanded mask": lambda n, m: torch.ones(1, m, dtype=torch.bool).tril(20).expand(n, m),
    "and a band": lambda n, m: (column(1) + 20 >= torch.arange(m)) & lower(n, m),
}


def of_dtype(dtype):
    return {
        "compared": lambda n, m: column(n, dtype=dtype) + 8 >= torch.arange(m, dtype=dtype),
        "difference": lambda n, m: column(n, dtype=dtype) - torch.arange(m, dtype=dtype) >= -8,
        "mixed": lambda n, m: column(n, dtype=dtype) + 8 >= torch.arange(m),
        "scaled": lambda n, m: column(n, dtype=dtype) * 9 >= torch.arange(m, dtype=dtype) * 9,
        "negated": lambda n, m: -column(n, dtype=dtype) <= -torch.arange(m, dtype=dtype),
        "cast": lambda n, m: column(n).to(dtype) + 8 >= torch.arange(m).to(dtype),
    }


def inputs(n=N, m=M):
    return [torch.randn(1, 2, x, 8, requires_grad=i < 2) for i, x in enumerate((n, m, n, m))]


def masked_by(mask, given, dynamic=False):
    def loss(q, k, r, u):
        keep = mask(q.shape[2], k.shape[2])
        products = (x @ y.mT * 0.3 for x, y in ((q, k), (r, u)))
        return rows_of_kl(*(x.masked_fill(~keep, -1e30) for x in products))

    return compare(loss, given, dynamic=dynamic).check()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", every(2, MASKS))
def test_masks(name, dynamic):
    outcome = masked_by(MASKS[name], inputs(), dynamic)
    assert outcome.num_fused == 1, str(outcome.report)
    assert ("row_program" in outcome.kinds) == (name == "every other row")  # it is no band


@pytest.mark.parametrize("name", every(2, of_dtype(torch.int64)))
@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.bfloat16, False), (torch.uint8, False), (torch.int8, True), (torch.bfloat16, True)],
    ids=str,
)
def test_dtypes(dtype, name, dynamic):
    masked_by(of_dtype(dtype)[name], inputs(264, 272), dynamic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_exact_dtypes_are_known(dtype):
    outcome = masked_by(of_dtype(dtype)["compared"], inputs())
    assert "masked" not in outcome.report.sites[0].form


@pytest.mark.parametrize(
    ("of_s", "of_t", "dynamic"),
    [
        (lambda x: x.narrow(2, -16, 16), lambda x: x[:, :, -16:], False),
        (lambda x: x.narrow(2, -16, 16), lambda x: x[:, :, -16:], True),
        (lambda x: x[:, :, -100:], lambda x: x[:, :, -50:], False),
    ],
)
def test_scores_sliced_from_before_the_first(of_s, of_t, dynamic):
    def loss(q, k, r, u):
        keep = lower(q.shape[2], k.shape[2])
        s, t = ((x @ y.mT).masked_fill(~keep, -1e30) for x, y in ((q, k), (r, u)))
        return rows_of_kl(of_s(s), of_t(t))

    assert compare(loss, inputs(), dynamic=dynamic).check().num_fused == 1


ENLARGED = {
    "where": lambda x, keep: torch.where(keep, x, -1e9),
    "masked_fill": lambda x, keep: x.masked_fill(~keep, -1e9),
    "add": lambda x, keep: x + torch.zeros(keep.shape).masked_fill(~keep, -1e30),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", ENLARGED)
@pytest.mark.parametrize("kind", ["index", "tensor"])
def test_a_mask_that_enlarges_the_scores(way, kind, dynamic):
    """One query row under a mask of many rows: the result is no longer the scores."""

    def loss(q, k, r, u, given):
        rows = torch.arange(k.shape[2])
        keep = rows[:, None] >= rows if kind == "index" else given
        return rows_of_kl(ENLARGED[way](q @ k.mT, keep), ENLARGED[way](r @ u.mT, keep))

    given = torch.ones(3, 2, 1, M) > 0
    given[1, :, :, M // 2 :] = False
    compare(loss, [*inputs(1, M), given], dynamic=dynamic).check()


@pytest.mark.parametrize(
    ("value", "cast"), [(-1e9, torch.float16), (0.1, torch.bfloat16), (-1e5, torch.float16)]
)
def test_values_of_masks_are_rounded(value, cast):
    def loss(q, k, r, u):
        added = torch.zeros(N, M).masked_fill(~lower(N, M), value).to(cast)
        return rows_of_kl(q @ k.mT + added, r @ u.mT + added).mean()

    compare(loss, inputs()).check()


def of_two_samples():
    return [torch.randn(2, 2, x, 8, requires_grad=i < 2) for i, x in enumerate((N, M, N, M))]


def distances(n, m):
    return (torch.arange(n)[:, None] - torch.arange(m)).clamp(-4, 4) + 4


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_bias_by_relative_positions(is_trained, dynamic):
    """They are computed in the graph, and read a table of each head's biases."""

    def loss(q, k, r, u, table):
        bias = table[distances(q.shape[2], k.shape[2])].permute(2, 0, 1)
        return rows_of_kl(q @ k.mT + bias, r @ u.mT)

    table = torch.randn(9, 2, requires_grad=is_trained)
    outcome = compare(loss, [*of_two_samples(), table], dynamic=dynamic).check()
    assert outcome.num_fused == 1, str(outcome.report)


def test_scores_gathered_by_relative_positions():
    """DeBERTa: eager code gathers scores of 9 positions, and an operand would be a vector each."""

    def loss(q, k, r, u, places):
        of_places = (q @ places[:, :, :9].mT).gather(-1, distances(N, N).expand(2, 2, N, N))
        s, t = q @ k.mT + of_places, r @ u.mT
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    given = [torch.randn(2, 2, N, 8, requires_grad=i < 2) for i in range(4)]
    given.append(torch.randn(1, 2, N, 8))  # as many places as keys
    outcome = compare(loss, given).check()
    assert outcome.reasons == ["scores are gathered at relative positions"]
