"""Puts our source files into the keys of torch's compile caches, which outlive a process.

A compiled graph has an operator by name only. Without the sources in its key, a cached graph would
call today's operator with yesterday's layout of what it stores, or with yesterday's gradient.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path

import torch

from torch_streamkl.compiler_marks import assume_constant_result
from torch_streamkl.version import __version__


@functools.cache
def source_digest() -> str:
    """Returns the digest of every file of the package."""
    rewrite = importlib.util.find_spec("torch_streamkl.fx_passes")
    assert rewrite is not None and rewrite.submodule_search_locations
    roots = (Path(__file__).parent, Path(rewrite.submodule_search_locations[0]))
    return " ".join([__version__, *(digest_of(root) for root in roots)])


def digest_of(root: Path) -> str:
    """Returns the digest of names and contents of a directory's files, without bytecode."""
    digest = hashlib.sha256()
    top = len(str(root)) + 1
    # few system calls a file: the first step of every process waits for it
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".pyc"):
                continue
            path = os.path.join(folder, name)
            with open(path, "rb", buffering=0) as file:
                content = file.readall()
            digest.update(f"{path[top:]}:{len(content)}:".encode())
            digest.update(content)
    return digest.hexdigest()


# Dynamo runs it while it traces a direct call, before any cache is asked. The rewrite has a pass
# whose key is part of the graph's (fx_passes/inductor_passes.py), and needs nothing here.
@assume_constant_result
def add_to_keys() -> bool:
    """Adds the digest to the keys of graphs that are compiled from now on in this process."""
    config = torch.compiler.config
    tag = f"torch_streamkl {source_digest()}"
    given = getattr(config, "cache_key_tag", None)  # None: a torch without tags
    if given is not None and tag not in given:
        config.cache_key_tag = f"{given} {tag}".strip()
    return True
