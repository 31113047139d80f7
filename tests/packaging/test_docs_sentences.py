"""Sentences of the user's pages have at most 30 words.

python -m tests.packaging.test_docs_sentences  # the longest sentences of every page
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 30
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a Markdown page: of paragraphs, items and cells.

    Left out are code, and sections between markers, which are generated.
    """
    text = re.sub(r"^( *)(```+).*?^\1\2[ ]*$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(?: {4}\S.*|:::.*|#.*|\|[ -|]*\|)$", "\n", text, flags=re.MULTILINE)
    text = re.sub(
        r"^\|(.*)\|$", lambda row: row[1].replace(" | ", "\n\n") + "\n", text, flags=re.M
    )
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(block.split()))


def num_words(sentence: str) -> int:
    return len(re.findall(r"[^\W_][\w.,'-]*", sentence))


def long_sentences(page: Path) -> list[str]:
    found = [s for s in sentences(page.read_text()) if num_words(s) > MOST_WORDS]
    return sorted(found, key=num_words, reverse=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    assert long_sentences(page) == []


def test_a_long_sentence_is_found() -> None:
    text = "Short. " + "word " * 31 + "end.\n\n```\n" + "code " * 40 + "\n```\n"
    assert [num_words(sentence) for sentence in sentences(text) if sentence] == [1, 32]


if __name__ == "__main__":
    for each in PAGES:
        for sentence in long_sentences(each):
            print(f"{each.relative_to(ROOT)}: {num_words(sentence)}: {sentence[:160]}")
