"""What is released: contents of sdist and wheel, their metadata, the types that a user sees.

An installed package is found by name: nothing has to be imported for ``backend="streamkl"``.
"""

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
from pathlib import Path

import pytest

from torch_streamkl import __version__

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "torch_streamkl", "fx_passes")
WHEEL = "from setuptools import build_meta as b; b.build_wheel('dist')"


def left_out(folder: str, names: list[str]) -> list[str]:
    # a link to fx_passes inside torch_streamkl is a developer's, not the package's
    link = "fx_passes" if folder.endswith("torch_streamkl") else ""
    return [n for n in names if n in ("__pycache__", link)]


def run(*command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | more
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with its sdist and its wheel in dist/."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    source = tmp_path_factory.mktemp("release") / "source"
    source.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=left_out)
        else:
            shutil.copy(ROOT / name, source / name)
    done = run("-c", f"{WHEEL}; b.build_sdist('dist')", cwd=source)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "deprecat" not in (done.stdout + done.stderr).lower()  # what users see of a build
    return source


def contents(source: Path) -> dict[str, bytes]:
    (path,) = (source / "dist").glob("*.whl")
    assert path.name == f"torch_streamkl-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        return {n: wheel.read(n) for n in wheel.namelist()}


@pytest.fixture(scope="module")
def site(source: Path) -> Path:
    """Where the wheel is installed."""
    (path,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(source.parent / "site")
    return source.parent / "site"


def test_wheel_holds_the_package_and_nothing_else(source: Path) -> None:
    found = {n: x for n, x in contents(source).items() if ".dist-info/" not in n}
    expected = {}
    for folder in PARTS[3:]:
        for path in (source / folder).rglob("*.py"):
            name = path.relative_to(source).as_posix()
            name = f"torch_streamkl/{name}" if folder == "fx_passes" else name
            expected[name] = path.read_bytes()
    assert found == expected | {"torch_streamkl/py.typed": b""}


def test_sdist_builds_the_same_wheel(source: Path, tmp_path: Path) -> None:
    (path,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (again,) = tmp_path.iterdir()
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= set(os.listdir(again))
    assert run("-c", WHEEL, cwd=again).returncode == 0
    assert contents(again) == contents(source)


def test_metadata(source: Path) -> None:
    ((metadata, entry_points),) = [
        [contents(source)[n.replace("METADATA", x)] for x in ("METADATA", "entry_points.txt")]
        for n in contents(source)
        if n.endswith("METADATA")
    ]
    found = message_from_bytes(metadata)
    fields = {
        "Name": "torch-streamkl", "Version": __version__, "Requires-Python": ">=3.11",
        "License-File": "LICENSE", "License-Expression": "Apache-2.0",
        "Author": "the torch_streamkl developers", "Description-Content-Type": "text/markdown",
    }  # fmt: skip
    assert {name: found[name] for name in fields} == fields
    classifiers = found.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not [x for x in classifiers if x.startswith("License ::")]  # deprecated
    assert found["Keywords"] and found.get_all("Project-URL")
    assert {"examples", "demo", "test"} <= set(found.get_all("Provides-Extra", []))
    needed = [x for x in found.get_all("Requires-Dist", []) if "extra ==" not in x]
    assert needed == ["torch>=2.11", 'triton>=3.6; platform_system == "Linux"']
    assert str(found.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    assert entry_points.decode().split() == (
        ["[torch_dynamo_backends]", "streamkl", "=", "torch_streamkl.fx_passes.backend:streamkl"]
    )


PROGRAM = """
import torch

def loss(q, k, t):
    wanted = (t @ t.mT).softmax(-1)
    return torch.nn.functional.kl_div((q @ k.mT).log_softmax(-1), wanted, reduction="sum")

q, k, t = (torch.randn(1, 2, 8, 4) for _ in range(3))
options = {"streamkl.inner": "eager", "streamkl.min_mib": 0}
compiled = torch.compile(loss, backend="streamkl", options=options)
torch.testing.assert_close(compiled(q, k, t), loss(q, k, t))
import torch_streamkl.fx_passes.backend, torch_streamkl.kernels
print(torch_streamkl.__file__, torch_streamkl.fx_passes.backend.__file__)
"""


def test_backend_is_found_by_name(site: Path, tmp_path: Path) -> None:
    done = run("-c", PROGRAM, cwd=tmp_path, PYTHONPATH=str(site), TORCH_LOGS="torch_streamkl")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 of 1 loss fused" in done.stderr
    assert all(Path(x).is_relative_to(site) for x in done.stdout.split())


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


@pytest.mark.slow  # mypy reads all of torch
def test_a_users_file_is_typed_and_a_mistake_is_seen(site: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    (tmp_path / "right.py").write_text(USERS_FILE)
    (tmp_path / "wrong.py").write_text(WRONG_FILE)
    command = [
        "-P",
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--cache-dir",
        os.devnull,
    ]
    done = run(*command, "right.py", "wrong.py", cwd=tmp_path, MYPYPATH=str(site), PATH="")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    right = [line for line in lines if line.startswith("right.py:")]
    assert len(right) == 4 and all("Revealed type" in line for line in right), right
    assert "Any" not in [line.split('"')[1] for line in right]
    assert any("torch_streamkl.fx_passes" in line for line in right)  # the report, not Any
    wrong = "\n".join(line for line in lines if line.startswith("wrong.py:"))
    assert 'Unexpected keyword argument "temprature"' in wrong
    assert 'incompatible type "str"; expected "Tensor"' in wrong


@pytest.mark.parametrize(
    "module", ["torch_streamkl", "torch_streamkl.distributed", "torch_streamkl.nitrobrew"]
)
def test_everything_public_is_there_listed_and_documented(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__all__
    for name in found.__all__:
        assert name == "__version__" or getattr(found, name).__doc__, name


def test_the_changelog_is_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in text or f"## {__version__}" in text
