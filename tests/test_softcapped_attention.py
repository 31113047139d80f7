"""``softmax(softcap(QK^T)) @ V`` beside a fused KL becomes FlexAttention, where that compiles.

Programs are as transformers' Gemma2 writes them. On a CPU FlexAttention has no backward: a
teacher's attention is replaced, a student's stays and is reported. What a student's becomes is
compared on a CPU all the same, with the operator run as it is, and on a GPU with its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare
from tests.support.plants import planted
from torch_streamkl.fx_passes.followup import softcapped
from torch_streamkl.fx_passes.followup.flex_attention import softcapped_attention
from torch_streamkl.fx_passes.fx_utils.nodes import name_of

LOWEST = torch.finfo(torch.float32).min
CALL = f"{softcapped_attention.__module__}.{softcapped_attention.__name__}"
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Masking = Callable[[Tensor, Tensor], Tensor]  # capped scores and the allowed keys of sequences


def attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, masked: Masking
) -> tuple[Tensor, Tensor]:
    """Grouped heads repeated, softcap, mask, softmax in float32: Gemma2's eager attention."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.3 / 5.0) * 5.0
    weights = F.softmax(masked(scores, keep), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2), weights


def _band(scores: Tensor, width: int | None) -> Tensor:
    i = torch.arange(scores.shape[-2], device=scores.device)
    j = torch.arange(scores.shape[-1], device=scores.device)
    allowed = j <= i[:, None]
    return allowed if width is None else allowed & (j > i[:, None] - width)


def _added(allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, LOWEST)


MASKS: dict[str, Masking] = {
    "none": lambda s, keep: s,
    "causal": lambda s, keep: s + _added(_band(s, None)),
    "window": lambda s, keep: s + _added(_band(s, 7)),
    "padding": lambda s, keep: s + _added(keep[:, None, None, :]),
    # on the left: the first rows have no keys
    "causal padding": lambda s, keep: s + _added(_band(s, None) & keep[:, None, None, :]),
    "window padding": lambda s, keep: s + _added(_band(s, 7) & keep[:, None, None, :]),
    "filled": lambda s, keep: s.masked_fill(~(_band(s, None) & keep[:, None, None, :]), LOWEST),
    "removed": lambda s, keep: s.masked_fill(~keep[:, None, None, :], -math.inf),
    "rows and keys": lambda s, keep: s.masked_fill(
        ~(keep[:, None, :, None] & keep[:, None, None, :]), LOWEST
    ),
    "biased": lambda s, keep: s + torch.linspace(-1, 1, s.shape[-1], device=s.device) ** 3,
}


def program(
    masked: Masking, *, student_output: bool = True, teacher_output: bool = True
) -> Callable[..., Any]:
    """The KL of two maps, with what their attention gives beside it."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, qt: Tensor, kt: Tensor, vt: Tensor, keep: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            wanted, p = attention(qt, kt, vt, keep, masked)
        got, s = attention(q, k, v, keep, masked)
        rows = F.kl_div(s.clamp_min(1e-9).log(), p, reduction="none").sum(-1)
        outputs = [got] * student_output + [wanted] * teacher_output
        return rows.mean(), *outputs

    return step


def inputs(
    tokens: int = 19,
    head_dims: tuple[int, int] = (8, 16),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    groups: int = 2,
) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(0)

    def tensor(heads: int, width: int, trained: bool) -> Tensor:
        x = torch.randn(2, heads, tokens, width, generator=make).to(device, dtype)
        return x.requires_grad_(trained)

    sizes = [(4, True), (4 // groups, True), (4 // groups, True)]
    own = [tensor(n, head_dims[0], trained) for n, trained in sizes]
    others = [tensor(n, head_dims[1], False) for n, _ in sizes]
    keep = torch.ones(2, tokens, dtype=torch.bool, device=device)
    keep[0, :3] = False
    return (*own, *others, keep)


@pytest.fixture
def _a_backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: run as it is, the operator has gradients."""
    monkeypatch.setattr(softcapped, "_why_not_on_cpu", lambda trains: "")


