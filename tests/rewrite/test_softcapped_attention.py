"""``softmax(softcap(QK^T)) @ V`` next to a fused KL becomes FlexAttention, where that compiles.

Programs are as transformers' Gemma2 writes them. FlexAttention is compiled for GPUs; on a CPU such
attention stays and is reported. What it becomes is compared on a CPU all the same, with the
operator run as it is, and on a GPU with its kernels.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare, run
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.gpus import on_a_gpu
from tests.support.plants import planted
from torch_streamkl.fx_passes.backend import collected
from torch_streamkl.fx_passes.fx_utils.nodes import name_of
from torch_streamkl.fx_passes.passes import softcapped
from torch_streamkl.fx_passes.passes.flex_attention import softcapped_attention

LOWEST = torch.finfo(torch.float32).min
CALL = f"{softcapped_attention.__module__}.{softcapped_attention.__name__}"
OPTIONS = {"min_mib": 0.0, "verify_max_seconds": 60.0}


def attention(q, k, v, keep, masked):
    """Grouped heads repeated, softcap, mask, softmax in float32: Gemma2's eager attention."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.3 / 5.0) * 5.0
    weights = F.softmax(masked(scores, keep), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2), weights


def _band(scores, width):
    i = torch.arange(scores.shape[-2], device=scores.device)
    j = torch.arange(scores.shape[-1], device=scores.device)
    allowed = j <= i[:, None]
    return allowed if width is None else allowed & (j > i[:, None] - width)


def _low(scores):
    return torch.finfo(scores.dtype).min


def _added(allowed):
    return torch.where(allowed, 0.0, LOWEST)


MASKS = {
    "none": lambda s, keep: s,
    "causal": lambda s, keep: s + _added(_band(s, None)),
    "window": lambda s, keep: s + _added(_band(s, 7)),
    "padding": lambda s, keep: s + _added(keep[:, None, None, :]),
    # on the left: the first rows have no keys
    "causal padding": lambda s, keep: s + _added(_band(s, None) & keep[:, None, None, :]),
    "window padding": lambda s, keep: s + _added(_band(s, 7) & keep[:, None, None, :]),
    "filled": lambda s, keep: s.masked_fill(~(_band(s, None) & keep[:, None, None, :]), _low(s)),
    "removed": lambda s, keep: s.masked_fill(~keep[:, None, None, :], -math.inf),
    "rows and keys": lambda s, keep: s.masked_fill(
        ~(keep[:, None, :, None] & keep[:, None, None, :]), _low(s)
    ),
    "computed": lambda s, keep: s.masked_fill(~(keep.cumsum(1) > 2)[:, None, None, :], _low(s)),
    "biased": lambda s, keep: s + torch.linspace(-1, 1, s.shape[-1], device=s.device) ** 3,
}


def program(masked):
    """The KL of two maps, and what reads their attention: elementwise operations, in part."""

    def step(q, k, v, qt, kt, vt, keep):
        with torch.no_grad():
            wanted, p = attention(qt, kt, vt, keep, masked)
        got, s = attention(q, k, v, keep, masked)
        rows = F.kl_div(s.clamp_min(1e-9).log(), p, reduction="none").sum(-1)
        return rows.mean(), got, torch.tanh(wanted) * 2.0

    return step


def inputs(
    tokens=19,
    head_dims=(8, 16),
    dtype=torch.float32,
    device="cpu",
    groups=2,
):
    make = torch.Generator().manual_seed(0)

    def tensor(heads, width, trained):
        x = torch.randn(2, heads, tokens, width, generator=make).to(device, dtype)
        return x.requires_grad_(trained)

    sizes = [(4, True), (4 // groups, True), (4 // groups, True)]
    own = [tensor(n, head_dims[0], trained) for n, trained in sizes]
    others = [tensor(n, head_dims[1], False) for n, _ in sizes]
    keep = torch.ones(2, tokens, dtype=torch.bool, device=device)
    keep[0, :3] = False
    return (*own, *others, keep)


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    """Run as it is, without Inductor, the operator and its gradients are right on a CPU too."""
    monkeypatch.setattr(softcapped, "_why_not_on_cpu", lambda: "")


def check(outcome, remaining=0):
    outcome.check_fused(remaining=remaining)
    for site in outcome.report.sites:
        assert site.check == "same value and gradients on random inputs", outcome.report


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("masks", every(4, MASKS))
def test_student_and_teacher(masks):
    check(compare(program(MASKS[masks]), inputs(), inner="aot_eager"))


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float16]))
def test_half_precision(dtype):
    check(compare(program(MASKS["causal padding"]), inputs(dtype=dtype), inner="aot_eager"))


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_heads_of_their_own():
    check(compare(program(MASKS["causal"]), inputs(groups=1), inner="aot_eager"))


