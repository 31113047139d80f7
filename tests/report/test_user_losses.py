"""No silence and no untruth: what the report says of users' losses, against what is allocated."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.support.more_user_losses  # adds to USER_LOSSES
import tests.support.public_losses  # noqa: F401  # so does this
import torch_streamkl
from tests.corpus.naive_losses import BY_NAME
from tests.support.allocations import Allocations, measure
from tests.support.covering import every
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes.reporting.hints import advice_for
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.reporting.text import NOTHING_REMAINS


def assert_true(report: Report, shapes: list[tuple[int, ...]]) -> None:
    """The report lists large tensors where such were allocated, and only there."""
    listed = [*report.remaining, *report.elsewhere]
    assert bool(listed) == bool(shapes), f"allocated {shapes}\n{report.details()}"
    assert (NOTHING_REMAINS in str(report)) == (not shapes), f"allocated {shapes}\n{report}"
    if shapes:
        largest = max(math.prod(shape) for shape in shapes)
        sizes = [math.prod(n for n in x.shape if isinstance(n, int)) for x in listed]
        assert max(sizes) >= largest, f"allocated {shapes}\n{report.details()}"
        assert report.remaining_bytes >= largest
        assert all(":" in x.location and x.reason for x in listed)


# others are quick: what blocks each, and why no loss was recognized
@pytest.mark.parametrize("name", every(2, USER_LOSSES))
def test_of_users(name: str) -> None:
    loss = USER_LOSSES[name]
    report, shapes = measure(loss.fn, loss.inputs(), loss.large)
    assert report.num_fused >= loss.fuses, report
    assert_true(report, shapes)
    for site in report.sites:
        assert site.fused or (site.reason and site.hint), report
    if not report.sites:
        assert report.unrecognized, report.details()
        assert "no distillation loss recognized" in str(report)
    assert "0 of 0" not in str(report)


QUICK = {
    "attn_clamp_qmask", "megatron_cached_topk_ghost", "liger_lmhead_jsd_b0.5",
    "tilelang_dsa_sparse",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in BY_NAME]
)
@pytest.mark.filterwarnings("ignore")
def test_of_the_corpus(name: str) -> None:
    """Sizes of operands do not count: scores there are seldom much larger."""
    case = BY_NAME[name]
    inputs = case["make_inputs"](torch.float32)
    eager = Allocations(1)
    with eager:
        case["fn"](*inputs)
    largest = max(math.prod(shape) for shape in eager.shapes)
    report, shapes = measure(case["fn"], inputs, largest // 2)
    operands = {x.numel() for x in inputs if isinstance(x, torch.Tensor)}
    if not case["has_matmul"]:
        operands = set()
    large = [shape for shape in shapes if math.prod(shape) not in operands]
    says_nothing = NOTHING_REMAINS in str(report)
    assert not (says_nothing and large), f"allocated {large}\n{report}"
    assert report.remaining or report.elsewhere or not large, f"allocated {large}\n{report}"


def named(name: str) -> Report:
    torch._dynamo.reset()
    loss = USER_LOSSES[name]
    return torch_streamkl.explain(loss.fn, *loss.inputs())


REASONS = {
    "custom_function": "it is in a custom autograd.Function",
    "checkpointed_loss": "it is an input of the checkpoint that the loss is in",
    "printed": 'a graph break at {file}:{line} lies between: print(end="")',
    "branch_on_values": "lies between: if s.isnan().any():",
    "item_between": "lies between: scale = 1.0 if s.detach().amax().item() < 0 else 2.0",
    "dropout_before_the_loss": "dropout changes the probabilities after the softmax",
    "logits_are_returned": "cumsum is applied to attention or vocabulary probabilities",
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons_name_what_blocks(name: str) -> None:
    report = named(name)
    (site,) = report.sites
    wanted = REASONS[name].partition("{file}")[0]
    assert wanted in site.reason, report
    if "graph break" in site.reason:
        (ended,) = report.breaks
        assert ended.location in site.reason or ended.code in site.reason


UNRECOGNIZED = {
    "universal_logit_distillation": "feeds sort at",
    "cross_entropy_alone": "cross-entropy with labels alone",
    "attention_alone": "attention probabilities that are compared with no other distribution",
}


@pytest.mark.parametrize("name", UNRECOGNIZED)
def test_why_no_loss_was_recognized(name: str) -> None:
    report = named(name)
    assert not report.sites
    assert UNRECOGNIZED[name] in str(report), report


def test_a_loss_of_rows_is_no_second_loss() -> None:
    report = named("bhattacharyya")
    assert (report.num_fused, len(report.sites)) == (1, 1), report


def test_swapped_arguments_are_warned_of() -> None:
    (site,) = named("swapped").sites
    assert site.fused and "kl_div expects log-probabilities" in site.warning


def test_logarithms_of_log_probabilities_are_warned_of() -> None:
    def loss(h: Tensor, w: Tensor, r: Tensor, u: Tensor) -> Tensor:
        s, t = h @ w.mT, r @ u.mT
        return F.kl_div(s.log_softmax(-1), t.log_softmax(-1), reduction="sum")

    inputs = [torch.randn(n, 4, requires_grad=i < 2) for i, n in enumerate((5, 9, 5, 9))]
    (site,) = torch_streamkl.explain(loss, *inputs, options={"streamkl.min_mib": 0}).sites
    assert site.fused and "log_target=True" in site.warning


def test_what_is_fused_with_a_loss_is_said() -> None:
    (site,) = named("kl_and_cross_entropy").sites
    assert "cross-entropy" in site.also


def test_forms_have_names() -> None:
    assert named("generalized_jsd").sites[0].form == "js, beta=0.5"
    assert named("r_drop").sites[0].form == ("jeffreys, student and teacher both need a gradient")


def test_log_probabilities_are_normalised_already() -> None:
    """Value and gradients, against the KL's own formula in float64."""
    loss = USER_LOSSES["normalised_twice"]
    torch._dynamo.reset()
    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0.0}
    given = loss.inputs()
    with torch_streamkl.reports() as report:
        value = torch.compile(loss.fn, backend="streamkl", options=options)(*given)
    assert report.num_fused == 1
    h, w, g, v = (x.detach().double() for x in given)
    s, t = h @ w.T, g @ v.T
    q, p = s.exp() / s.exp().sum(-1, keepdim=True), t.exp() / t.exp().sum(-1, keepdim=True)
    assert abs(value.item() - (p * (p / q).log()).sum().item() / len(h)) < 1e-5
    grad_h, grad_w = torch.autograd.grad(value, given[:2])
    torch.testing.assert_close(grad_h.double(), (q - p) @ w / len(h), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad_w.double(), (q - p).T @ h / len(h), rtol=1e-4, atol=1e-6)


