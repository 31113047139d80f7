"""Sets the current fake tensor mode, for torch functions that look it up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_streamkl.fx_passes.fx_utils.torch_names import FakeTensorMode, later


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
