"""Runs real tensors inside of a compilation, and restores the state of the process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from torch_streamkl.fx_passes.fx_utils.fake_modes import found_mode
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    _disable_current_modes,
    optional,
    unset_fake_temporarily,
)
from torch_streamkl.runtime.launch import with_index

# NOTE [cuDNN's attention is not run in checks]
# PyTorch keeps a compiled cuDNN graph for each shape and layout of q, k and v. The one of a
# backward holds the strides of the first gradient that it is given, which are not part of the key:
# with another layout of the gradient the next call reads it wrongly. A check draws gradients of
# its own, so it must leave nothing there for the model. (aten/src/ATen/native/cudnn/MHA.cpp)


@contextlib.contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def _without_compiled_autograd() -> Any:
    """Its state is that of the program around the check; a torch without it has none to keep."""
    disable = optional("torch._dynamo.compiled_autograd", "_disable")
    return contextlib.nullcontext() if disable is None else disable()


@contextlib.contextmanager
def isolated(devices: set[torch.device]) -> Iterator[None]:
    """Runs real tensors during a trace, and restores random state, modes and caches afterwards.

    What no node of a region changes is not restored: another thread may have set it meanwhile.
    """
    cuda = sorted({with_index(d).index for d in devices if d.type == "cuda"})
    grad = torch.is_grad_enabled()
    with (
        unset_fake_temporarily(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        _without_compiled_autograd(),
        found_mode(None),
        torch.random.fork_rng(devices=cuda),
        warnings.catch_warnings(),
        _without_cudnn_attention(),
    ):
        warnings.simplefilter("ignore")  # the program itself will say them
        yield
    for index in cuda:
        with torch.cuda.device(index):
            torch.cuda.empty_cache()
