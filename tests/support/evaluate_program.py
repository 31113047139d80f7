"""Evaluates an expression on tensors: the meaning of the graph, in float64, for tests and checks.

One dimension an axis. Nothing is fast here: what runs is written by rows/ and kernels/.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from torch_streamkl.program.graph import (
    ANY,
    ARGMAX,
    FLOAT,
    INT,
    KEY,
    LOGSUMEXP,
    MAX,
    ROW,
    Axis,
)
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.walks import walk

_TYPES = {"bool": torch.bool, INT: torch.int64, FLOAT: torch.float64}
Placed = tuple[Tensor, tuple[Axis, ...]]


def evaluate(
    root,
    tensors,
    sizes=None,
    order=None,
):
    """Returns the values of an expression, with its free axes as dimensions in this order.

    ``tensors`` are those of captures and variables by their values, ``sizes`` those of axes and
    extents that are no numbers. An index that is out of range reads some element: what selects
    it is a `where` that does not.
    """
    return _Evaluation(tensors, sizes or {}).run(root, order)


class _Evaluation:
    def __init__(self, tensors, sizes):
        self.tensors, self.sizes = tensors, sizes
        self.bound: dict[Axis, Tensor] = {}

    def size(self, axis):
        known = self.sizes.get(axis, axis.size)
        return known if isinstance(known, int) else self.sizes[known]

    def run(self, root, order):
        done = {}
        for x in walk([root]):
            done[x] = self._value(x, [done[a] for a in x.args])
        value, axes = done[root]
        wanted = tuple(axes if order is None else order)
        for a in wanted:
            if a not in axes:
                value, axes = value.unsqueeze(-1).expand(*value.shape, self.size(a)), (*axes, a)
        return value.permute([axes.index(a) for a in wanted])

    def _value(self, x, args):
        match x.op:
            case "const":
                return torch.tensor(x.value, dtype=_TYPES[x.dtype]), ()
            case "index":
                return torch.arange(self.size(x.value)), (x.value,)
            case "size":
                return torch.tensor(self.sizes[x.value]), ()
            case "P" | "S" | "logP" | "logS":
                return self.tensors[x.op, x.value], ()
        tensors, axes = _aligned(args)
        if x.op in ("capture", "dot"):
            return self._captured(x, tensors, axes)
        if x.op == "contract":
            total = tensors[0] * tensors[1]
            kept = tuple(a for a in axes if a not in x.value)
            return total.sum([axes.index(a) for a in x.value if a in axes]), kept
        if x.op in ("reduce", "log_softmax"):
            axis = x.value.axis if x.op == "reduce" else x.value
            if axis not in axes:
                tensors = [tensors[0].unsqueeze(-1)]
                tensors[0] = tensors[0].expand(*tensors[0].shape[:-1], self.size(axis))
                axes = (*axes, axis)
            d = axes.index(axis)
            if x.op == "log_softmax":
                return tensors[0].log_softmax(d), axes
            reduction = _REDUCTIONS[x.kind]
            return reduction(tensors[0], d), axes[:d] + axes[d + 1 :]
        return self._pointwise(x, tensors), axes

    def _captured(self, x, at, axes):
        tensor = self.tensors[x.value if x.op == "capture" else (x.op, x.value)]
        if tensor.is_floating_point():
            tensor = tensor.double()
        if not at:
            return tensor, tuple(ordered(x.axes))
        places = [t.long().clamp(0, n - 1) for t, n in zip(at, tensor.shape, strict=True)]
        return tensor[tuple(torch.broadcast_tensors(*places))], axes

    def _pointwise(self, x, args):
        match x.op:
            case "linear":
                total = torch.tensor(x.value[0], dtype=_TYPES[x.dtype])
                for c, t in zip(x.value[1], args, strict=True):
                    total = total + torch.tensor(c, dtype=_TYPES[x.dtype]) * t
                return total
            case "product" | "mul":
                total = args[0]
                for t in args[1:]:
                    total = _product(total, t)
                return total
            case "nonnegative":
                return args[0] >= 0
            case "and" | "or":
                total = torch.tensor(x.op == "and")
                for t in args:
                    total = total & t if x.op == "and" else total | t
                return total
            case "logaddexp" if len(args) > 2:
                return torch.stack(torch.broadcast_tensors(*args)).logsumexp(0)
            case "where":
                condition, a, b = args
                return torch.where(condition, a.to(_TYPES[x.dtype]), b.to(_TYPES[x.dtype]))
            case "round":
                return args[0].to(getattr(torch, x.value)).to(args[0].dtype)
            case "pow":
                return args[0] ** x.value
        if x.dtype == FLOAT:  # torch divides two integers in float32
            args = [t.double() for t in args]
        return OPERATIONS[x.op].run(*args)


def _product(a, b):
    """0 times infinity is 0, with a gradient of 0; the gradient of others is as ever."""
    is_special = ((a == 0) & ~torch.isfinite(b)) | ((b == 0) & ~torch.isfinite(a))
    if not bool(is_special.any()):
        return a * b
    a, b = (torch.where(is_special, 0.0, x.double()) for x in (a, b))
    return a * b


def _log_sum_exp(x, d):
    """-inf where all are, with a gradient of 0."""
    is_empty = (x == -math.inf).all(d, keepdim=True)
    total = x.masked_fill(is_empty, 0.0).logsumexp(d)
    return total.masked_fill(is_empty.squeeze(d), -math.inf)


_REDUCTIONS = {
    "sum": lambda x, d: x.sum(d),
    LOGSUMEXP: _log_sum_exp,
    MAX: lambda x, d: x.amax(d),
    ANY: lambda x, d: x.any(d),
    ARGMAX: lambda x, d: x.argmax(d),
}


def _aligned(args):
    """Tensors with one dimension for each of their axes."""
    axes = tuple(dict.fromkeys(a for _, own in args for a in own))
    found = []
    for tensor, own in args:
        permuted = tensor.permute(sorted(range(len(own)), key=lambda i: axes.index(own[i])))
        shape = iter(permuted.shape)
        found.append(permuted.reshape([next(shape) if a in own else 1 for a in axes]))
    return found, axes


def ordered(axes: Iterable[Axis]) -> list[Axis]:
    """Returns axes in the order of a tensor's dimensions: heads, rows, keys, and any others."""
    last = {ROW.name: 1, KEY.name: 2}
    return sorted(axes, key=lambda a: (last.get(a.name, 0), repr(a)))
