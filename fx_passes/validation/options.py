"""When a rewrite is checked, and how much that may cost."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("auto", "always", "never")
SHARE_OF_FREE_MEMORY = 0.25  # where no limit is given


class NotChecked(Exception):
    """Why a replacement cannot be judged, in the user's terms."""


@dataclass(frozen=True)
class CheckOptions:
    """The values of ``streamkl.verify*``."""

    mode: str = "auto"  # "auto" within the bounds, "always" without them, "never"
    max_mib: float | None = None  # memory of one check; None is a share of what is free
    max_seconds: float = 1.0  # of all checks of a graph, compiling kernels excepted
    version: str = ""  # of the sources: passes are recorded in Inductor's cache for it

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            known = " or ".join(repr(mode) for mode in MODES)
            raise ValueError(f"streamkl.verify must be {known}, got {self.mode!r}")
        if self.max_mib is not None and not _is_positive(self.max_mib):
            raise ValueError(
                f"streamkl.verify_max_mib must be a number above 0 or None, got {self.max_mib!r}"
            )
        if not _is_positive(self.max_seconds):
            raise ValueError(
                f"streamkl.verify_max_seconds must be a number above 0, got {self.max_seconds!r}"
            )


def _is_positive(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0
