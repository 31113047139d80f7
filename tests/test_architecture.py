"""The stages of the rewrite import each other in one direction, and all of them are installed."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_streamkl

ROOT = Path(__file__).parents[1]
PASSES, OPERATORS = ROOT / "fx_passes", ROOT / "torch_streamkl"
PREFIX = "torch_streamkl.fx_passes."
# each may import what stands before it, and itself
STAGES = (
    "fx_utils",
    "domain",
    "capture",
    "analysis",
    "planning",
    "lowering",
    "reporting",
    "followup",
    "validation",
    "sharded",
    "pipeline",
    "ddp",
    "inductor_sites",
    "inductor_launch",
    "inductor_lowering",
    "inductor_kernels",
    "gradients_in_forward",
    "inductor_once",
    "inductor_passes",
    "sites_alone",
    "backend",
    "leaves",
    "explain",
    "verify",
    "fallback",
    "enable",
)


def _imports(file: Path) -> Iterator[str]:
    """The modules that a file imports, ``from package import module`` as package.module."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (f"{module}.{name.name}" for name in node.names)


def _stage(file: Path) -> str:
    return file.relative_to(PASSES).parts[0].removesuffix(".py")


FILES = sorted(f for f in PASSES.rglob("*.py") if f.name != "__init__.py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PASSES)))
def test_stages_import_earlier_ones_only(file: Path) -> None:
    allowed = STAGES[: STAGES.index(_stage(file)) + 1]
    imported = {m.removeprefix(PREFIX).split(".")[0] for m in _imports(file) if PREFIX in m}
    assert not imported - set(allowed)


def test_operators_never_import_the_rewrite() -> None:
    entry = OPERATORS / "__init__.py"  # names the front ends, for type checkers and on demand
    for file in OPERATORS.rglob("*.py"):
        assert file == entry or not any(m.startswith(PREFIX[:-1]) for m in _imports(file)), file


def test_every_folder_is_a_package_of_the_distribution() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for root, name in ((OPERATORS, "torch_streamkl"), (PASSES, "torch_streamkl.fx_passes")):
        for init in root.rglob("__init__.py"):
            found.add(".".join((name, *init.parent.relative_to(root).parts)))
    assert set(settings["packages"]) == found


def test_public_names_exist() -> None:
    for name in torch_streamkl.__all__:
        assert getattr(torch_streamkl, name) is not None
