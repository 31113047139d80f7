"""A release of torch that moved a private name: the error says which one, and what to do."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._prims_common
import torch._subclasses.fake_tensor
import torch.fx.experimental.symbolic_shapes
from torch import fx

from torch_streamkl.fx_passes.fx_utils import nodes, torch_names

PASSES = Path(__file__).parents[2] / "fx_passes"
MOVED = {
    "a class": (torch._subclasses.fake_tensor, "FakeTensorMode"),
    "a function": (torch._prims_common, "elementwise_dtypes"),
    "a method": (torch.fx.experimental.symbolic_shapes.ShapeEnv, "_rename_unbacked_to"),
    "a function that newer releases may publish": (
        torch.fx.experimental.symbolic_shapes,
        "statically_known_true",
    ),
}
# what the rewrite leaves out where it is missing
OPTIONAL = {
    "ddp.py",
    "inductor_kernels.py",
    "inductor_launch.py",
    "inductor_lowering.py",
    "inductor_calls.py",
}
PUBLIC = {"torch._dynamo.config", "torch._inductor.config"}  # as torch documents them


@pytest.fixture
def _names_again():
    yield
    importlib.reload(torch_names)


@pytest.mark.usefixtures("_names_again")
@pytest.mark.parametrize("what", MOVED)
def test_the_error_names_it(what):
    owner, name = MOVED[what]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(ImportError) as raised:
            importlib.reload(torch_names)
    message = str(raised.value)
    assert name in message
    assert f"torch {torch.__version__}" in message
    assert "docs/reference/compatibility.md" in message
    assert "compile without the rewrite" in message


@pytest.mark.usefixtures("_names_again")
def test_a_module_that_moved():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils._sympy.functions", None)
        with pytest.raises(ImportError, match=r"torch\.utils\._sympy\.functions"):
            importlib.reload(torch_names)


@pytest.mark.parametrize(
    ("module", "name"), [("torch._inductor", "no_such_thing"), ("torch._no_such_part", "thing")]
)
def test_names_that_are_imported_later(module, name):
    with pytest.raises(ImportError, match=re.escape(f"torch {torch.__version__}")) as raised:
        torch_names.later(module, name)
    assert (name if module == "torch._inductor" else module) in str(raised.value)


def test_operators_do_not_need_it():
    """In a process of its own: the rewrite stops with the message, the operators run."""
    program = """
import torch, torch._prims_common
del torch._prims_common.elementwise_dtypes
import torch_streamkl
q, k = torch.randn(2, 1, 1, 4, 8)
print(torch_streamkl.attention_kl(q, k, q, k).sum().item())
torch_streamkl.enable()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert abs(float(done.stdout)) < 1e-5
    assert "ImportError: torch_streamkl" in done.stderr
    assert "elementwise_dtypes" in done.stderr


def _private_imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            is_private = any(part.startswith("_") for part in parts) or "experimental" in parts
            if parts[0] == "torch" and is_private and module not in PUBLIC:
                yield module


FILES = sorted(f for f in PASSES.rglob("*.py") if f.name not in {"torch_names.py", *OPTIONAL})


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PASSES)))
def test_private_names_are_imported_in_one_place(file):
    assert not list(_private_imports(file))


@pytest.mark.parametrize("target", nodes.ATTRIBUTES)
def test_an_attribute_has_the_same_names_as_an_operator(target):
    """As which torch 2.14 traces it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    name = nodes.ATTRIBUTES[target]
    attribute = graph.call_function(getattr, (x, name))
    operator = graph.call_function(target, (x,))
    assert nodes.name_of(operator) == nodes.name_of(attribute) == "getattr"
    assert nodes.said_name(operator) == nodes.said_name(attribute) == name
