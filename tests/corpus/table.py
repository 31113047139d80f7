"""Write docs/evidence/corpus.md, the outcome of every corpus loss.

Run as `python -m tests.corpus.table`.
"""

import re
import sys
from pathlib import Path

from tests.corpus.naive_losses import ALL_CASES, BY_NAME
from tests.corpus.outcomes import row_of, run_case

PATH = Path(__file__).parents[2] / "docs" / "evidence" / "corpus.md"
HEAD = """# The corpus: which public losses fuse?

`tests/corpus/naive_losses.py` has {total} losses that follow the operations of public
distillation code.
{with_matmuls} of them include the matmuls that compute scores or logits. In **{fused} of these
{with_matmuls}, every loss is fused.**
The other {on_logits} take logits as inputs, so they cannot save memory: the logits exist
before the loss.

- Each line is one loss. `{heads}` marks a loss together with its LM heads. The same loss
  without them is on another line.
- "not fused": the next column has the report's reason. "no loss": the graph does not compare two
  distributions.
- "fused" with a remark: the loss is fused, and other code still materializes the tensors that the
  remark counts.
- Errors are relative to float64: of the loss, and of the gradient with the largest error.
- Losses are compiled with `backend="streamkl"` and `streamkl.min_mib=0`: float32, static
  shapes, training.

`python -m tests.corpus.table` writes this page, and `tests/rewrite/test_corpus.py` checks that
it is current.

| loss | outcome | reason, or what remains | loss error | gradient error |
| --- | --- | --- | --- | --- |
"""
LINE = re.compile(
    r"^\| `(?P<case>[^`]+)` \| (?P<verdict>[^|]*) \| (?P<reason>.*) \| (\S+) \| (\S+) \|$"
)


CAPTURED = """
## With the settings of `torch_streamkl.enable()`

These losses include their matmuls and are not fused above. Here graph breaks are allowed, and
Dynamo has the settings of `enable()`:

- a graph break in a called function leaves the caller's graph whole;
- rows that a mask selects stay in the graph.

| loss | outcome | reason, or what remains | loss error | gradient error |
| --- | --- | --- | --- | --- |
"""


def is_captured(row):
    """Whether a case is in the second table too."""
    return bool(BY_NAME[row.case]["has_matmul"]) and row.verdict == "not fused"


def render(rows, captured):
    """The page."""
    fused = sum(row.verdict.startswith("fused") for row in rows)
    with_matmuls = sum(bool(BY_NAME[row.case]["has_matmul"]) for row in rows)
    head = HEAD.format(
        total=len(rows),
        with_matmuls=with_matmuls,
        on_logits=len(rows) - with_matmuls,
        fused=fused,
        heads="/lm_head",
    )
    return head + _lines(rows) + CAPTURED + _lines(captured)


def _lines(rows):
    return "".join(
        f"| `{r.case}` | {r.verdict} | {escaped(r.reason)} "
        f"| {r.loss_error:.0e} | {r.gradient_error:.0e} |\n"
        for r in rows
    )


def escaped(text):
    return text.replace("|", "\\|")


def committed(captured=False):
    """Verdict and reason of each case as a table of the page in the repository has them."""
    text = PATH.read_text().partition(CAPTURED)[2 if captured else 0]
    found = (LINE.match(line) for line in text.splitlines())
    return {m["case"]: (m["verdict"], m["reason"]) for m in found if m}


def main():
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
