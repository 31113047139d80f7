"""A program that compiles without the rewrite compiles with it, and gives the same results."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tests.support.comparing import compare
from tests.support.distilled_step import WIDTH, Step, gradients
from tests.support.hard_programs import EXACT, PROGRAMS, make_inputs
from torch_streamkl.fx_passes import backend, fusing, pipeline
from torch_streamkl.fx_passes.capture import retrace
from torch_streamkl.fx_passes.closed_forms import earliest
from torch_streamkl.fx_passes.lowering import attention_call, writer

slow = pytest.mark.slow


def _run(fn):
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


def _compiled(given, inner):
    torch._dynamo.reset()
    reports = []
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
def test_program(name, inner):
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
def _naive(q, k, t):
    wanted = (t @ t.mT).softmax(-1)
    return F.kl_div((q @ k.mT).log_softmax(-1), wanted, reduction="none").sum(-1)


def _floats(*dtypes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, 9, 8, generator=generator).to(dtype) for dtype in dtypes]


def _rewritten(fn=_naive, **options):
    torch._dynamo.reset()
    options = {"streamkl.inner": "aot_eager", **options}
    return torch.compile(fn, backend="streamkl", options=options)


def _is_exact(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT * 10)


def under_autocast(q, k, t):
    with torch.autocast("cpu", torch.bfloat16):
        return _naive(q, k, t)


def autocast_in_the_middle(q, k, t):
    with torch.autocast("cpu", torch.bfloat16):
        got = q @ k.mT
    with torch.autocast("cpu", enabled=False):
        wanted = (t @ t.mT).softmax(-1)
        return F.kl_div(got.float().log_softmax(-1), wanted, reduction="batchmean")


@pytest.mark.parametrize(
    ("loss", "types", "is_outside", "sites"),
    [
        (under_autocast, "float32 float32", False, 1),
        (_naive, "float32 float32", True, 1),
        (autocast_in_the_middle, "float32 float32", False, None),
        (_naive, "float32 float64", False, None),
        (_naive, "float64 float32", False, None),
    ],
)
def test_types(loss, types, is_outside, sites):
    student, teacher = (getattr(torch, name) for name in types.split())
    inputs = _floats(student, student, teacher)
    inputs[0].requires_grad_()
    inputs[1].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_outside):
        outcome = compare(loss, inputs, inner="aot_eager").check()
    assert sites in (None, outcome.num_fused)


@pytest.mark.parametrize("made_inside", [True, False])
def test_inference_mode(made_inside):
    with torch.inference_mode():
        inputs = _floats(*(torch.float64,) * 3)
        inputs = [x + 0 for x in inputs] if made_inside else inputs
        compiled = _rewritten()
        _is_exact(compiled(*inputs), _naive(*inputs))
    # the same compiled function, then for training
    inputs = [x.clone().requires_grad_() for x in inputs]
    _is_exact(compiled(*inputs), _naive(*inputs))


def test_tensor_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    plain = _floats(*(torch.float64,) * 3)
    with backend.collected() as report:
        got = _rewritten()(TwoTensor(plain[0], plain[0] * 2), *plain[1:])
    _is_exact(got.a, _naive(*plain))
    _is_exact(got.b, _naive(plain[0] * 2, *plain[1:]))
    assert not report.failures
    assert "TwoTensor" in report.sites[0].reason


def test_meta_device():
    inputs = [x.to("meta") for x in _floats(*(torch.float32,) * 3)]
    assert _rewritten()(*inputs).shape == (2, 2, 9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_beside_the_loss_compiles(dtype):
    step = Step().to(dtype)
    x = torch.randn(3, 12, WIDTH, dtype=dtype)
    options = {"streamkl.strict": True, "streamkl.inner": "inductor"}
    _rewritten(step, **options)(x).backward()
    got = gradients(step)
    step.zero_grad()
    step(x).backward()
    limit = 64 * torch.finfo(dtype).eps
    for a, b in zip(got, gradients(step), strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit * float(b.abs().max()))


def test_exported_program():
    class Module(nn.Module):
        def forward(self, q, k, t):
            return _naive(q, k, t)

    inputs = tuple(_floats(*(torch.float64,) * 3))
    torch._dynamo.reset()
    exported = torch.export.export(Module(), inputs).module()
    with backend.collected() as report:
        _is_exact(_rewritten(exported)(*inputs), _naive(*inputs))
    assert report.num_fused == 1


# ------------------------------------------------------------------------------------- faults
STAGES = [
    (pipeline, "copied"),
    (retrace, "why_unsupported"),
    (retrace, "find_region"),
    (retrace, "trace_region"),
    (pipeline, "read_trace"),
    (pipeline, "divergence_sites"),
    (pipeline, "find_divergences"),
    (earliest, "match_program"),
    (pipeline, "Aliases"),
    (pipeline, "score_sized_nodes"),
    (fusing, "describe"),
    (fusing, "as_user"),
    (attention_call.CallTensors, "emit"),
    (writer.Writer, "tensor"),
    (pipeline, "shapes_as_sizes"),
    (pipeline, "remove_dead"),
    (pipeline, "replace_attention"),
    (pipeline, "how_sites_run"),
    (pipeline, "large_tensors_left"),
    (torch.fx.Graph, "lint"),
]


@pytest.mark.parametrize(("owner", "stage"), STAGES, ids=[s for _, s in STAGES])
def test_fault_leaves_the_graph_as_it_was(owner, stage, monkeypatch, caplog):
    def attention(q, k, v, t):
        got, wanted = (q @ k.mT).softmax(-1), (t @ t.mT).softmax(-1)
        return (wanted * (wanted.log() - got.log())).sum(-1), got @ v

    def planted(*_, **__):
        raise RuntimeError("planted")

    codes = []
    reports = []

    def compiler(gm, inputs):
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


HEADS = {"h": (12, 8), "w": (30, 8), "c": (8,), "ht": (12, 6), "wt": (30, 6)}


def added_by_rows(h, w, c):
    return h @ w.T + torch.tanh(h @ c)[:, None]


@pytest.mark.parametrize(
    "scores",
    [
        added_by_rows,
        lambda h, w, c: h @ w.T + (h @ c)[:, None],
        lambda h, w, c: h @ w.T + c.sum().tanh(),
        lambda h, w, c: added_by_rows(h, w, c) - torch.tanh(h @ c)[:, None],
        lambda h, w, c: h.detach() @ w.T + h @ c.expand(len(w), -1).T,
    ],
)
def test_what_a_softmax_ignores_has_a_gradient(scores):
    def loss(h, w, c, ht, wt):
        log_s, log_t = scores(h, w, c).log_softmax(-1), (ht @ wt.T).log_softmax(-1)
        return F.kl_div(log_s, log_t, log_target=True, reduction="batchmean")

    torch.manual_seed(0)
    x = [torch.randn(size, requires_grad=not name.endswith("t")) for name, size in HEADS.items()]
    results = []
    for fn in (_rewritten(loss, **{"streamkl.min_mib": 0}), loss):
        value = fn(*x)
        results.append([value, *torch.autograd.grad(value, x[:3], allow_unused=True)])
    for found, expected in zip(*results, strict=True):
        assert found is not None, "an optimizer skips a parameter without gradient"
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
