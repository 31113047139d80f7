"""Low-rank adapters of LM heads: ``x W^T + s (x A^T) B^T`` fuses, with gradients to A, B and x."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare, refusals
from tests.support.covering import every
from tests.support.losses import kd, rows_of_kl
from tests.support.named_inputs import given

ROWS, WIDTH, TEACHER, VOCAB, RANK = 7, 12, 20, 50, 3
of_head = given("x w a b bias xt wt labels")


def inputs(dtype=torch.float32, trains_w=False):
    make = torch.Generator().manual_seed(0)
    shapes = (
        (2, ROWS, WIDTH), (VOCAB, WIDTH), (RANK, WIDTH), (VOCAB, RANK), (VOCAB,),
        (2, ROWS, TEACHER), (VOCAB, TEACHER),
    )  # fmt: skip
    tensors = [torch.randn(*s, generator=make).to(dtype) for s in shapes]
    labels = torch.randint(0, VOCAB, (2, ROWS), generator=make)
    labels[:, :2] = -100
    for i, x in enumerate(tensors):
        x.requires_grad_(i in (0, 2, 3) or (trains_w and i in (1, 4)))
    return [*tensors, labels]


def peft(x, w, a, b):
    """As PEFT's layers compute it."""
    result = F.linear(x, w)
    return result + adapter(x, a, b) * 0.5


def adapter(x, a, b, bias=None):
    return F.linear(F.linear(x, a), b, bias)


FORMS = {
    "peft": peft,
    "adapter first": lambda x, w, a, b: x @ a.t() @ b.t() * 0.5 + x @ w.t(),
    "with a bias": lambda x, w, a, b, bias: F.linear(x, w, bias) + adapter(x, a, b),
    "bias of the adapter": lambda x, w, a, b, bias: F.linear(x, w) - 2.0 * adapter(x, a, b, bias),
    "softcap": lambda x, w, a, b: 3.0 * torch.tanh(peft(x, w, a, b) / 3.0),
    "negative": lambda x, w, a, b: -(0.25 * F.linear(x, w) - adapter(x * 2, a, b)),
    "learned temperature": lambda x, w, a, b, bias: peft(x, w, a, b) / bias.detach()[0],
    "value per row": lambda x, w, a, b: peft(x, w, a, b) * x.detach()[..., :1].abs(),
    "adapter of one row": lambda x, w, a, b: F.linear(x, w) + adapter(x[:, :1], a, b),
    # whose vocabulary entries have another order
    "other vocabulary entries": lambda x, w, a, b: F.linear(x, w) + adapter(x, a, b).flip(-1),
    "padded vocabulary entries": lambda x, w, a, b: F.pad(
        peft(x, w, a, b)[..., :30], (0, VOCAB - 30), value=float("-inf")
    ),
}


def rows(s, t):
    return rows_of_kl(s / 2, t / 2)


def loss_of(form):
    form = of_head(form)

    def loss(*values):
        return rows(form(*values), F.linear(values[5], values[6])).mean()

    return loss


def fused(program, inputs, **options):
    outcome = compare(program, inputs, **options).check_fused(1)
    assert "a sum of two products" in outcome.report.sites[0].form


@pytest.mark.parametrize("form", every(2, FORMS))
@pytest.mark.parametrize("trains_w", [False, True])
def test_forms(form, trains_w):
    fused(loss_of(FORMS[form]), inputs(trains_w=trains_w))


