"""Registers the rules that read operations, by operator overload, and what a rule is given.

A rule knows one operation. It returns the result as an `arrays.Array`, or a tuple of those where
the operation has several results, or raises `NoRule` with the reason why this call is not read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, fx

from torch_streamkl.bounds import LABELS
from torch_streamkl.fx_passes.fx_utils.nodes import name_of, named_arguments, target_name
from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array, Dim
from torch_streamkl.fx_passes.reading.positions import key_of
from torch_streamkl.program.canonical import FALSE, TRUE, choose, linear
from torch_streamkl.program.functions import function
from torch_streamkl.program.graph import BOOL, FLOAT, INT, Node, Size, const
from torch_streamkl.program.shifts import is_lost

if TYPE_CHECKING:
    from torch_streamkl.fx_passes.reading.reader import Reader

aten = torch.ops.aten
Result = Array | tuple[Array | None, ...]
Rule = Callable[["Call"], Result]
R = TypeVar("R", bound=Rule)
RULES: dict[object, Rule] = {}


@functools.cache
def names_of_rules() -> frozenset[str]:
    """Returns the names of operations with a rule, as torch's functions and methods have them."""
    overloads = (x for x in RULES if isinstance(x, torch._ops.OpOverload))
    return frozenset(target_name(x).strip("_") for x in overloads)


class NoRule(ValueError):
    """Raised with the reason why a call is not read; its result is captured."""


def rule(*overloads: object) -> Callable[[R], R]:
    """Registers a function for overloads, and for their variants that write in place.

    A foreign ``mine::softmax`` is not torch's: only an overload that is registered has a rule.
    """

    def register(function: R) -> R:
        for overload in overloads:
            for each in (overload, *_in_place(overload)):
                assert each not in RULES, f"{each} has a rule already"
                RULES[each] = function
        return function

    return register


def _in_place(overload: Any) -> Iterable[object]:
    if not isinstance(overload, torch._ops.OpOverload):
        return ()
    name = overload._schema.name.removeprefix("aten::")
    packet = getattr(aten, f"__i{name[2:]}" if name.startswith("__") else f"{name}_", None)
    has = packet is not None and overload._overloadname in packet.overloads()
    return (getattr(packet, overload._overloadname),) if has else ()


