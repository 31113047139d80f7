"""Rewrites attention whose probabilities nothing else reads to scaled_dot_product_attention.

Fusing a KL removes one reader of the attention probabilities. The attention that remains is
written by hand and still materializes them. Inductor's own pattern misses most of its spellings.
Only graphs with a fused KL are changed. Scores with a softcap go to FlexAttention, if it compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.torch_version import TorchVersion

from torch_streamkl.fx_passes.capture.aliases import Aliases
from torch_streamkl.fx_passes.capture.region import MATMULS
from torch_streamkl.fx_passes.capture.retrace import Trace, outer_node
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import ABSORBING
from torch_streamkl.fx_passes.domain.values import Attention
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import written_storages
from torch_streamkl.fx_passes.fx_utils.nodes import example, location_of, name_of
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression, provably_equal, quotient
from torch_streamkl.fx_passes.fx_utils.strides import strides_are_seen, with_strides_of
from torch_streamkl.fx_passes.lowering.calls import add_up_biases
from torch_streamkl.fx_passes.lowering.empty_rows import (
    rows_with_keys,
    uniform_rows,
    window_tensor,
)
from torch_streamkl.fx_passes.lowering.operands import (
    _permuted,
    canonical,
    placed,
    rows_as_user,
    shape,
)
from torch_streamkl.fx_passes.passes import softcapped
from torch_streamkl.fx_passes.planning.dimensions import Geometry, geometry
from torch_streamkl.fx_passes.planning.masks import MaskPlan, masks_of
from torch_streamkl.fx_passes.planning.profitability import why_attention_is_skipped

STUDENT = 1
# Inductor of torch 2.11 takes its log-sum-exp for float32 there, and the backward fails
COMPILES_IN_FLOAT64 = TorchVersion(torch.__version__) >= "2.13"


def replace_attention(
    graph: fx.Graph,
    trace: Trace,
    values: Mapping[fx.Node, object],
    aliases: Aliases,
    builder: Callable[[fx.Node], Builder],
    refused: Mapping[str, str],
    min_mib: float | None,
) -> list[str]:
    """Replaces attention written by hand whose probabilities have no other reader.

    Attention probabilities below ``min_mib`` are skipped; None is the threshold of the device.
    Returns what the report says of that which stays.
    """
    notes: dict[str, None] = {}
    remaining_attention, written = RemainingAttention(trace.outer), written_storages(graph)
    for inner in trace.graph.nodes:
        value, node = values.get(inner), trace.outer.get(inner)
        if not isinstance(value, Attention) or node is None or not _is_only_reader(node):
            continue
        if node.name in refused:
            reason = refused[node.name]
            notes[f"the attention at {location_of(node)[0]} keeps its probabilities: {reason}"] = (
                None
            )
            continue
        device = _device_of(node)
        size = why_attention_is_skipped(value.probabilities, device, min_mib)
        if size:
            notes[f"the attention at {location_of(node)[0]} is skipped: {size}"] = None
            continue
        build = builder(node)
        try:
            with build.undone_if_unsupported():
                replacement = remaining_attention.replace(node, value, build)
                if not _same_metadata(replacement, node):
                    raise Unsupported("the fused attention has another shape or type")
                if strides_are_seen(node, replacement, build, written):
                    value_of_user = example(node)
                    assert isinstance(value_of_user, Tensor)
                    replacement = with_strides_of(build, replacement, value_of_user)
                aliases.check(build.added, build.selecting)
        except Unsupported as reason:
            notes[f"the attention at {location_of(node)[0]} keeps its probabilities: {reason}"] = (
                None
            )
            continue
        node.replace_all_uses_with(replacement)
        trace.outer[inner] = replacement  # the next layer reads it
    return list(notes)


def _device_of(node: fx.Node) -> str:
    value = example(node)
    assert isinstance(value, Tensor)
    return value.device.type


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


def _same_metadata(a: fx.Node, b: fx.Node) -> bool:
    x, y = example(a), example(b)
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    return (
        x.dtype == y.dtype
        and len(x.shape) == len(y.shape)
        and all(provably_equal(p, q) for p, q in zip(x.shape, y.shape, strict=True))
    )


@dataclass
class RemainingAttention:
    """Rewrites the attention of one graph; masks that layers share are built once."""

    outer: Mapping[fx.Node, fx.Node]
    masks: dict[object, fx.Node] = field(default_factory=dict)
    alive: dict[fx.Node, fx.Node] = field(default_factory=dict)  # rows with keys, by mask

    def replace(self, node: fx.Node, attention: Attention, build: Builder) -> fx.Node:
        """Returns a node with the value of ``probabilities @ values``, or raises Unsupported."""
        elements = attention.probabilities
        distribution, layout = elements.parts[0], elements.layouts[0]
        form = read(distribution.scores)
        if form.padded is not None or distribution.averaged:
            raise Unsupported("scaled_dot_product_attention has no padding or mean of heads")
        place = geometry(
            distribution, layout, distribution, layout, elements.key_dim, [attention.values]
        )
        if place.query is None:
            raise Unsupported("attention of a single query row")
        value = example(node)
        assert isinstance(value, Tensor)
        if value.dtype == torch.float64 and value.device.type == "cpu" and not COMPILES_IN_FLOAT64:
            raise Unsupported("scaled_dot_product_attention in float64 on a CPU needs torch 2.13")
        mask = masks_of(place)
        inputs = [place.student.rows, place.student.keys, attention.values]
        nodes = [outer_node(o.node, self.outer) for o in inputs]
        # the scores' matmul may have rounded its operands before: autocast
        product = distribution.scores.dtype
        is_rounded = (
            product is not None and torch.promote_types(product, value.dtype) == value.dtype
        )
        if not is_rounded and any(not _is_exact_in(value.dtype, n) for n in nodes):
            raise Unsupported(
                f"scores of more precision than {value.dtype}, the type of the result"
            )
        q = self._tensor(build, place, inputs[0], nodes, value.dtype, is_keys=False)
        k = self._tensor(build, place, inputs[1], nodes, value.dtype, is_keys=True)
        v = self._tensor(build, place, inputs[2], nodes, value.dtype, is_keys=True)
        # with a softcap, masks are no tensor of queries x keys: one is made to look for empty rows
        is_needed = not form.softcap or _may_lack_keys(place, mask)
        options = self._mask_options(build, place, mask, nodes, value.dtype) if is_needed else {}
        alive = self._rows_with_keys(build, place, mask, options, value.dtype)
        if form.softcap:
            if not provably_equal(shape(k)[1], shape(v)[1]):
                k, v = (_repeated(build, x, shape(q)[1], q) for x in (k, v))
            out = softcapped.emit(build, place, mask, alive, (q, k, v), value, nodes, self.outer)
        else:
            k, v, options = _with_groups(build, q, k, v, options)
            out = _fused(build, q, k, v, form.scale, options)
            if alive is not None:
                uniform = uniform_rows(build, q, k, v, form.scale, added=form.added)
                out = build.call(torch.where, alive, out, uniform)
        out = rows_as_user(
            build, out, place, elements.rank, elements.key_dim, nodes, trailing=True
        )
        return _permuted(build, out, attention.order)

    def _tensor(
        self,
        build: Builder,
        place: Geometry,
        operand: Any,
        nodes: list[fx.Node],
        dtype: torch.dtype,
        *,
        is_keys: bool,
    ) -> fx.Node:
        factors = () if is_keys else read(place.student.distribution.scores).factors
        return canonical(
            build,
            operand,
            STUDENT,
            place,
            nodes,
            self.outer,
            is_keys=is_keys,
            dtype=dtype,
            factors=factors,
        )

    def _mask_options(
        self,
        build: Builder,
        place: Geometry,
        mask: MaskPlan,
        nodes: list[fx.Node],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        key = place.student.distribution.scores
        form = read(key)
        if form.mask and form.fill > ABSORBING:
            raise Unsupported(f"attention with the finite mask value {form.fill:g}")
        assert place.query is not None
        square = provably_equal(
            place.digits[place.query].size, key.size(place.student.distribution.axis)
        )
        is_causal = mask.window_right is not None and expression(mask.window_right) == 0 and square
        banded = mask.window_left is not None or mask.window_right is not None
        dense = bool(mask.tensors or mask.row_tensors or form.biases)
        if not banded and not dense:
            return {}
        if is_causal and mask.window_left is None and not dense:
            return {"is_causal": True}
        return {"attn_mask": self._mask(build, place, mask, nodes, dtype)}

    def _rows_with_keys(
        self,
        build: Builder,
        place: Geometry,
        mask: MaskPlan,
        options: dict[str, Any],
        dtype: torch.dtype,
    ) -> fx.Node | None:
        """Marks the rows that have a key; None if all have, or if eager is NaN in the others."""
        total = options.get("attn_mask")
        form = read(place.student.distribution.scores)
        if total is None or not _may_lack_keys(place, mask):
            return None
        if not form.exact_fill:
            raise Unsupported("two additive masks overlap, and a row may be left without any key")
        made = self.alive.get(total)
        if made is None or made._erased:
            made = self.alive[total] = rows_with_keys(build, total, None, dtype)
        return made

    def _mask(
        self,
        build: Builder,
        place: Geometry,
        mask: MaskPlan,
        nodes: list[fx.Node],
        dtype: torch.dtype,
    ) -> fx.Node:
        """Builds an additive mask at the smallest shape that holds it."""
        form = read(place.student.distribution.scores)
        identity = (form.mask, form.fill, form.biases, dtype, str(place.digits))
        made = self.masks.get(identity)
        if made is not None and not made._erased:  # with what was taken back
            return made
        keep = window_tensor(build, place, mask.window_left, mask.window_right, nodes)
        for literal in (*mask.tensors, *mask.row_tensors):
            x = placed(
                build, outer_node(literal.node, self.outer), literal.layout, STUDENT, place, nodes
            )
            x = x if literal.positive else build.call(torch.logical_not, x)
            keep = x if keep is None else build.call(torch.logical_and, keep, x)
        total = None
        if keep is not None:
            # the lowest number, not -inf: a row without keys stays uniform, as in the user's code
            low = -math.inf if form.fill == -math.inf else torch.finfo(dtype).min
            query = example(nodes[0])
            assert isinstance(query, Tensor)
            zero = build.call(torch.zeros, (), dtype=dtype, device=query.device)
            total = build.call(torch.where, keep, zero, low)
        bias = add_up_biases(build, form.biases, STUDENT, place, nodes, self.outer, dtype)
        if bias is not None:
            bias = build.method("to", bias, dtype)
            total = bias if total is None else build.call(torch.add, total, bias)
        assert total is not None
        self.masks[identity] = total
        return total


def _is_exact_in(dtype: torch.dtype, node: fx.Node) -> bool:
    """Whether a type holds every value of a tensor."""
    value = example(node)
    assert isinstance(value, Tensor)
    return torch.promote_types(value.dtype, dtype) == dtype


def _may_lack_keys(place: Geometry, mask: MaskPlan) -> bool:
    """Whether eager code may have a row without keys that is no row of NaN."""
    form = read(place.student.distribution.scores)
    removed = form.fill == -math.inf and not form.biases
    return not removed and not _has_diagonal(place, mask)


def _has_diagonal(place: Geometry, mask: MaskPlan) -> bool:
    """Whether the mask is a band in which every query provably has the key on its diagonal."""
    key, bounds = place.student.distribution.scores, (mask.window_left, mask.window_right)
    assert place.query is not None
    num_keys = key.size(place.student.distribution.axis)
    spare = expression(num_keys - place.digits[place.query].size)
    numbers = [spare, *(expression(b) for b in bounds if b is not None)]
    dense = bool(mask.tensors or mask.row_tensors or read(key).biases)
    return not dense and all(isinstance(n, int) and n >= 0 for n in numbers)


def _with_groups(
    build: Builder, q: fx.Node, k: fx.Node, v: fx.Node, options: dict[str, Any]
) -> tuple[fx.Node, fx.Node, dict[str, Any]]:
    """Keeps grouped heads if the fused kernels support them, and repeats them otherwise."""
    heads = shape(q)[1]
    if provably_equal(shape(k)[1], heads) and provably_equal(shape(v)[1], heads):
        return k, v, options
    value = example(q)
    assert isinstance(value, Tensor)
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
    value = example(x)
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _whole_lines(build: Builder, x: fx.Node) -> fx.Node:
    """Pads the last dimension of a tensor with zeros to a multiple of 16 bytes."""
    value, width = example(x), shape(x)[-1]
    assert isinstance(value, Tensor)
    if not isinstance(width, int):
        return x
    missing = -width % (16 // value.element_size())
    return build.call(F.pad, x, (0, missing)) if missing else x


def shape_scale(q: fx.Node) -> float:
    """Returns scaled_dot_product_attention's default scale, or 0 if it is not known."""
    head_dim = shape(q)[-1]
    return head_dim**-0.5 if isinstance(head_dim, int) and head_dim else 0.0
