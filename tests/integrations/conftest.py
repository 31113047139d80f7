"""Libraries run as installed; Inductor analyses and partitions, and its graphs are interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import torch_streamkl
from tests.support.subgraphs import inductor_without_code


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing compiled before, nothing enabled after, and C++ only where a test is about it.

    A model takes Inductor minutes of C++ on a CPU, and none of it is ours: what runs before
    the code generation, our passes among it, runs as ever.
    """
    torch._dynamo.reset()
    has_code = "generates_code" in request.keywords
    # a graph that is found in a cache is not analysed again
    with (
        contextlib.nullcontext() if has_code else inductor_without_code(),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield
    torch_streamkl.disable()
