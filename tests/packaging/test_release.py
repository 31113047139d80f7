"""What is released: contents of sdist and wheel, their metadata, the types that a user sees."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from torch_streamkl import __version__

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "torch_streamkl", "fx_passes")
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


def left_out(folder: str, names: list[str]) -> list[str]:
    # a link to fx_passes inside torch_streamkl is a developer's, not the package's
    link = "fx_passes" if folder.endswith("torch_streamkl") else ""
    return [n for n in names if n in ("__pycache__", link)]


def modules() -> set[str]:
    """Files of the package by the names that they are installed under."""
    found = {"torch_streamkl/py.typed"}
    for folder, name in (
        ("torch_streamkl", "torch_streamkl"),
        ("fx_passes", "torch_streamkl/fx_passes"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT / folder)
            if folder == "fx_passes" or inside.parts[0] != "fx_passes":
                found.add(f"{name}/{inside.as_posix()}")
    return found


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    source = tmp_path_factory.mktemp("release") / "source"
    source.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=left_out)
        else:
            shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "deprecat" not in (done.stdout + done.stderr).lower()  # what users see of a build
    return source / "dist"


def test_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    (path,) = dist.glob("*.whl")
    assert path.name == f"torch_streamkl-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        names = {n for n in wheel.namelist() if ".dist-info/" not in n}
        assert names == modules()
        for name in ("torch_streamkl/linear/ops.py", "torch_streamkl/fx_passes/backend.py"):
            here = ROOT / name.replace("torch_streamkl/fx_passes", "fx_passes")
            assert wheel.read(name) == here.read_bytes()


def test_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= {
        p.name for p in source.iterdir()
    }
    program = "from setuptools import build_meta as b; b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, check=True)
    (again,), (wheel,) = (source / "dist").glob("*.whl"), dist.glob("*.whl")
    with zipfile.ZipFile(again) as x, zipfile.ZipFile(wheel) as y:
        assert {n: x.read(n) for n in x.namelist()} == {n: y.read(n) for n in y.namelist()}


def metadata(dist: Path) -> tuple[Message, str]:
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        info = next(n.split("/")[0] for n in wheel.namelist() if ".dist-info/" in n)
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        return message_from_bytes(wheel.read(f"{info}/METADATA")), entry_points


def test_metadata(dist: Path) -> None:
    found, entry_points = metadata(dist)
    assert (found["Name"], found["Version"]) == ("torch-streamkl", __version__)
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-File"] == "LICENSE"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Author"] == "the torch_streamkl developers"
    classifiers = found.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not [x for x in classifiers if x.startswith("License ::")]  # deprecated
    assert found["Keywords"] and found.get_all("Project-URL")
    assert {"examples", "demo", "test"} <= set(found.get_all("Provides-Extra", []))
    needed = [x for x in found.get_all("Requires-Dist", []) if "extra ==" not in x]
    assert needed == ["torch>=2.11", 'triton>=3.6; platform_system == "Linux"']
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert entry_points.split() == (
        ["[torch_dynamo_backends]", "streamkl", "=", "torch_streamkl.fx_passes.backend:streamkl"]
    )


USERS_FILE = """
import torch
from torch import Tensor

import torch_streamkl
from torch_streamkl import LinearKL, attention_kl, attention_kl_varlen, linear_kl, row_program
from torch_streamkl.distributed import shard_sequence

q: Tensor = torch.randn(1, 2, 8, 4)
loss: Tensor = attention_kl(q, q, q, q, is_causal=True, window=(3, None), reduction="mean")
rows: Tensor = linear_kl(q[0, 0], q[0, 1], q[0, 0], q[0, 1], temperature=2.0)
module: torch.nn.Module = LinearKL(reduction="mean")
report = torch_streamkl.explain(lambda x: x.sum(), q)
fused: int = report.num_fused
reasons: list[str] = [site.reason for site in report.sites]
options: dict[str, object] = torch_streamkl.inductor_options()
each: torch.Tensor = row_program(lambda e: e.s.logsumexp("key") ** 2, dots={"s": (q, q)})
verified: torch_streamkl.Verification = torch_streamkl.verify(lambda x: x.sum(), q)
reveal_type(attention_kl)
reveal_type(linear_kl)
reveal_type(report)
reveal_type(shard_sequence)
"""
WRONG_FILE = """
import torch

from torch_streamkl import attention_kl

q = torch.randn(1, 2, 8, 4)
attention_kl(q, q, q, q, temprature=2.0)
attention_kl(q, q, q, "not a tensor")
"""


@pytest.fixture(scope="module")
def said(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each user's file in one run, which reads all of torch."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    (path,) = dist.glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder / "site")
    files = {"users_file.py": USERS_FILE, "wrong_file.py": WRONG_FILE}
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-P", "-m", "mypy", "--strict", "--follow-imports=silent",
               "--cache-dir", os.devnull, *files]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=folder,
        env={"MYPYPATH": str(folder / "site"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if line.startswith(f"{name}:")] for name in files}


@pytest.mark.slow  # mypy reads all of torch
def test_a_users_file_is_typed(said: dict[str, list[str]]) -> None:
    out = said["users_file.py"]
    assert len(out) == 4 and all("Revealed type" in line for line in out), out
    assert "Any" not in [line.split('"')[1] for line in out]
    assert any("torch_streamkl.fx_passes" in line for line in out)  # the report's type, not Any


@pytest.mark.slow
def test_a_users_mistake_is_seen(said: dict[str, list[str]]) -> None:
    out = "\n".join(said["wrong_file.py"])
    assert 'Unexpected keyword argument "temprature"' in out
    assert 'incompatible type "str"; expected "Tensor"' in out


@pytest.mark.parametrize(
    "module", ["torch_streamkl", "torch_streamkl.distributed", "torch_streamkl.nitrobrew"]
)
def test_everything_public_is_listed_and_documented(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__all__
    for name in found.__all__:
        if name != "__version__":
            assert getattr(found, name).__doc__, name


def test_the_changelog_is_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in text or f"## {__version__}" in text