def check(outcome: Outcome, remaining: int = 0) -> None:
    outcome.check()
    assert outcome.num_fused == 1, outcome.report
    (site,) = outcome.report.sites
    assert site.check == "same value and gradients on random inputs", outcome.report
    assert outcome.report.remaining_quadratic == remaining, outcome.report


@pytest.mark.parametrize("masks", MASKS)
def test_teacher_on_a_cpu(masks: str) -> None:
    """It takes no part in the backward, and leaves nothing of queries x keys."""
    fn = program(MASKS[masks], student_output=False)
    check(compare(fn, inputs(), inner="aot_eager"))


@pytest.mark.usefixtures("_a_backward_on_the_cpu")
@pytest.mark.parametrize("masks", MASKS)
def test_student(masks: str) -> None:
    check(compare(program(MASKS[masks]), inputs(), inner="aot_eager"))


@pytest.mark.usefixtures("_a_backward_on_the_cpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(compare(program(MASKS["causal padding"]), inputs(dtype=dtype), inner="aot_eager"))


@pytest.mark.usefixtures("_a_backward_on_the_cpu")
def test_heads_of_their_own() -> None:
    check(compare(program(MASKS["causal"]), inputs(groups=1), inner="aot_eager"))


@pytest.mark.usefixtures("_a_backward_on_the_cpu")
@pytest.mark.parametrize("masks", ["causal", "window padding"])
def test_lengths_that_vary(masks: str) -> None:
    """Bounds of a window and buffers with symbolic sizes, and the same graph for two lengths."""
    tensors = inputs()
    for x in tensors[:6]:
        torch._dynamo.mark_dynamic(x, 2)
    torch._dynamo.mark_dynamic(tensors[6], 1)
    check(compare(program(MASKS[masks]), tensors, inner="aot_eager"))


@pytest.mark.usefixtures("_a_backward_on_the_cpu")
def test_bias_inside_of_the_softcap() -> None:
    """In a graph with a fused KL of other maps: attention_kl has no such bias."""

    def step(q: Tensor, k: Tensor, v: Tensor, qt: Tensor, kt: Tensor, bias: Tensor) -> Any:
        p, s = (qt @ kt.mT * 0.2).softmax(-1), (q @ k.mT * 0.2).log_softmax(-1)
        capped = torch.tanh(q @ k.mT * 0.2 + bias) * 4.0
        return F.kl_div(s, p, reduction="batchmean"), capped.softmax(-1) @ v

    q, k, v, qt, kt, _, _ = inputs(groups=1)
    check(compare(step, (q, k, v, qt, kt, torch.randn(4, 1, 19)), inner="aot_eager"))


def test_student_on_a_cpu_stays() -> None:
    outcome = compare(program(MASKS["causal"]), inputs())
    outcome.check()
    assert outcome.num_fused == 1
    assert outcome.report.remaining_quadratic > 0
    assert "FlexAttention has no backward on a CPU" in str(outcome.report)


@pytest.mark.skipif(
    not torch.cpu._is_avx2_supported(), reason="FlexAttention's code for a CPU needs AVX2"
)
@pytest.mark.parametrize(("masks", "dtype"), [
    ("window padding", torch.float32), ("causal", torch.bfloat16)
])  # fmt: skip
def test_generated_code_of_a_cpu(masks: str, dtype: torch.dtype) -> None:
    fn = program(MASKS[masks], student_output=False)
    check(compare(fn, inputs(40, dtype=dtype), inner="inductor"))


@pytest.mark.usefixtures("_a_backward_on_the_cpu")
@pytest.mark.expects_failed_checks
@pytest.mark.parametrize("changed", [
    {"softcap": 4.0}, {"scale": 0.07}, {"last": 1}, {"last": None}, {"has_slope": False},
    {"masks": ()}, {"alive": None},
], ids=lambda changed: next(iter(changed)))  # fmt: skip
def test_faults_are_caught(changed: dict[str, Any]) -> None:
    """A wrong call is refused by the check, and the program stays as it was."""

    def edit(graph: Any) -> None:
        node = next(n for n in reversed(graph.nodes) if name_of(n) == CALL)  # the student's
        assert node.kwargs.keys() >= changed.keys()
        node.kwargs = {**node.kwargs, **changed}

    with planted(edit) as edited:
        outcome = compare(program(MASKS["causal padding"]), inputs(), inner="aot_eager")
    assert edited
    outcome.check()
    assert "the check failed" in str(outcome.report), outcome.report


def test_the_graph_calls_one_function() -> None:
    """No submodules: copies, checks and DDPOptimizer see a function like any other."""
    graphs: list[Any] = []
    with planted(lambda graph: graphs.append(graph)):
        compare(program(MASKS["window padding"], student_output=False), inputs())
    names = [name_of(n) for n in graphs[-1].nodes]
    assert names.count(CALL) == 1
    assert not [n for n in graphs[-1].nodes if n.op == "get_attr"]


@pytest.mark.parametrize(("shape", "changed", "reason"), [
    ((2, 4, 64, 8), {}, "takes heads of 16 to 256"),
    ((2, 4, 64, 512), {}, "takes heads of 16 to 256"),
    ((2, 4, 64, 64), {"dtype": torch.float64}, "has no torch.float64"),
    ((2, 4, 64, 64), {"capability": (7, 5)}, "compute capability 8.0"),
    ((2, 4, 64, 256), {"memory": 101376}, "do not fit this GPU"),
    ((2, 4, 64, 64), {"memory": 101376, "dtype": torch.float32}, "do not fit this GPU"),
    ((2, 4, 64, 128), {"memory": 101376}, ""),
    ((2, 4, 64, 256), {}, ""),
    ((2, 4, 64, 64), {"device": "xpu"}, "not tried on xpu"),
])  # fmt: skip
def test_why_not(
    shape: tuple[int, ...],
    changed: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    softcapped._why_not_on_gpu.cache_clear()
    given = {"dtype": torch.bfloat16, "capability": (9, 0), "memory": 232448, "device": "cuda"}
    given |= changed
    properties = SimpleNamespace(shared_memory_per_block_optin=given["memory"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    x: Any = SimpleNamespace(
        shape=shape, dtype=given["dtype"], device=torch.device(given["device"], 0)
    )
    found = softcapped.why_not(x, x, trains=True)
    softcapped._why_not_on_gpu.cache_clear()
    assert (reason in found) if reason else not found


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("masks", "dtype", "head_dim", "tokens"), [
    ("window padding", torch.bfloat16, 256, 200),
    ("causal", torch.bfloat16, 128, 257),
    ("causal padding", torch.float32, 64, 130),
    ("none", torch.float16, 64, 128),
    ("biased", torch.float32, 256, 100),
    ("filled", torch.bfloat16, 96, 300),
])  # fmt: skip
def test_on_a_gpu(masks: str, dtype: torch.dtype, head_dim: int, tokens: int) -> None:
    tensors = inputs(tokens, (head_dim, head_dim), dtype, "cuda")
    options = {"streamkl.min_mib": 0.0}
    check(compare(program(MASKS[masks]), tensors, inner="inductor", options=options))


@on_a_gpu
@pytest.mark.gpu
def test_lengths_that_vary_on_a_gpu() -> None:
    for tokens in (100, 300):
        tensors = inputs(tokens, (64, 64), torch.bfloat16, "cuda")
        fn = program(MASKS["window padding"])
        options = {"streamkl.min_mib": 0.0}
        check(compare(fn, tensors, inner="inductor", dynamic=True, options=options))


@on_a_gpu
@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    """Forward and backward with less than one map of 1 GiB."""
    tokens, options = 8192, {"streamkl.min_mib": 0.0, "streamkl.verify": "never"}
    tensors = inputs(tokens, (128, 128), torch.bfloat16, "cuda")
    fn = program(MASKS["causal padding"])
    step = torch.compile(fn, backend="streamkl", options=options)

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, *outputs = step(*tensors)
        torch.autograd.grad((loss + outputs[0].float().square().mean(),), tensors[:3])
        return torch.cuda.max_memory_allocated() - before

    peak()  # compiles
    assert peak() < 2 * 4 * tokens * tokens * 2
