"""Decides when softcapped attention becomes a call of FlexAttention, and inserts the call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.closed_forms.attention import Attention
from torch_streamkl.fx_passes.closed_forms.masks import conditions_of, offset_of
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported, first_line
from torch_streamkl.fx_passes.fx_utils.fake_modes import found_mode
from torch_streamkl.fx_passes.fx_utils.nodes import tensor_of
from torch_streamkl.fx_passes.lowering.attention_call import PARTLY, CallTensors
from torch_streamkl.fx_passes.passes.flex_attention import softcapped_attention
from torch_streamkl.program.canonical import linear

LEAST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256  # of Triton's tl.dot, of torch's table of tiles
HALF = (torch.float16, torch.bfloat16)
# ptxas was seen to take more than 200 s for heads of 256; for heads of 64, 280 s with a bias, and
# 190 s for lengths that vary: without matrix units every product of a tile is an instruction
SLOW = "FlexAttention for {} takes minutes to compile"
LARGEST_BUFFER = (
    2**31
)  # entries: FlexAttention's kernels have 32-bit offsets into captured tensors


def emit(
    tensors: CallTensors,
    found: Attention,
    alive: fx.Node | None,
    inputs: tuple[fx.Node, fx.Node, fx.Node],
    result: Tensor,
) -> fx.Node:
    """Inserts a call with the value of ``softmax(scores) @ v``; raises Unsupported if none
    compiles.
    """
    build, writer, form, masks = tensors.build, tensors.writer, found.form, found.masks
    q, k, v = (tensor_of(x) for x in inputs)
    has_bias = bool(form.inner_biases or form.biases)
    reason = why_not(q, v, has_bias) or _why_not_grouped(q, k, v)
    if reason:
        raise Unsupported(reason)
    options: dict[str, Any] = {"softcap": form.softcap, "scale": form.scale}
    offset = offset_of(found.axes)
    if masks.window_left is not None:
        first = linear(0.0, [(1.0, offset), (-1.0, masks.window_left)])
        options["first"] = writer.size(first)
    if masks.window_right is not None:
        last = linear(0.0, [(1.0, offset), (1.0, masks.window_right)])
        options["last"] = writer.size(last)
    conditions = sorted(conditions_of(masks.dense, found.axes), key=lambda x: x.digest)
    kept = [writer.tensor(x, found.axes.scores, partly=PARTLY) for x in conditions]
    options["masks"] = tuple(kept)
    options["inner_bias"] = tensors.bias(form.inner_biases, result.dtype)
    options["bias"] = tensors.bias(form.biases, result.dtype)
    for x in (*kept, options["inner_bias"], options["bias"]):
        size = 0 if x is None else tensor_of(x).numel()
        if isinstance(size, int) and size >= LARGEST_BUFFER:
            raise Unsupported("a mask or bias of more than 2**31 entries")
    options["alive"] = alive
    options["has_slope"] = form.added and result.requires_grad
    try:
        with found_mode(build.mode):
            return build.call(softcapped_attention, *inputs, **options)
    except (ImportError, AttributeError, AssertionError, RuntimeError) as error:
        # a prototype of torch, reached below its public function
        kind = type(error).__name__
        raise Unsupported(f"FlexAttention: {kind}: {first_line(error)}") from error


def why_not(q: Tensor, v: Tensor, has_bias: bool = False) -> str:
    """Explains why FlexAttention is not compiled for such tensors; None if it is."""
    sizes = (q.shape[1], q.shape[3], v.shape[1], v.shape[3])
    if not all(isinstance(n, int) for n in sizes):
        return "FlexAttention needs to know the numbers of heads and their size"
    if q.device.type == "cpu":
        return _why_not_on_cpu()
    if q.device.type != "cuda":
        return f"FlexAttention is not tried on {q.device.type}"
    if q.dtype not in (torch.float32, *HALF):
        return f"FlexAttention has no {q.dtype} on a GPU"
    if not all(LEAST_HEAD_DIM <= n <= LARGEST_HEAD_DIM for n in (q.shape[3], v.shape[3])):
        return f"FlexAttention takes heads of {LEAST_HEAD_DIM} to {LARGEST_HEAD_DIM} on a GPU"
    head_dim = max(q.shape[3], v.shape[3])
    return _why_not_on_gpu(q.device, q.dtype, head_dim) or _why_slow(q, v, has_bias)


def _why_not_on_cpu() -> str:
    # Nor can Inductor (2.11, 2.13) compile its forward there in every program: not where an
    # elementwise operation reads the output, nor where a captured tensor is computed.
    return "FlexAttention has no backward on a CPU"


@functools.cache
def _why_not_on_gpu(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "FlexAttention needs a GPU of compute capability 8.0"
    properties: Any = torch.cuda.get_device_properties(device)
    memory = properties.shared_memory_per_block_optin
    # its tiles of the backward are those of GPUs with 163 KiB and more
    if memory < 160 * 1024 and (head_dim > 128 or dtype not in HALF):
        return f"FlexAttention's tiles for heads of {head_dim} in {dtype} do not fit this GPU"
    return ""


def _why_slow(q: Tensor, v: Tensor, has_bias: bool) -> str:
    """Explains what takes minutes to compile on a GPU; empty if nothing does."""
    if q.dtype in HALF:
        return ""
    head_dim = max(q.shape[3], v.shape[3])
    if head_dim > 128:
        return SLOW.format(f"heads of {head_dim} in {q.dtype}")
    if not all(isinstance(x.shape[2], int) for x in (q, v)):
        return SLOW.format(f"lengths that vary in {q.dtype}")
    return SLOW.format(f"{q.dtype} with a bias") if has_bias else ""


def _why_not_grouped(q: Tensor, k: Tensor, v: Tensor) -> str:
    heads, of_keys, of_values = (x.shape[1] for x in (q, k, v))
    return "" if of_keys == of_values and heads % of_keys == 0 else "key heads of other groups"
