"""Provides the lock under which expressions are made."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager


def free_after_fork() -> AbstractContextManager[bool]:
    """Returns a lock that is free in a forked process, whose other threads are gone."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        # as Python does with its own
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
