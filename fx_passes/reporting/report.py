"""Defines the report on every distillation loss of a program; `text.py` formats it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch_streamkl.fx_passes.reporting import formats, text


@dataclass(frozen=True)
class Site:
    """A matched loss, or something that looks like one."""

    fused: bool
    kind: str  # "attention_kl", "linear_kl", "row_program", or "" when nothing was recognised
    form: str  # what was recognised
    reason: str  # empty when fused, otherwise what the operators do not support
    location: str  # file:line of the user's code
    code: str = ""  # that line
    bytes_saved: int = 0
    hint: str = ""  # a hint: what would make it fusable
    blocked_at: str = ""  # file:line of the unsupported operation, where that is another line
    runs: str = ""  # implementation on this device; for LM heads, where the gradients are made
    check: str = ""  # what came of running it against the code that it replaces
    # why a loss that could be fused is skipped: its size, and the threshold
    left: str = ""
    node: str = field(default="", compare=False)  # the replaced value's name in the graph
    blocked_code: str = ""  # the line of the unsupported operation
    is_required: bool = True  # False for a sum that is no divergence: `strict` does not ask for it
    warning: str = ""  # of a loss that is fused and is probably not what was meant
    also: str = ""  # what is computed in the same pass
    # which scores are the student's, which the teacher's, and who needs a gradient
    roles: str = field(default="", compare=False)


@dataclass(frozen=True)
class Remaining:
    """A score- or logit-sized tensor that the compiled program still materializes."""

    name: str
    shape: tuple[object, ...]
    location: str
    reason: str  # who reads it
    cause: str = ""  # why nothing could take its place, where that is known
    num_bytes: int = 0


@dataclass(frozen=True)
class Outside:
    """Logits or attention probabilities that a graph returns to code that is not compiled."""

    what: str  # "logits" or "attention map"
    shape: tuple[object, ...]
    num_bytes: int
    location: str


@dataclass(frozen=True)
class GraphBreak:
    """Says where Dynamo ended a graph, so that no loss is seen across that line."""

    location: str
    code: str
    reason: str


@dataclass
class Report:
    """Every loss of a program, and which score- and logit-sized tensors are left."""

    sites: list[Site] = field(default_factory=list)
    remaining: list[Remaining] = field(default_factory=list)  # on the path of the losses
    failures: list[str] = field(
        default_factory=list
    )  # exceptions in the analysis; the graph was not fused
    outside: list[Outside] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what else keeps large tensors, and where
    not_analysed: int = 0  # graphs with losses that are not fused as a whole
    elsewhere: list[Remaining] = field(default_factory=list)  # that no recognized loss reads
    unrecognized: list[str] = field(default_factory=list)  # why those belong to no loss
    breaks: list[GraphBreak] = field(default_factory=list)
    not_scanned: list[str] = field(default_factory=list)  # why what remains is not known
    num_graphs: int = 0  # that were analysed: compiled, and not found in a cache
    num_not_ours: int = 0  # graphs that Dynamo gave to other compilers, if none was analysed
    num_cached: int = 0  # graphs that AOTAutograd found in its cache, if none was analysed

    @property
    def num_fused(self) -> int:
        return sum(site.fused for site in self.sites)

    @property
    def num_unfused(self) -> int:
        """Returns divergences that stay as they are for another reason than their size."""
        return sum(not (site.fused or site.left) and site.is_required for site in self.sites)

    @property
    def num_remaining(self) -> int:
        return len(self.remaining)

    @property
    def bytes_saved(self) -> int:
        return sum(site.bytes_saved for site in self.sites)

    @property
    def remaining_bytes(self) -> int:
        """Returns bytes of all score- and logit-sized tensors that the program still
        materializes.
        """
        return sum(x.num_bytes for x in (*self.remaining, *self.elsewhere))

    @property
    def is_complete(self) -> bool:
        """Returns whether everything was analysed: else what remains is not known."""
        return not (self.not_analysed or self.failures or self.not_scanned)

    @property
    def is_empty(self) -> bool:
        """Whether no graph was analysed, so that nothing is known."""
        known = (self.sites, self.remaining, self.elsewhere, self.outside, self.notes)
        return not self.num_graphs and self.is_complete and not any(known)

    def extend(self, other: Report) -> None:
        self.sites += other.sites
        self.remaining += other.remaining
        self.failures += other.failures
        self.outside += other.outside
        self.notes += other.notes
        self.not_analysed += other.not_analysed
        self.elsewhere += other.elsewhere
        self.unrecognized += other.unrecognized
        self.not_scanned += other.not_scanned
        self.num_graphs += other.num_graphs
        self.num_not_ours += other.num_not_ours
        self.num_cached += other.num_cached
        self.breaks += [x for x in other.breaks if x not in self.breaks]

    def __str__(self) -> str:
        return text.short(self)

    def details(self) -> str:
        """Returns everything that is known, as text: code, form, implementation, tensors that
        remain.
        """
        return text.details(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as lists, dictionaries, strings and numbers."""
        return formats.to_dict(self)

    def to_json(self, **options: Any) -> str:
        """Returns the report as JSON; ``options`` are those of ``json.dumps``."""
        return formats.to_json(self, **options)

    def _repr_html_(self) -> str:
        """Returns what a notebook shows."""
        return formats.to_html(self)
