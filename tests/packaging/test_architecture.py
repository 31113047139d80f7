"""Stages import earlier stages, operators have layers, and one function launches kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES, OPERATORS = ROOT / "fx_passes", ROOT / "torch_streamkl"
PREFIX = "torch_streamkl.fx_passes."
# each may import what stands before it, and itself
STAGES = (
    "fx_utils",
    "options",
    "capture",
    "reading",
    "closed_forms",
    "planning",
    "lowering",
    "reporting",
    "passes",
    "validation",
    "dtensors",
    "fusing",
    "pipeline",
    "ddp",
    "inductor_calls",
    "inductor_launch",
    "inductor_lowering",
    "inductor_kernels",
    "gradients_in_forward",
    "inductor_double_backward",
    "views_of_inputs",
    "inductor_passes",
    "run_without_inductor",
    "backend",
    "explain",
    "verification",
    "verify",
    "fallback",
    "enable",
)


def _imports(file: Path, at_runtime: bool = False) -> Iterator[str]:
    """The modules that a file imports, ``from package import module`` as package.module."""
    todo: list[ast.AST] = [ast.parse(file.read_text())]
    while todo:
        node = todo.pop()
        if at_runtime and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (f"{module}.{name.name}" for name in node.names)


def _stage(file: Path) -> str:
    return file.relative_to(PASSES).parts[0].removesuffix(".py")


def test_stages_import_earlier_ones_only() -> None:
    for file in PASSES.rglob("*.py"):
        if file.name != "__init__.py":
            allowed = STAGES[: STAGES.index(_stage(file)) + 1]
            imported = {
                m.removeprefix(PREFIX).split(".")[0] for m in _imports(file) if PREFIX in m
            }
            assert not imported - set(allowed), file


def test_operators_never_import_the_rewrite() -> None:
    entry = OPERATORS / "__init__.py"  # names the front ends, for type checkers and on demand
    for file in OPERATORS.rglob("*.py"):
        assert file == entry or not any(m.startswith(PREFIX[:-1]) for m in _imports(file)), file


LAUNCH = OPERATORS / "runtime" / "launch.py"
WRITTEN = {  # write a compiled kernel's launch as source, and find the C function behind it
    OPERATORS / "runtime" / "capture.py",
    OPERATORS / "runtime" / "triton_launcher.py",
}
# what is looked up and called, and is no kernel
TABLES = {"_FUNCTIONS", "COMPARISONS", "_calls", "lowerings", "list", "dict", "set", "frozenset"}
# functions of torch.cuda that are of no device, or of all
OF_NO_DEVICE = {
    "is_available", "is_initialized", "empty_cache", "get_rng_state_all", "set_rng_state_all",
}  # fmt: skip
SOURCES = sorted(f for root in (OPERATORS, PASSES) for f in root.rglob("*.py"))


def _calls(file: Path) -> Iterator[ast.Call]:
    """Those of Python: kernels call what they call on the GPU."""
    todo: list[ast.AST] = [ast.parse(file.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef):
            if any("jit" in ast.unparse(x) for x in node.decorator_list):
                continue
        if isinstance(node, ast.Call):
            yield node
        todo += ast.iter_child_nodes(node)


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _launches(call: ast.Call) -> bool:
    """Whether a call looks like ``kernel[grid](...)``, ``kernel.warmup(...)`` or a launcher's."""
    if isinstance(call.func, ast.Subscript):
        return _last_name(call.func.value) not in TABLES
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("run", "warmup"):
        return False
    return _is_kernel(call.func.value) or call.func.attr == "warmup"


def _is_kernel(node: ast.expr) -> bool:
    return _last_name(node).endswith(("kernel", "compiled", "launcher"))


def test_one_function_launches_kernels() -> None:
    for file in SOURCES:
        found = [ast.unparse(call.func) for call in _calls(file) if _launches(call)]
        assert not found or file == LAUNCH, (file, found)
        named = [x for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.Attribute)]
        runs = [ast.unparse(x) for x in named if x.attr == "run" and _is_kernel(x.value)]
        assert not runs or file in WRITTEN, (file, runs)


LAUNCHES = (
    "kernel[grid](x)", "row_kernel[(n, 1, 1)](x, num_warps=4)", "self._compiled[name][grid](x)",
    "kernels.row_kernel[n,](x)", "kernel.run(x, grid=grid, warmup=False)", "kernel.warmup(x)",
)  # fmt: skip
OTHER_CALLS = ("plan.run(name, kernel, grid)", "_FUNCTIONS[name](x)")


@pytest.mark.parametrize("text", LAUNCHES + OTHER_CALLS)
def test_what_a_launch_looks_like(text: str) -> None:
    call = ast.parse(text).body[0].value  # type: ignore[attr-defined]
    assert _launches(call) is (text in LAUNCHES)


def test_no_question_is_of_the_current_device() -> None:
    """Streams, properties and memory are those of a device that is named."""
    for file in SOURCES:
        for call in _calls(file):
            name = ast.unparse(call.func)
            if name.startswith("torch.cuda.") and file != LAUNCH:
                is_named = bool(call.args or call.keywords)
                assert is_named or _last_name(call.func) in OF_NO_DEVICE, (file, name)
            is_raw = "_cuda_getDevice" in name or "get_current_device" in name
            assert not is_raw, (file, name)


# what a folder of the operators may not import, besides what the order of all of them says
APART = {
    "runtime": ("attention", "linear", "rows", "kernels", "distributed"),
    "kernels": ("attention", "linear", "rows", "distributed"),
    "attention/hopper": ("attention/triton/launches",),
    "linear": ("rows", "distributed"),
    "attention": ("linear", "rows", "distributed"),
}
NAMED = "torch_streamkl.rows.named"  # runs row programs that are a divergence of an LM head


def _graph() -> dict[str, set[str]]:
    """The modules of the operators, and those that each imports when it runs, early or late."""
    names = {
        ".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in OPERATORS.rglob("*.py")
    }
    graph = {}
    for name, file in names.items():
        found = {
            x if x in names else x.rpartition(".")[0] for x in _imports(file, at_runtime=True)
        }
        graph[name] = found & set(names) - {name}
    return graph


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that import each other in a circle, none where there is none."""
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    return sorted(left)


def _folder(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_no_circle_of_imports() -> None:
    graph = _graph()
    assert not _circle(graph)
    folders: dict[str, set[str]] = {}
    for name, others in graph.items():
        if name != "torch_streamkl.__init__":
            inside = folders.setdefault(_folder(name), set())
            inside |= {_folder(x) for x in others} - {_folder(name)}
    assert not _circle(folders)
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_layers_of_the_operators() -> None:
    for name, others in _graph().items():
        for folder, forbidden in APART.items():
            if name.startswith(f"torch_streamkl.{folder.replace('/', '.')}."):
                for each in forbidden:
                    prefix = f"torch_streamkl.{each.replace('/', '.')}"
                    assert not [x for x in others if f"{x}.".startswith(f"{prefix}.")], name
        if name.startswith("torch_streamkl.rows.") and name != NAMED:
            assert not [x for x in others if x.startswith("torch_streamkl.linear.")], name
