"""Runs a program with other roundings, to measure how large the errors of correct code may be."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_streamkl.fx_passes.fx_utils.torch_names import TorchDispatchMode, tree_map
from torch_streamkl.fx_passes.validation.gradient_terms import random_signs
from torch_streamkl.fx_passes.validation.running import EXPONENTIALS, change_of_exponent

# operations that only move or choose numbers: every implementation of them gives the same
EXACT = {
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "abs", "alias", "amax", "amin", "arange",
    "argmax", "argmin", "as_strided", "bernoulli", "cat", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "constant_pad_nd", "contiguous", "copy", "detach", "diagonal",
    "embedding", "empty", "empty_like", "expand", "eye", "fill", "flip", "floor", "full",
    "full_like", "gather", "index", "index_select", "lift_fresh", "linspace", "masked_fill",
    "masked_scatter", "masked_select", "max", "maximum", "min", "minimum", "neg", "new_empty",
    "new_full", "new_ones", "new_zeros", "one_hot", "ones", "ones_like", "permute", "relu",
    "repeat", "roll", "round", "scalar_tensor", "scatter", "select", "select_backward", "set",
    "sign", "slice", "slice_backward", "sort", "split", "squeeze", "stack", "t", "threshold",
    "threshold_backward", "to", "topk", "transpose", "tril", "triu", "trunc", "unbind", "unfold",
    "unsqueeze", "value_selecting_reduction_backward", "view", "where", "zero", "zeros",
    "zeros_like",
}  # fmt: skip
_NAMES = {"_softmax": "softmax", "_log_softmax": "log_softmax", "sigmoid": "exp", "exp2": "exp"}
_MOST = 1.0  # a negative number that moves by more is the value of a mask


class PerturbedNumber(float):
    """Represents a number from a tensor: results computed with it are perturbed by one rounding of
    its dtype.
    """

    eps: float
    signs: random.Random

    def moved(self, x: Any) -> Any:
        if type(x) is not float:  # complex, or NotImplemented
            return x
        return perturbed_number(x * (1 + self.signs.choice((-1, 1)) * self.eps), self)


def perturbed_number(x: float, like: Any) -> PerturbedNumber:
    """Returns a number that is rounded as another one is."""
    number = PerturbedNumber(x)
    number.eps, number.signs = like.eps, like.signs
    return number


def _moving(name: str) -> Any:
    def operation(self: PerturbedNumber, *others: Any) -> Any:
        return self.moved(getattr(float, name)(self, *others))

    return operation


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _side in ("", "r"):
        setattr(PerturbedNumber, f"__{_side}{_name}__", _moving(f"__{_side}{_name}__"))


class PerturbItems(TorchFunctionMode):
    """Makes ``item()`` of floating-point tensors return a `PerturbedNumber`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.signs = random.Random(seed)
        self.eps = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not Tensor.item or type(made) is not float:
            return made
        self.eps = torch.finfo(args[0].dtype).eps
        return perturbed_number(made, self)


class PerturbRounding(TorchDispatchMode):
    """Perturbs the result of every operation by one rounding of its dtype, up or down.

    - Sums and matrix products also get perturbed inputs, because their own additions may be done
      in another order.
    - The result of an exponential changes by as much as roundings of its argument change it.
    - Numbers that a program takes out of tensors stay float64, while a compiled program may keep
      them as tensors. So results that are computed from such a number are perturbed, too.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}
        self.numbers = PerturbItems(seed)

    def __enter__(self) -> Any:
        self.numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.numbers.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "_opname", func)).rstrip("_")
        if name in EXACT or not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        is_pointwise = torch.Tag.pointwise in func.tags
        is_written = func._schema.is_mutable
        if not is_pointwise and not is_written:
            args = tree_map(self._moved_wide, args)
        made = func(*args, **kwargs)
        inputs = [x for x in args if isinstance(x, Tensor)]
        if not any(x.is_floating_point() for x in inputs):
            return made  # a factory, or a cast of integers
        memory = {x.untyped_storage().data_ptr() for x in inputs if _is_plain(x)}

        def moved(x: Any) -> Any:
            if not _is_plain(x) or (x.untyped_storage().data_ptr() in memory and not is_written):
                return x
            change = self._change(x)
            op = _NAMES.get(name, name)
            if op in EXPONENTIALS:
                change = change + self._sign(x) * change_of_exponent(op, x, inputs[0], x.dtype)
            near = x + change
            near = torch.where(near.isfinite(), near, x)
            return x.copy_(near) if is_written else near

        return tree_map(moved, made)

    def _moved_wide(self, x: Any) -> Any:
        """Perturbs an input of a sum, which is added up in at least float32."""
        if not _is_plain(x) or x.dtype not in (torch.float32, torch.float64):
            return x
        near = x + self._change(x)
        return torch.where(near.isfinite(), near, x)

    def _change(self, x: Tensor) -> Tensor:
        # A narrow result is computed in float32 and rounded once, by half a unit at most. Tensors
        # move by more, for programs that round in other places; of a loss that would be 1 %.
        units = 0.5 if x.dtype.itemsize == 2 and x.numel() == 1 else 1.0
        change = x * self._sign(x) * (units * torch.finfo(x.dtype).eps)
        return torch.where((x < 0) & (change.abs() > _MOST), 0.0, change)

    def _sign(self, x: Tensor) -> Tensor:
        if x.device not in self.generators:
            self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        return random_signs(x, self.generators[x.device])


def _is_plain(x: Any) -> bool:
    is_tensor = type(x) in (Tensor, torch.nn.Parameter)
    return is_tensor and x.is_floating_point() and x.layout is torch.strided
