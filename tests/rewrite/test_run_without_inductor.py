"""A graph with nothing to compile next to its sites runs without Inductor, as eager code does."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torch_streamkl
from tests.support.compiling import compile_rewritten
from tests.support.gpus import on_a_gpu
from tests.support.losses import elements_of_kl, kd, rows_of_kl
from torch_streamkl.attention import direct
from torch_streamkl.fx_passes import backend, run_without_inductor

LEAST_SCORE = torch.finfo(torch.float32).min
LEAST = {"streamkl.min_mib": 0, "streamkl.strict": True}


@pytest.fixture(autouse=True)
def _on_this_device(monkeypatch):
    """A CPU stands for the GPU."""
    torch._dynamo.reset()
    monkeypatch.setattr(run_without_inductor, "DEVICE", "cpu")


@pytest.fixture
def without_inductor(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("Inductor is called")

    monkeypatch.setattr(backend, "later", refuse)


def maps(sq, sk, tq, tk, mask=None):
    groups = sq.shape[1] // sk.shape[1]
    sk, tk = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (sk, tk))
    scores = [q @ k.mT / q.shape[-1] ** 0.5 for q, k in ((sq, sk), (tq, tk))]
    return scores if mask is None else [x.masked_fill(~mask, LEAST_SCORE) for x in scores]


def kl(*inputs):
    s, t = maps(*inputs)
    return rows_of_kl(s, t).mean()


def weighted(*inputs):
    *given, weight = inputs
    s, t = maps(*given)
    rows = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
    return (rows * weight).sum() / weight.sum()


def masked(*inputs):
    s, t = maps(*inputs)
    return F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean")


def two_layers(*inputs):
    return kl(*inputs[:4]) + 0.5 * kl(*inputs[4:])


def of_a_frozen_teacher(*inputs):
    s, t = maps(*inputs)
    return kd(s, t.detach())


def tokens_are_second(*inputs):
    return kl(*(x.transpose(1, 2) for x in inputs))


def inputs_of(heads=4, kv_heads=4, layers=1, batch=2):
    counts = [heads, kv_heads] * (2 * layers)
    return [torch.randn(batch, n, 9, 8).requires_grad_() for n in counts]


def results(function, inputs):
    value = function(*inputs)
    learning = [x for x in inputs if x.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, learning, allow_unused=True)]


def compiled(function, **options):
    options = {**LEAST, **options}
    return torch.compile(function, backend="streamkl", dynamic=False, options=options)


CASES = {
    "mean": (kl, inputs_of),
    "grouped heads": (kl, lambda: inputs_of(4, 2)),
    "grouped heads of one sequence": (kl, lambda: inputs_of(6, 2, batch=1)),
    "weighted rows": (weighted, lambda: [*inputs_of(), torch.rand(2, 4, 9)]),
    "mask": (masked, lambda: [*inputs_of(), torch.arange(9).view(1, 1, 1, 9) < 7]),
    "two layers": (two_layers, lambda: inputs_of(layers=2)),
    "teacher detached": (of_a_frozen_teacher, inputs_of),
    "as many heads as tokens": (tokens_are_second, lambda: inputs_of(9, 9)),
    "heads second": (kl, lambda: [_heads_second(x) for x in inputs_of()]),
}


def _heads_second(x):
    """As a model has them: [batch, tokens, heads, head_dim], transposed."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name):
    loss, make = CASES[name]
    inputs = make()
    function, exact = compiled(loss), results(loss, inputs)
    for _ in range(3):  # launches are recorded by the second call
        torch.testing.assert_close(results(function, inputs), exact)
    others = [x.detach().clone().requires_grad_(x.requires_grad) for x in make()]
    torch.testing.assert_close(results(function, others), results(loss, others))


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("name", ["mean", "grouped heads", "grouped heads of one sequence"])
def test_no_dispatcher_and_no_views(name, monkeypatch):
    calls = []

    def seen(*given):
        calls.append(given)
        return called(*given)

    called = direct.attention_kl
    monkeypatch.setattr(direct, "attention_kl", seen)
    loss, make = CASES[name]
    inputs = make()
    compiled(loss)(*inputs)
    ((tensors, _),) = calls
    assert all(x is y for x, y in zip(tensors, inputs, strict=False))


