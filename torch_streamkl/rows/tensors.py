"""Checks the tensors of a call, and brings them to the shapes that programs use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.attention.arguments import window_of
from torch_streamkl.bounds import check_key_lengths
from torch_streamkl.program.masks import Keys
from torch_streamkl.rows.program import (
    COLUMNS,
    KEY,
    PAIR,
    ROW,
    VALUES,
    Capture,
)
from torch_streamkl.rows.trace import POSITIONS, dtype_of

Columns = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Inputs:
    """Holds the tensors as the caller passed them, by name."""

    dots: dict[str, tuple[Tensor, Tensor]]
    rows: dict[str, Tensor]
    keys: dict[str, Tensor]
    pairs: dict[str, Tensor]
    columns: dict[str, Columns]
    key_lengths: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class Normalised:
    """Holds tensors in the order of `Program.tensor_names`, and the sizes and names that the
    tracer needs.
    """

    tensors: list[Tensor]
    dot_names: list[str]
    dot_heads: tuple[int, ...]
    captures: tuple[Capture, ...]
    capture_names: list[str]
    num_heads: dict[int, int]  # of each axis of heads
    has_lengths: bool
    has_mask: bool
    row_shape: tuple[int, ...] | None  # of the results of LM heads


@dataclass(frozen=True)
class _Sizes:
    batch: int
    num_rows: int
    num_keys: int
    heads: dict[int, int]  # the axis of each number of heads
    row_shape: tuple[int, ...] | None

    def axis(self, name: str, heads: int) -> int:
        if heads == 1:
            return 0
        if heads not in self.heads:
            raise ValueError(
                f"{name} must have 1 head or as many as a dot ({_listed(self.heads)}), got {heads}"
            )
        return self.heads[heads]


def _listed(values: object) -> str:
    return ", ".join(str(v) for v in values) or "1"  # type: ignore[attr-defined]


def keys_of(
    inputs: Normalised, is_causal: bool, window: tuple[int | None, int | None] | None
) -> Keys:
    """Returns which keys a row has."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    left, right = window_of(window) or (None, None)
    is_bounded = is_causal or left is not None or right is not None
    if inputs.row_shape is not None and is_bounded:
        what = "is_causal=True" if is_causal else f"window={window!r}"
        raise ValueError(f"{what} needs keys with positions; {_OF_LM_HEADS}")
    return Keys(left, 0 if is_causal else right, inputs.has_lengths, inputs.has_mask)


_OF_LM_HEADS = (
    "the vocabulary of an LM head has none: hide entries in the function, by torch.where and a "
    "condition in keys, pairs or columns"
)


def _check_no_dtensors(inputs: Inputs) -> None:
    """Raises if any tensor is a DTensor: row programs do not run on several ranks."""
    declared = (inputs.dots, inputs.rows, inputs.keys, inputs.pairs, inputs.columns)
    given = [item for tensors in declared for item in tensors.items()]
    for name, x in [*given, ("key_lengths", inputs.key_lengths), ("mask", inputs.mask)]:
        if any(hasattr(part, "device_mesh") for part in (x if isinstance(x, tuple) else (x,))):
            raise NotImplementedError(
                f"row_program takes plain tensors, got a DTensor for {name}; pass x.to_local() or "
                "x.full_tensor()"
            )


def normalised(inputs: Inputs) -> Normalised:
    """Checks the metadata of all tensors, and adds missing batch and head dimensions."""
    if not inputs.dots:
        raise ValueError("a row program must have at least one dot")
    _check_names(inputs)
    _check_no_dtensors(inputs)
    operands = {name: _operands(name, pair) for name, pair in inputs.dots.items()}
    every = {f"{n}[{i}]": x for n, pair in operands.items() for i, x in enumerate(pair)}
    checks.same("dtype", {name: x.dtype for name, x in every.items()})
    checks.same("device", {name: x.device for name, x in every.items()})
    is_vocab = {name: pair[1].ndim == 2 for name, pair in operands.items()}
    checks.same("kind (attention or LM head)", dict(is_vocab))
    sizes = _sizes(operands)
    given: list[Tensor] = []
    heads = []
    for name, (q, k) in operands.items():
        if sizes.row_shape is not None:
            q, k = q.reshape(1, 1, sizes.num_rows, q.shape[-1]), k[None, None]
        heads.append(sizes.axis(name, q.shape[1]))
        given += [q, k]
    captures: list[Capture] = []
    names: list[str] = []
    for kind, declared in ((ROW, inputs.rows), (KEY, inputs.keys), (PAIR, inputs.pairs)):
        for name, x in declared.items():
            x = _capture(name, kind, x, sizes)
            captures.append(Capture(kind, dtype_of(x), sizes.axis(name, x.shape[1])))
            given.append(x)
            names.append(name)
    for name, column in inputs.columns.items():
        for kind, x in _columns(name, column, sizes):
            ids = len(captures) - 1 if kind == VALUES else -1
            captures.append(Capture(kind, dtype_of(x), sizes.axis(name, x.shape[1]), ids))
            given.append(x)
            names.append(name)  # of ids and values, the values keep the name
    device = next(iter(every.values())).device
    for name, x in zip(names, given[2 * len(heads) :], strict=True):
        checks.on_device(name, x, device)
    if inputs.key_lengths is not None:
        given.append(_lengths(inputs.key_lengths, sizes, device))
    if inputs.mask is not None:
        given.append(_mask(inputs.mask, sizes, device))
    return Normalised(
        given,
        list(operands),
        tuple(heads),
        tuple(captures),
        names,
        {axis: count for count, axis in sizes.heads.items()},
        inputs.key_lengths is not None,
        inputs.mask is not None,
        sizes.row_shape,
    )


