"""Every way of writing the divergence fuses, and loss and gradients stay as exact as eager's."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn, special

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.losses import elements_of_kl, kd, rows_of_kl
from tests.support.programs import (
    CALLS,
    GRADIENTS,
    LOGS,
    MASKS,
    PROBABILITIES,
    PRODUCERS,
    REDUCTIONS,
    SCALES,
    SPELLINGS,
    Program,
)
from tests.support.table import Table
from torch_streamkl.fx_passes.pipeline import rewrite
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.stored_gradients import scaled_gradients

slow = pytest.mark.slow


def fused(program, inputs, **options):
    """Compare, and require that every site fused and nothing of queries x keys is left."""
    return compare(program, inputs, **options).check_fused()


# -------------------- one dimension of choice at a time
def choices(field, values, step=1, **others):
    """Programs with each value of a field, of which every ``step``-th is quick."""
    return [
        pytest.param(
            Program(**{**others, field: x}),
            id="-".join([field, x, *others.values()]),
            marks=[slow] if i % step else [],
        )
        for i, x in enumerate(values)
    ]


# 0 * log(0) is NaN in eager with every mask
WITHOUT_MASK = {"softmax_log", "division", "js_mixture"}
CHOICES = [
    *choices("producer", PRODUCERS, 3, mask="tril_min"),
    *choices("scale", SCALES, mask="tril_min"),
    *choices("mask", MASKS),
    *choices("mask", MASKS, 8, spelling="clamp_both"),
    *choices("spelling", SPELLINGS),
    *choices("spelling", sorted(SPELLINGS.keys() - WITHOUT_MASK), 8, mask="tril_min"),
    *choices("reduction", REDUCTIONS, 3, mask="tril_min"),
    *choices("call", CALLS, 3, mask="tril_min"),
    *choices("gradient", GRADIENTS),
    *choices("gradient", GRADIENTS, 3, spelling="symmetric"),
]


@pytest.mark.parametrize("program", CHOICES)
def test_choices(program):
    # a boolean index breaks the graph otherwise
    fused(program, program.inputs(), fullgraph=program.reduction == "index_rows")


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("probability", PROBABILITIES)
def test_log_and_probability_spellings_combine(log, probability):
    base = Program()

    def loss(sq, sk, tq, tk, pad):
        s, t = base.scores(sq, sk, pad, "matmul"), base.scores(tq, tk, pad, "at")
        return F.kl_div(LOGS[log](s), PROBABILITIES[probability](t), reduction="batchmean")

    fused(loss, base.inputs())


# -------------------- how it is run
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    program = Program(producer="upcast", mask="tril_min")
    fused(program, program.inputs(dtype=dtype))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_shapes_modes_and_inner_compilers(dynamic, training, inner):
    program = Program(mask="causal_and_pad", spelling="log_ratio", reduction="masked_mean")
    options = {"dynamic": dynamic, "training": training, "inner": inner}
    fused(program, program.inputs(), fullgraph=True, **options)


# what symbolic sizes change is in the rule of a mask or of a producer
@pytest.mark.parametrize(
    ("mask", "producer"),
    [
        ("tril_min", "bmm"),
        ("band", "broadcast_key"),
        ("arange_where", "bshd"),
        ("pad_bool", "matmul"),
    ],
)
def test_dynamic_shapes(mask, producer):
    program = Program(mask=mask, producer=producer, uses_values=True)
    fused(program, program.inputs(), dynamic=True)


def test_one_dynamic_graph_serves_other_lengths():
    program = Program(mask="tril_min")
    compiled = compile_rewritten(program, dynamic=True)
    for n in (7, 16, 33):
        given = program.inputs(seed=n, num_queries=n)
        torch.testing.assert_close(compiled(*given), program(*given))


@pytest.mark.parametrize(
    "program",
    [
        Program(mask="pad_1e4", call="KLDivLoss_flat", uses_values=True),
        pytest.param(Program(spelling="js", gradient="both"), marks=slow),
    ],
    ids=["pad", "js"],
)
def test_through_inductor(program):
    fused(program, program.inputs(), inner="inductor")


# -------------------- a mask on keys after the softmax: the sum over the stricter side's keys
def _forward(p, q):
    return p * ((p + 1e-9).log() - (q + 1e-9).log())


def _mixture(p, q):
    m = 0.5 * (p + q)
    return _forward(p, m) + _forward(q, m)


def _of_the_stricter_side(p, q):
    return _forward(q, p)


def within_the_student_s_keys(form, stricter, wider, sq, sk, tq, tk, pad):
    low = torch.finfo(sq.dtype).min
    s = (sq @ sk.mT / 3.0).masked_fill(~stricter(sq, pad), low).softmax(-1)
    t = (tq @ tk.mT / 3.0).masked_fill(~wider(sq, pad), low).softmax(-1)
    values = form(t, s)
    rows = (values * stricter(sq, pad)).sum(-1)
    count = stricter(sq, pad).expand_as(values).any(-1).sum()
    return rows.sum() / count.clamp(min=1)


def _causal(q, pad):
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()


STRICTER = {
    "window": (lambda q, pad: _causal(q, pad).triu(-3), _causal),
    "pad": (lambda q, pad: _causal(q, pad) & pad[:, None, None, :], _causal),
    "strict": (lambda q, pad: _causal(q, pad).tril(-1), _causal),  # a row without keys
    "all": (_causal, lambda q, pad: torch.ones_like(_causal(q, pad))),
}


@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)],
)
@pytest.mark.parametrize("form", [_forward, _mixture, _of_the_stricter_side])
@pytest.mark.parametrize("mask", STRICTER)
@pytest.mark.parametrize("gradient", ["student", "both"])
def test_sum_over_the_keys_of_the_stricter_side(mask, form, gradient, dtype, dynamic):
    program = functools.partial(within_the_student_s_keys, form, *STRICTER[mask])
    inputs = Program(gradient=gradient).inputs(dtype=dtype)
    outcome = compare(program, inputs, dynamic=dynamic).check_fused(1, remaining=None)
    # the count of rows is the user's own: it makes its mask of queries x keys
    assert outcome.report.num_remaining <= 1, str(outcome.report)


# -------------------- neighbours of the divergence
@pytest.mark.parametrize(
    "mask", ["none", "tril_min", "pad_bool", "causal_and_pad", "additive_causal"]
)
def test_probabilities_that_also_make_the_attention_output(mask):
    program = Program(mask=mask, uses_values=True)
    outcome = fused(program, program.inputs())
    assert outcome.report.sites[0].kind == "attention_kl"


def attention_inputs():
    """As of a program, next to a mask, a bias and a number."""
    make = torch.Generator().manual_seed(1)
    operands = Program().inputs()
    n = operands[0].shape[2]
    keep = torch.rand(2, 1, n, n, generator=make) > 0.3
    keep[..., 0] = True
    bias = torch.randn(1, 4, n, n, generator=make)
    return [*operands, keep, bias, torch.tensor(-0.5, requires_grad=True)]


LOSSES = Table("sq sk tq tk pad keep bias number", sites=1)


@LOSSES(sites=2)
def several_sites_share_their_operands(sq, sk, tq, tk, pad):
    first, second = Program(mask="tril_min"), Program(spelling="reverse", mask="tril_min")
    return first(sq, sk, tq, tk, pad) + 0.5 * second(sq, sk, tq, tk, pad)


@LOSSES(sites=3)
def layers_in_a_loop(sq, sk, tq, tk, pad):
    total, hidden = 0.0, sq
    for _ in range(3):
        loss, hidden = Program(mask="tril_min", uses_values=True)(hidden, sk, tq, tk, pad)
        total = total + loss
    return total / 3, hidden


@LOSSES()
def boolean_and_additive_masks_that_are_inputs(sq, sk, tq, tk, keep, bias):
    s, t = (
        (q @ k.transpose(-1, -2) + bias).masked_fill(keep.logical_not(), -1e9)
        for q, k in ((sq, sk), (tq, tk))
    )
    return kd(s, t)


@LOSSES()
def sizes_of_queries_and_keys_differ(sq, sk, tq, tk):
    sq, tq = sq[:, :, -4:], tq[:, :, -4:]
    n, m = sq.shape[2], sk.shape[2]
    keep = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    s, t = ((q @ k.mT).masked_fill(~keep, float("-inf")) for q, k in ((sq, sk), (tq, tk)))
    return elements_of_kl(s, t).nansum(-1).mean()


@LOSSES()
def the_tighter_of_two_windows_counts(sq, sk, tq, tk):
    ones = torch.ones(sq.shape[2], sk.shape[2], dtype=torch.bool)

    def masked(scores):
        wider = scores.masked_fill(ones.triu(3) | ones.tril(-9), -1e9)
        return wider.masked_fill(ones.triu(1) | ones.tril(-5), -1e9)

    return kd(masked(sq @ sk.mT), masked(tq @ tk.mT))


@LOSSES.each({"positive": 2.5, "negative": -0.5})
def a_factor_of_every_element(factor, sq, sk, tq, tk):
    s, t = (sq @ sk.mT).log_softmax(-1), (tq @ tk.mT).log_softmax(-1)
    return (factor * t.exp() * (t - s)).sum(-1).mean()


@LOSSES()
def gradient_of_a_learned_temperature(sq, sk, tq, tk, number):
    return kd(sq @ sk.mT * number.exp(), tq @ tk.mT)


# torch.special has softmaxes and logarithms by names of its own: they are the same functions
SPECIAL = {
    "softmax, log_softmax": lambda s, t: F.kl_div(
        special.log_softmax(s, -1), special.softmax(t, dim=-1, dtype=torch.float64)
    ),
    "logsumexp": lambda s, t: (
        special.softmax(t, -1) * (special.logsumexp(s, -1, keepdim=True) - s)
    ).sum(-1),
    "xlogy": lambda s, t: (
        special.xlogy(t.softmax(-1), t.softmax(-1)) - t.softmax(-1) * s.log_softmax(-1)
    ).sum(-1),
    "expit": lambda s, t: (special.expit(s) * t.softmax(-1)).sum(-1),
    "log1p": lambda s, t: (t.softmax(-1) * special.log1p(s.softmax(-1))).sum(-1),
    "keywords of torch": lambda s, t: F.kl_div(
        torch.log_softmax(input=s, dim=-1), F.softmax(input=t, dim=-1, _stacklevel=5)
    ),
}


@LOSSES.each(SPECIAL)
def names_of_torch_special(form, sq, sk, tq, tk):
    return form(sq @ sk.mT, tq @ tk.mT).mean()


@LOSSES.parametrized()
def test_losses_of_attention(row):
    assert fused(row.program, attention_inputs()).num_fused == row.sites


# a tensor that varies along some of [batch, key heads, heads of a group, queries, keys]
SHARED_KEYS = [
    ((1, 2, 1, 1, 7), 1), ((1, 2, 1, 5, 7), 1), ((1, 2, 3, 5, 7), 1),
    ((1, 1, 3, 1, 7), 1), ((1, 1, 3, 5, 7), 1), ((1, 1, 1, 5, 7), 1), ((2, 2, 1, 5, 7), 2),
    ((2, 2, 3, 1, 7), 2),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize(("size", "batch"), SHARED_KEYS)
def test_masks_of_heads_that_share_keys(size, batch, kind):
    def loss(sq, sk, tq, tk, x):
        maps = []
        for q, k in ((sq, sk), (tq, tk)):
            scores = (q @ k.repeat_interleave(3, 1).mT).unflatten(1, (2, 3))
            scores = scores + x if kind == "bias" else scores.masked_fill(x > 1.0, -1e9)
            maps.append(scores.flatten(1, 2))
        s, t = maps
        return (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1).mean()

    shapes = ((batch, 6, 5, 4), (batch, 2, 7, 4)) * 2
    inputs = [torch.randn(shape).requires_grad_(i < 2) for i, shape in enumerate(shapes)]
    outcome = fused(loss, [*inputs, torch.randn(size)])
    assert [site.kind for site in outcome.report.sites] == ["attention_kl"], str(outcome.report)


@pytest.mark.parametrize("trained", ["one", "two"])
@pytest.mark.parametrize("has_entropy", [True, False])
def test_one_distribution_and_two_others_in_one_expression(trained, has_entropy):
    """Two sites of one sum, each with its own factor."""

    def loss(ak, aq, bk, bq, ck, cq):
        a, b, c = ((q @ k.mT).log_softmax(-1) for q, k in ((aq, ak), (bq, bk), (cq, ck)))
        entropy = 2.5 * a if has_entropy else 0.0
        return (a.exp() * (entropy - 0.5 * b - 2.0 * c)).sum(-1).mean()

    torch.manual_seed(1)
    inputs = [torch.randn(2, 3, n, 4) for n in (7, 5) * 3]
    for x in inputs[:2] if trained == "one" else inputs[2:]:
        x.requires_grad_()
    (site,) = fused(loss, inputs).report.sites
    assert site.form.count("; ") == 1, site.form


# ---------------------------------------------------------------------------- language-model heads
ROWS, VOCAB, DIM, TEACHER = 12, 40, 8, 16
HEADS = Table("xs ws xt wt labels bias", remaining=0, inner="eager", dynamic=None, sites=1)


def hidden_inputs():
    make = torch.Generator().manual_seed(0)
    shapes = ((2, ROWS, DIM), (VOCAB, DIM), (2, ROWS, TEACHER), (VOCAB, TEACHER))
    xs, ws, xt, wt = (torch.randn(*s, generator=make) for s in shapes)
    labels = torch.randint(0, VOCAB, (2, ROWS), generator=make)
    labels = labels.masked_fill(torch.rand(2, ROWS, generator=make) < 0.3, -100)
    return [xs.requires_grad_(), ws.requires_grad_(), xt, wt, labels]


PRODUCTS = {
    "linear": F.linear,
    "matmul_t": lambda x, w: x @ w.t(),
    "matmul_T": lambda x, w: torch.matmul(x, w.T),
    "transpose": lambda x, w: x @ w.transpose(0, 1),
    "einsum": lambda x, w: torch.einsum("btd,vd->btv", x, w),
    "fp32": lambda x, w: F.linear(x, w).float(),
    "flat": lambda x, w: F.linear(x.view(-1, x.shape[-1]), w).view(*x.shape[:-1], -1),
}


@HEADS.each(PRODUCTS)
def heads_of_language_models(product, xs, ws, xt, wt, labels):
    rows = rows_of_kl(product(xs, ws) / 2.0, product(xt, wt) / 2.0)
    keep = labels != -100
    return (rows * keep).sum() / keep.sum()


@HEADS.each({x: SPELLINGS[x] for x in ("exp_of_log", "reverse")})
def spellings_with_heads(spelling, xs, ws, xt, wt):
    return spelling(F.linear(xs, ws), F.linear(xt, wt)).sum(-1).mean()


@HEADS()
def a_bias_behind_the_scale(xs, ws, xt, wt, bias):
    return kd(xs @ ws.T * 0.25 + bias, xt @ wt.T * 0.5 + 3.0 * bias.detach())


@HEADS()
def a_layer_of_cohere_before_the_head(xs, ws, xt, wt):
    """It subtracts the mean of what a weight projects, which looks like a comparison of both."""

    def normalized(x):
        x = x - x.mean(-1, keepdim=True)
        return 2.0 * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    hidden = xs + xs @ ws[:DIM].T, xt + xt @ wt[:TEACHER].T
    return kd(normalized(hidden[0]) @ ws.T * 0.25, normalized(hidden[1]) @ wt.T * 0.25)


def _one_detached(x):
    with torch.no_grad():
        first = x[..., 9]
    return torch.stack([first, x[..., 5]], -1)


COLUMNS = {  # of a reranker's yes and no tokens
    "stack": lambda x: torch.stack([x[..., 5], x[..., 9]], -1),
    "backwards": lambda x: torch.stack([x[..., 9], x[..., -7]], -1),
    "cat": lambda x: torch.cat([x[..., 3:4], x[..., 9:10], x[..., 15:16]], -1),
    "unsqueezed": lambda x: torch.cat([x[..., 5].unsqueeze(-1), x[..., 9].unsqueeze(2)], 2),
    "uneven slices": lambda x: torch.cat([x[..., :3], x[..., 9:11]], -1),
    "before a slice": lambda x: torch.cat([x[..., 1:9:4], x[..., 9:]], -1),
    "after a slice": lambda x: torch.cat([x[..., 9:], x[..., 1:9:4]], -1),
    "one without a gradient": (_one_detached, None),
}


@HEADS.each(COLUMNS)
def columns_that_are_joined(join, xs, ws, xt, wt):
    return kd(join(F.linear(xs, ws)), join(F.linear(xt, wt)))


def chunks_of_tokens(chunks, xs, ws, xt, wt, labels):
    total = 0.0
    keep = labels != -100
    for a, b, kept in zip(*(x.chunk(chunks, 1) for x in (xs, xt, keep)), strict=True):
        s, t = (a @ ws.t()).float().log_softmax(-1), (b @ wt.t()).float().log_softmax(-1)
        rows = F.kl_div(s, t, reduction="none", log_target=True).sum(-1)
        total = total + (rows * kept).sum()
    return total / keep.sum()


for chunks in (1, 3):
    program = functools.partial(chunks_of_tokens, chunks)
    HEADS.add(f"chunks_of_tokens-{chunks}", program, sites=chunks)


SUMS = {
    "mean": lambda rows, keep: rows.mean(),
    "masked": lambda rows, keep: (rows * keep).sum() / keep.sum(),
    "written": lambda rows, keep: rows.mul_(keep).sum() / keep.sum(),
    "filled": lambda rows, keep: rows.masked_fill(~keep, 0).sum() / keep.sum(),
    "where": lambda rows, keep: torch.where(keep, rows, 0.0).sum(),
    "transposed": lambda rows, keep: (rows.transpose(0, 1).contiguous() * keep.t() / 3).sum(),
    "flat": lambda rows, keep: (rows.view(-1) * keep.view(-1).float()).mean() * 4.0,
    "permuted": lambda rows, keep: (rows.unsqueeze(0).permute(2, 0, 1) * keep.t()[:, None]).sum(),
}
NOT_SUMS = {
    "squared": lambda rows, keep: rows.square().sum(),
    "two readers": lambda rows, keep: rows.mean() + rows.amax(),
    "learned weight": lambda rows, keep: (rows * rows.detach().add(1).requires_grad_()).sum(),
    "per sequence": lambda rows, keep: (rows * keep).sum(1) / keep.sum(1),
}


@pytest.mark.parametrize("reduction", [*SUMS, *NOT_SUMS])
def test_weighted_sums_have_their_gradient_in_the_forward(reduction):
    reduce = {**SUMS, **NOT_SUMS}[reduction]

    def loss(xs, ws, xt, wt, labels):
        return reduce(rows_of_kl(F.linear(xs, ws), F.linear(xt, wt)), labels != -100)

    fused(loss, hidden_inputs())
    found = []

    def backend(gm, _):
        assert not rewrite(gm).failures
        found.extend(getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(loss, backend=backend)(*hidden_inputs())
    assert ("linear_kl_sum.default" in found) == (reduction in SUMS), found


SCALED = {  # of a sum, and what the backward multiplies its gradients by
    "batchmean and temperature": (lambda x, n: x / 7 * 0.25 * 4, 1),
    "from the left": (lambda x, n: -2 * x, 1),
    "mean": (lambda x, n: torch.div(x, 3.0), 1),
    "by a tensor": (lambda x, n: x * 2 / n, 1),
    "times a tensor, by another": (lambda x, n: n.square() * x / n.long(), 1),
    "by a mask's sum": (lambda x, n: x / n.clamp(min=1) * 0.25, 1),
    "by a tensor of 0": (lambda x, n: x * (n * 0), 0),
    "by a tensor of 0 in float16": (lambda x, n: x * (n * 0).half(), 0),
    "by tensors too large together": (lambda x, n: x / (n * 1e8) / (n * 1e8), 1 / 3e8),
    "by a tensor too large": (lambda x, n: x / (n * 1e20), 1 / 3e20),
    "by nothing": (lambda x, n: x * 0.0, 0),
    "of what others read": (lambda x, n: 2 * x + 3 * x, 5),
    "by too little": (lambda x, n: x * 1e-30, 1e-30),
    "without gradient": (lambda x, n: 2 * x.detach() + x * x.detach() / x.detach(), 1),
    "an inverse": (lambda x, n: 2.0 / x, None),
}


@pytest.mark.parametrize("name", list(SCALED))
def test_what_multiplies_a_sum_is_part_of_its_rows_weights(name, monkeypatch):
    """The backward has nothing to multiply a weight's gradient by."""
    scale, factor = SCALED[name]
    factors = []
    monkeypatch.setattr(
        linear_ops,
        "scaled_gradients",
        lambda stored, grad, needs: factors.append(grad) or scaled_gradients(stored, grad, needs),
    )

    def loss(xs, ws, xt, wt, labels):
        number = (labels >= 0).float().sum() * 0 + 3
        return scale(rows_of_kl(F.linear(xs, ws), F.linear(xt, wt)).sum(), number)

    fused(loss, hidden_inputs(), verify="never")
    for value in map(float, factors):
        assert value != 1 if factor is None else value == pytest.approx(factor, rel=1e-6), value
    assert factors


