"""Memory that nobody may read holds NaN: what is allocated, and what lies between rows."""

import contextlib
from dataclasses import replace

import torch


@contextlib.contextmanager
def poisoned_memory():
    """`torch.utils.deterministic.fill_uninitialized_memory` fills what is allocated."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def padded(spec):
    """The spec with NaN between its rows, where it does not ask for other strides or layouts."""
    if spec.strides == "contiguous" and spec.layout == "bhnd" and spec.packed is None:
        return replace(spec, strides="padded")
    return spec
