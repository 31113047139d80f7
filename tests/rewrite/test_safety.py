"""A program that compiles without the rewrite compiles with it, and gives the same results."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tests.support.comparing import compare
from tests.support.covering import only
from tests.support.distilled_step import WIDTH, Step, gradients
from tests.support.hard_programs import EXACT, PROGRAMS, Program, make_inputs
from torch_streamkl.fx_passes import backend, fusing, graph_rewriting, pipeline
from torch_streamkl.fx_passes.lowering import attention_call, writer
from torch_streamkl.fx_passes.planning import divergences, losses
from torch_streamkl.fx_passes.reporting.report import Report

slow = pytest.mark.slow


def _run(fn: object) -> list[object]:
    """All results, inputs as they are afterwards, and gradients of the floating results."""
    leaves = make_inputs()
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
    results, _ = tree_flatten(fn(*inputs))
    tensors = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    weights = [torch.linspace(0.5, 1.5, max(x.numel(), 1)).double()[: x.numel()] for x in tensors]
    weights = [w.reshape(x.shape) for w, x in zip(weights, tensors, strict=True)]
    grads = torch.autograd.grad(tensors, wanted, weights, allow_unused=True) if tensors else []
    plain = [x.detach() if isinstance(x, Tensor) else x for x in results]
    return [*plain, *(x.detach() for x in inputs), *grads]


def _compiled(given: Program, inner: str) -> tuple[list[object], list[Report]]:
    torch._dynamo.reset()
    reports: list[Report] = []
    backend.REPORTS.append(reports.append)
    try:
        options = {"options": {"streamkl.inner": inner}, **given.compile_options}
        return _run(torch.compile(given.fn, backend="streamkl", **options)), reports
    finally:
        backend.REPORTS.remove(reports.append)


# AOTAutograd takes as long as all before it: it gets every third
@pytest.mark.parametrize(
    ("name", "inner"),
    [
        pytest.param(name, inner, marks=[] if (inner == "eager") == (i % 3 != 1) else slow)
        for i, name in enumerate(PROGRAMS)
        for inner in ("eager", "aot_eager")
    ],
)
def test_program(name: str, inner: str) -> None:
    given = PROGRAMS[name]
    results, reports = _compiled(given, inner)
    expected = _run(given.fn)
    assert not any(r.failures for r in reports)
    assert len(results) == len(expected)
    for i, (a, b) in enumerate(zip(expected, results, strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            assert a is b is None or a == b, f"result {i}"
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"result {i}"
        scale = float(a.abs().max()) + 1 if a.numel() else 1.0
        assert float((a - b).abs().max()) <= EXACT * scale, f"result {i}"
    assert sum(r.num_fused for r in reports) == given.num_fused, [str(r) for r in reports]
    assert given.num_graphs in (None, len(reports))


# ------------------------------------------------------------------------------ other inputs
def _naive(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    wanted = (t @ t.mT).softmax(-1)
    return F.kl_div((q @ k.mT).log_softmax(-1), wanted, reduction="none").sum(-1)


def _floats(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, 9, 8, generator=generator).to(dtype) for dtype in dtypes]


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    def under_autocast(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _naive(q, k, t)

    inputs = _floats(torch.float32, torch.float32, torch.float32)
    inputs[0].requires_grad_()
    inputs[1].requires_grad_()
    if inside:
        outcome = compare(under_autocast, inputs, inner="aot_eager")
    else:
        with torch.autocast("cpu", torch.bfloat16):
            outcome = compare(_naive, inputs, inner="aot_eager")
    assert outcome.check().num_fused == 1


def test_autocast_in_the_middle() -> None:
    def loss(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            got = q @ k.mT
        with torch.autocast("cpu", enabled=False):
            wanted = (t @ t.mT).softmax(-1)
            return F.kl_div(got.float().log_softmax(-1), wanted, reduction="batchmean")

    inputs = _floats(torch.float32, torch.float32, torch.float32)
    inputs[0].requires_grad_()
    compare(loss, inputs, inner="aot_eager").check()


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")])
def test_sides_of_different_types(dtypes: tuple[str, str]) -> None:
    student, teacher = (getattr(torch, d) for d in dtypes)
    inputs = _floats(student, student, teacher)
    inputs[0].requires_grad_()
    compare(_naive, inputs, inner="aot_eager").check()


@pytest.mark.parametrize("made_inside", [True, False])
def test_inference_mode(made_inside: bool) -> None:
    torch._dynamo.reset()
    with torch.inference_mode():
        inputs = _floats(*(torch.float64,) * 3)
        inputs = [x + 0 for x in inputs] if made_inside else inputs
    compiled = torch.compile(_naive, backend="streamkl", options={"streamkl.inner": "aot_eager"})
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*inputs), _naive(*inputs), rtol=0, atol=EXACT * 10)
    # the same compiled function, then for training
    inputs = [x.clone().requires_grad_() for x in inputs]
    torch.testing.assert_close(compiled(*inputs), _naive(*inputs), rtol=0, atol=EXACT * 10)


def test_tensor_subclass() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    torch._dynamo.reset()
    plain = _floats(*(torch.float64,) * 3)
    compiled = torch.compile(_naive, backend="streamkl", options={"streamkl.inner": "aot_eager"})
    with backend.collected() as report:
        got = compiled(TwoTensor(plain[0], plain[0] * 2), *plain[1:])
    torch.testing.assert_close(got.a, _naive(*plain), rtol=0, atol=EXACT * 10)
    torch.testing.assert_close(got.b, _naive(plain[0] * 2, *plain[1:]), rtol=0, atol=EXACT * 10)
    assert not report.failures
    assert "TwoTensor" in report.sites[0].reason


def test_meta_device() -> None:
    torch._dynamo.reset()
    inputs = [x.to("meta") for x in _floats(*(torch.float32,) * 3)]
    compiled = torch.compile(_naive, backend="streamkl", options={"streamkl.inner": "aot_eager"})
    assert compiled(*inputs).shape == (2, 2, 9)


@pytest.mark.parametrize(
    "dtype",
    only([torch.float64], [torch.float64, torch.float32, torch.bfloat16]),
)
def test_attention_beside_the_loss_compiles(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = Step().to(dtype)
    x = torch.randn(3, 12, WIDTH, dtype=dtype)
    torch.compile(step, backend="streamkl", options={"streamkl.strict": True})(x).backward()
    got = gradients(step)
    step.zero_grad()
    step(x).backward()
    limit = 64 * torch.finfo(dtype).eps
    for a, b in zip(got, gradients(step), strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit * float(b.abs().max()))


def test_exported_program() -> None:
    torch._dynamo.reset()

    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
            return _naive(q, k, t)

    inputs = tuple(_floats(*(torch.float64,) * 3))
    exported = torch.export.export(Module(), inputs).module()
    compiled = torch.compile(exported, backend="streamkl", options={"streamkl.inner": "aot_eager"})
    with backend.collected() as report:
        torch.testing.assert_close(compiled(*inputs), _naive(*inputs), rtol=0, atol=EXACT * 10)
    assert report.num_fused == 1


# ------------------------------------------------------------------------------------- faults
STAGES = [
    (pipeline, "copied"),
    (graph_rewriting, "why_unsupported"),
    (graph_rewriting, "find_region"),
    (graph_rewriting, "trace_region"),
    (losses, "read_trace"),
    (losses, "divergence_sites"),
    (losses, "find_divergences"),
    (divergences, "match_program"),
    (graph_rewriting, "Aliases"),
    (graph_rewriting, "score_sized_nodes"),
    (fusing, "describe"),
    (fusing.divergences, "emit"),
    (attention_call, "emit"),
    (writer.Writer, "tensor"),
    (graph_rewriting, "shapes_as_sizes"),
    (graph_rewriting, "remove_dead"),
    (graph_rewriting, "replace_attention"),
    (graph_rewriting, "how_sites_run"),
    (graph_rewriting, "large_tensors_left"),
    (torch.fx.Graph, "lint"),
]


@pytest.mark.parametrize(("owner", "stage"), STAGES, ids=[s for _, s in STAGES])
def test_fault_leaves_the_graph_as_it_was(
    owner: object, stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        got, wanted = (q @ k.mT).softmax(-1), (t @ t.mT).softmax(-1)
        return (wanted * (wanted.log() - got.log())).sum(-1), got @ v

    def planted(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    codes: list[str] = []
    reports: list[Report] = []

    def compiler(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        codes.append(gm.code)
        with monkeypatch.context() as patch:
            patch.setattr(owner, stage, planted)
            reports.append(pipeline.rewrite(gm))
        codes.append(gm.code)
        return gm.forward

    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "torch_streamkl"):
        results = torch.compile(attention, backend=compiler)(*make_inputs())
    for a, b in zip(attention(*make_inputs()), results, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    (report,) = reports
    assert codes[0] == codes[1]
    assert report.num_fused == 0
    assert any("planted" in failure for failure in report.failures)
    assert "planted" in str(report)
    assert any("left as it was" in record.message for record in caplog.records)
