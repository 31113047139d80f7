"""The code of README and docs runs, and the reports that they show are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _section(name: str, page: str = README) -> str:
    found = re.search(f"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", page, re.DOTALL)
    assert found is not None
    return found[1]


UNFUSED = (ROOT / "docs" / "reference" / "supported.md").read_text()
# A script after the other in a process, which takes seconds to import what it needs.
RUN = """
import contextlib, runpy, sys, torch
for script in sys.argv[1:]:
    torch._dynamo.reset()
    with open(script + ".out", "w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the scripts of the pages print."""
    folder = tmp_path_factory.mktemp("scripts")
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    scripts = {"example": blocks[0], "operators": blocks[1], "unfused": _unfused()[0]}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    paths = [str(folder / f"{name}.py") for name in scripts]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *paths], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    outputs = [Path(f"{path}.out").read_text().replace(f"{folder}/", "") for path in paths]
    return dict(zip(scripts, outputs, strict=True))


def _unfused() -> tuple[str, str]:
    """The script of an unfused site, and the report that is shown."""
    shown = re.fullmatch(
        r"```py\n(.*?)```\n```\n(.*?)```\n", _section("unfused", UNFUSED), re.DOTALL
    )
    assert shown is not None
    return shown[1], shown[2]


def test_the_example_prints_the_report_that_is_shown(printed: dict[str, str]) -> None:
    assert _section("example") == f"```\n{printed['example']}```\n"


def test_the_report_of_an_unfused_site_is_the_one_that_is_shown(printed: dict[str, str]) -> None:
    assert printed["unfused"] == _unfused()[1]


def test_the_example_is_a_loss_that_eager_code_computes(printed: dict[str, str]) -> None:
    found = re.match(r"loss ([\d.]+), uncompiled ([\d.]+)\n", printed["example"])
    assert found is not None
    assert found[1] == found[2]
    assert "check passed" in printed["example"]  # a size that is checked


def test_the_operators_example_runs(printed: dict[str, str]) -> None:
    assert re.fullmatch(r"torch.Size\(\[1, 8, 256\]\) tensor\([\d.]+\)\n", printed["operators"])


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
    assert len(README.splitlines()) <= 110  # two screens
