"""Every way of writing the divergence fuses, and loss and gradients stay as exact as eager's."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.comparing import Outcome, compare
from tests.support.covering import every, only
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
from torch_streamkl.fx_passes.pipeline import rewrite

NEEDS_FULLGRAPH = {"index_rows"}  # a boolean index breaks the graph otherwise


def fused(program: Any, inputs: list[Any], **options: Any) -> Outcome:
    """Compare, and require that every site fused and nothing of queries x keys is left."""
    outcome = compare(program, inputs, **options).check()
    assert outcome.num_fused == len(outcome.report.sites) > 0, str(outcome.report)
    assert outcome.report.num_remaining == 0, str(outcome.report)
    return outcome


# -------------------- a mask on keys after the softmax: the sum over the stricter side's keys
def _forward(p: Tensor, q: Tensor) -> Tensor:
    return p * ((p + 1e-9).log() - (q + 1e-9).log())


def _mixture(p: Tensor, q: Tensor) -> Tensor:
    m = 0.5 * (p + q)
    return _forward(p, m) + _forward(q, m)


def within_the_student_s_keys(form, stricter, wider, sq, sk, tq, tk, pad):
    scores = (sq @ sk.mT / 3.0).masked_fill(~stricter(sq, pad), torch.finfo(sq.dtype).min)
    teacher_scores = (tq @ tk.mT / 3.0).masked_fill(~wider(sq, pad), torch.finfo(sq.dtype).min)
    s, t = scores.softmax(-1), teacher_scores.softmax(-1)
    values = form(t, s) if form is not None else _forward(s, t)  # the stricter side as teacher
    rows = (values * stricter(sq, pad)).sum(-1)
    count = stricter(sq, pad).expand_as(values).any(-1).sum()
    return rows.sum() / count.clamp(min=1)


def _causal(q: Tensor, pad: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()


STRICTER = {
    "window": (lambda q, pad: _causal(q, pad).triu(-3), _causal),
    "pad": (lambda q, pad: _causal(q, pad) & pad[:, None, None, :], _causal),
    "strict": (lambda q, pad: _causal(q, pad).tril(-1), _causal),  # a row without keys
    "all": (_causal, lambda q, pad: torch.ones_like(_causal(q, pad))),
}


@pytest.mark.parametrize("form", [_forward, _mixture, None])
@pytest.mark.parametrize("mask", STRICTER)
@pytest.mark.parametrize("gradient", ["student", "both"])
def test_sum_over_the_keys_of_the_stricter_side(mask: str, form: Any, gradient: str) -> None:
    program = functools.partial(within_the_student_s_keys, form, *STRICTER[mask])
    outcome = compare(program, Program(gradient=gradient).inputs()).check()
    assert outcome.num_fused == len(outcome.report.sites) == 1, str(outcome.report)
    # the count of rows is the user's own: it makes its mask of queries x keys
    assert outcome.report.num_remaining <= 1, str(outcome.report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_sum_over_the_keys_of_the_stricter_side_elsewhere(
    dtype: torch.dtype, dynamic: bool
) -> None:
    program = functools.partial(within_the_student_s_keys, _mixture, *STRICTER["window"])
    inputs = Program(gradient="both").inputs(dtype=dtype)
    outcome = compare(program, inputs, dynamic=dynamic).check()
    assert outcome.num_fused == len(outcome.report.sites) == 1, str(outcome.report)


# -------------------- one dimension of choice at a time
@pytest.mark.parametrize("producer", every(2, PRODUCERS))
def test_producers_of_scores(producer: str) -> None:
    program = Program(producer=producer, mask="tril_min")
    fused(program, program.inputs())


@pytest.mark.parametrize("scale", SCALES)
def test_places_of_the_scale(scale: str) -> None:
    program = Program(scale=scale, mask="tril_min")
    fused(program, program.inputs())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("spelling", ["kl_div", "clamp_both"])
def test_masks(mask: str, spelling: str) -> None:
    program = Program(mask=mask, spelling=spelling)
    fused(program, program.inputs())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    program = Program(spelling=spelling)
    fused(program, program.inputs())


@pytest.mark.parametrize(
    "spelling", every(3, sorted(set(SPELLINGS) - {"softmax_log", "division", "js_mixture"}))
)
def test_spellings_with_a_causal_mask(spelling: str) -> None:
    # the three left out are NaN in eager for every mask: 0 * log(0)
    program = Program(spelling=spelling, mask="tril_min", scale="temperature")
    fused(program, program.inputs())


@pytest.mark.parametrize("reduction", every(2, REDUCTIONS))
def test_reductions(reduction: str) -> None:
    program = Program(reduction=reduction, mask="tril_min")
    fused(program, program.inputs(), fullgraph=reduction in NEEDS_FULLGRAPH)


@pytest.mark.parametrize("call", every(2, CALLS))
def test_reductions_inside_the_loss_call(call: str) -> None:
    program = Program(call=call, mask="tril_min")
    fused(program, program.inputs())


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("spelling", ["kl_div", "reverse", "symmetric"])
def test_what_gets_gradient(gradient: str, spelling: str) -> None:
    program = Program(gradient=gradient, spelling=spelling)
    fused(program, program.inputs())


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("probability", PROBABILITIES)
def test_log_and_probability_spellings_combine(log: str, probability: str) -> None:
    base = Program()

    def loss(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, pad: Tensor) -> Tensor:
        s, t = base.scores(sq, sk, pad, "matmul"), base.scores(tq, tk, pad, "at")
        return F.kl_div(LOGS[log](s), PROBABILITIES[probability](t), reduction="batchmean")

    fused(loss, base.inputs())


# -------------------- how it is run
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    program = Program(producer="upcast", mask="tril_min")
    fused(program, program.inputs(dtype=dtype))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_shapes_modes_and_inner_compilers(dynamic: bool, training: bool, inner: str) -> None:
    program = Program(mask="causal_and_pad", spelling="log_ratio", reduction="masked_mean")
    fused(
        program, program.inputs(), dynamic=dynamic, training=training, inner=inner, fullgraph=True
    )


# what symbolic sizes change is in the rule of a mask or of a producer: each is here, next to
# others
@pytest.mark.parametrize(
    ("mask", "producer"),
    [
        ("tril_min", "bmm"),
        ("band", "broadcast_key"),
        ("arange_where", "bshd"),
        ("pad_bool", "matmul"),
        *(
            pytest.param(mask, producer, marks=pytest.mark.slow)
            for mask, producer in (
                ("none", "matmul"),
                ("tril_min", "matmul"),
                ("arange_where", "broadcast_key"),
                ("band", "bmm"),
            )
        ),
    ],
)
def test_dynamic_shapes(mask: str, producer: str) -> None:
    program = Program(mask=mask, producer=producer, uses_values=True)
    fused(program, program.inputs(), dynamic=True)


def test_one_dynamic_graph_serves_other_lengths() -> None:
    program = Program(mask="tril_min")
    torch._dynamo.reset()
    compiled = torch.compile(
        program, backend="streamkl", dynamic=True, options={"streamkl.inner": "eager"}
    )
    for n in (7, 16, 33):
        given = program.inputs(seed=n, num_queries=n)
        torch.testing.assert_close(compiled(*given), program(*given))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(Program(mask="tril_min", spelling="log_ratio"), marks=pytest.mark.slow),
        Program(mask="pad_1e4", call="KLDivLoss_flat", uses_values=True),
        pytest.param(Program(spelling="js", gradient="both"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_through_inductor(program: Program) -> None:
    fused(program, program.inputs(), inner="inductor")


# -------------------- neighbours of the divergence
@pytest.mark.parametrize(
    "mask", ["none", "tril_min", "pad_bool", "causal_and_pad", "additive_causal"]
)
def test_probabilities_that_also_make_the_attention_output(mask: str) -> None:
    program = Program(mask=mask, uses_values=True)
    outcome = fused(program, program.inputs())
    assert outcome.report.sites[0].kind == "attention_kl"


def test_several_sites_share_their_operands() -> None:
    first, second = Program(mask="tril_min"), Program(spelling="reverse", mask="tril_min")

    def both(*args: Tensor) -> Tensor:
        return first(*args) + 0.5 * second(*args)

    assert fused(both, first.inputs()).num_fused == 2


def test_layers_in_a_loop() -> None:
    program = Program(mask="tril_min", uses_values=True)

    def layers(
        hidden: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, pad: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = 0.0
        for _ in range(3):
            loss, hidden = program(hidden, sk, tq, tk, pad)
            total = total + loss
        return total / 3, hidden

    assert fused(layers, program.inputs()).num_fused == 3


def test_boolean_and_additive_masks_that_are_inputs() -> None:
    program = Program()

    def loss(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
        def scores(q: Tensor, k: Tensor) -> Tensor:
            return (q @ k.transpose(-1, -2) + bias).masked_fill(keep.logical_not(), -1e9)

        return F.kl_div(
            scores(sq, sk).log_softmax(-1), scores(tq, tk).softmax(-1), reduction="batchmean"
        )

    inputs = program.inputs()[:4]
    n = inputs[0].shape[2]
    make = torch.Generator().manual_seed(1)
    keep = torch.rand(2, 1, n, n, generator=make) > 0.3
    keep[..., 0] = True
    fused(loss, [*inputs, keep, torch.randn(1, 4, n, n, generator=make)])


# a tensor that varies along some of [batch, key heads, heads of a group, queries, keys]
SHARED_KEYS = [
    ((1, 2, 1, 1, 7), 1), ((1, 2, 1, 5, 7), 1), ((1, 2, 3, 5, 7), 1),
    ((1, 1, 3, 1, 7), 1), ((1, 1, 3, 5, 7), 1), ((1, 1, 1, 5, 7), 1), ((2, 2, 1, 5, 7), 2),
    ((2, 2, 3, 1, 7), 2),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize(("size", "batch"), SHARED_KEYS)
def test_masks_of_heads_that_share_keys(size: tuple[int, ...], batch: int, kind: str) -> None:
    def loss(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, x: Tensor) -> Tensor:
        maps = []
        for q, k in ((sq, sk), (tq, tk)):
            scores = (q @ k.repeat_interleave(3, 1).mT).unflatten(1, (2, 3))
            scores = scores + x if kind == "bias" else scores.masked_fill(x > 1.0, -1e9)
            maps.append(scores.flatten(1, 2))
        s, t = maps
        rows = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
        return rows.mean()

    queries, keys = ((batch, 6, 5, 4), (batch, 2, 7, 4))
    inputs = [
        torch.randn(size).requires_grad_(i < 2) for i, size in enumerate([queries, keys] * 2)
    ]
    outcome = fused(loss, [*inputs, torch.randn(size)])
    assert [site.kind for site in outcome.report.sites] == ["attention_kl"], str(outcome.report)


def test_sizes_of_queries_and_keys_differ() -> None:
    def loss(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
        n, m = sq.shape[2], sk.shape[2]
        keep = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        s = (sq @ sk.mT).masked_fill(~keep, float("-inf")).log_softmax(-1)
        t = (tq @ tk.mT).masked_fill(~keep, float("-inf")).softmax(-1)
        return F.kl_div(s, t, reduction="none").nansum(-1).mean()

    a = Program().inputs()
    fused(loss, [a[0][:, :, -4:].detach().requires_grad_(), a[1], a[2][:, :, -4:], a[3]])


def test_the_tighter_of_two_windows_counts() -> None:
    def loss(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
        ones = torch.ones(sq.shape[2], sk.shape[2], dtype=torch.bool)

        def masked(scores: Tensor) -> Tensor:
            wider = scores.masked_fill(ones.triu(3) | ones.tril(-9), -1e9)
            return wider.masked_fill(ones.triu(1) | ones.tril(-5), -1e9)

        s, t = masked(sq @ sk.mT).log_softmax(-1), masked(tq @ tk.mT).softmax(-1)
        return F.kl_div(s, t, reduction="batchmean")

    fused(loss, Program().inputs()[:4])


@pytest.mark.parametrize("factor", [2.5, -0.5])
def test_a_factor_of_every_element(factor: float) -> None:
    def loss(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
        s, t = (sq @ sk.mT).log_softmax(-1), (tq @ tk.mT).log_softmax(-1)
        return (factor * t.exp() * (t - s)).sum(-1).mean()

    fused(loss, Program().inputs()[:4])


@pytest.mark.parametrize("trained", ["one", "two"])
@pytest.mark.parametrize("has_entropy", [True, False])
def test_one_distribution_and_two_others_in_one_expression(
    trained: str, has_entropy: bool
) -> None:
    """Two sites of one sum, each with its own factor."""

    def loss(ak: Tensor, aq: Tensor, bk: Tensor, bq: Tensor, ck: Tensor, cq: Tensor) -> Tensor:
        a, b, c = ((q @ k.mT).log_softmax(-1) for q, k in ((aq, ak), (bq, bk), (cq, ck)))
        entropy = 2.5 * a if has_entropy else 0.0
        return (a.exp() * (entropy - 0.5 * b - 2.0 * c)).sum(-1).mean()

    torch.manual_seed(1)
    inputs = [torch.randn(2, 3, n, 4) for n in (7, 5) * 3]
    for x in inputs[:2] if trained == "one" else inputs[2:]:
        x.requires_grad_()
    (site,) = fused(loss, inputs).report.sites
    assert site.form.count("; ") == 1, site.form


def test_gradient_of_a_learned_temperature() -> None:
    def loss(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, log_scale: Tensor) -> Tensor:
        s = sq @ sk.mT * log_scale.exp()
        return F.kl_div(s.log_softmax(-1), (tq @ tk.mT).softmax(-1), reduction="batchmean")

    fused(loss, [*Program().inputs()[:4], torch.tensor(-0.5, requires_grad=True)])


# ---------------------------------------------------------------------------- language-model heads
ROWS, VOCAB, DIM, TEACHER = 12, 40, 8, 16
HEADS_OF_MODELS = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul_t": lambda x, w: x @ w.t(),
    "matmul_T": lambda x, w: torch.matmul(x, w.T),
    "transpose": lambda x, w: x @ w.transpose(0, 1),
    "einsum": lambda x, w: torch.einsum("btd,vd->btv", x, w),
    "fp32": lambda x, w: F.linear(x, w).float(),
    "flat": lambda x, w: F.linear(x.view(-1, x.shape[-1]), w).view(*x.shape[:-1], -1),
}


def hidden_inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    shapes = ((2, ROWS, DIM), (VOCAB, DIM), (2, ROWS, TEACHER), (VOCAB, TEACHER))
    xs, ws, xt, wt = (torch.randn(*s, generator=make).to(dtype) for s in shapes)
    labels = torch.randint(0, VOCAB, (2, ROWS), generator=make).masked_fill(
        torch.rand(2, ROWS, generator=make) < 0.3, -100
    )
    return [xs.requires_grad_(), ws.requires_grad_(), xt, wt, labels]


@pytest.mark.parametrize("head", HEADS_OF_MODELS)
@pytest.mark.parametrize("spelling", ["kl_div", "exp_of_log", "reverse"])
def test_heads_of_language_models(head: str, spelling: str) -> None:
    def loss(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        s, t = HEADS_OF_MODELS[head](xs, ws) / 2.0, HEADS_OF_MODELS[head](xt, wt) / 2.0
        rows = SPELLINGS[spelling](s, t).sum(-1)
        keep = labels != -100
        return (rows * keep).sum() / keep.sum()

    fused(loss, hidden_inputs())


def test_a_bias_behind_the_scale() -> None:
    def loss(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, bias: Tensor) -> Tensor:
        s, t = xs @ ws.T * 0.25 + bias, xt @ wt.T * 0.5 + 3.0 * bias.detach()
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1), requires_grad=True)
    fused(loss, [*hidden_inputs()[:4], bias])


def test_modules_and_tied_embeddings() -> None:
    torch.manual_seed(0)
    teacher, embedding = nn.Linear(TEACHER, VOCAB, bias=False), nn.Embedding(VOCAB, DIM)
    for p in teacher.parameters():
        p.requires_grad_(False)

    class Distil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.teacher = embedding, teacher
            self.loss = nn.KLDivLoss(reduction="batchmean", log_target=True)

        def forward(self, ids: Tensor, xt: Tensor) -> Tensor:
            s = F.linear(self.embedding(ids), self.embedding.weight)
            t = self.teacher(xt)
            return (
                self.loss(
                    F.log_softmax(s / 2, -1).flatten(0, 1), F.log_softmax(t / 2, -1).flatten(0, 1)
                )
                * 4
            )

    ids = torch.arange(2 * ROWS).view(2, ROWS) % VOCAB
    xt = torch.randn(2, ROWS, TEACHER)
    model = Distil()
    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend="streamkl", options={"streamkl.inner": "eager", "streamkl.strict": True}
    )
    results = []
    for run in (model, compiled):
        loss = run(ids, xt)
        results.append((loss.detach(), *torch.autograd.grad(loss, embedding.weight)))
    for exact, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("chunks", [1, 3])
def test_chunks_of_tokens(chunks: int) -> None:
    def loss(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        total = 0.0
        for a, b, keep in zip(
            xs.chunk(chunks, 1),
            xt.chunk(chunks, 1),
            (labels != -100).chunk(chunks, 1),
            strict=True,
        ):
            s, t = (a @ ws.t()).float().log_softmax(-1), (b @ wt.t()).float().log_softmax(-1)
            rows = F.kl_div(s, t, reduction="none", log_target=True).sum(-1)
            total = total + (rows * keep).sum()
        return total / (labels != -100).sum()

    assert fused(loss, hidden_inputs()).num_fused == chunks


def test_program_is_readable() -> None:
    # ids of the parametrised tests name every choice
    assert "mask='band'" in str(replace(Program(), mask="band"))


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
@pytest.mark.parametrize("spelling", ["kl_div", "reverse"])
def test_weighted_sums_have_their_gradient_in_the_forward(reduction: str, spelling: str) -> None:
    reduce = {**SUMS, **NOT_SUMS}[reduction]

    def loss(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        rows = SPELLINGS[spelling](F.linear(xs, ws), F.linear(xt, wt)).sum(-1)
        return reduce(rows, labels != -100)

    fused(loss, hidden_inputs())
    graph = rewritten_targets(loss, hidden_inputs())
    assert ("linear_kl_sum.default" in graph) == (reduction in SUMS), graph


def rewritten_targets(fn: Any, inputs: list[Any]) -> list[str]:
    """Operators of the rewritten graph."""
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        assert not rewrite(gm).failures
        found.extend(getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*inputs)
    return found


@pytest.mark.parametrize("inner", only(["aot_eager"], ["aot_eager", "inductor"]))
def test_gradient_in_the_forward(inner: str) -> None:
    def loss(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        rows = SPELLINGS["kl_div"](F.linear(xs, ws), F.linear(xt, wt)).sum(-1)
        return SUMS["masked"](rows, labels != -100) * 2.5

    fused(loss, hidden_inputs(), inner=inner, dynamic=inner == "aot_eager")


def _vocab(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


WITH_LABELS = {
    "mean": lambda s, y: F.cross_entropy(_vocab(s), y.view(-1)),
    "float": lambda s, y: F.cross_entropy(_vocab(s.float()), y.reshape(-1), ignore_index=-100),
    "sum": lambda s, y: F.cross_entropy(_vocab(s), y.view(-1), reduction="sum") / s.shape[0],
    "module": lambda s, y: nn.CrossEntropyLoss()(_vocab(s), y.view(-1)),
    "none": lambda s, y: (F.cross_entropy(_vocab(s), y.view(-1), reduction="none") * 0.3).mean(),
}
WITH_OTHER_LABELS = {  # other rows, other logits, or another loss: the logits stay
    "shifted": lambda s, y: F.cross_entropy(_vocab(s[:, :-1]), y[:, 1:].reshape(-1)),
    "smoothed": lambda s, y: F.cross_entropy(_vocab(s), y.view(-1), label_smoothing=0.1),
    "classes first": lambda s, y: F.cross_entropy(s.transpose(1, 2), y),
}


@pytest.mark.parametrize("loss", every(2, [*WITH_LABELS, *WITH_OTHER_LABELS]))
@pytest.mark.parametrize("first", ["labels", "teacher"])
def test_cross_entropy_of_labels_shares_the_logits(loss: str, first: str) -> None:
    of_labels = {**WITH_LABELS, **WITH_OTHER_LABELS}[loss]

    def step(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        s = F.linear(xs, ws)
        hard = of_labels(s, labels) * 0.5 if first == "labels" else 0.0
        with torch.no_grad():
            t = F.linear(xt, wt)
        soft = F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="none").sum(-1)
        hard = of_labels(s, labels) * 0.5 if first == "teacher" else hard
        return hard + 4 * (soft * (labels != -100)).mean()

    outcome = compare(step, hidden_inputs(), inner="aot_eager").check()
    assert outcome.num_fused == 1
    shared = loss in WITH_LABELS
    assert (outcome.report.num_remaining == 0) == shared, str(outcome.report)


ROW_SELECTIONS = {
    "elements": lambda s, t, keep: SPELLINGS["kl_div"](s, t)[keep].sum() / keep.sum(),
    "rows": lambda s, t, keep: SPELLINGS["kl_div"](s, t).sum(-1)[keep].mean(),
    "selected rows": lambda s, t, keep: SPELLINGS["kl_div"](s, t)[keep].sum(-1).mean(),
    "logits": lambda s, t, keep: F.kl_div(
        s[keep].log_softmax(-1), t[keep].softmax(-1), reduction="batchmean"
    ),
    "flat": lambda s, t, keep: SPELLINGS["reverse"](
        _vocab(s)[keep.view(-1)], _vocab(t)[keep.view(-1)]
    ).sum(),
}


@pytest.mark.parametrize("selection", every(2, ROW_SELECTIONS))
def test_rows_are_selected_before_the_product(selection: str) -> None:
    def loss(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        return ROW_SELECTIONS[selection](F.linear(xs, ws), F.linear(xt, wt), labels != -100)

    for inner in ("eager", "aot_eager"):
        fused(loss, hidden_inputs(), fullgraph=True, inner=inner)


def _padded(x: Tensor, size: int, value: float = float("-inf")) -> Tensor:
    return F.pad(x, (0, size - x.shape[-1]), value=value)


PADDED = {
    "teacher": lambda s, t: F.kl_div(
        s.log_softmax(-1), _padded(t, s.shape[-1]).softmax(-1), reduction="batchmean"
    ),
    "finite": lambda s, t: (
        torch.where(
            torch.isfinite(lt := _padded(t, s.shape[-1]).log_softmax(-1)),
            lt.exp() * (lt - s.log_softmax(-1)),
            torch.zeros_like(s),
        )
        .sum(-1)
        .mean()
    ),
    "positive": lambda s, t: (
        torch.where(
            (p := _padded(t, s.shape[-1]).softmax(-1)) > 0, p * (p.log() - s.log_softmax(-1)), 0.0
        )
        .sum(-1)
        .mean()
    ),
    "reverse where finite": lambda s, t: (
        torch.where(
            torch.isfinite(lt := _padded(t, s.shape[-1]).log_softmax(-1)),
            s.softmax(-1) * (s.log_softmax(-1) - lt),
            torch.zeros_like(s),
        )
        .sum(-1)
        .mean()
    ),
    "common vocabulary entries": lambda s, t: F.kl_div(
        s[..., : t.shape[-1]].log_softmax(-1), t.softmax(-1), reduction="batchmean"
    ),
    # padding that takes part
    "zeros": lambda s, t: F.kl_div(
        s.log_softmax(-1), _padded(t, s.shape[-1], 0.0).softmax(-1), reduction="batchmean"
    ),
}


@pytest.mark.parametrize("form", PADDED)
def test_vocabularies_of_different_sizes(form: str) -> None:
    def loss(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        return PADDED[form](F.linear(xs, ws), F.linear(xt, wt))

    xs, ws, xt, wt, labels = hidden_inputs()
    outcome = compare(loss, [xs, ws, xt, wt[:-6].clone(), labels]).check()
    assert outcome.num_fused == 1, str(outcome.report)
    assert torch.isfinite(outcome.compiled.outputs[0]).all()
