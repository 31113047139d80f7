"""A weight as libraries quantize it: a tensor subclass that computes its products itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Quantized(Tensor):
    """Holds int8 numbers and a scale for each row, as torchao's weight-only int8 does."""

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data8, scale):
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, data8.shape, dtype=scale.dtype, device=data8.device
        )

    def __init__(self, data8, scale):
        self.data8, self.scale = data8, scale

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dequantize(self):  # type: ignore[override]
        return self.data8.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *rest):
        return cls(inner["data8"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight = args[:2]
            return x @ weight.data8.to(x.dtype).T * weight.scale[:, 0].to(x.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale)
        raise NotImplementedError(f"{func} of a quantized weight")
