"""Rewrites attention whose probabilities nothing else reads to scaled_dot_product_attention.

Fusing a KL removes one reader of the attention probabilities. The attention that remains is
written by hand and still materializes them. Inductor's own pattern misses most of its spellings.
Only graphs with a fused KL are changed. Scores with a softcap go to FlexAttention, if it compiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.torch_version import TorchVersion

from torch_streamkl.fx_passes.capture.aliases import Aliases
from torch_streamkl.fx_passes.closed_forms.attention import (
    Attention,
    Weighted,
    attention_of,
    weighted_sum,
)
from torch_streamkl.fx_passes.closed_forms.masks import offset_of
from torch_streamkl.fx_passes.closed_forms.score_form import ABSORBING
from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import written_storages
from torch_streamkl.fx_passes.fx_utils.nodes import location_of, name_of, tensor_of
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.fx_utils.sizes import Size, provably_equal, quotient, same_shape
from torch_streamkl.fx_passes.fx_utils.strides import strides_are_seen, with_strides_of
from torch_streamkl.fx_passes.lowering.attention_call import PARTLY, CallTensors
from torch_streamkl.fx_passes.lowering.empty_rows import rows_with_keys, uniform_rows
from torch_streamkl.fx_passes.lowering.placed import Placed
from torch_streamkl.fx_passes.lowering.writer import Writer
from torch_streamkl.fx_passes.passes import softcapped
from torch_streamkl.fx_passes.planning.losses import Losses
from torch_streamkl.fx_passes.planning.profitability import why_attention_is_skipped
from torch_streamkl.fx_passes.reading.arrays import Array, Dim
from torch_streamkl.program.canonical import all_of
from torch_streamkl.program.graph import Node, constant

# Inductor of torch 2.11 takes its log-sum-exp for float32 there, and the backward fails
COMPILES_IN_FLOAT64 = TorchVersion(torch.__version__) >= "2.13"


def replace_attention(
    graph: fx.Graph,
    losses: Losses,
    aliases: Aliases,
    builder: MakeBuilder,
    refused: Mapping[str, str],
    min_mib: float | None,
) -> list[str]:
    """Replaces attention written by hand whose probabilities have no other reader.

    Attention probabilities below ``min_mib`` are skipped; None is the threshold of the device.
    Returns what the report says of that which stays.
    """
    notes: dict[str, None] = {}
    outer = dict(losses.trace.outer)
    remaining, written = RemainingAttention(losses, outer), written_storages(graph)
    for inner in losses.trace.graph.nodes:
        found, node = losses.reading.arrays.get(inner), outer.get(inner)
        if not isinstance(found, Array) or node is None or inner.op != "call_function":
            continue
        if node._erased:  # a product of a fused loss, such as of features that are a softmax
            continue
        is_product = name_of(inner) in MATMULS
        weighted = weighted_sum(found.expr, found.dims) if is_product else None
        if weighted is None or not _is_only_reader(node):
            continue
        place = f"the attention at {location_of(node)[0]}"
        if node.name in refused:
            notes[f"{place} keeps its probabilities: {refused[node.name]}"] = None
            continue
        size = why_attention_is_skipped(weighted.axes, tensor_of(node).device.type, min_mib)
        if size:
            notes[f"{place} is skipped: {size}"] = None
            continue
        build = builder(node)
        try:
            with build.undone_if_unsupported():
                replacement = remaining.replace(node, weighted, found.dims, build)
                made, like = tensor_of(replacement), tensor_of(node)
                if made.dtype != like.dtype or not same_shape(made.shape, like.shape):
                    raise Unsupported("the fused attention has another shape or type")
                if strides_are_seen(node, replacement, build, written):
                    replacement = with_strides_of(build, replacement, tensor_of(node))
                aliases.check(build.added, build.selecting)
        except Unsupported as reason:
            notes[f"{place} keeps its probabilities: {reason}"] = None
            continue
        node.replace_all_uses_with(replacement)
        outer[inner] = replacement  # the next layer reads it
    return list(notes)


def _is_only_reader(node: fx.Node) -> bool:
    """Whether the probabilities that a matmul reads have no other use, back to their scores."""
    current = node.all_input_nodes[0]
    while name_of(current) not in MATMULS:
        if len(current.users) != 1:
            return False
        if name_of(current) in ("softmax", "_softmax"):
            return True
        if not current.all_input_nodes:
            return False
        current = current.all_input_nodes[0]
    return False


@dataclass
class RemainingAttention:
    """Rewrites the attention of one graph; masks that layers share are built once."""

    losses: Losses
    outer: Mapping[fx.Node, fx.Node]  # the user's nodes, or what took their place
    masks: dict[object, fx.Node] = field(default_factory=dict)
    alive: dict[fx.Node, fx.Node] = field(default_factory=dict)  # rows with keys, by mask

    def replace(
        self, node: fx.Node, weighted: Weighted, dims: Sequence[Dim], build: Builder
    ) -> fx.Node:
        """Returns a node with the value of ``probabilities @ values``, or raises Unsupported."""
        found = attention_of(weighted, dims)
        if found.axes.query is None:
            raise Unsupported("attention of a single query row")
        value = tensor_of(node)
        if value.dtype == torch.float64 and value.device.type == "cpu" and not COMPILES_IN_FLOAT64:
            raise Unsupported("scaled_dot_product_attention in float64 on a CPU needs torch 2.13")
        form = found.form
        if form.mask and form.fill > ABSORBING:
            raise Unsupported(f"attention with the finite mask value {form.fill:g}")
        writer = Writer(build, self.losses.reading, self.outer, _read_by(found))
        tensors = CallTensors(writer, found.call, self.losses.product_types)
        q, k, v = self._inputs(tensors, found, value.dtype)
        # with a softcap, masks are no tensor of queries x keys: one is made to look for empty rows
        is_needed = not form.softcap or self._may_lack_keys(found)
        options = self._mask_options(tensors, found, value.dtype) if is_needed else {}
        alive = self._rows_with_keys(build, found, options, value.dtype)
        if form.softcap:
            if not provably_equal(shape(k)[1], shape(v)[1]):
                k, v = (_repeated(build, x, shape(q)[1], q) for x in (k, v))
            out = softcapped.emit(tensors, found, alive, (q, k, v), value)
        else:
            k, v, options = _with_groups(build, q, k, v, options)
            out = _fused(build, q, k, v, form.scale, options)
            if alive is not None:
                uniform = uniform_rows(build, q, k, v, form.scale, added=form.added)
                out = build.call(torch.where, alive, out, uniform)
        placed = Placed(out, (*found.axes.scores[:3], found.width))
        return writer.arranging.arranged(placed, dims, expand=range(len(dims)))

    def _inputs(
        self, tensors: CallTensors, found: Attention, dtype: torch.dtype
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Queries, keys and values in the type of the result."""
        side, build = found.side, tensors.build
        q, k = tensors.queries(side), tensors.keys(side)
        v = tensors.of_keys(found.values, found.axes.heads, found.width)
        # the scores' matmul may have rounded its operands before: autocast
        product = self.losses.product_types.get(side.product.names)
        is_rounded = product is not None and _holds(dtype, product.result)
        if not is_rounded and not all(_holds(dtype, tensor_of(x).dtype) for x in (q, k, v)):
            raise Unsupported(f"scores of more precision than {dtype}, the type of the result")
        q = tensors.multiplied(q, side.product.factors, found.axes.scores[:3])
        return build.cast(q, dtype), build.cast(k, dtype), build.cast(v, dtype)

    def _mask_options(
        self, tensors: CallTensors, found: Attention, dtype: torch.dtype
    ) -> dict[str, Any]:
        masks, axes = found.masks, found.axes
        assert axes.query is not None and axes.query.size is not None
        assert axes.key.size is not None
        square = self.losses.reading.sizes.are_equal(axes.query.size, axes.key.size)
        right = masks.window_right
        is_causal = right is not None and constant(right) == 0 and square
        banded = masks.window_left is not None or right is not None
        dense = not masks.dense.is_empty or bool(found.form.biases)
        if not banded and not dense:
            return {}
        if is_causal and masks.window_left is None and not dense:
            return {"is_causal": True}
        return {"attn_mask": self._mask(tensors, found, dtype)}

    def _rows_with_keys(
        self, build: Builder, found: Attention, options: dict[str, Any], dtype: torch.dtype
    ) -> fx.Node | None:
        """Marks the rows that have a key; None if all have, or if eager is NaN in the others."""
        total = options.get("attn_mask")
        if total is None or not self._may_lack_keys(found):
            return None
        if not found.form.exact_fill:
            raise Unsupported("two additive masks overlap, and a row may be left without any key")
        made = self.alive.get(total)
        if made is None or made._erased:
            made = self.alive[total] = rows_with_keys(build, total, None, dtype)
        return made

    def _mask(self, tensors: CallTensors, found: Attention, dtype: torch.dtype) -> fx.Node:
        """Builds an additive mask at the smallest shape that holds it."""
        form, build, writer = found.form, tensors.build, tensors.writer
        identity = (form.mask, form.fill, form.biases, dtype, found.axes)
        made = self.masks.get(identity)
        if made is not None and not made._erased:  # with what was taken back
            return made
        total = None
        if form.mask:
            keep = writer.tensor(all_of(*form.mask), found.axes.scores, partly=PARTLY)
            # the lowest number, not -inf: a row without keys stays uniform, as in the user's code
            low = -math.inf if form.fill == -math.inf else torch.finfo(dtype).min
            zero = build.call(torch.zeros, (), dtype=dtype, device=writer.arranging.device)
            total = build.call(torch.where, keep, zero, low)
        bias = tensors.bias(form.biases, dtype)
        if bias is not None:
            bias = build.cast(bias, dtype)
            total = bias if total is None else build.call(torch.add, total, bias)
        assert total is not None
        self.masks[identity] = total
        return total

    def _may_lack_keys(self, found: Attention) -> bool:
        """Whether eager code may have a row without keys that is no row of NaN."""
        removed = found.form.fill == -math.inf and not found.form.biases
        return not removed and not _has_diagonal(found)


