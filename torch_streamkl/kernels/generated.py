"""Defines functions from source that was written in this process."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from typing import Any


def function_of(
    source: str,
    name: str,
    what: str,
    scope: Mapping[str, Any],
    module: str = "generated",
    definition: str | None = None,
) -> Any:
    """Returns the function of this name; only its ``definition`` is run, if that is less.

    Its module's name has a digest of the source, and ``what`` it is is in its file's name.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    filename = f"<streamkl {what} {digest}>"
    # Triton reads the source of a jit function through inspect, which asks linecache
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    found = {**scope, "__name__": f"torch_streamkl.kernels.{module}_{digest}"}
    exec(compile(source if definition is None else definition, filename, "exec"), found)
    return found[name]
