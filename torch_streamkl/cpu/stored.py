"""Keeps the code of compiled row kernels on disk, where a second process finds it without a trace.

Inductor's cache of graphs is asked with a graph, and the symbolic trace that makes one takes a
second of every process. Here the code that Inductor wrote is found by what determines it: our
sources and what was asked of them, torch's sources and Inductor's settings, and the CPU. The C++
that this code compiles is in Inductor's own cache, under keys of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torch_streamkl.compile_caches import source_digest

_log = logging.getLogger("torch_streamkl")
FOLDER = "streamkl_rows"  # in Inductor's cache
Body = Callable[..., Any]


def path_of(body: Body, form: object) -> Path | None:
    """Returns the file for the code of a row kernel; None if it is not to be kept.

    ``form`` is everything else that its code depends on, with a representation that means the
    same in another process.
    """
    from torch._inductor import config

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    if body.__module__.partition(".")[0] != "torch_streamkl":
        return None  # its source is not in our digest
    try:
        from torch._inductor.cpu_vec_isa import pick_vec_isa
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        surroundings, isa = _surroundings(), pick_vec_isa()
        if surroundings is None:
            return None
        parts = (source_digest(), surroundings, torch.get_default_dtype(), isa, isa.bit_width(),
                 body.__module__, body.__qualname__, form)  # fmt: skip
        name = hashlib.sha256(repr(tuple(map(str, parts))).encode()).hexdigest()
        return Path(cache_dir()) / FOLDER / f"{name}.py"
    except Exception:  # another torch: it is traced again
        _log.debug("row kernels are not kept on disk", exc_info=True)
        return None


def _surroundings() -> str | None:
    """Returns Inductor's key of a graph without nodes: what is left in it is torch, the system and
    Inductor's settings. None if Inductor keeps no graphs with these.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.codecache import FxGraphCache
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    nothing = fx.GraphModule({}, fx.Graph())
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        found, _ = FxGraphCache.prepare_key(nothing, [], {}, [], False)
    return None if found is None else found[0]


def load(path: Path) -> Callable[..., Any] | None:
    """Loads a row kernel; None if it is not there or cannot be loaded."""
    try:
        source = path.read_text()
    except OSError:
        return None
    try:
        from torch._inductor.codecache import PyCodeCache

        found: Callable[..., Any] = PyCodeCache.load(source).call
    except Exception:
        _log.debug("a row kernel on disk cannot be loaded", exc_info=True)
        return None
    return found


def store(path: Path, compiled: Any) -> None:
    """Writes the code of a graph that Inductor compiled, if it is all of it."""
    source = getattr(compiled, "source_code", None)
    if not source or getattr(compiled, "constants", None):
        return
    from torch._inductor.codecache import write_atomic  # no other process reads half of it

    with contextlib.suppress(OSError):
        write_atomic(str(path), source, make_dirs=True)