def _read_by(found: Attention) -> list[Node]:
    """The expressions of all that attention reads."""
    side, biases = found.side, (*found.form.biases, *found.form.inner_biases)
    of_biases = [f.value for b in biases for f in b.factors]
    factors = [*(f.value for f in side.product.factors), *of_biases]
    return [*side.operands, found.values, *found.form.mask, *(b.value for b in biases), *factors]


def _has_diagonal(found: Attention) -> bool:
    """Whether the mask is a band in which every query provably has the key on its diagonal."""
    masks = found.masks
    bounds = [b for b in (masks.window_left, masks.window_right) if b is not None]
    numbers = [constant(x) for x in (offset_of(found.axes), *bounds)]
    dense = not masks.dense.is_empty or bool(found.form.biases)
    return not dense and all(n is not None and n >= 0 for n in numbers)


def shape(node: fx.Node) -> Sequence[Size]:
    """Returns the recorded shape of a node."""
    return tensor_of(node).shape


def _holds(dtype: torch.dtype, values: torch.dtype) -> bool:
    """Whether a type holds every value of another."""
    return torch.promote_types(values, dtype) == dtype


def _with_groups(
    build: Builder, q: fx.Node, k: fx.Node, v: fx.Node, options: dict[str, Any]
) -> tuple[fx.Node, fx.Node, dict[str, Any]]:
    """Keeps grouped heads if the fused kernels support them, and repeats them otherwise."""
    heads = shape(q)[1]
    if provably_equal(shape(k)[1], heads) and provably_equal(shape(v)[1], heads):
        return k, v, options
    value = tensor_of(q)
    half = value.dtype in (torch.float16, torch.bfloat16)
    if (
        value.device.type == "cuda"
        and half
        and "attn_mask" not in options
        and provably_equal(shape(k)[1], shape(v)[1])
    ):
        return k, v, {**options, "enable_gqa": True}
    return _repeated(build, k, heads, q), _repeated(build, v, heads, q), options