def test_student_and_teacher_are_named() -> None:
    (roles,) = {named("r_drop").sites[0].roles}
    student, teacher = roles.split("; ")
    assert student.startswith("student: matmul of ") and teacher.startswith("teacher: matmul of ")
    products = {x.split(" (")[0].partition(": ")[2] for x in (student, teacher)}
    assert products == {"matmul of h and w", "matmul of mul and w"}  # both directions are summed
    assert student.endswith("needs a gradient") and teacher.endswith("needs a gradient")
    (roles,) = {named("reverse_kl").sites[0].roles}
    assert roles.endswith("needs no gradient") and "teacher: matmul of g and v" in roles


class _Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(4, 9, bias=False)


STUDENT, TEACHER = _Head(), _Head()


class _Trainer:
    def __init__(self) -> None:
        self.model = STUDENT

    def loss(self, hidden: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        s, t = self.model.lm_head(hidden), inputs["h"] @ TEACHER.lm_head.weight.T
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


class _Step(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList([STUDENT, TEACHER])

    def forward(self, hidden: Tensor, g: Tensor) -> Tensor:
        s, t = self.models[0].lm_head(hidden), self.models[1].lm_head(g)
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def _of_a_closure(weight: Tensor) -> Any:
    def loss(h: Tensor) -> Tensor:
        s, t = h @ weight.T, h @ TEACHER.lm_head.weight.T
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    return loss


def test_inputs_have_the_names_of_the_users_code() -> None:
    """Not those of Dynamo (L_self_modules_...), nor of explain()'s own frame."""
    h, g = torch.randn(5, 4), torch.randn(5, 4)
    trainer, step = _Trainer(), _Step()
    by_keyword = functools.partial(trainer.loss, inputs={"h": g})
    of_step = ("hidden and self.models.0.lm_head.weight", "g and self.models.1.lm_head.weight")
    for fn, args, names in (
        (trainer.loss, (h, {"h": g}), ("hidden and self.model.lm_head.weight", "inputs['h'] and")),
        (by_keyword, (h,), ("and self.model.lm_head.weight", "inputs['h'] and TEACHER.lm_head")),
        (step, (h, g), of_step),
        (_of_a_closure(torch.randn(9, 4)), (h,), ("h and weight", "h and TEACHER.lm_head.weight")),
    ):
        options = {"streamkl.min_mib": 0.0, "streamkl.inner": "eager"}
        explained = torch_streamkl.explain(fn, *args, options=options)
        with torch_streamkl.reports() as compiled:
            torch._dynamo.reset()
            torch.compile(fn, backend="streamkl", options=options)(*args)
        for report in (explained, compiled):
            (site,) = report.sites
            assert all(name in site.roles for name in names), site.roles


def test_a_js_of_float32_numbers_has_its_beta() -> None:
    """As TRL: beta is a tensor, and its logarithms are rounded."""

    def jsd(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t, beta = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1), torch.tensor(0.1)
        m = torch.logsumexp(torch.stack([s + torch.log1p(-beta), t + torch.log(beta)]), dim=0)
        of_t = F.kl_div(m, t, reduction="none", log_target=True)
        of_s = F.kl_div(m, s, reduction="none", log_target=True)
        return (beta * of_t + (1 - beta) * of_s).sum(-1).mean()

    inputs = USER_LOSSES["cosine"].inputs()
    (site,) = torch_streamkl.explain(jsd, *inputs, options={"streamkl.min_mib": 0}).sites
    assert site.form == "js, beta=0.1"


def test_probabilities_as_a_log_target_are_warned_of() -> None:
    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
        return F.kl_div(s, t, log_target=True, reduction="batchmean")

    inputs = USER_LOSSES["cosine"].inputs()
    (site,) = torch_streamkl.explain(loss, *inputs, options={"streamkl.min_mib": 0}).sites
    assert site.fused and "expects log-probabilities as its target" in site.warning


def test_a_write_through_a_slice_with_a_step_has_its_line() -> None:
    def loss(q: Tensor, k: Tensor, r: Tensor, u: Tensor) -> Tensor:
        s, t = q @ k.mT, r @ u.mT
        s[..., ::2] = -1e4  # here
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    report = torch_streamkl.explain(loss, *USER_LOSSES["gram"].inputs())
    assert all("s[..., ::2] = -1e4  # here" in site.reason for site in report.sites), report


def test_a_symbolic_number_is_named() -> None:
    def skewed(h: Any, w: Any, g: Any, v: Any, alpha: float) -> Any:
        p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
        return (p * (p.log() - (alpha * p + (1 - alpha) * q).log())).sum(-1).mean()

    inputs = USER_LOSSES["cosine"].inputs()
    torch._dynamo.reset()
    with torch_streamkl.reports() as report:
        compiled = torch.compile(
            skewed, backend="streamkl", options={"streamkl.inner": "eager"}, dynamic=False
        )
        compiled(*inputs, 0.1)
        assert report.sites[0].form.startswith("skewed forward_kl, KL(P || 0.1 P + 0.9 S)")
        torch._dynamo.reset()
        torch.compile(skewed, backend="streamkl", options={"streamkl.inner": "eager"})(
            *inputs, 0.1
        )
        torch.compile(skewed, backend="streamkl", options={"streamkl.inner": "eager"})(
            *inputs, 0.2
        )
    assert all(
        site.fused or "a Python number that changes between calls" in site.reason
        for site in report.sites
    ), report


def test_every_reason_of_users_is_in_the_table() -> None:
    for name in REASONS:
        for site in named(name).sites:
            assert advice_for(site.reason) is not None, site.reason
