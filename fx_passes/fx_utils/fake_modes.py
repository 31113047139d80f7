"""Finds and sets the fake tensor mode of a graph, and keeps its guards out of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    FakeTensor,
    FakeTensorMode,
    later,
    tree_leaves,
)


def without_guards(mode: FakeTensorMode) -> contextlib.AbstractContextManager[object]:
    """Keeps what is compared of symbolic sizes from becoming a guard of the program."""
    shapes = mode.shape_env
    return shapes.suppress_guards() if shapes is not None else contextlib.nullcontext()


def fake_mode_of(nodes: Iterable[fx.Node]) -> FakeTensorMode:
    """Returns the mode that the recorded values live in; another one could not mix with them."""
    for node in nodes:
        for x in tree_leaves(example(node)):
            local = getattr(x, "_local_tensor", x)  # of a DTensor
            if isinstance(local, FakeTensor):
                return local.fake_mode
    raise ValueError("no fake tensor is recorded in the graph")


@contextlib.contextmanager
def found_mode(mode: FakeTensorMode | None) -> Iterator[None]:
    """Sets the mode that higher-order operators find, whatever tensors they are given.

    The mode of a backend is not that of Dynamo's graph. None means no mode: real tensors.
    """
    context = later("torch._guards", "TracingContext")
    if context.try_get() is None:
        yield
        return
    with context.patch(fake_mode=mode):
        yield
