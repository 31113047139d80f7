"""Sets the current fake tensor mode, for torch functions that look it up, and its guards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_streamkl.fx_passes.fx_utils.torch_names import FakeTensorMode, later


def without_guards(mode: FakeTensorMode) -> contextlib.AbstractContextManager[object]:
    """Keeps what is compared of symbolic sizes from becoming a guard of the program."""
    shapes = mode.shape_env
    return shapes.suppress_guards() if shapes is not None else contextlib.nullcontext()


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
