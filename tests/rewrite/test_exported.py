"""Programs that AOTInductor and the C++ wrapper compile: exported, loaded by another process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.export.experimental
from torch import nn
from torch._inductor.utils import run_and_get_code

import torch_streamkl
from tests.support.gpus import on_a_gpu
from tests.support.losses import kd
from torch_streamkl import attention_kl, linear_kl

ROOT = Path(__file__).parents[2]
SCALE = 0.3
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_a_gpu])]
# On a CPU a package holds names of operators: who loads it has to know them. On a GPU it holds our
# kernels, as Inductor's own.
IMPORTS = {"cpu": "import torch_streamkl", "cuda": ""}
LOAD = """
import sys, torch
package, tensors = sys.argv[1:]
inputs, expected = torch.load(tensors)
{before}
{imports}
found = torch._inductor.aoti_load_package(package).loader.run(inputs)
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
print("equal")
"""


# What a package with names of operators says to a process that does not know them.
FAILS = """
try:
    torch._inductor.aoti_load_package(package).loader.run(inputs)
except Exception as error:
    assert "Could not find schema for torch_streamkl::" in str(error), error
else:
    raise AssertionError("loaded without our operators")
"""


class Maps(nn.Module):
    """Queries and keys of two heads, and the logits of 20 vocabulary entries."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.vocab = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(8, 20)

    def forward(self, x):
        return [f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k)]


class Step(nn.Module):
    """The loss of a distillation step: maps and vocabulary entries, by naive code or by our
    functions.
    """

    def __init__(self, is_naive):
        super().__init__()
        torch.manual_seed(0)
        self.is_naive = is_naive
        self.student, self.teacher = Maps(), Maps()
        self.teacher.requires_grad_(False)

    def forward(self, x):
        return self._maps(x) + self._vocab(x.flatten(0, 1))

    def _maps(self, x):
        q, k = self.student(x)
        teacher_q, teacher_k = self.teacher(x)
        if not self.is_naive:
            return attention_kl(
                q, k, teacher_q, teacher_k, student_scale=SCALE, teacher_scale=SCALE,
                reduction="batchmean",
            )  # fmt: skip
        return kd(q @ k.mT * SCALE, teacher_q @ teacher_k.mT * SCALE)

    def _vocab(self, x):
        heads = self.student.vocab, self.teacher.vocab
        if not self.is_naive:
            (w, b), (tw, tb) = ((head.weight, head.bias) for head in heads)
            return linear_kl(x, w, x, tw, student_bias=b, teacher_bias=tb, reduction="mean")
        student, teacher = (head(x) for head in heads)
        p, log_s = teacher.softmax(-1), student.log_softmax(-1)
        return (p * (p.log() - log_s)).sum(-1).mean()

    @property
    def learns(self):
        return [p for p in self.parameters() if p.requires_grad]


def batch(device, seqlen=40):
    generator = torch.Generator().manual_seed(seqlen)
    return torch.randn(2, seqlen, 8, generator=generator).to(device)


def expected_of(step, x, trains):
    naive = Step(is_naive=True).to(x.device)
    loss = naive(x)
    gradients = torch.autograd.grad(loss, naive.learns) if trains else ()
    return [loss.detach(), *gradients]


def loaded(exported, x, expected, tmp_path, imports, configs=None, before=""):
    """What a process says that loads the package and compares its results."""
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "step.pt2"), inductor_configs=configs
    )
    torch.save(([x], expected), tmp_path / "tensors")
    source = LOAD.format(imports=imports, before=before)
    arguments = ["-X", "faulthandler", "-c", source, package, str(tmp_path / "tensors")]
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def assert_equal(found, device, tmp_path):
    """A package of ours gave what was expected.

    The CUDA build of torch 2.11 dies (SIGSEGV) while it loads packages, of a GPU and of the CPU.
    So where the process was killed by a signal, there is a control: a package of the naive step,
    compiled by plain Inductor and loaded without us. Where that dies, too, ours cannot be judged.
    """
    if found.returncode < 0:
        step, x = Step(is_naive=True).to(device), batch(device)
        exported = torch.export.export(step, (x,))
        control = loaded(exported, x, [step(x).detach()], tmp_path, "")
        if control.returncode < 0:
            pytest.skip(
                "the control, a package of plain torch with nothing of torch_streamkl in it, does "
                f"not load here: signal {-control.returncode}, torch {torch.__version__}"
            )
    assert found.stdout == "equal\n", (found.returncode, found.stderr)


@pytest.mark.parametrize("device", DEVICES)
def test_loss_of_naive_code(device, tmp_path):
    """Exported as it is: the rewrite is one of Inductor's passes."""
    step, x = Step(is_naive=True).to(device), batch(device)
    exported, expected = torch.export.export(step, (x,)), expected_of(step, x, trains=False)
    configs = torch_streamkl.inductor_options(strict=True)
    before = FAILS if device == "cpu" else ""
    found = loaded(exported, x, expected, tmp_path, IMPORTS[device], configs, before)
    assert_equal(found, device, tmp_path)


@pytest.mark.slow  # half a minute; the test above has a package, that below gradients in C++
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_loss_and_gradients(device, dynamic, tmp_path):
    """One graph with the backward in it, for one length and for all of a range."""
    step, x = Step(is_naive=False).to(device), batch(device, 56 if dynamic else 40)
    dims = ({1: torch.export.Dim("seqlen", min=2, max=512)},) if dynamic else None
    forward = torch.export.export(step, (batch(device),), dynamic_shapes=dims)
    joint = torch.export.experimental._export_forward_backward(forward)
    # sizes that vary decide in how many chunks the LM heads are: an operator does
    imports, configs = IMPORTS["cpu" if dynamic else device], torch_streamkl.inductor_options()
    found = loaded(joint, x, expected_of(step, x, trains=True), tmp_path, imports, configs)
    assert_equal(found, device, tmp_path)


def _value_and_gradients(function, step, x):
    loss = function(x)
    return [loss.detach(), *torch.autograd.grad(loss, step.learns)]


@pytest.mark.parametrize("device", DEVICES)
def test_cpp_wrapper(device):
    """C++ calls the operators and nothing of ours next to; on a GPU it launches the kernels."""
    step = Step(is_naive=True).to(device)
    x = batch(device)
    options = {"cpp_wrapper": True, "streamkl.strict": True}
    options["fx_graph_cache"] = False  # a graph from the cache has no code to look at
    compiled = torch.compile(step, backend="streamkl", options=options)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        found, codes = run_and_get_code(_value_and_gradients, compiled, step, x)
    torch.testing.assert_close(found, expected_of(step, x, trains=True), rtol=1e-4, atol=1e-5)
    code = "\n".join(codes)
    # by its schema, or in torch 2.11 by its name in Python
    operators = re.search(r'"(torch\.ops\.)?torch_streamkl(::|\.)_(attention|linear)_kl', code)
    assert (operators is None) == (device == "cuda")
    assert ("call_streamkl_forward_kernel" in code) == (device == "cuda")
    assert "CompiledForward(" not in code