def of_several_lengths(masks, device, head_dim, dtype=torch.float32, **options):
    """The second length makes a graph with symbolic sizes, which serves the third."""
    fn = program(MASKS[masks])
    compiled = compile_rewritten(fn, **options)
    with collected() as report:
        for tokens in (40, 57, 70):
            tensors = inputs(tokens, (head_dim, head_dim), dtype, device)
            exact = [
                x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
                for x in tensors
            ]
            outcomes = run(compiled, tensors), run(fn, tensors), run(fn, exact)
            for x, y, z in zip(*(outcome.tensors() for outcome in outcomes), strict=True):
                error, of_eager = ((a.double() - z).abs().max() for a in (x, y))
                assert error <= 2 * of_eager + torch.finfo(dtype).eps * z.abs().max()
    assert report.num_fused == len(report.sites) == 2, report
    assert not report.remaining, report


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.slow
@pytest.mark.parametrize("masks", ["window padding", "causal"])
def test_lengths_that_vary(masks):
    of_several_lengths(masks, "cpu", 8, inner="aot_eager")


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_bias_inside_of_the_softcap():
    """In a graph with a fused KL of other maps: attention_kl has no such bias."""

    def step(q, k, v, qt, kt, bias):
        p, s = (qt @ kt.mT * 0.2).softmax(-1), (q @ k.mT * 0.2).log_softmax(-1)
        capped = torch.tanh(q @ k.mT * 0.2 + bias) * 4.0
        return F.kl_div(s, p, reduction="batchmean"), capped.softmax(-1) @ v

    q, k, v, qt, kt, _, _ = inputs(groups=1)
    check(compare(step, (q, k, v, qt, kt, torch.randn(4, 1, 19)), inner="aot_eager"))


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_under_autocast(softcap):
    """The matmul of the scores rounds float32 queries and keys itself: so may the fused one."""

    def scores(q, k):
        s = torch.matmul(q, k.transpose(2, 3)) * 0.3
        s = s if softcap is None else torch.tanh(s / softcap) * softcap
        return F.softmax(s, dim=-1, dtype=torch.float32)

    def step(q, k, v, qt, kt):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                p = scores(qt, kt)
            s = scores(q, k)
            out = torch.matmul(s, v)
        return (p * (p.clamp_min(1e-9).log() - s.clamp_min(1e-9).log())).sum(-1).mean(), out

    q, k, v, qt, kt, _, _ = inputs(groups=1)
    check(compare(step, (q, k, v, qt, kt), inner="aot_eager"))


def test_on_a_cpu_it_stays():
    outcome = compare(program(MASKS["causal"]), inputs())
    outcome.check()
    assert outcome.num_fused == 1
    assert outcome.report.num_remaining > 0
    assert "FlexAttention has no backward on a CPU" in outcome.report.details()


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.expects_failed_checks
@pytest.mark.parametrize("changed", every(4, [
    {"softcap": 4.0}, {"scale": 0.07}, {"last": 1}, {"last": None}, {"has_slope": False},
    {"masks": ()}, {"alive": None},
]), ids=lambda changed: next(iter(changed)))  # fmt: skip
def test_faults_are_caught(changed):
    """A wrong call is refused by the check, and the program stays as it was."""

    def edit(graph):
        node = next(n for n in reversed(graph.nodes) if name_of(n) == CALL)  # the student's
        assert node.kwargs.keys() >= changed.keys()
        node.kwargs = {**node.kwargs, **changed}

    with planted(edit) as edited:
        outcome = compare(program(MASKS["causal padding"]), inputs(), inner="aot_eager")
    assert edited
    outcome.check()
    assert "the check failed" in outcome.report.details(), outcome.report


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_the_graph_calls_a_function():
    """No submodules: copies, checks and DDPOptimizer see a function like any other."""
    graphs = []
    with planted(lambda graph: graphs.append(graph)):
        compare(program(MASKS["window padding"]), inputs())
    names = [name_of(n) for n in graphs[-1].nodes]
    assert names.count(CALL) == 2
    assert not [n for n in graphs[-1].nodes if n.op == "get_attr"]


