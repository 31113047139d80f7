"""The project speaks the field's language: no retired terms, short sentences, verbs in docstrings.

python -m tests.packaging.test_language  # what breaks the rules
"""

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
MOST_WORDS = 30  # of a sentence

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
# Module docstrings begin with a verb in the third person, such as "Captures", "Holds", "Defines".
VERB = re.compile(r"[A-Z][a-z]+s\b")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that make a sentence of a text, wherever they stand in it.
AUXILIARIES = _words("""
    is are was were be has have had does do did can could may might must will would should
    needs need takes take gets get gives give lets let makes make means mean
""")
PLURALS_OF_NOUNS = _words("""
    Axes Blocks Bytes Chunks Coefficients Dots Elements Entries Factors Gradients Heads Inputs
    Kernels Keys Layouts Lines Losses Masks Maxima Nodes Operands Options Outputs Pairs Parts
    Pieces Pointers Positions Probabilities Products Programs Queries Ranges Ranks Rows Rules
    Scores Sequences Shares Sites Sizes Statistics Strides Tensors Terms Tiles Tokens Tools Values
    Variables Weights Words This
""")
# docstrings may be imperative, as torch's are
IMPERATIVES = _words("""
    Accumulate Add Apply Ask Bring Build Call Change Check Choose Collect Compare Compile Compute
    Convert Copy Count Create Cut Decide Define Describe Draw Drop Erase Evaluate Find Fold Forget
    Give Group Insert Issue Keep Launch Let Load Look Make Map Mark Merge Move Multiply Note Pack
    Pad Pass Plan Put Raise Read Record Refuse Register Release Remember Remove Replace Return
    Rewrite Run Say Set Start Store Sum Switch Take Tell Trace Turn Undo Use Wait Wrap Write
    Raised Whether True
""")


# ------------------------------------------------------------------------------------------- terms
def _texts() -> Iterator[tuple[str, str]]:
    for folder in (*PACKAGES, "docs", "examples", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            if path.suffix in (".py", ".md") and not name.startswith(RECORDS):
                if "fx_passes" not in path.parts[len(ROOT.parts) + 1 :]:  # an installation's link
                    yield name, path.read_text()
    for path in sorted(ROOT.glob("*.md")):
        yield path.name, path.read_text()


TEXTS = dict(_texts())
MODULES = {n: x for n, x in TEXTS.items() if n.startswith(PACKAGES) and n.endswith(".py")}
PAGES = {
    n: x for n, x in TEXTS.items() if n.endswith(".md") and (n.startswith("docs/") or "/" not in n)
}


def _matches(term: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"(?<![A-Za-z])(?:{term})(?![A-Za-z])", text, re.IGNORECASE))


@pytest.mark.parametrize("term", RETIRED)
def test_retired_terms_stay_retired(term: str) -> None:
    found = {
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in TEXTS.items()
        if (name, term) not in ALLOWED and not (term in IN_CODE and name.endswith(".md"))
        for match in _matches(term, text)
    }
    assert not found, f"use {RETIRED[term]}:\n" + "\n".join(sorted(found))


def test_every_allowance_is_needed() -> None:
    for (name, term), why in ALLOWED.items():
        assert _matches(term, TEXTS[name]), (name, why)


# --------------------------------------------------------------------------------------- sentences
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


def long_sentences(text: str) -> list[str]:
    return [s for s in sentences(text) if num_words(s) > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    assert long_sentences(PAGES[page]) == []


# -------------------------------------------------------------------------------------- docstrings
def _public(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Classes and functions, and documented functions inside of them, whose names are public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if node in tree.body or ast.get_docstring(node) is not None:
                yield node


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`\"(\[])", paragraph)[0]


def has_verb(sentence: str) -> bool:
    """Whether a sentence begins with a verb, or holds a finite one. Crude, on purpose."""
    first, *rest = re.findall(r"[A-Za-z']+", re.sub(r"`+[^`]*`+", "code", sentence)) or [""]
    if first in IMPERATIVES or (VERB.fullmatch(first) and first not in PLURALS_OF_NOUNS):
        return True
    return any(x.lower() in AUXILIARIES for x in (first, *rest))


def faults(name: str, text: str) -> Iterator[str]:
    tree = ast.parse(text)
    if not VERB.match(ast.get_docstring(tree) or ""):
        yield f"{name}: a module begins without a verb"
    for node in (tree, *_public(tree)):
        where = f"{name}: {getattr(node, 'name', 'module')}"
        sentence = first_sentence(ast.get_docstring(node) or "")
        if not sentence:
            yield f"{where}: no docstring"
        elif sentence.split()[0] in NOUN_PHRASES or not has_verb(sentence):
            yield f"{where}: a noun phrase: {sentence}"
        elif num_words(sentence) > MOST_WORDS:
            yield f"{where}: long: {sentence}"


def test_docstrings_open_with_a_sentence() -> None:
    found = [fault for name, text in MODULES.items() for fault in faults(name, text)]
    assert not found, "\n".join(found)


def test_what_breaks_a_rule_is_found() -> None:
    text = "Short. " + "word " * 31 + "end.\n\n```\n" + "code " * 40 + "\n```\n"
    assert [num_words(sentence) for sentence in sentences(text) if sentence] == [1, 32]
    assert len(long_sentences(text)) == 1
    assert has_verb("Returns the axes of a layout.") and has_verb("Rewrite every graph.")
    assert has_verb("A tensor whose elements a formula has.")  # crude: any finite verb counts
    assert not has_verb("The kernels of one call.")
    assert not has_verb("Rows of logits in plain torch.")
    code = '"""Rows."""\ndef f(): ...\ndef g():\n    """What it is."""\n'
    assert [x.split(": ")[1:3] for x in faults("x", code)] == [
        ["module", "a noun phrase"], ["f", "no docstring"], ["g", "a noun phrase"],
    ]  # fmt: skip


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
    title = re.compile(r"^ *(?:# )?(?:\"\"\")?NOTE \[([^\]]+)\]$", re.M)
    stands: dict[str, list[str]] = {}
    for name, text in MODULES.items():
        for note in title.findall(text):
            stands.setdefault(note, []).append(name)
    files = [f"/{p.relative_to(ROOT)}" for p in ROOT.rglob("*.py") if ".venv" not in p.parts]
    wrong = []
    for name, text in MODULES.items():
        prose = _prose(text)
        for match in re.finditer(r"NOTE \[([^\]]+)\](?:,? (?:in|of) ([\w/]+\.py))?", prose):
            if not any(file.endswith(match[2] or "") for file in stands.get(match[1], [])):
                wrong.append(f"{name}: {match[0]}")
        for file in re.findall(r"(?<![\w.-])[\w/]+\.py\b", prose):
            if not any(known.endswith(f"/{file}".replace("//", "/")) for known in files):
                wrong.append(f"{name}: {file}")
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    for module, source in MODULES.items():
        print(*faults(module, source), sep="\n")
    for page, source in PAGES.items():
        print(*(f"{page}: {x}" for x in long_sentences(source)), sep="\n")
