"""Libraries run as installed; Inductor analyses and partitions, and its graphs are interpreted."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from functorch.compile import make_boxed_func
from torch import fx

import torch_streamkl


def _interpreted(gm: fx.GraphModule, *_: object, **__: object) -> Any:
    return make_boxed_func(gm.forward)


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before, nothing enabled after, and C++ only where a test is about it.

    A model takes Inductor minutes of C++ on a CPU, and none of it is ours: what runs in front of
    the code generation, our passes among it, runs as ever.
    """
    torch._dynamo.reset()
    if "generates_code" not in request.keywords:
        compile_fx = torch._inductor.compile_fx.compile_fx
        without_code = functools.partial(compile_fx, inner_compile=_interpreted)
        monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", without_code)
    # a graph that is found in a cache is not analysed again
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch_streamkl.disable()
