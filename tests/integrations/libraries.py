"""Libraries that tests need: where one is missing its tests are skipped, and counted by its name.

A module's own `pytest.importorskip` would leave it out without a vocabulary entry when tests run
in several processes.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def optional(name: str) -> Any:
    """The module, or None where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips the tests that it marks and names the first library that is missing."""
    missing = [name for name in names if optional(name) is None]
    reason = f"{missing[0]} is not installed" if missing else ""
    return pytest.mark.skipif(bool(missing), reason=reason)
