"""Private names of torch that moved: compilations never fail because of it, ours or others'.

What the rewrite cannot do without is an ImportError before anything is compiled
(test_torch_names.py). What it can do without is left out, and the report says what that costs.
"""

import importlib

import pytest
import torch

import torch_streamkl
from tests.support.losses import kd
from tests.support.subgraphs import inductor_without_code
from torch_streamkl.fx_passes import (
    backend,
    gradients_in_forward,
    inductor_calls,
    inductor_double_backward,
    inductor_kernels,
)
from torch_streamkl.fx_passes.fx_utils import torch_names

# what the report says without a name, and names whose absence costs nothing
COSTLY = {
    "torch._inductor.lowering.lowerings": inductor_double_backward.WITHOUT_LOWERINGS,
    "torch._inductor.pattern_matcher.stable_topological_sort": gradients_in_forward.WITHOUT_SORT,
    "torch._inductor.codegen.custom_extern_kernel_codegen.CUSTOM_EXTERN_KERNEL_CODEGEN": (
        inductor_calls.WITHOUT_TABLE
    ),
    "torch._inductor.codegen.custom_extern_kernel_codegen.CustomCodegen": (
        inductor_calls.WITHOUT_TABLE
    ),
    "torch._inductor.codegen.wrapper.ExternKernelAllocLine": inductor_calls.WITHOUT_TABLE,
    "torch._inductor.virtualized.V": inductor_calls.WITHOUT_TABLE,
}
FREE = [
    "torch._inductor.lowering.fallback_handler",
    "torch._inductor.ir.UserDefinedTritonKernel",
    "torch._inductor.kernel.mm.aten_mm",
    "torch._inductor.cudagraph_trees.reset_cudagraph_trees",
    "torch._inductor.runtime.cache_dir_utils.cache_dir",
    "torch._dynamo.exc.TensorifyScalarRestartAnalysis",
    "torch._dynamo.callback.callback_handler",
    "torch._dynamo.backends.distributed.DDPOptimizer",
    "torch._dynamo.compiled_autograd._disable",
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch._C._get_fp32_precision_getter",
    "torch._TorchCompileInductorWrapper",
    "torch._inductor.list_mode_options",
    "torch._inductor.compile_fx.get_cpp_wrapper_config",
    "torch.nn.attention.flex_attention.BlockMask",
    "torch._higher_order_ops.flex_attention.flex_attention",
]
NEEDED_BY_TORCH = {
    "torch._inductor.lowering.lowerings", "torch._dynamo.compiled_autograd._disable",
    "torch._C._get_fp32_precision_getter", "torch._TorchCompileInductorWrapper",
}  # fmt: skip
INSTALLED = (inductor_double_backward.install, inductor_calls.install, inductor_kernels.install)


def fused(s, w, t):
    q, k = s @ w, t @ w
    return kd(q @ q.mT, k @ k.mT) + kd(q, k)


def unfused(s, w, t):
    return (torch.tanh(s @ w) - t).pow(2).mean()


def _hide(hidden, patch):
    """Attributes of owners, from our modules only."""

    def found(x, name, *default):
        if not any(x is owner and name == attribute for owner, attribute in hidden):
            return getattr(x, name, *default)
        if default:
            return default[0]
        raise AttributeError(name)

    for module in (backend, torch_names):
        patch.setattr(module, "getattr", found, raising=False)


@pytest.fixture
def _as_in_a_new_process():
    torch._dynamo.reset()
    for install in INSTALLED:
        install.cache_clear()
    with inductor_without_code():
        yield
    for install in INSTALLED:
        install.cache_clear()


def go_on(names, fn, backend_name):
    """A program compiles where names are missing, and the report says what that costs."""
    x = [torch.randn(6, 8).requires_grad_(), torch.randn(8, 8).requires_grad_(), torch.randn(6, 8)]
    want = fn(*x)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend_name)
    with pytest.MonkeyPatch.context() as patch, backend.collected() as report:
        hidden = []
        for name in names:
            module, _, attribute = name.rpartition(".")
            owner = importlib.import_module(module)
            if name in NEEDED_BY_TORCH:
                hidden.append((owner, attribute))
            else:
                patch.delattr(owner, attribute, raising=False)  # older ones may lack it
        _hide(hidden, patch)
        with torch_streamkl.enable():
            got = compiled(*x)
    torch.testing.assert_close(got, want)
    assert report.num_fused == 2 * (fn is fused), report
    assert not report.failures, report
    if fn is fused:
        assert {COSTLY[name] for name in names if name in COSTLY} <= set(report.notes)


def short(name):
    return name.rpartition(".")[2]


# `make test` hides these at once; each alone is slow
EACH = [pytest.param([x], id=f"{short(x)} alone", marks=pytest.mark.slow) for x in FREE]


@pytest.mark.usefixtures("_as_in_a_new_process")
@pytest.mark.parametrize(
    "names", [FREE, *([x] for x in COSTLY), *EACH], ids=lambda names: short(names[0])
)
def test_compilations_go_on(names):
    go_on(names, fused, "streamkl")


@pytest.mark.usefixtures("_as_in_a_new_process")
@pytest.mark.parametrize("names", [FREE, [*COSTLY], *EACH], ids=lambda names: short(names[0]))
@pytest.mark.parametrize(
    ("fn", "backend_name"),
    [(unfused, "inductor"), (fused, "inductor"), (unfused, "streamkl")],
    ids=["others", "by enable", "others by the backend"],
)
def test_other_compilations_go_on(names, fn, backend_name):
    go_on(names, fn, backend_name)


@pytest.mark.usefixtures("_as_in_a_new_process")
def test_graphs_of_others_get_no_hooks():
    x = [torch.randn(8, 8).requires_grad_() for _ in range(3)]
    with torch_streamkl.enable():
        torch.compile(unfused)(*x)
        assert not any(install.cache_info().currsize for install in INSTALLED)
        torch.compile(fused)(*x)
    assert inductor_double_backward.install.cache_info().currsize == 1
