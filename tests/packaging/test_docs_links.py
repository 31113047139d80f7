"""Every link of the Markdown files leads to a file, and every anchor to a heading.

The site's own check is `make docs`; this one needs no package.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path: path.read_text()
    for pattern in ("*.md", "docs/**/*.md", "bench/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
}
FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def anchors(page: str) -> set[str]:
    """Headings as GitHub and the site name them."""
    found: list[str] = []
    for line in FENCED.sub("", page).splitlines():
        if heading := re.match(r"#{1,6} +(.*?) *(?:\{#([\w-]+)\})?$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            name = heading[2] or re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.append(name if name not in found else f"{name}-{found.count(name)}")
    return set(found)


def broken(path: Path, page: str) -> list[str]:
    """The links of a page that lead nowhere, without its code, in which brackets are no links."""
    wrong = []
    for match in LINK.finditer(re.sub(r"`[^`\n]+`", "code", FENCED.sub("", page))):
        name, _, anchor = (match[1] or match[2]).partition("#")
        target = (path.parent / name).resolve() if name else path
        leads = target.exists() and target.is_relative_to(ROOT)
        if leads and anchor and target in PAGES:
            leads = anchor in anchors(PAGES[target])
        if not leads and not re.match(r"[a-z]+:", name):
            wrong.append(match[1] or match[2])
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_named_files(path: Path) -> None:
    assert broken(path, PAGES[path]) == []
    folders = "tests|bench|docs|examples|fx_passes|torch_streamkl"
    names = re.findall(rf"`((?:{folders})/[\w./-]*\w/?)(?:::[\w\[\]]+)?`", PAGES[path])
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_a_broken_link_is_found() -> None:
    links = "[a](not-there.md) [b](guide/trainers.md#not-there) [c](#x) [d](guide/trainers.md)"
    right = "[e](guide/trainers.md#limits-and-what-to-do) [f](https://x.y/z)"
    found = broken(ROOT / "docs" / "x.md", f"{links} {right}\n```\n[g](h.md)\n```\n")
    assert found[:2] == ["not-there.md", "guide/trainers.md#not-there"]
    assert found[2:] == ["#x"]


def test_the_navigation_of_the_site_has_every_page() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages)


def test_files_that_contributing_names_exist() -> None:
    text = PAGES[ROOT / "CONTRIBUTING.md"]
    names = set(re.findall(r"`([\w.-]+/[\w./-]*|\w[\w-]+\.(?:yml|toml))`", text))
    assert len(names) > 50
    both = re.findall(r"`(\w+\.py)`", text)  # of attention/ and linear/
    names |= {f"torch_streamkl/{x}/{name}" for x in ("attention", "linear") for name in both}
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []
