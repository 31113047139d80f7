"""What a reader found in the stages after the analysis: each program stands for its class."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.losses import elements_of_kl
from tests.support.losses import rows_of_kl as rows
from tests.support.table import Table
from torch_streamkl.fx_passes.planning.profitability import why_ids_are_left
from torch_streamkl.program.graph import Axis
from torch_streamkl.rows.program import COLUMNS


def tensors(*shapes):
    """Two trained tensors, and others."""
    make = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=make).requires_grad_(i < 2) for i, s in enumerate(shapes)]


def maps():
    """Of both sides, a bias of scores and a number."""
    shapes = ((2, 2, 5, 4), (2, 2, 7, 4)) * 2
    return [*tensors(*shapes, (5, 7)), torch.tensor(0.5)]


def heads():
    """Of both sides, weights of rows and a bias."""
    return tensors((6, 4), (12, 4), (6, 5), (12, 5), (6,), (3, 4))


def fresh(step, inner="aot_eager", **options):
    return compile_rewritten(step, inner=inner, verify="never", **options)


HEADS = Table("h w ht wt m c", {"s t": lambda h, w, ht, wt: (h @ w.T, ht @ wt.T)}, sites=1)
MAPS = Table(
    "q k qt kt x a",
    {"s t": lambda q, k, qt, kt: (q @ k.mT, qt @ kt.mT)},
    sites=1,
    dynamic=None,
)

# ------------------------------------------------------ from the rows of an LM head to their sum
BEHIND_ROWS = {
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


@HEADS.each(BEHIND_ROWS, step=2)
def arguments_by_name_behind_the_rows(behind, s, t, m):
    return behind(rows(s, t), m)


@HEADS()
def weights_that_change_before_the_sum(s, t, m):
    weighted = rows(s, t) * m
    m.data.zero_()  # which autograd does not see
    return weighted.sum().detach()


@HEADS()
def weights_that_change_before_the_backward(s, t, m):
    total = (rows(s, t).unsqueeze(0) * m).sum()
    m.data.zero_()
    return total


BIASES = {
    "one an entry": (lambda c: c[:, :1], 0),
    "one a group": (lambda c: c[0], 0),
    "of all": (lambda c: c, 1),
}


@HEADS.each(BIASES)
def bias_of_groups_of_entries(part, s, t, c):
    return rows((s.view(6, 3, 4) + part(c)).reshape(6, 12), t).sum()


@HEADS(sites=None)
def out_without_gradient(s, t, m):
    with torch.no_grad():
        weighted = torch.empty_like(m)
        torch.mul(rows(s, t), m, out=weighted)
    return weighted.sum()


@HEADS.parametrized()
def test_heads(row):
    outcome = compare(row.program, heads(), inner="aot_eager", verify="never").check()
    assert row.sites in (None, outcome.num_fused), str(outcome.report)


# -------------------------------------------------------------- operations that return their input
@MAPS(sites=2)
def what_returns_its_input_stands_behind_the_site(s, t, x):
    bias = x.exp()
    first = rows(s + bias, t + bias).sum()
    again = bias.contiguous()  # the same tensor, defined after the first loss
    return first + rows(2 * s + again, t + again).sum()


# ------------------------------------------------------------------------------ layout in memory
def by_einsum(q, k):
    """[batch, queries, heads, keys], of which heads are the batch of the matmul."""
    return torch.einsum("bhnd,bhmd->bnhm", q, k).contiguous()


LAYOUTS = {
    "view with keepdim": lambda s, t: elements_of_kl(s, t).sum(-1, keepdim=True).view(2, 10),
    "view": lambda s, t: rows(s, t).view(-1),
    "permuted": lambda s, t: rows(s.permute(2, 1, 0, 3), t.permute(2, 1, 0, 3)).sum(0),
    "as_strided": lambda s, t: rows(s, t).as_strided((3,), (2,)),
}


def layout_of_the_rows(layout, q, k, qt, kt):
    return layout(by_einsum(q, k), by_einsum(qt, kt))


MAPS.each(LAYOUTS)(layout_of_the_rows)
MAPS.each({f"{name}, dynamic": x for name, x in LAYOUTS.items()}, step=2, dynamic=True)(
    layout_of_the_rows
)


def test_strides_of_an_output():
    step = MAPS.of_inputs(lambda q, k, qt, kt: rows(by_einsum(q, k), by_einsum(qt, kt)))
    compiled = fresh(step, strict=True)
    assert compiled(*maps()).stride() == step(*maps()).stride()


def heads_merged(o):
    return o.transpose(1, 2).reshape(2, 5, 8)


def heads_merged_and_written(o):
    merged = heads_merged(o)  # a copy of what lies in another order
    merged.add_(1)
    return merged * heads_merged(o)


READERS = {
    "as it lies": lambda o: o,
    "viewed": lambda o: o.view(2, 10, 4),
    "heads merged": heads_merged,
    "heads merged and written": heads_merged_and_written,
}


@MAPS.each(READERS)
def layout_of_attention(reader, q, k, qt, kt):
    q, k, qt, kt = (x.view(2, -1, 2, 4).transpose(1, 2) for x in (q, k, qt, kt))
    p = (q @ k.mT).softmax(-1)
    return F.kl_div(p.log(), (qt @ kt.mT).softmax(-1), reduction="sum"), reader(p @ k)


# ---------------------------------------------------------------------- writes inside of a region
@MAPS(sites=0)
def checkpointed_code_that_writes_to_an_operand(q, k, qt, kt):
    teacher = qt @ kt.mT
    total = checkpoint(lambda x: x.mul_(2).sum(), kt, use_reentrant=False)
    return rows(q @ k.mT, teacher).sum() + total


# --------------------------------------------------------------------------------- symbolic sizes
@MAPS(dynamic=True)
def window_of_half_the_keys(s, t, q, k):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    away = (j > i + 1) | (j <= i - k.shape[2] // 2)
    return rows(s.masked_fill(away, -1e9), t.masked_fill(away, -1e9)).sum()


# ------------------------------------------- a maximum with gradient here, and without it there
def quotient(e):
    return (e / e.sum(-1, keepdim=True)).log()


# of scores s, their maximum m with gradient and n without
MAXIMA = {
    "in the difference only": lambda s, m, n: s - m - (s - n).exp().sum(-1, keepdim=True).log(),
    "in the sum only": lambda s, m, n: s - n - (s - m).exp().sum(-1, keepdim=True).log(),
    "in the quotient": lambda s, m, n: ((s - n).exp() / (s - m).exp().sum(-1, keepdim=True)).log(),
    "in both": lambda s, m, n: quotient((s - m).exp()),
    "in neither": lambda s, m, n: quotient((s - n).exp()),
}


@pytest.mark.parametrize("where", MAXIMA)
def test_gradient_of_a_maximum(where):
    """Where the maximum has a gradient, it stays a value of the rows, and its scores remain."""

    @MAPS.of_inputs
    def program(s, t):
        largest = s.amax(-1, keepdim=True)
        return F.kl_div(
            MAXIMA[where](s, largest, largest.detach()), t.softmax(-1), reduction="sum"
        )

    outcome = compare(program, maps(), verify="never").check()
    assert outcome.num_fused == 1, str(outcome.report)
    assert outcome.report.num_remaining == (where not in ("in both", "in neither"))


# -------------------------------------------------------------------- attention next to the loss
@MAPS(sites=None)
def matmul_by_keyword(s, t, k):
    p = s.softmax(-1)
    out = torch.matmul(input=p, other=k)
    return F.kl_div(p.log(), t.softmax(-1), reduction="sum") + out.square().sum()


@MAPS(sites=None)
def heads_of_nothing(q, k, t):
    q, k = q[..., :0], k[..., :0]
    p = (q @ k.mT).softmax(-1)
    return F.kl_div(p.log(), t.softmax(-1), reduction="sum") + (p @ k).sum()


@MAPS.parametrized()
def test_maps(row):
    options = {"inner": "aot_eager", "verify": "never", "dynamic": row.dynamic}
    outcome = compare(row.program, maps(), **options).check()
    assert row.sites in (None, outcome.num_fused), str(outcome.report)


def _between(q, k, qt, kt, x, a):
    scores, teacher = (q @ k.mT) / a, (qt @ kt.mT) / a
    a.mul_(2)
    return rows(scores, teacher).sum()


def _of_queries(q, k, qt, kt, x, a):
    scores = (q * a) @ k.mT
    a.fill_(1.0)
    return rows(scores, qt @ kt.mT).sum()


def _of_the_loss(q, k, qt, kt, x, a):
    weight = a * 1.0
    loss = rows(q @ k.mT, qt @ kt.mT).sum() * weight
    weight.mul_(2)
    return loss


@pytest.mark.parametrize("program", [_between, _of_queries, _of_the_loss])
def test_a_number_that_is_written_before_the_backward(program):
    """Autograd has saved it: eager code raises, and so does the compiled program."""
    for step in (program, fresh(program, "eager")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(*maps()).backward()


def test_a_factor_that_is_infinite_inside_of_a_sum():
    """Eager code adds inf and -inf; the fused value is the factor times the sum."""

    @MAPS.of_inputs
    def step(s, t, a):
        return (a * (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1)))).sum(-1)

    compiled = fresh(step)
    with torch.no_grad():
        for a in (2.0, torch.inf, -torch.inf):
            eager, fused = (f(*maps()[:-1], torch.tensor(a)) for f in (step, compiled))
            if a == 2.0:
                assert torch.allclose(eager, fused, rtol=1e-4, atol=1e-5)
            else:
                assert eager.isnan().any() and bool((fused == a).all())


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token(num_tokens):
    inputs = tensors((num_tokens, 4), (12, 4), (num_tokens, 5), (12, 5))
    outcome = compare(lambda h, w, ht, wt: rows(h @ w.T, ht @ wt.T).sum(), inputs, verify="never")
    assert outcome.check().num_fused == num_tokens, str(outcome.report)
    if not num_tokens:
        assert outcome.reasons == ["the scores have a dimension without entries"]


def guarded(ce):
    return torch.where(ce.isnan(), 0.0, ce)


@pytest.mark.parametrize("guard", [lambda ce: ce, guarded])
@pytest.mark.parametrize("num_labels", [0, 1, 6])
def test_gradients_beside_labels_that_are_ignored(guard, num_labels):
    """Also of a batch without any label."""
    labels = torch.full((6,), -100)
    labels[:num_labels] = torch.arange(num_labels)
    given = heads()[:4]

    def step(h, w, ht, wt):
        z = h @ w.T
        return rows(z, ht @ wt.T).sum() + guard(F.cross_entropy(z, labels))

    results = []
    for run in (step, fresh(step, strict=True)):
        value = run(*given)
        results.append([value, *torch.autograd.grad(value, given[:2])])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    assert all(g.isfinite().all() for g in results[1][1:])


# -------------------------------------------------- functions of a probability that underflows
FUNCTIONS = {
    "a half": lambda p: p / 2,
    "the square": lambda p: p**2,
    "the square root": lambda p: p.sqrt(),
    "a half of the square": lambda p: 0.5 * p * p,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("by", ["kl_div", "xlogy"])
def test_a_function_of_a_probability_that_underflows(name, by):
    @MAPS.of_inputs
    def loss(s, t):
        wanted, got = FUNCTIONS[name](t.softmax(-1)), s.log_softmax(-1)
        if by == "kl_div":
            return F.kl_div(got, wanted, reduction="sum")
        return (torch.xlogy(wanted, wanted) - wanted * got).sum()

    inputs = maps()
    inputs[2] = inputs[2] * 60
    scores = inputs[2] @ inputs[3].mT
    assert scores.softmax(-1).min() == 0.0
    largest = float(scores.abs().max())
    outcome = compare(loss, inputs, verify="never", largest_score=largest)
    assert outcome.compiled.outputs[0].isfinite()
    assert outcome.check().num_fused == 1, str(outcome.report)


@pytest.mark.parametrize(
    ("count", "device", "given", "is_left"),
    [(64, "cuda", None, True), (16, "cuda", None, False), (64, "cpu", None, False),
     (64, "cuda", 0.0, False)],
)  # fmt: skip
def test_programs_that_read_many_ids(count, device, given, is_left):
    ids = SimpleNamespace(kind=COLUMNS, dims=((), (), (), (Axis("place", count),)))
    form = SimpleNamespace(captures=[ids])
    assert bool(why_ids_are_left(form, device, given)) == is_left
