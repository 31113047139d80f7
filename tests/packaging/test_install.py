"""An installed package is found by name: nothing has to be imported for ``backend="streamkl"``."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "torch_streamkl", "fx_passes")
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
print(torch_streamkl.__file__)
print(torch_streamkl.fx_passes.backend.__file__)
"""


def _run(*command: str | Path, cwd: Path, **variables: str) -> tuple[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    text = [str(part) for part in command]
    done = subprocess.run(
        text, env=environment, capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "editable", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["install", "editable"]
)
def test_backend_is_found_by_name(tmp_path: Path, editable: bool) -> None:
    installed = Path(torch.__file__).parents[1]
    # looked up, not imported: setuptools gives up its own distutils in a process that imports pip
    if not all((installed / name).is_dir() for name in ("pip", "setuptools")):
        pytest.skip("pip and setuptools are not installed next to torch")
    source, home = tmp_path / "source", tmp_path / "home"
    source.mkdir()
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    venv.create(home, with_pip=False, symlinks=True)
    (site_packages,) = home.glob("lib/python*/site-packages")
    # torch and the build tools as they are here, without what their .pth files would run
    (site_packages / "base.pth").write_text(str(installed))
    python = home / "bin" / "python"
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    requirement = ["--editable", source] if editable else [source]
    _run(python, "-m", "pip", "install", *options, *requirement, cwd=tmp_path)

    out, logged = _run(python, "-c", PROGRAM, cwd=tmp_path, TORCH_LOGS="torch_streamkl")
    assert "1 of 1 loss fused" in logged
    package, passes = out.split()
    expected = source if editable else home
    assert Path(package).is_relative_to(expected)
    assert Path(passes).is_relative_to(expected)
