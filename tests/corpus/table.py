"""Write docs/evidence/corpus.md, the outcome of every corpus loss.

Run as `python -m tests.corpus.table`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.corpus.naive_losses import ALL_CASES, BY_NAME
from tests.corpus.outcomes import Row, row_of, run_case

PATH = Path(__file__).parents[2] / "docs" / "evidence" / "corpus.md"
HEAD = """# The corpus: what happens to real losses

`tests/corpus/naive_losses.py` has {total} losses that follow the operations of public distillation
code. Each line is one of them. In {fused}, every loss is fused.

- Compiled with `backend="streamkl"`: float32, static shapes, training, at any size
  (`streamkl.min_mib=0`).
- The errors are those against float64, relative to the largest value of the loss and of each
  gradient.
- "no site": the graph has no two distributions to compare.
- `{heads}` marks losses with the language-model heads inside of the graph. A loss on logits alone
  is not fused, because its logits exist before it starts.

Written by `python -m tests.corpus.table`; `tests/rewrite/test_corpus.py` checks that
it is current.

| case | verdict | reason | loss error | gradient error |
| --- | --- | --- | --- | --- |
"""
LINE = re.compile(
    r"^\| `(?P<case>[^`]+)` \| (?P<verdict>[^|]*) \| (?P<reason>.*) \| (\S+) \| (\S+) \|$"
)


CAPTURED = """
## With the settings of `torch_streamkl.enable()`

These are the losses above that have both products and are not fused. Here graph breaks are
allowed, and Dynamo has the settings of `enable()`:

- a graph break in a called function leaves its caller's graph whole;
- rows that a mask selects stay in the graph.

| case | verdict | reason | loss error | gradient error |
| --- | --- | --- | --- | --- |
"""


def is_captured(row: Row) -> bool:
    """Whether a case is in the second table too."""
    return bool(BY_NAME[row.case]["has_matmul"]) and row.verdict == "not fused"


def render(rows: Sequence[Row], captured: Sequence[Row]) -> str:
    """The page."""
    fused = sum(row.verdict.startswith("fused") for row in rows)
    head = HEAD.format(total=len(rows), fused=fused, heads="/lm_head")
    return head + _lines(rows) + CAPTURED + _lines(captured)


def _lines(rows: Sequence[Row]) -> str:
    return "".join(
        f"| `{r.case}` | {r.verdict} | {escaped(r.reason)} "
        f"| {r.loss_error:.0e} | {r.gradient_error:.0e} |\n"
        for r in rows
    )


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def committed(captured: bool = False) -> dict[str, tuple[str, str]]:
    """Verdict and reason of each case as a table of the page in the repository has them."""
    text = PATH.read_text().partition(CAPTURED)[2 if captured else 0]
    found = (LINE.match(line) for line in text.splitlines())
    return {m["case"]: (m["verdict"], m["reason"]) for m in found if m}


def main() -> None:
    rows = []
    for case in ALL_CASES:
        outcome = run_case(case).check()
        rows.append(row_of(case, outcome))
        print(f"{rows[-1].case:45s} {rows[-1].verdict:20s} {rows[-1].reason}", file=sys.stderr)
    again = [
        row_of(BY_NAME[r.case], run_case(BY_NAME[r.case], captured=True).check())
        for r in rows
        if is_captured(r)
    ]
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(render(rows, again))


if __name__ == "__main__":
    main()
