"""Provides the caches of what depends on metadata alone."""

from __future__ import annotations

from typing import Any, TypeVar

V = TypeVar("V")


class Bounded(dict[Any, V]):
    """Caches up to a number of entries, and drops all of them when it is full."""

    def __init__(self, most: int = 1024) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: V) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)
