"""The project speaks the field's language: no retired terms, and docstrings that are sentences."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch_streamkl", "fx_passes")

# A term of our own for which the field has one: its pattern, and the term to use. A pattern is
# matched within identifiers, too: "_" and digits end a word, as everything but letters does.
RETIRED = {
    "words?": "vocab, vocab entries, ids",
    "(?:in|takes?|took|by|hopper)[ _]turns": "persistent kernel; alternately",
    "panels?": "query tiles, token tiles",
    "sites?_alone": "run_without_inductor",
    "row_body": "row kernel",
    "unite_rows": "combine kernel",
    "stand_ins?": "opaque nodes",
    "heads that share keys": "GQA, MQA",
    "left alone": "skipped, not fused",
    "quadratic tensors?": "score-sized or logit-sized tensor",
    "values of rows": "per-row values",
    "planted faults?": "mutations",
    "fixed bases?": "frozen row max",
    "key[ _]sums?": "delta",
    "[hg]_sum": "delta",
    "hard[ _]labels?": "labels",
    "sharded/(?:whole|back)": "dtensors/unshard, dtensors/restore",
    "followups?": "passes",
    "remed(?:y|ies)": "hint",
    "heads_as_rows": "pack_gqa",
    "one_beside": "next to",
    "vocabulary entrys": "a rename's slip",
    "recognisers?": "Reader",
    "RowElements": "Reading",
    "quadratic[_ ]nodes": "score-sized nodes",
    "(?:every|new|own|kept)_maps?": "materialized nodes",
    "unrecordable": "NotCapturable",
    "undone_if_blocked": "undone_if_unsupported",
    "is_behind": "is_later",
    "leftovers": "RemainingAttention",
}
# where a term means what everybody means by it: (path, pattern) and the reason
ALLOWED = {
    ("CHANGELOG.md", "words?"): "names of arguments before they were renamed",
    ("CONTRIBUTING.md", "words?"): "the length of a sentence",
    ("docs/evidence/mutations.md", "words?"): "names of tests",
    (
        "bench/notes/hopper_kernels.md",
        "(?:in|takes?|took|by|hopper)[ _]turns",
    ): "the file of a record",
    ("bench/offline/rates.py", "words?"): "the words of a line of assembly",
}
# terms that prose may use, and names may not
IN_CODE = ("hard[ _]labels?",)
RECORDS = ("bench/results", "bench/RESULTS.md")  # what was measured, in the words of its time

# A docstring's first sentence holds a verb and says what the thing does or is. These openings
# begin noun phrases; a docstring that begins so is a riddle without its context.
NOUN_PHRASES = (
    "What", "Which", "Who", "Whose", "Of", "As", "Where", "How", "Why", "From", "By", "With",
)  # fmt: skip
LONGEST_SENTENCE = 30  # words
# Module docstrings begin with a verb in the third person, such as "Captures", "Holds", "Defines".
VERB = re.compile(r"[A-Z][a-z]+s\b")
# How many docstrings still break a rule, exactly: lower a number with the docstring that you fix.
OFFENDERS = {
    "modules without a verb": 0,
    "without a docstring": 0,
    "noun phrases": 0,
    "long sentences": 0,
}


def _texts() -> Iterator[tuple[str, str]]:
    for folder in (*PACKAGES, "docs", "examples", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            if path.suffix in (".py", ".md") and not name.startswith(RECORDS):
                if not path.is_symlink() and "fx_passes" not in path.parts[len(ROOT.parts) + 1 :]:
                    yield name, path.read_text()
    for path in sorted(ROOT.glob("*.md")):
        yield path.name, path.read_text()


@pytest.mark.parametrize("term", RETIRED)
def test_retired_terms_stay_retired(term: str) -> None:
    pattern = re.compile(rf"(?<![A-Za-z])(?:{term})(?![A-Za-z])", re.IGNORECASE)
    found = {
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in _texts()
        if (name, term) not in ALLOWED and not (term in IN_CODE and name.endswith(".md"))
        for match in pattern.finditer(text)
    }
    assert not found, f"use {RETIRED[term]}:\n" + "\n".join(sorted(found))


def test_every_allowance_is_needed() -> None:
    texts = dict(_texts())
    for (name, term), why in ALLOWED.items():
        assert re.search(rf"(?<![A-Za-z])(?:{term})(?![A-Za-z])", texts[name], re.I), (name, why)


def _modules() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "fx_passes" not in path.parts[len(ROOT.parts) + 1 :]:
                yield str(path.relative_to(ROOT)), path.read_text()


def _public(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes, functions, and the documented methods of classes, whose names are public."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                yield node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    if ast.get_docstring(method) is not None:
                        yield method


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`\"(\[])", paragraph)[0]


def _offenders() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {rule: [] for rule in OFFENDERS}
    for name, text in _modules():
        tree = ast.parse(text)
        if not VERB.match(ast.get_docstring(tree) or ""):
            found["modules without a verb"].append(name)
        for node in (tree, *_public(tree)):
            docstring = ast.get_docstring(node)
            where = name if isinstance(node, ast.Module) else f"{name}: {node.name}"
            if docstring is None:
                if not isinstance(node, ast.Module):
                    found["without a docstring"].append(where)
                continue
            sentence = first_sentence(docstring)
            if sentence.split()[0] in NOUN_PHRASES:
                found["noun phrases"].append(f"{where}: {sentence}")
            if len(sentence.split()) > LONGEST_SENTENCE:
                found["long sentences"].append(f"{where}: {sentence}")
    return found


@pytest.mark.parametrize("rule", OFFENDERS)
def test_docstrings_open_with_a_sentence(rule: str) -> None:
    found = _offenders()[rule]
    assert len(found) == OFFENDERS[rule], "\n".join(found)


def _prose(text: str) -> str:
    """A module's comments and docstrings, lines joined."""
    strings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
    }
    parts = [
        token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
        or (token.type == tokenize.STRING and token.start[0] in strings)
    ]
    return " ".join(" ".join(parts).split())


def test_references_of_comments_lead_somewhere() -> None:
    """A NOTE that is named exists, in the file that is named with it; and so do named modules."""
    texts = dict(_modules())
    stands = {
        (match[1], name)
        for name, text in texts.items()
        for match in re.finditer(r"^ *(?:# )?(?:\"\"\")?NOTE \[([^\]]+)\]$", text, re.M)
    }
    notes = {note for note, _ in stands}
    files = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if ".venv" not in p.parts]
    wrong = []
    for name, text in texts.items():
        prose = _prose(text)
        for match in re.finditer(r"NOTE \[([^\]]+)\](?:,? (?:in|of) ([\w/]+\.py))?", prose):
            at = [file for note, file in stands if note == match[1]]
            if match[1] not in notes or (match[2] and not any(f.endswith(match[2]) for f in at)):
                wrong.append(f"{name}: {match[0]}, which stands in {at}")
        for match in re.finditer(r"(?<![\w.-])[\w/]+\.py\b", prose):
            if not any(f"/{file}".endswith(f"/{match[0]}") for file in files):
                wrong.append(f"{name}: {match[0]}")
    assert not wrong, "\n".join(wrong)