class Call:
    """Holds one call: its arguments by the names of the schema, and what torch recorded of it."""

    def __init__(self, reader: Reader, node: fx.Node, value: object = None) -> None:
        self.reader, self.node = reader, node
        self.arguments = named_arguments(node)
        self.value = node.meta.get("val") if value is None else value

    # ------------------------------------------------------------------------- arguments

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an argument as it is in the graph."""
        return self.arguments.get(name, default)

    def has(self, name: str) -> bool:
        """Returns whether an argument is given and not None."""
        return self.arguments.get(name) is not None

    def array(self, name: str) -> Array:
        """Returns a tensor or number."""
        return self.reader.array(self.arguments[name])

    def arrays(self, *names: str) -> list[Array]:
        """Returns several of them."""
        return [self.array(name) for name in names]

    def number(self, name: str, default: float | None = None) -> Node:
        """Returns a number, known or not."""
        given = self.arguments.get(name, default)
        x = self.reader.array(given)
        if x.dims:
            raise NoRule(f"{name} is a tensor")
        return x.expr

    def known(self, name: str, default: Any = None) -> Any:
        """Returns a number of the graph; raises if it is a value of the program."""
        given = self.arguments.get(name, default)
        if isinstance(given, (fx.Node, torch.SymInt, torch.SymFloat)):
            raise NoRule(f"{name} is not known in the graph")
        return given

    def size(self, x: object) -> Size:
        """Returns a size or position, known or symbolic."""
        return self.reader.size(x)

    @property
    def rank(self) -> int:
        """Returns how many dimensions the tensor has that an operation is of."""
        return len(self.array("self").dims)

    def dim(self, default: int | None = None) -> int:
        """Returns a dimension counted from the front."""
        return int(self.known("dim", default)) % max(self.rank, 1)

    def dims(self) -> list[int]:
        """Returns dimensions, all of them where none are given."""
        given, rank = self.known("dim"), self.rank
        if given is None or given == []:
            return list(range(rank))
        every = [given] if isinstance(given, int) else given
        return sorted({d % max(rank, 1) for d in every}) if rank else []

    def reads_at(self, at: Node, of: str, dim: int, size: Size) -> None:
        """Notes that torch raises where positions are out of range: `Reading.indices`.

        Of labels one value is no position; what else reads them does not know that.
        """
        indices, key = self.reader.reading.indices, key_of(at)
        self.reader.reading.index_sizes.setdefault(key, set()).add(size)
        if key not in indices or indices[key][0].startswith(LABELS):
            indices[key] = of, dim

    # ------------------------------------------------------------------------- results

    @property
    def name(self) -> str:
        """Returns the operation, without what says that it writes in place."""
        return name_of(self.node).strip("_")

    @property
    def shape(self) -> tuple[Size, ...]:
        """Returns the shape of the result."""
        return self.shape_of(self.value)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the type of the result."""
        assert isinstance(self.value, Tensor)
        return self.value.dtype

    def shape_of(self, value: object) -> tuple[Size, ...]:
        """Returns the sizes of a tensor that torch recorded."""
        assert isinstance(value, Tensor)
        return tuple(self.reader.sizes.of(n) for n in value.shape)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Returns the type of an argument, None for a number."""
        given = self.arguments.get(name)
        value = given.meta.get("val") if isinstance(given, fx.Node) else None
        return value.dtype if isinstance(value, Tensor) else None

    @property
    def keepdim(self) -> bool:
        """Returns whether dimensions that are reduced stay, with size 1."""
        return bool(self.get("keepdim", False))

    def observes(self, what: str) -> None:
        """Notes that this call tells NaN and infinity from numbers: `Reading.observers`."""
        self.reader.observers[self.node] = what

    def made(self, expr: Node, dims: Sequence[Dim] = ()) -> Array:
        """Returns a tensor with the sizes of this trace."""
        return Array(expr, tuple(dims), self.reader.sizes)

    def pointwise(self, make: Callable[..., Node], *operands: Array) -> Array:
        """Returns an operation on tensors that broadcast."""
        exprs, dims = arrays.met(*operands)
        return self.made(make(*exprs), dims)


def number_of(x: Node, dtype: str = FLOAT) -> Node:
    """Returns a condition as 1 and 0."""
    return choose(x, const(1.0, dtype), const(0.0, dtype)) if x.dtype == BOOL else x


def truth_of(value: bool) -> Node:
    """Returns a condition that is known."""
    return TRUE if value else FALSE


def in_type(value: float, dtype: torch.dtype) -> Node:
    """Returns a number as a tensor of a type has it."""
    if dtype == torch.bool:
        return truth_of(bool(value))
    if dtype.is_floating_point:
        rounded = float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))
        return const(rounded, FLOAT)
    if dtype.is_complex or not math.isfinite(value):
        raise NoRule(f"{value} as {dtype}")
    whole = torch.tensor(math.trunc(value), dtype=torch.int64, device="cpu")
    return const(float(whole.to(dtype)), INT)  # -8 is 248 among bytes


def applied(op: str) -> Callable[..., Node]:
    """Returns an operation of the table, of numbers."""
    return lambda *args: function(op, *(number_of(x) for x in args))


def added(a: Node, b: Node, sign: float = 1.0) -> Node:
    """Returns ``a + sign * b``, of which no large part is lost: `shifts.is_lost`."""
    total = linear(0.0, [(1.0, a), (sign, b)])
    if FLOAT in (a.dtype, b.dtype) and is_lost(total, (a, b)):
        raise NoRule("a number that is large is added to scores, and taken away again")
    return total
