"""The figures of the README's table, and of pages that repeat them, are those of records."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROVIDERS = ("eager", "inductor", "liger_chunked", "streamkl")  # the columns of the README
MHA = "attention KL, 32 heads of 128, causal, 8192 tokens"
LONG = "attention KL, Llama-3-8B heads, causal, 65,536 tokens"
STEP = "step of a Llama pair, attention KL of two layers, 8192 tokens"
HEAD = "LM-head forward KL, Qwen 7B from 32B, 8192 tokens"
ROWS = {  # by the first cell: the record, and which of its cases
    MHA: ("h200-mha", "mha-128-causal B=1 N=8192"),
    LONG: ("h200-attention-cases", "llama-3-8b B=1 N=65536"),
    STEP: ("h200-end-to-end-8192", 8192),
    HEAD: ("h200-liger", "qwen-7b-from-32b-head T=8192 V=152064"),
}
# further sentences: page, text with the figures, record, case, provider
SENTENCES = (
    ("docs/guide/attention.md", "tokens: (3.9 ms) and (133 MiB)", MHA, "streamkl"),
    ("docs/guide/attention.md", "takes (23.4 ms) and (16.1 GiB)", MHA, "inductor"),
    ("docs/guide/lm-heads.md", "tokens: (66.2 ms) and (1.6 GiB)", HEAD, "streamkl"),
    ("docs/guide/lm-heads.md", "takes (67.1 ms) and (4.6 GiB)", HEAD, "inductor"),
)


def measured(row: str, provider: str) -> tuple[float, float] | str | None:
    """Milliseconds and MiB of a record, "out of memory", or None if it has no such provider."""
    name, case = ROWS[row]
    record = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    if isinstance(case, int):
        found = [x for x in record["end_to_end"] if x["context"] == case]
    else:
        found = [x for x in record["records"] if x["case"] == case]
    found = [x for x in found if x["provider"] == provider]
    if not found:
        return None
    (one,) = found
    if one["status"] == "oom":
        return "out of memory"
    step: Any = one["step_ms"] if isinstance(case, int) else one["timing"]["step"]["median_ms"]
    return float(step), float(one["peak_mib"])


def assert_rounded(text: str, exact: float, unit: str) -> None:
    """A text such as "3.9 ms" is the exact number, rounded to its last digit."""
    number, found_unit = text.split()
    assert found_unit in (unit, "GiB")
    exact /= 1024 if found_unit == "GiB" else 1
    digits = len(number.partition(".")[2])
    assert abs(float(number) - exact) <= 0.5001 * 10**-digits, (text, exact)


def assert_is(cell: str, expected: tuple[float, float] | str | None) -> None:
    cell = cell.strip("* ")
    if expected is None:
        assert cell in ("none", "")
    elif isinstance(expected, str):
        assert cell == expected
    else:
        for text, exact, unit in zip(cell.split(", "), expected, ("ms", "MiB"), strict=True):
            assert_rounded(text, exact, unit)


@pytest.mark.parametrize("row", ROWS)
def test_the_readme_has_the_figures_of_records(row: str) -> None:
    (line,) = [
        x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith(f"| {row}")
    ]
    cells = line.strip("| ").split(" | ")[1:]
    for cell, provider in zip(cells, PROVIDERS, strict=True):
        assert_is(cell, measured(row, provider))


@pytest.mark.parametrize(("page", "text", "row", "provider"), SENTENCES)
def test_pages_have_the_figures_of_records(page: str, text: str, row: str, provider: str) -> None:
    shown = re.sub(r"[()]", "", text)
    assert shown in (ROOT / page).read_text()
    assert_is(", ".join(re.findall(r"\(([^)]*)\)", text)), measured(row, provider))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="needs the history"
)
def test_commits_that_pages_name_exist() -> None:
    named = {
        (str(page.relative_to(ROOT)), match[0])
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for match in re.finditer(
            r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b", page.read_text()
        )
    }
    assert len(named) > 10
    assert not [x for x in named if git("cat-file", "-t", x[1]) != "commit"]
