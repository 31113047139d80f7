"""Counts what makes public text hard to read: a crude measure, for this tree or another one.

    python -m tests.packaging.test_language_counts [folder of a checkout ...]

Public text is the Markdown of the root and of docs/, and the docstrings of modules, public classes
and public functions. All counts of faults are 0 in this tree.
Commit 49fe3e5 has 154 long sentences, 201 and 163 retired terms, and 768 docstrings without
a verb.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.test_docs_sentences import MOST_WORDS, num_words, sentences
from tests.packaging.test_language import ALLOWED, IN_CODE, RETIRED, first_sentence

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch_streamkl", "fx_passes")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that make a sentence of a text, wherever they stand in it.
AUXILIARIES = _words(
    """
    is are was were be has have had does do did can could may might must will would should
    needs need takes take gets get gives give lets let makes make means mean
    """
)
NOUN_PLURALS = _words(
    """
    Axes Blocks Bounds Bytes Casts Chunks Coefficients Counts Dots Elements Entries Factors
    Gradients Heads Inputs Kernels Keys Layouts Limits Lines Loads Losses Masks Maxima Names
    Nodes Operands Options Outputs Pairs Parts Pieces Pointers Positions Probabilities
    Products Programs Queries Ranges Ranks Rows Rules Scores Sequences Shapes Shares Sites
    Sizes Statistics Strides Tensors Terms Tiles Tokens Tools Values Variables Views Weights
    Words This
    """
)
VERBS_AND_NOUNS = _words(
    """
    Bounds Casts Counts Limits Loads Names Shapes Views Weights
    """
)


def pages(root: Path) -> Iterator[tuple[str, str]]:
    for path in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]:
        yield str(path.relative_to(root)), path.read_text()


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """Yields where each public docstring stands, and its text."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = str(path.relative_to(root))
            if "fx_passes" in path.relative_to(root).parts[1:]:  # the link of an installation
                continue
            tree = ast.parse(path.read_text())
            if text := ast.get_docstring(tree):
                yield name, text
            for node in ast.walk(tree):
                is_named = isinstance(node, ast.ClassDef | ast.FunctionDef)
                if is_named and not node.name.startswith("_"):
                    if text := ast.get_docstring(node):
                        yield f"{name}: {node.name}", text


def has_verb(sentence: str) -> bool:
    """Whether a sentence begins with a verb, or holds a finite one. Crude, on purpose."""
    words = re.findall(r"[A-Za-z']+", re.sub(r"`+[^`]*`+", "code", sentence))
    if not words:
        return False
    first = words[0]
    if first in IMPERATIVES or first in ("Raised", "Whether", "True"):
        return True
    if re.fullmatch(r"[A-Z][a-z]+s", first) and first not in NOUN_PLURALS - VERBS_AND_NOUNS:
        return True
    return any(word.lower() in AUXILIARIES for word in words)


# docstrings may be imperative, as torch's are
IMPERATIVES = _words(
    """
    Accumulate Add Apply Ask Bring Build Call Change Check Choose Collect Compare Compile
    Compute Convert Copy Count Create Cut Decide Define Describe Draw Drop Erase Evaluate Find
    Fold Forget Give Group Insert Issue Keep Launch Let Load Look Make Map Mark Merge Move
    Multiply Note Pack Pad Pass Plan Put Raise Read Record Refuse Register Release Remember
    Remove Replace Return Rewrite Run Say Set Start Store Sum Switch Take Tell Trace Turn Undo
    Use Wait Wrap Write
    """
)


def _retired(name: str, text: str) -> int:
    return sum(
        len(re.findall(rf"(?<![A-Za-z])(?:{term})(?![A-Za-z])", text, re.IGNORECASE))
        for term in RETIRED
        if (name, term) not in ALLOWED and not (term in IN_CODE and name.endswith(".md"))
    )


FAULTS = (
    f"pages: sentences over {MOST_WORDS} words",
    "pages: retired terms",
    f"docstrings: first sentences over {MOST_WORDS} words",
    "docstrings: first sentences without a verb",
    "docstrings: retired terms",
)


def counts(root: Path) -> dict[str, int]:
    """Returns every count of a checkout."""
    of_pages, of_code = list(pages(root)), list(docstrings(root))
    firsts = [first_sentence(text) for _, text in of_code]
    return {
        "pages: sentences": sum(len(list(sentences(text))) for _, text in of_pages),
        f"pages: sentences over {MOST_WORDS} words": sum(
            num_words(s) > MOST_WORDS for _, text in of_pages for s in sentences(text)
        ),
        "pages: retired terms": sum(_retired(name, text) for name, text in of_pages),
        "docstrings": len(of_code),
        f"docstrings: first sentences over {MOST_WORDS} words": sum(
            num_words(s) > MOST_WORDS for s in firsts
        ),
        "docstrings: first sentences without a verb": sum(not has_verb(s) for s in firsts),
        "docstrings: retired terms": sum(
            _retired(name.split(":")[0], text) for name, text in of_code
        ),
    }


def test_public_text_has_none_of_these() -> None:
    found = counts(ROOT)
    assert {name: found[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Returns the axes of a layout.", True),
        ("Rewrite every graph.", True),
        ("A tensor whose elements a formula has.", True),  # crude: any finite verb counts
        ("The kernels of one call.", False),
        ("Rows of logits in plain torch.", False),
    ],
)
def test_verbs_are_told_from_nouns(sentence: str, expected: bool) -> None:
    assert has_verb(sentence) is expected


if __name__ == "__main__":
    roots = [Path(x) for x in sys.argv[1:]] or [ROOT]
    every = [counts(root) for root in roots]
    for title in every[0]:
        print(f"{title:55s}" + "".join(f"{c[title]:8d}" for c in every))
    for root in roots:
        for place, text in docstrings(root):
            if not has_verb(first_sentence(text)):
                print(f"{root.name}: {place}: {first_sentence(text)}")
