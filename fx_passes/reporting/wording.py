"""Says the analysis' reasons in sentences and in the terms of the docs.

The analysis names what it gives up on by short phrases, which hints and the analysis itself
compare. Somebody who reads a report has not seen those terms.
"""

from __future__ import annotations

import re
from dataclasses import replace

from torch import fx

from torch_streamkl.fx_passes.fx_utils.user_names import with_user_names
from torch_streamkl.fx_passes.reporting.operations import CLAUSES, why_not
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.reporting.text import with_hint, without_hint

_PROBABILITIES = "attention or vocabulary probabilities"
_SENTENCES = (
    (rf"^in-place ([\w:.]+) of (scores|{_PROBABILITIES})", r"\1 writes \2 in place"),
    (rf"^(\w+_) of (scores|{_PROBABILITIES})$", r"\1 writes \2 in place"),
    (
        r"reads the sum, and eager has NaN or infinity where it has a value$",
        "reads the sum, which may be a number where eager code has NaN or infinity",
    ),
    (r"^(?:[gl][te]|eq|ne) of (the logarithm of a probability that may underflow)",
     r"a comparison with \1"),
    (r"^(multinomial) has no rule$", rf"\1 is applied to {_PROBABILITIES}"),
    (r"^([\w:.]+) has no rule$", r"the rewrite does not read \1"),
    (r"^t of scores", "the scores are transposed"),
    (r"\bchosen entries\b", "gathered entries"),
    (r"\b(an? [\w ]+?|it) meets (the scores|scores|them)\b", r"\1 is combined with \2"),
    (r"\bmeet a tensor\b", "are combined with a tensor"),
    (r"\ba value of rows\b", "a per-row value"),
    (r"\bsize that varies\b", "dynamic size"),
    (r"^a maximum over the keys leaves the elements$",
     "the loss uses the maximum over the keys (amax) other than to shift a softmax"),
    (r"\b(the )?elements\b", "values per query and key"),
    (r"\blog-sum-exp\b", "logsumexp"),
)  # fmt: skip


_OPERATION = re.compile(rf"^([\w:.]+) of (scores|{_PROBABILITIES})$")
_IN_PLACE = re.compile(r"^(t|\w+_) of ")  # and a transpose


def as_sentence(reason: str) -> str:
    """Returns a reason as the report says it."""
    found = _OPERATION.match(reason)
    if found is not None and not _IN_PLACE.match(reason):
        return f"{found[1]} is applied to {found[2]}{why_not(found[1])}"
    for pattern, text in _SENTENCES:
        reason = re.sub(pattern, text, reason)
    return reason


def reword(report: Report, graph: fx.Graph) -> None:
    """Says the reasons of a report of the analysis in sentences, with the user's names."""
    inputs = graph.find_nodes(op="placeholder")
    report.sites[:] = [
        replace(site, reason=with_user_names(as_sentence(site.reason), inputs))
        if site.reason
        else site
        for site in report.sites
    ]
    report.unrecognized[:] = [_unrecognized(text) for text in report.unrecognized]


def _unrecognized(text: str) -> str:
    """A reason, its place and a hint: only the reason is the analysis'."""
    reason, at, rest = text.partition(" at ")
    sentence = as_sentence(reason)
    clause = CLAUSES.search(sentence)
    end = clause[0] if clause is not None and at else ""
    place, hint = without_hint(rest)
    return with_hint(sentence.removesuffix(end) + at + place + end, hint)