@pytest.mark.parametrize("reduction", ["mean", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, reduction):
    @of_head
    def loss(x, w, a, b, xt, wt):
        found = rows(peft(x, w, a, b), F.linear(xt, wt))
        return found.mean() if reduction == "mean" else (found**2).sum()

    fused(loss, inputs(dtype))


@of_head
def an_adapter_of_the_teacher(x, w, a, b):
    with torch.no_grad():
        t = peft(x, w, a, b)
    return rows(F.linear(x, w), t).sum()


@of_head
def labels_and_shifted_tokens(x, w, a, b, xt, wt, labels):
    """The loss of a causal model: KL and cross-entropy of shifted logits."""
    s = peft(x, w, a, b)[:, :-1].reshape(-1, VOCAB)
    t = F.linear(xt, wt)[:, :-1].reshape(-1, VOCAB)
    return F.cross_entropy(s, labels[:, 1:].reshape(-1)) + 4 * kd(s / 2, t / 2)


@of_head
def selected_rows(x, w, a, b, xt, wt, labels):
    keep = labels != -100
    return rows(peft(x, w, a, b)[keep], F.linear(xt, wt)[keep]).mean()


@pytest.mark.parametrize(
    ("loss", "dynamic"),
    [
        (loss_of(peft), True),
        (an_adapter_of_the_teacher, False),
        (labels_and_shifted_tokens, False),
        (selected_rows, True),
    ],
    ids=["plain", "teacher", "labels", "selected"],
)
def test_losses(loss, dynamic):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fused(loss, inputs(trains_w=True), inner="aot_eager", dynamic=dynamic)


@pytest.mark.slow
def test_through_inductor():
    fused(labels_and_shifted_tokens, inputs(), inner="inductor")


# ------------------------------------------------------------ not one head with one adapter
def weight_decomposed(x, w, a, b, bias):
    """DoRA: a magnitude per vocabulary entry over the norm of the adapted weight."""
    norm = (w + 0.5 * b @ a).norm(dim=1).detach()
    magnitude = (bias.abs() / norm)[None]
    adapted = adapter(x, a, b) * 0.5
    return F.linear(x, w) + (magnitude - 1) * F.linear(x, w) + magnitude * adapted


def of_other_rows(x, w, a, b):
    """Rows that another order has: as many, and not the same."""
    return F.linear(x, w) + adapter(x, a, b).transpose(0, 1).reshape(*x.shape[:2], -1)


def in_another_type(x, w, a, b):
    """An adapter in float32 next to a head in bfloat16: the operator would round it."""
    adapted = adapter(x.float(), a.float(), b.float())
    return (F.linear(x, w) + adapted).to(x.dtype)


def removed_entries(x, w, a, b):
    masked = F.linear(x, w).masked_fill(torch.arange(VOCAB) > 40, float("-inf"))
    return masked + adapter(x, a, b)


# several products that meet: the operators of divergences take one and an adapter
ROW_PROGRAMS = {
    "two adapters": lambda x, w, a, b: peft(x, w, a, b) + adapter(x.sin(), a, b),
    "after a tanh": lambda x, w, a, b: torch.tanh(F.linear(x, w)) + adapter(x, a, b),
    "after removed entries": removed_entries,
    "capped": lambda x, w, a, b: F.linear(x, w) + torch.tanh(adapter(x, a, b)),
    # words that another matrix has in every text of the batch
    "of each text": lambda x, w, a, b: (
        F.linear(x, w) + F.linear(x, a) @ torch.stack([b, b.sin()]).mT
    ),
    "multiplied": lambda x, w, a, b: F.linear(x, w) * adapter(x, a, b),
}


@pytest.mark.parametrize("form", every(2, ROW_PROGRAMS))
def test_is_a_row_program(form):
    loss = loss_of(ROW_PROGRAMS[form])
    outcome = compare(loss, inputs(), inner="aot_eager").check()
    assert outcome.kinds == {"row_program"}, str(outcome.report)
    assert all(refusals(loss, inputs()))


@pytest.mark.parametrize("form", [weight_decomposed, of_other_rows, in_another_type])
def test_left_alone(form):
    dtype = torch.bfloat16 if form is in_another_type else torch.float32
    outcome = compare(loss_of(form), inputs(dtype), inner="aot_eager").check()
    assert outcome.num_fused == 0
    assert outcome.report.sites[0].reason
