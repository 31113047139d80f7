"""The code of README and docs runs, and the reports that they show are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _section(name: str, page: str = README) -> str:
    found = re.search(f"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", page, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_prints_the_report_that_is_shown(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks[:2]))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace(str(tmp_path) + "/", "")
    assert _section("example") == f"```\n{printed}```\n"


def test_the_report_of_an_unfused_site_is_the_one_that_is_shown(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "what-is-fused.md").read_text()
    section = _section("unfused", page)
    shown = re.fullmatch(r"```py\n(.*?)```\n```\n(.*?)```\n", section, re.DOTALL)
    assert shown is not None
    script = tmp_path / "unfused.py"
    script.write_text(shown[1])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace(str(tmp_path) + "/", "") == shown[2]


def test_the_operators_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    setup = """
import torch
q_s, k_s, q_t, k_t = torch.randn(4, 1, 2, 33, 16)
x_s, w_s, x_t, w_t = torch.randn(5, 8), torch.randn(31, 8), torch.randn(5, 12), torch.randn(31, 12)
"""
    names: dict[str, object] = {}
    exec(setup + blocks[2], names)
    assert names["rows"].shape == (1, 2, 33)
    assert names["loss"].ndim == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_is_linked_exists(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)[)#]", text) + re.findall(r'src="([^":]+)"', text)
    assert not [link for link in links if not (page.parent / link).exists()]


def test_every_page_is_linked_from_the_readme() -> None:
    """Or from a page that is."""
    linked = {link for page in PAGES for link in re.findall(r"([\w-]+\.md)", page.read_text())}
    assert {page.name for page in PAGES} <= {*linked, "README.md"}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120  # two screens