@pytest.mark.parametrize(("shape", "changed", "reason"), [
    ((2, 4, 64, 8), {}, "takes heads of 16 to 256"),
    ((2, 4, 64, 512), {}, "takes heads of 16 to 256"),
    ((2, 4, 64, 64), {"dtype": torch.float64}, "has no torch.float64"),
    ((2, 4, 64, 64), {"capability": (7, 5)}, "compute capability 8.0"),
    ((2, 4, 64, 256), {"memory": 101376}, "do not fit this GPU"),
    ((2, 4, 64, 64), {"memory": 101376, "dtype": torch.float32}, "do not fit this GPU"),
    ((2, 4, 64, 128), {"memory": 101376}, ""),
    ((2, 4, 64, 256), {"dtype": torch.float32}, "takes minutes to compile"),
    ((2, 4, 64, 128), {"dtype": torch.float32}, ""),
    ((2, 4, "s0", 64), {"dtype": torch.float32}, "takes minutes to compile"),
    ((2, 4, "s0", 64), {}, ""),
    ((2, 4, 64, 64), {"dtype": torch.float32, "has_bias": True}, "takes minutes to compile"),
    ((2, 4, 64, 64), {"has_bias": True}, ""),
    ((2, 4, 64, 256), {}, ""),
    ((2, 4, 64, 64), {"device": "xpu"}, "not tried on xpu"),
])  # fmt: skip
def test_why_not(
    shape,
    changed,
    reason,
    monkeypatch,
):
    softcapped._why_not_on_gpu.cache_clear()
    given = {"dtype": torch.bfloat16, "capability": (9, 0), "memory": 232448, "device": "cuda"}
    given |= changed
    properties = SimpleNamespace(shared_memory_per_block_optin=given["memory"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    x = SimpleNamespace(shape=shape, dtype=given["dtype"], device=torch.device(given["device"], 0))
    found = softcapped.why_not(x, x, given.get("has_bias", False))
    softcapped._why_not_on_gpu.cache_clear()
    assert (reason in found) if reason else not found


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("masks", "dtype", "head_dim", "tokens"), [
    ("window padding", torch.bfloat16, 256, 200),
    ("causal", torch.bfloat16, 128, 257),
    ("causal padding", torch.float32, 64, 130),
    ("none", torch.float16, 64, 128),
    ("biased", torch.bfloat16, 64, 100),
    ("computed", torch.bfloat16, 64, 150),
    ("filled", torch.bfloat16, 96, 300),
])  # fmt: skip
def test_on_a_gpu(masks, dtype, head_dim, tokens):
    tensors = inputs(tokens, (head_dim, head_dim), dtype, "cuda")
    check(compare(program(MASKS[masks]), tensors, inner="inductor", **OPTIONS))


@on_a_gpu
@pytest.mark.gpu
def test_lengths_that_vary_on_a_gpu():
    options = {"inner": "inductor", **OPTIONS}
    of_several_lengths("window padding", "cuda", 64, torch.bfloat16, **options)


@on_a_gpu
@pytest.mark.gpu
def test_memory_on_a_gpu():
    """Forward and backward with less than one map of 1 GiB."""
    tokens = 8192
    tensors = inputs(tokens, (128, 128), torch.bfloat16, "cuda")
    fn = program(MASKS["causal padding"])
    # a length of a test before would make this one symbolic, if Dynamo had not forgotten it
    step = compile_rewritten(fn, inner="inductor", min_mib=0.0, verify="never")

    def peak():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, *outputs = step(*tensors)
        torch.autograd.grad((loss + outputs[0].float().square().mean(),), tensors[:3])
        return torch.cuda.max_memory_allocated() - before

    peak()  # compiles
    assert peak() < 2 * 4 * tokens * tokens * 2
