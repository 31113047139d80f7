"""Decides when a rewrite is checked, and how much that may cost."""

from __future__ import annotations

from dataclasses import dataclass

from torch_streamkl.fx_passes.options import RewriteOptions

SHARE_OF_FREE_MEMORY = 0.25  # where no limit is given


class NotChecked(Exception):
    """Raised if a replacement cannot be checked; says why in the user's terms."""


@dataclass(frozen=True)
class CheckOptions:
    """Holds the values of ``streamkl.verify*``."""

    mode: str = "auto"  # "auto" within the bounds, "always" without them, "never"
    max_mib: float | None = None  # memory of one check; None is a share of what is free
    max_seconds: float = 1.0  # of all checks of a graph, compiling kernels excepted
    version: str = ""  # of the sources: passes are recorded in Inductor's cache for it
    uses_inductor: bool = False  # after the check

    @classmethod
    def of(cls, options: RewriteOptions, version: str) -> CheckOptions:
        return cls(
            options.verify,
            options.verify_max_mib,
            options.verify_max_seconds,
            version,
            options.inner == "inductor",
        )