def _repeated(build: Builder, x: fx.Node, heads: Size, q: fx.Node) -> fx.Node:
    have = shape(x)[1]
    if provably_equal(have, heads):
        return x
    repeats = quotient(heads, have)
    if repeats is None:
        raise Unsupported("grouped heads of unknown number")
    x = build.method("unsqueeze", x, 2)
    x = build.method("expand", x, -1, -1, build.size(repeats, (q, x)), -1, -1)
    return build.method("flatten", x, 1, 2)


def _fused(
    build: Builder, q: fx.Node, k: fx.Node, v: fx.Node, scale: float, options: dict[str, Any]
) -> fx.Node:
    """Inserts scaled_dot_product_attention; on a GPU, heads are padded to a width of its fused
    kernels.

    With a mask those want rows of whole 16 bytes: for TinyBERT's heads of 26 the maps would be
    made. Zeros add nothing to scores, and what they add to the result is cut off.
    """
    inputs = [q, k, v]
    if _is_on_gpu(q):
        inputs = [_whole_lines(build, x) for x in inputs]
    if scale != shape_scale(inputs[0]):
        options = {**options, "scale": scale}
    out = build.call(F.scaled_dot_product_attention, *inputs, **options)
    return out if inputs[2] is v else build.method("narrow", out, -1, 0, shape(v)[-1])


def _is_on_gpu(x: fx.Node) -> bool:
    return tensor_of(x).device.type == "cuda"


def _whole_lines(build: Builder, x: fx.Node) -> fx.Node:
    """Pads the last dimension of a tensor with zeros to a multiple of 16 bytes."""
    value, width = tensor_of(x), shape(x)[-1]
    if not isinstance(width, int):
        return x
    missing = -width % (16 // value.element_size())
    return build.call(F.pad, x, (0, missing)) if missing else x


def shape_scale(q: fx.Node) -> float:
    """Returns scaled_dot_product_attention's default scale, or 0 if it is not known."""
    head_dim = shape(q)[-1]
    return head_dim**-0.5 if isinstance(head_dim, int) and head_dim else 0.0
