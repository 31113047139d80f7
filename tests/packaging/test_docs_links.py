"""Every link of the Markdown files leads to a file, and every anchor to a heading.

The site's own check is `make docs`; this one needs no package.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "bench/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


@functools.cache
def _text(path: Path) -> str:
    """The page without its code, in which brackets are no links."""
    return re.sub(r"`[^`\n]+`", "`code`", FENCED.sub("", path.read_text()))


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """Headings as GitHub and the site name them."""
    found: list[str] = []
    for line in FENCED.sub("", path.read_text()).splitlines():
        if heading := re.match(r"#{1,6} +(.*?) *(?:\{#([\w-]+)\})?$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            name = heading[2] or re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.append(name if name not in found else f"{name}-{found.count(name)}")
    return frozenset(found)


def broken(path: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for match in LINK.finditer(_text(path)):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        leads = target.exists() and target.is_relative_to(ROOT)
        if leads and anchor and target.suffix == ".md":
            leads = anchor in anchors(target)
        if not leads:
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "not-there.md"
    assert not page.exists()
    found = LINK.findall("[a](not-there.md) and [b](guide/trainers.md#not-there)")
    assert [link for link, _ in found] == ["not-there.md", "guide/trainers.md#not-there"]
    assert "limits-and-what-to-do" in anchors(ROOT / "docs" / "guide" / "trainers.md")
    assert "not-there" not in anchors(ROOT / "docs" / "guide" / "trainers.md")


def test_the_navigation_of_the_site_has_every_page() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page: Path) -> None:
    folders = "tests|bench|docs|examples|fx_passes|torch_streamkl"
    names = re.findall(rf"`((?:{folders})/[\w./-]*\w/?)(?:::[\w\[\]]+)?`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = set(re.findall(r"`([\w.-]+/[\w./-]*|\w[\w-]+\.(?:yml|toml))`", text))
    assert len(names) > 50
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []
    in_both = re.findall(r"`(\w+\.py)`", text)  # of attention/ and linear/
    for folder in ("attention", "linear"):
        assert all((ROOT / "torch_streamkl" / folder / name).exists() for name in in_both)
