"""Defines Report, what is known of every distillation loss of a program; `text.py` formats it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch_streamkl.fx_passes.reporting import formats, text


@dataclass(frozen=True)
class Site:
    """Describes one matched loss, or a detached value such as a metric, fused or not."""

    fused: bool
    kind: str  # the operator, such as "linear_kl"; "" when nothing was recognised
    form: str  # what was recognised
    reason: str  # empty when fused, otherwise what the operators do not support
    location: str  # file:line of the user's code
    code: str = ""  # that line
    bytes_saved: int = 0  # of what several losses read, an equal share
    hint: str = ""  # a hint: what would make it fusable
    unsupported_at: str = ""  # file:line of the unsupported operation, where that is another line
    runs: str = ""  # implementation on this device; for LM heads, where the gradients are made
    check: str = ""  # what came of running it against the code that it replaces
    # why a loss that could be fused is skipped: its size, and the threshold
    skipped: str = ""
    node: str = field(default="", compare=False)  # the replaced value's name in the graph
    unsupported_code: str = ""  # the line of the unsupported operation
    is_required: bool = True  # False for a sum that is no divergence: `strict` does not ask for it
    is_loss: bool = True  # False where no gradient is needed, as of a metric
    warning: str = ""  # of a loss that is fused and is probably not what was meant
    num_sharing: int = 1  # losses that read some of what it saves, itself included
    also: str = ""  # what is computed in the same pass
    # which scores are the student's, which the teacher's, and who needs a gradient
    roles: str = field(default="", compare=False)


@dataclass(frozen=True)
class Remaining:
    """Describes a score- or logit-sized tensor that the compiled program still materializes."""

    name: str
    shape: tuple[object, ...]
    location: str
    reason: str  # who reads it
    cause: str = ""  # why nothing could take its place, where that is known
    num_bytes: int = 0


@dataclass(frozen=True)
class Outside:
    """Describes logits or attention probabilities that a graph returns to code that is not
    compiled.
    """

    what: str  # "logits" or "attention map"
    shape: tuple[object, ...]
    num_bytes: int
    location: str


@dataclass(frozen=True)
class GraphBreak:
    """Says where Dynamo ended a graph: losses are not seen across that line."""

    location: str
    code: str
    reason: str


@dataclass
class Report:
    """Lists every loss of a program with its outcome, and the large tensors that remain.

    ``print(report)`` is short, ``report.details()`` complete, and a notebook shows a table. The
    page docs/reference/report.md explains every text.

    Attributes:
        sites: one record per loss: whether it is fused and as what, where it is in your code, the
            result of the check, and the bytes saved; if it is not fused, the reason and a hint.
        remaining: score- and logit-sized tensors that a recognized loss reads and that the
            compiled program still materializes.
        elsewhere: further tensors of that size, which no recognized loss reads.
        unrecognized: for the tensors in ``elsewhere``, why no loss was recognized; if all losses
            are fused, who else reads those in ``remaining``.
        unfused_comparisons: the lines of your code that compare two score- or logit-sized
            distributions and are not fused, even if they are not recognized as a loss.
        outside: logits or probabilities that a graph returns to code that is not compiled.
        breaks: graph breaks, with their lines.
        notes: further facts, such as a cross-entropy that keeps the student's logits.
        failures: exceptions of the analysis. The graph is then not fused.
        not_analysed: the number of graphs with losses that were not analysed.
        not_scanned: why ``remaining`` and ``elsewhere`` may be incomplete.
        num_large: the number of different shapes of score- and logit-sized tensors in your code,
            before it is rewritten.
        num_graphs: the number of analysed graphs. Graphs from a cache do not count.
        num_not_ours: if no graph was analysed, the number of graphs that other backends compiled.
        num_cached: if no graph was analysed, the number of graphs from AOTAutograd's cache.
    """

    sites: list[Site] = field(default_factory=list)
    remaining: list[Remaining] = field(default_factory=list)  # on the path of the losses
    failures: list[str] = field(default_factory=list)  # of the analysis; the graph was not fused
    outside: list[Outside] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what else keeps large tensors, and where
    not_analysed: int = 0  # graphs with losses that are not fused as a whole
    elsewhere: list[Remaining] = field(default_factory=list)  # that no recognized loss reads
    unrecognized: list[str] = field(default_factory=list)  # why those belong to no loss
    unfused_comparisons: list[str] = field(default_factory=list)  # places of unknown losses
    breaks: list[GraphBreak] = field(default_factory=list)
    not_scanned: list[str] = field(default_factory=list)  # why what remains is not known
    num_graphs: int = 0  # that were analysed: compiled, and not found in a cache
    num_large: int = 0  # shapes of scores and logits in the programs as they are written
    num_not_ours: int = 0  # graphs that Dynamo gave to other compilers, if none was analysed
    num_cached: int = 0  # graphs that AOTAutograd found in its cache, if none was analysed

    @property
    def num_fused(self) -> int:
        """Counts the losses that are fused, and the detached values."""
        return sum(site.fused for site in self.sites)

    @property
    def num_unfused(self) -> int:
        """Counts the divergences that are not fused. Skipped losses do not count."""
        return sum(not (site.fused or site.skipped) and site.is_required for site in self.sites)

    @property
    def num_skipped(self) -> int:
        """Counts the losses that could be fused and are skipped for their size."""
        return sum(bool(site.skipped) for site in self.sites)

    @property
    def num_remaining(self) -> int:
        """Counts the score- and logit-sized tensors in ``remaining``."""
        return len(self.remaining)

    @property
    def bytes_saved(self) -> int:
        """Sums the bytes of scores and logits that fused losses do not materialize."""
        return sum(site.bytes_saved for site in self.sites)

    @property
    def remaining_bytes(self) -> int:
        """Sums the bytes of all score- and logit-sized tensors that are still materialized."""
        return sum(x.num_bytes for x in (*self.remaining, *self.elsewhere))

    @property
    def is_complete(self) -> bool:
        """True if graphs were analysed, and each of them as a whole.

        If it is False, more tensors may remain than the report lists.
        """
        return not (self.is_empty or self._has_gaps)

    @property
    def is_empty(self) -> bool:
        """True if no graph was analysed: the report knows nothing then."""
        known = (self.sites, self.remaining, self.elsewhere, self.outside, self.notes)
        return not (self.num_graphs or self._has_gaps or any(known))

    @property
    def _has_gaps(self) -> bool:
        return bool(self.not_analysed or self.failures or self.not_scanned)

    def extend(self, other: Report) -> None:
        """Adds the losses, tensors and counts of another report to this one."""
        breaks = [*self.breaks, *(x for x in other.breaks if x not in self.breaks)]
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.breaks = breaks

    def __str__(self) -> str:
        return text.short(self)

    def details(self) -> str:
        """Formats all that is known as text: code, form, implementation, remaining tensors."""
        return text.details(self)

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to lists, dicts, strings and numbers."""
        return formats.to_dict(self)

    def to_json(self, **options: Any) -> str:
        """Converts the report to JSON. ``options`` are those of ``json.dumps``."""
        return formats.to_json(self, **options)

    def _repr_html_(self) -> str:
        """Formats the report as HTML, for notebooks."""
        return formats.to_html(self)
