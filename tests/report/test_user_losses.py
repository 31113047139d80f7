"""No silence and no untruth: what the report says of users' losses, against what is allocated."""

import functools
import math

import pytest
import torch

import tests.support.more_user_losses  # adds to USER_LOSSES
import tests.support.public_losses  # noqa: F401  # so does this
import torch_streamkl
from tests.corpus.naive_losses import BY_NAME
from tests.support.allocations import Allocations, measure
from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.losses import kd
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes.reporting.text import NOTHING_REMAINS


def assert_true(report, shapes):
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
def test_of_users(name):
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
def test_of_the_corpus(name):
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


def test_log_probabilities_are_normalised_already():
    loss = USER_LOSSES["normalised_twice"]
    outcome = compare(loss.fn, loss.inputs(), inner="aot_eager")
    assert outcome.check().num_fused == 1


STUDENT, TEACHER = torch.nn.Linear(4, 9, bias=False), torch.nn.Linear(4, 9, bias=False)


class _Trainer:
    def __init__(self):
        self.lm_head = STUDENT

    def loss(self, hidden, inputs):
        return kd(self.lm_head(hidden), inputs["h"] @ TEACHER.weight.T)


class _Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.models = torch.nn.ModuleList([STUDENT, TEACHER])

    def forward(self, hidden, g):
        return kd(self.models[0](hidden), self.models[1](g))


def _of_a_closure(weight):
    return lambda h: kd(h @ weight.T, h @ TEACHER.weight.T)


def test_inputs_have_the_names_of_the_users_code():
    """Not those of Dynamo (L_self_modules_...), nor of explain()'s own frame."""
    h, g = torch.randn(5, 4), torch.randn(5, 4)
    by_keyword = functools.partial(_Trainer().loss, inputs={"h": g})
    for fn, args, names in (
        (_Trainer().loss, (h, {"h": g}), ("hidden and self.lm_head.weight", "inputs['h'] and")),
        (by_keyword, (h,), ("and self.lm_head.weight", "inputs['h'] and TEACHER.weight")),
        (_Step(), (h, g), ("hidden and self.models.0.weight", "g and self.models.1.weight")),
        (_of_a_closure(torch.randn(9, 4)), (h,), ("h and weight", "h and TEACHER.weight")),
    ):
        options = {"streamkl.inner": "eager"}
        explained = torch_streamkl.explain(fn, *args, options=options)
        with torch_streamkl.reports() as compiled:
            compile_rewritten(fn)(*args)
        for report in (explained, compiled):
            (site,) = report.sites
            assert all(name in site.roles for name in names), site.roles