def report_of(loss):
    report = torch_streamkl.explain(loss, *inputs_of(), options=LEAST)
    assert report.num_fused == 1
    return report


def test_the_report_says_it():
    assert run_without_inductor.NOTE in report_of(kl).notes


def operands_are_scaled(*inputs):
    return kl(inputs[0].exp(), *inputs[1:])


def part_has_no_gradients(*inputs):
    with torch.no_grad():
        factor = inputs[0].sum()
    return kl(*inputs) * factor


def many_operations(*inputs):
    value = kl(*inputs)
    for i in range(run_without_inductor.MAX_OPERATIONS):
        value = value * value + i
    return value


def is_returned_with_a_view(*inputs):
    """Which is a tensor of its own in eager code, whatever its shape is."""
    value = kl(*inputs)
    return value, value.view(())


@pytest.mark.parametrize(
    "loss",
    [operands_are_scaled, part_has_no_gradients, many_operations, is_returned_with_a_view],
)
def test_what_inductor_compiles(loss):
    assert run_without_inductor.NOTE not in report_of(loss).notes


@pytest.mark.parametrize(
    "options", [{"cpp_wrapper": True}, {"triton.cudagraphs": True}, {"max_autotune": False}]
)
def test_options_are_for_inductor(options, monkeypatch):
    monkeypatch.setattr(backend, "later", _meets)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Inductor is asked"):
        compiled(kl, **options)(*inputs_of())


def test_configured_passes_are_for_inductor(monkeypatch):
    monkeypatch.setattr(backend, "later", _meets)
    configured = torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: None)
    with (
        configured,
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Inductor is asked"),
    ):
        compiled(kl)(*inputs_of())


def test_what_is_stored_is_inductors(tmp_path):
    options = LEAST
    function = torch.compile(kl, backend="streamkl", fullgraph=True, options=options)
    inputs = inputs_of()
    if not hasattr(function, "aot_compile"):
        pytest.skip("torch.compile has no aot_compile in this torch")
    stored = function.aot_compile((tuple(inputs), {}))
    stored.save_compiled_function(str(tmp_path / "loss"))
    torch.testing.assert_close(results(stored, inputs), results(kl, inputs))


def _meets(*_):
    raise RuntimeError("Inductor is asked")


def test_sizes_that_vary():
    function = compile_rewritten(kl, dynamic=True, strict=True)
    with backend.collected() as report:
        inputs = inputs_of()
        torch.testing.assert_close(results(function, inputs), results(kl, inputs))
    assert report.num_fused == 1 and run_without_inductor.NOTE not in report.notes