@pytest.mark.parametrize("is_written", [False, True])
def test_a_tensor_that_is_written_later_is_no_weight(is_written):
    def loss(xs, ws, xt, wt, labels):
        number = (labels >= 0).float().sum()
        total = rows_of_kl(F.linear(xs, ws), F.linear(xt, wt)).sum() / number
        return total, number.add_(1) if is_written else number

    names = []

    def backend(gm, _):
        assert rewrite(gm).num_fused == 1
        names.extend(getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(loss, backend=backend)(*hidden_inputs())
    assert "linear_kl_sum.default" in names
    assert ("where" in names) != is_written, names


def a_gradient_in_the_forward(xs, ws, xt, wt, labels):
    rows = rows_of_kl(F.linear(xs, ws), F.linear(xt, wt))
    return SUMS["masked"](rows, labels != -100) * 2.5


HEADS.add("in_the_forward", a_gradient_in_the_forward, inner="aot_eager", dynamic=True)
HEADS.add("in_the_forward-inductor", a_gradient_in_the_forward, False, inner="inductor")


def _vocab(x):
    return x.reshape(-1, x.shape[-1])


LABELS = {
    "mean": lambda s, y: F.cross_entropy(_vocab(s), y.view(-1)),
    "float": lambda s, y: F.cross_entropy(_vocab(s.float()), y.reshape(-1), ignore_index=-100),
    "sum": lambda s, y: F.cross_entropy(_vocab(s), y.view(-1), reduction="sum") / s.shape[0],
    "module": lambda s, y: nn.CrossEntropyLoss()(_vocab(s), y.view(-1)),
    "none": lambda s, y: (F.cross_entropy(_vocab(s), y.view(-1), reduction="none") * 0.3).mean(),
}
OTHER_LABELS = {  # other rows, other logits, or another loss: the logits stay
    "shifted": lambda s, y: F.cross_entropy(_vocab(s[:, :-1]), y[:, 1:].reshape(-1)),
    "smoothed": lambda s, y: F.cross_entropy(_vocab(s), y.view(-1), label_smoothing=0.1),
    "classes first": lambda s, y: F.cross_entropy(s.transpose(1, 2), y),
}


@pytest.mark.parametrize("loss", every(2, [*LABELS, *OTHER_LABELS]))
@pytest.mark.parametrize("first", ["labels", "teacher"])
def test_cross_entropy_of_labels_shares_the_logits(loss, first):
    of_labels = {**LABELS, **OTHER_LABELS}[loss]

    def step(xs, ws, xt, wt, labels):
        s = F.linear(xs, ws)
        hard = of_labels(s, labels) * 0.5 if first == "labels" else 0.0
        with torch.no_grad():
            t = F.linear(xt, wt)
        soft = rows_of_kl(s / 2, t / 2)
        hard = of_labels(s, labels) * 0.5 if first == "teacher" else hard
        return hard + 4 * (soft * (labels != -100)).mean()

    outcome = compare(step, hidden_inputs(), inner="aot_eager").check()
    assert outcome.num_fused == 1
    assert (outcome.report.num_remaining == 0) == (loss in LABELS), str(outcome.report)


SELECTED = {
    "elements": lambda s, t, keep: SPELLINGS["kl_div"](s, t)[keep].sum() / keep.sum(),
    "rows": lambda s, t, keep: rows_of_kl(s, t)[keep].mean(),
    "logits": lambda s, t, keep: kd(s[keep], t[keep]),
    "flat": lambda s, t, keep: SPELLINGS["reverse"](
        _vocab(s)[keep.view(-1)], _vocab(t)[keep.view(-1)]
    ).sum(),
}


@pytest.mark.parametrize("selection", every(2, SELECTED))
def test_rows_are_selected_before_the_product(selection):
    def loss(xs, ws, xt, wt, labels):
        return SELECTED[selection](F.linear(xs, ws), F.linear(xt, wt), labels != -100)

    fused(loss, hidden_inputs(), fullgraph=True, inner="aot_eager")


def _padded(x, like, value=float("-inf")):
    return F.pad(x, (0, like.shape[-1] - x.shape[-1]), value=value)


def _where(condition, values):
    return torch.where(condition, values, torch.zeros_like(values)).sum(-1).mean()


def finite(s, t):
    logs = _padded(t, s).log_softmax(-1)
    return _where(torch.isfinite(logs), logs.exp() * (logs - s.log_softmax(-1)))


def positive(s, t):
    p = _padded(t, s).softmax(-1)
    return _where(p > 0, p * (p.log() - s.log_softmax(-1)))


def reverse_where_finite(s, t):
    logs = _padded(t, s).log_softmax(-1)
    return _where(torch.isfinite(logs), s.softmax(-1) * (s.log_softmax(-1) - logs))


VOCABULARIES = {
    "teacher": lambda s, t: kd(s, _padded(t, s)),
    "finite": finite,
    "positive": positive,
    "reverse where finite": reverse_where_finite,
    "common vocabulary entries": lambda s, t: kd(s[..., : t.shape[-1]], t),
    "zeros": lambda s, t: kd(s, _padded(t, s, 0.0)),  # padding that takes part
}


@HEADS.each(VOCABULARIES, remaining=None)
def vocabularies_of_different_sizes(form, xs, ws, xt, wt):
    return form(F.linear(xs, ws), F.linear(xt, wt[:-6].clone()))


@HEADS.parametrized()
def test_losses_of_heads(row):
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1), requires_grad=True)
    given = [*hidden_inputs(), bias]
    outcome = compare(row.program, given, inner=row.inner, dynamic=row.dynamic)
    outcome.check_fused(row.sites, row.remaining)
    assert torch.isfinite(outcome.compiled.outputs[0]).all()


def test_modules_and_tied_embeddings():
    teacher = nn.Linear(TEACHER, VOCAB, bias=False).requires_grad_(False)

    class Distil(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.teacher = nn.Embedding(VOCAB, DIM), teacher
            self.loss = nn.KLDivLoss(reduction="batchmean", log_target=True)

        def forward(self, ids, xt):
            s, t = F.linear(self.embedding(ids), self.embedding.weight), self.teacher(xt)
            s, t = (F.log_softmax(x / 2, -1).flatten(0, 1) for x in (s, t))
            return self.loss(s, t) * 4

    model = Distil()
    inputs = torch.arange(2 * ROWS).view(2, ROWS) % VOCAB, torch.randn(2, ROWS, TEACHER)
    results = []
    for run in (model, compile_rewritten(model, strict=True)):
        loss = run(*inputs)
        results.append((loss.detach(), *torch.autograd.grad(loss, model.embedding.weight)))
    for exact, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact)
