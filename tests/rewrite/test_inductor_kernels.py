"""Graphs of C++ launch our kernels: what they compute, and what is written for a GPU."""

import functools
import importlib.util
import re
from collections import Counter

import pytest
import torch

from tests.support.covering import only
from tests.support.interpreter import inside, outside, quiet
from tests.support.losses import kd
from torch_streamkl import attention_kl, linear_kl
from torch_streamkl.attention import ops
from torch_streamkl.fx_passes import backend, inductor_kernels
from torch_streamkl.registration import WITHOUT_AUTOGRAD

pytestmark = quiet
slow = pytest.mark.slow
KL = "(P*(logP-logS))"
EQUAL, GROUPS = [(2, 3, 20, 8)] * 4, [(1, 4, 20, 8), (1, 2, 20, 8)] * 2
FEW, LONG = [(1, 4, 3, 8), (1, 2, 24, 8)] * 2, [(1, 1, 8, 8), (1, 1, 160, 8)] * 2
MEAN = [(1, 1, 20, 8)] * 2 + [(1, 2, 20, 8)] * 2
ONE = {"forward_kernel": 1, "dq_kernel": 2, "dk_kernel": 2}  # both sides learn
SPLIT = {"state_kernel": 1, "merge_kernel": 1, "dq_kernel": 2, "dk_kernel": 2}
CASES = {
    "plain": (EQUAL, {}, ONE),
    "causal": (GROUPS, {"is_causal": True, "divergence": "js"}, ONE),
    "pack_gqa": (FEW, {}, ONE),
    "split": (LONG, {"divergence": "js"}, SPLIT | {"sums_kernel": 1, "merge_sums_kernel": 1}),
    "split_mask": (LONG, {"attn_mask": torch.arange(160).view(1, 1, 1, 160) % 3 > 0}, SPLIT),
    "head_mean": (
        MEAN,
        {"head_reduction": "mean"},
        {"lse_kernel": 2, "mean_kernel": 2, "mean_sums_kernel": 1, "group_sums_kernel": 1}
        | {"mean_dq_kernel": 2, "mean_dk_kernel": 2},
    ),
}
QUICK = ("split", "pack_gqa")


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that graphs launch."""
    from tests.support.cpp_graphs import launched_by_graphs

    with launched_by_graphs(monkeypatch) as names:
        yield names


def counted(launched):
    return Counter(re.sub(r"streamkl_(\w+kernel).*", r"\1", name) for name in launched)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="streamkl", options={"fx_graph_cache": False})


def check(graph, function, shapes, learns=range(4), varies=None):
    """The value and gradients of a compiled function are those of the reference."""
    inputs = [torch.randn(shape).requires_grad_(i in learns) for i, shape in enumerate(shapes)]
    if varies is not None:
        for x in inputs:
            torch._dynamo.mark_dynamic(x, varies)
    results = []
    for call in (graph, lambda *x: function(*x, impl="reference")):
        value = call(*inputs)
        gradients = torch.autograd.grad(value.sum(), [x for x in inputs if x.requires_grad])
        results.append([value.detach(), *gradients])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def rows(*tensors, impl="auto", **options):
    return attention_kl(*tensors, reduction="none", impl=impl, **options)


@inside
@pytest.mark.parametrize("name", only(QUICK, CASES))
def test_attention(name, launched):
    shapes, options, expected = CASES[name]
    function = functools.partial(rows, **options)
    check(compiled(lambda *x: function(*x)), function, shapes)
    assert counted(launched) == expected


@inside
def test_lengths_that_vary(launched):
    graph = compiled(rows)
    for seqlen, stance in ((20, "default"), (33, "fail_on_recompile")):
        with torch.compiler.set_stance(stance):
            check(graph, rows, [(1, 2, seqlen, 8)] * 4, varies=2)
    assert counted(launched) == {name: 2 * n for name, n in ONE.items()}


@inside
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=slow)])
def test_heads(reduction, launched):
    def loss(*x, impl="auto"):
        return linear_kl(*x[:4], student_bias=x[4], reduction=reduction, impl=impl)

    check(compiled(loss), loss, ((20, 8), (30, 8), (20, 16), (30, 16), (30,)), (0, 1, 4))
    scaled = {"scale_kernel": 3} if reduction == "mean" else {}  # gradients of the forward
    assert counted(launched) == {"row_kernel": 1 if scaled else 2} | scaled


HEADS = (20, 8), (30, 8), (20, 16), (30, 16)


@pytest.fixture
def launched_by_python(monkeypatch):
    """Names of the kernels that graphs of Python launch."""
    from tests.support.cpp_graphs import launched_by_graphs

    with launched_by_graphs(monkeypatch, of_cpp=False) as names:
        yield names


@inside
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=slow)])
def test_heads_with_few_tokens(reduction, launched_by_python):
    """The launches are of a graph of Python; attention next to them is an operator."""
    attention = [torch.randn(1, 2, 20, 8) for _ in range(4)]

    def loss(*x, impl="auto"):
        of_heads = linear_kl(*x, reduction=reduction, temperature=2.0, impl=impl)
        return of_heads + attention_kl(*attention, reduction="mean", impl=impl)

    check(compiled(loss), loss, HEADS, (0, 1))
    scaled = {"scale_kernel": 2} if reduction == "mean" else {}  # gradients of the forward
    assert counted(launched_by_python) == {"row_kernel": 1 if scaled else 2} | scaled


@inside
@pytest.mark.parametrize("factor", [1.0, 0.0, -2.5])
def test_stored_gradients_are_multiplied_in_place(factor, launched_by_python):
    """Of a weight that nothing else reads; Inductor adds what another term gives the other."""

    def loss(*x, impl="auto"):
        return linear_kl(*x, reduction="mean", impl=impl) + x[0].square().sum()

    graph = compiled(loss)
    for call in range(2):  # a call finds nothing of the one before
        check(lambda *x: graph(*x) * factor, lambda *x, impl: loss(*x, impl=impl) * factor, HEADS)
        assert counted(launched_by_python) == {
            "row_kernel": call + 1,
            "scale_kernel": 3 * call + 3,
        }


@inside
def test_stored_gradients_that_are_kept_for_another_backward(launched_by_python):
    graph, inputs = compiled(lambda *x: linear_kl(*x, reduction="mean")), []
    for learns, size in zip((True, True, False, False), HEADS, strict=True):
        inputs.append(torch.randn(size).requires_grad_(learns))
    with torch._functorch.config.patch(donated_buffer=False):
        loss = graph(*inputs) * 2.0
        first = torch.autograd.grad(loss, inputs[:2], retain_graph=True)
        for x in first:
            x.mul_(3.0)  # the caller's own
        second = torch.autograd.grad(loss, inputs[:2])
    expected = torch.autograd.grad(2.0 * linear_kl(*inputs, reduction="mean"), inputs[:2])
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-5)
    assert "scale_kernel" not in counted(launched_by_python)


@inside
def test_labels_of_few_tokens_are_checked(launched_by_python):
    labels = torch.arange(20) % 30
    labels[3] = -100

    def loss(*x, impl="auto"):
        return linear_kl(*x, labels=labels, hard_weight=0.5, reduction="mean", impl=impl)

    graph = compiled(loss)
    check(graph, loss, HEADS, (0, 1))
    assert counted(launched_by_python) == {"row_kernel": 1, "scale_kernel": 2}
    labels[4] = 30
    with pytest.raises(IndexError, match="Target 30 is out of bounds"):
        graph(*map(torch.randn, HEADS))


@inside
@pytest.mark.parametrize("why", ["chunks", "tokens"])
def test_other_heads_are_operators(why, launched_by_python, caplog):
    sizes, options = HEADS, {}
    if why == "chunks":
        sizes = (3000, 8), (30, 8), (3000, 16), (30, 16)
        options["max_workspace_mib"] = 1

    def loss(*x, impl="auto"):
        return linear_kl(*x, reduction="mean", impl=impl, **options)

    check(compiled(loss), loss, sizes, (0, 1), varies=0 if why == "tokens" else None)
    assert set(counted(launched_by_python)) == {"scale_kernel"}
    assert not caplog.text  # as usual


@inside
def test_a_call_that_cannot_be_traced(launched, caplog):
    check(compiled(rows), rows, [(1, 2, 20, 8)] * 4, varies=3)
    assert not launched
    assert "the number of heads or their width varies" in caplog.text


@outside
@pytest.mark.parametrize("moved", ["UserDefinedTritonKernel", "MutationOutput"])
def test_an_inductor_that_moved_its_parts(moved, monkeypatch):
    from torch._inductor import ir

    monkeypatch.delattr(ir, moved)
    assert not inductor_kernels.install.__wrapped__()


@outside
@pytest.mark.parametrize("launches", [True, False])
def test_the_report_says_it(launches, monkeypatch):
    monkeypatch.setattr(inductor_kernels, "install", lambda: launches)

    def loss(q, k, teacher_q, teacher_k):
        return kd(q @ k.mT, teacher_q @ teacher_k.mT)

    def notes(cpp_wrapper):
        torch._dynamo.reset()
        found = []

        def rewritten(gm, _):
            options = backend.split_options({})[0]
            found.extend(backend.rewrite_and_report(gm, options, cpp_wrapper).notes)
            return gm.forward

        torch.compile(loss, backend=rewritten)(*(torch.randn(1, 2, 20, 8) for _ in range(4)))
        return found

    assert inductor_kernels.NOTE[launches] in notes(cpp_wrapper=True)
    assert not set(inductor_kernels.NOTE.values()) & set(notes(cpp_wrapper=False))


# --------------------------------------------------------------------------------- for a GPU
@outside
def test_written_as_cpp():
    """Without a GPU: neither compiled nor run."""
    from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper

    from tests.support.cpp_graphs import written_as_cpp

    if not hasattr(DeferredTritonCallWrapper, "generate_lazy"):
        pytest.skip("this torch compiles kernels before it writes C++")
    forward, backward = (
        WITHOUT_AUTOGRAD[x] for x in (ops.attention_kl, ops.attention_kl_backward)
    )

    def step(q, k, tq, tk):
        options = {"functional": KL, "student_scale": 0.125, "teacher_scale": 0.125}
        value, *statistics = forward(q, k, tq, tk, **options)
        wanted = [True, True, False, False]
        grads = backward(value, *statistics, wanted, q, k, tq, tk, **options)
        return value, *grads[:2]

    code = written_as_cpp(step, *[(torch.bfloat16, (32, 12, 128, 64))] * 4)
    called = re.findall(r"^ *call_streamkl_(\w+kernel)_\d+\(", code, re.MULTILINE)
    assert called == ["forward_kernel", "dq_kernel", "dk_kernel"]
    assert "enable_fp_fusion" in code
    assert "from torch_streamkl.attention.triton.forward import forward_kernel" in code
    for operator in (forward, backward):
        assert operator._schema.name not in code
        assert str(operator) not in code


@outside
def test_an_entry_compiles_to_what_the_kernel_does(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from bench.offline import Launch, compile_launch, looks_like
    from torch_streamkl.kernels import entries
    from torch_streamkl.runtime import trace as traced

    with looks_like("sm_90"), FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(EQUAL[0], dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        trace, _ = traced.trace(lambda *x: ops.run_forward(*x, impl="triton"), tensors)
        (launch,) = (x for x in trace.steps if isinstance(x, traced.Launch))
        entry, values = entries.entry_of(launch)
        file = tmp_path / "entry.py"
        file.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{entry.src}")
        spec = importlib.util.spec_from_file_location("entry", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, entry.__name__)
        found = compile_launch(Launch(kernel, launch.grid, values, launch.options), "sm_90")
        names = [p.name for p in launch.kernel.params]
        own = dict(zip(names, (*launch.arguments, *launch.constants), strict=True))
        expected = compile_launch(Launch(launch.kernel, launch.grid, own, launch.options), "sm_90")
    assert (found.shared_bytes, found.spill_bytes) == (expected.shared_bytes, expected.spill_bytes)
    assert found.asm["ptx"].count("fma") == expected.asm["ptx"].count("fma")