def _check_names(inputs: Inputs) -> None:
    seen: set[str] = set(POSITIONS)
    groups = (inputs.dots, inputs.rows, inputs.keys, inputs.pairs, inputs.columns)
    for name in (name for group in groups for name in group):
        if (
            not isinstance(name, str)
            or not name.isidentifier()
            or name.startswith("_")
            or name in seen
        ):
            raise ValueError(
                f"names of a row program's tensors must be distinct identifiers, got {name!r}"
            )
        seen.add(name)


def _operands(name: str, pair: object) -> tuple[Tensor, Tensor]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"dot {name} must be a pair of tensors, got {type(pair).__name__}")
    for i, x in enumerate(pair):
        checks.tensor(f"{name}[{i}]", x)
        checks.floating(f"{name}[{i}]", x)
    q, k = pair
    if not ((k.ndim == 2 and q.ndim >= 2) or (k.ndim == 4 and q.ndim == 4)):
        raise ValueError(
            f"{name} must be [batch, heads, seqlen, head_dim] tensors, or [..., hidden] and "
            f"[vocab, hidden], got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    # a batch may be empty, and select no rows
    needed = {
        0: (q.shape[-1], *q.shape[1:2] * (k.ndim == 4)),
        1: k.shape[-3 if k.ndim == 4 else -2 :],
    }
    for i, sizes in needed.items():
        if 0 in sizes:
            raise ValueError(
                f"{name}[{i}] must have no empty dimension but batch and rows, got "
                f"{tuple(pair[i].shape)}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{name} must share its last dimension, got {q.shape[-1]} and {k.shape[-1]}"
        )
    if k.ndim == 4 and (q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"{name} must share the batch, and its heads must be a multiple of its key heads, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    return checks.as_matmul_operand(q), checks.as_matmul_operand(k)


def _sizes(operands: dict[str, tuple[Tensor, Tensor]]) -> _Sizes:
    first_q, first_k = next(iter(operands.values()))
    if first_k.ndim == 2:
        row_shape = tuple(first_q.shape[:-1])
        for name, (q, k) in operands.items():
            if tuple(q.shape[:-1]) != row_shape or k.shape[0] != first_k.shape[0]:
                raise ValueError(
                    f"all dots must share rows and vocabulary entries, got {row_shape} and "
                    f"{first_k.shape[0]}, "
                    f"but {tuple(q.shape[:-1])} and {k.shape[0]} in {name}"
                )
        return _Sizes(1, math.prod(row_shape), first_k.shape[0], {}, row_shape)
    heads: dict[int, int] = {}
    for name, (q, k) in operands.items():
        got, rule = (q.shape[0], q.shape[2], k.shape[2]), first_q.shape
        if got != (rule[0], rule[2], first_k.shape[2]):
            raise ValueError(
                f"all dots must share batch, seqlen_q and seqlen_k, got "
                f"{(rule[0], rule[2], first_k.shape[2])}, but {got} in {name}"
            )
        if q.shape[1] > 1:
            heads.setdefault(q.shape[1], len(heads) + 1)
    return _Sizes(first_q.shape[0], first_q.shape[2], first_k.shape[2], heads, None)


def _capture(name: str, kind: str, x: object, sizes: _Sizes) -> Tensor:
    x = checks.tensor(name, x)
    is_number = x.is_floating_point() or x.is_complex()
    if is_number and x.dtype not in checks.FLOAT_DTYPES:
        raise TypeError(
            f"{name} must be boolean, integers, float64, float32, bfloat16 or float16, got "
            f"{x.dtype}"
        )
    if sizes.row_shape is not None:
        return _of_vocab(name, kind, x, sizes, sizes.row_shape)
    full = {
        ROW: ("batch", "heads", sizes.num_rows),
        KEY: ("batch", "heads", sizes.num_keys),
        PAIR: ("batch", "heads", sizes.num_rows, sizes.num_keys),
    }[kind]
    if x.ndim > len(full):
        raise ValueError(f"{name} must have at most {len(full)} dimensions, got {tuple(x.shape)}")
    x = x.reshape((1,) * (len(full) - x.ndim) + tuple(x.shape))
    expected = (sizes.batch, x.shape[1], *full[2:])
    if any(got not in (1, size) for got, size in zip(x.shape, expected, strict=True)):
        raise ValueError(f"{name} must broadcast to {expected}, got {tuple(x.shape)}")
    sizes.axis(name, x.shape[1])
    return x


def _of_vocab(
    name: str, kind: str, x: Tensor, sizes: _Sizes, row_shape: tuple[int, ...]
) -> Tensor:
    if kind == KEY:
        if x.shape != (sizes.num_keys,):
            raise ValueError(f"{name} must have shape ({sizes.num_keys},), got {tuple(x.shape)}")
        return x[None, None]
    if kind == ROW:
        try:
            return x.expand(row_shape).reshape(1, 1, sizes.num_rows)
        except RuntimeError:
            raise ValueError(
                f"{name} must broadcast to {row_shape}, got {tuple(x.shape)}"
            ) from None
    if tuple(x.shape) != (*row_shape, sizes.num_keys):
        raise ValueError(
            f"{name} must have shape {(*row_shape, sizes.num_keys)}, got {tuple(x.shape)}"
        )
    return x.reshape(1, 1, sizes.num_rows, sizes.num_keys)


def _columns(name: str, given: object, sizes: _Sizes) -> list[tuple[str, Tensor]]:
    pair = given if isinstance(given, tuple) else (given,)
    if len(pair) > 2 or not pair:
        raise TypeError(f"{name} must be ids, or (ids, values), got {len(pair)} of them")
    found: list[tuple[str, Tensor]] = []
    for kind, x in zip((COLUMNS, VALUES), pair, strict=False):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be ids, or (ids, values), got {type(x).__name__}")
        checks.tensor(name, x)
        is_number = x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
        if kind == COLUMNS and is_number:
            raise TypeError(f"ids of {name} must be integers, got {x.dtype}")
        if kind == VALUES:
            checks.floating(f"values of {name}", x)
        if sizes.row_shape is not None:
            if tuple(x.shape[:-1]) != sizes.row_shape:
                raise ValueError(
                    f"{name} must have shape {sizes.row_shape} and k, got {tuple(x.shape)}"
                )
            x = x.reshape(1, 1, sizes.num_rows, x.shape[-1])
        expected = (sizes.batch, x.shape[1] if x.ndim == 4 else 1, sizes.num_rows)
        if x.ndim != 4 or any(a not in (1, b) for a, b in zip(x.shape, expected, strict=False)):
            raise ValueError(
                f"{name} must be [batch, heads or 1, seqlen_q, k], got {tuple(x.shape)}"
            )
        found.append((kind, x))
    if len(found) == 2 and found[0][1].shape != found[1][1].shape:
        raise ValueError(
            f"ids and values of {name} must share a shape, got {tuple(found[0][1].shape)} and "
            f"{tuple(found[1][1].shape)}"
        )
    return found


def _lengths(lengths: Tensor, sizes: _Sizes, device: torch.device) -> Tensor:
    if sizes.row_shape is not None:
        raise ValueError(f"key_lengths need keys with positions; {_OF_LM_HEADS}")
    checks.tensor("key_lengths", lengths)
    if lengths.shape != (sizes.batch,) or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"key_lengths must be int32 or int64 of shape ({sizes.batch},), got {lengths.dtype} "
            f"{tuple(lengths.shape)}"
        )
    checks.on_device("key_lengths", lengths, device)
    if checks.is_plain((lengths,)):
        check_key_lengths(lengths, sizes.num_keys)
    return lengths


def _mask(mask: Tensor, sizes: _Sizes, device: torch.device) -> Tensor:
    if sizes.row_shape is not None:
        raise ValueError(f"mask needs keys with positions; {_OF_LM_HEADS}")
    checks.tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, True takes part, got {mask.dtype}")
    mask = _capture("mask", PAIR, mask, sizes)
    if mask.shape[1] != 1:
        raise ValueError(
            f"mask must be the same for all heads, got {mask.shape[1]}; declare one per head in "
            "pairs and use torch.where"
        )
    checks.on_device("mask", mask, device)
    return mask