@pytest.mark.usefixtures("without_inductor")
def test_a_second_derivative_is_refused():
    inputs = inputs_of()
    (grad, *_) = torch.autograd.grad(compiled(kl)(*inputs), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(grad.sum(), inputs)


@pytest.mark.usefixtures("without_inductor")
def test_around_it():
    """What runs a compiled function in another way than once, forward and backward."""
    inputs, function = inputs_of(), compiled(kl)
    exact = results(kl, inputs)
    again = results(lambda *x: checkpoint(function, *x, use_reentrant=False), inputs)
    torch.testing.assert_close(again, exact)
    with torch.no_grad():
        torch.testing.assert_close(function(*inputs), exact[0])
    value = function(*inputs)
    for _ in range(2):
        found = torch.autograd.grad(value, inputs, retain_graph=True)
        torch.testing.assert_close(list(found), exact[1:])
    several = torch.autograd.grad(value, inputs, torch.tensor([1.0, -2.0]), is_grads_batched=True)
    torch.testing.assert_close([x[0] for x in several], exact[1:])
    torch.testing.assert_close([x[1] for x in several], [-2 * x for x in exact[1:]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, high = results(function, inputs), results(kl, inputs)
    torch.testing.assert_close(low, high, rtol=0.05, atol=0.01)


@pytest.mark.usefixtures("without_inductor")
def test_compiled_autograd():
    inputs, function = inputs_of(), compiled(kl)
    exact = results(kl, inputs)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for _ in range(2):
            torch.testing.assert_close(results(function, inputs), exact)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, monkeypatch):
    """Also as a part of a CUDA graph that the user records."""
    monkeypatch.setattr(run_without_inductor, "DEVICE", "cuda")
    loss, make = CASES[name]
    inputs = [x.detach().cuda().requires_grad_(x.requires_grad) for x in make()]
    function, exact = compiled(loss), results(loss, inputs)
    for _ in range(3):
        torch.testing.assert_close(results(function, inputs), exact, rtol=1e-3, atol=1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(function, inputs)
    with torch.no_grad():
        inputs[0].mul_(0.5)
    graph.replay()
    torch.testing.assert_close(found, results(loss, inputs), rtol=1e-3, atol=1e-5)


def rows_of(*inputs):
    s, t = maps(*inputs)
    return rows_of_kl(s, t)


def rows_with_a_key(*inputs):
    s, t = maps(*inputs)
    return elements_of_kl(s, t).sum(-1, keepdim=True)


def of_bits(*inputs):
    *given, bits = inputs
    return (rows_of(*given) * bits.view(torch.float32)).sum()


def written(*inputs):
    *given, weight, total = inputs
    torch.mul(weight, 2, out=total)
    return kl(*given)


BY_INDUCTOR = {
    "other bits": (of_bits, lambda: [*inputs_of(), torch.rand(2, 4, 9).view(torch.int32)]),
    "written": (written, lambda: [*inputs_of(), torch.rand(2, 4, 9), torch.zeros(2, 4, 9)]),
    "view of rows": (rows_with_a_key, inputs_of),
}


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_equals_eager_by_inductor(name):
    """A graph is Inductor's where no note of explain() says that it runs without."""
    loss, make = BY_INDUCTOR[name]
    report = torch_streamkl.explain(loss, *make(), options=LEAST)
    assert report.num_fused == 1 and run_without_inductor.NOTE not in report.notes
    inputs = make()
    found = compiled(loss, **{"streamkl.inner": "eager"})(*inputs)
    seen = [x.clone() for x in inputs]
    torch.testing.assert_close(found, loss(*inputs))
    torch.testing.assert_close(seen, inputs)


@pytest.mark.usefixtures("without_inductor")
def test_rows_are_tensors_of_their_own():
    """They may be written to in place, as what eager code sums."""
    inputs, weight = inputs_of(), torch.rand(2, 4, 9).requires_grad_()
    function = compiled(rows_of)
    with torch.no_grad():
        rows, exact = function(*inputs), rows_of(*inputs)
    torch.testing.assert_close(rows.mul_(weight), exact.mul_(weight))
    assert function(*inputs).detach_().is_leaf


@pytest.mark.usefixtures("without_inductor")
def test_what_is_logged_shares_memory():
    def logged(*inputs):
        value = kl(*inputs)
        return value, value.detach()

    loss, log = compile_rewritten(logged, inner="inductor", strict=True)(*inputs_of())
    assert loss.requires_grad and not log.requires_grad
    assert loss.data_ptr() == log.data_ptr()


@pytest.mark.usefixtures("without_inductor")
def test_views_of_inputs_are_results():
    def returned(*inputs):
        teacher = inputs[2].detach()
        return kl(*inputs), teacher, teacher.view(inputs[2].shape), inputs[3].view(2, 4, 9, 8)

    inputs = inputs_of()
    function = compile_rewritten(returned, inner="inductor", strict=True)
    _, teacher, view, key = function(*inputs)
    assert teacher is not view and teacher.data_ptr() == view.data_ptr()
    assert key is not inputs[3] and key._base is inputs[3]
