"""Defines the proxies that a row program's function computes with; they record operations.

Operators, reversed operators, methods and torch functions all lead to the functions of
functions.py.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_streamkl.program.graph import BOOL, FLOAT, INT, Node, apply, const

if TYPE_CHECKING:
    from torch_streamkl.rows.trace import Tracer


# Of elements, by torch's names; functions.py fills it
FUNCTIONS: dict[str, Callable[..., Element]] = {}
ALIASES = {
    "log_sigmoid": "logsigmoid", "true_divide": "div", "multiply": "mul", "clip": "clamp",
    "subtract": "sub", "divide": "div", "negative": "neg", "absolute": "abs", "truediv": "div",
    "floordiv": "floor_divide", "mod": "remainder", "sgn": "sign", "fix": "trunc",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
    "special_xlogy": "xlogy", "special_expm1": "expm1", "special_exp2": "exp2",
    "special_erf": "erf", "special_log1p": "log1p", "special_expit": "sigmoid", "expit": "sigmoid",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax",
    "special_logsumexp": "logsumexp",
}  # fmt: skip


class Element:
    """Represents one value for each row and key, or for each row after a reduction over keys."""

    __array_ufunc__ = None  # a number of NumPy leaves its operators to these

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self._tracer, self._node = tracer, node

    def _apply(self, op: str, *args: Any) -> Element:
        return Element(self._tracer, apply(op, *(node_of(self._tracer, a) for a in args)))

    @property
    def _dtype(self) -> str:
        return self._node.dtype

    def __pos__(self) -> Element:
        return self

    # comparisons make elements
    def __hash__(self) -> int:
        return object.__hash__(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "an element of a row program has no truth value while it is traced; use torch.where, "
            "and & | ~ between conditions"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        _function(name)
        return functools.partial(_call, "where_self" if name == "where" else name, self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Element:
        name = getattr(function, "__name__", str(function)).strip("_")
        _function(name)
        every = (*args, *(kwargs or {}).values())
        tracer = next(x._tracer for x in every if isinstance(x, Element))
        given = dict(kwargs or {})
        if args and not isinstance(args[0], Element):
            args = (Element(tracer, node_of(tracer, args[0])), *args[1:])
        elif not args and not isinstance(given.get("input"), Element):
            given["input"] = Element(tracer, node_of(tracer, given.get("input")))
        return _call(name, *args, **given)

    if TYPE_CHECKING:  # the operators, which are set below

        def __add__(self, other: Any) -> Element: ...
        def __sub__(self, other: Any) -> Element: ...
        def __rsub__(self, other: Any) -> Element: ...
        def __mul__(self, other: Any) -> Element: ...
        def __truediv__(self, other: Any) -> Element: ...
        def __rtruediv__(self, other: Any) -> Element: ...
        def __mod__(self, other: Any) -> Element: ...
        def __and__(self, other: Any) -> Element: ...
        def __xor__(self, other: Any) -> Element: ...
        def __lt__(self, other: Any) -> Element: ...
        def __gt__(self, other: Any) -> Element: ...
        def __eq__(self, other: Any) -> Element: ...  # type: ignore[override]
        def __ne__(self, other: Any) -> Element: ...  # type: ignore[override]
        def __neg__(self) -> Element: ...
        def __invert__(self) -> Element: ...


def _cannot(name: str) -> str:
    known = ", ".join(sorted(set(FUNCTIONS) - {"where_self", "rpow"}))
    return (
        f"a row program cannot express {name}; it has arithmetic, comparisons, & | ^ ~ and {known}"
    )


def _function(name: str) -> Callable[..., Element]:
    function = FUNCTIONS.get(ALIASES.get(name, name))
    if function is None:
        raise NotImplementedError(_cannot(name))
    return function


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


# that torch's own functions pass on when their caller gave none
_UNSET = {"dtype": None, "out": None, "inplace": False}


def _call(name: str, /, *args: Any, **kwargs: Any) -> Element:
    """Calls a function on elements; raises for arguments that it does not have, by name."""
    name = ALIASES.get(name, name)
    function = FUNCTIONS[name]
    kwargs.pop("_stacklevel", None)
    for key, unset in _UNSET.items():
        if key in kwargs and (kwargs[key] is unset):
            del kwargs[key]
    signature = _signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        taken = ", ".join(str(p).split(":")[0] for p in signature.parameters.values())
        raise TypeError(f"{name} of an element takes ({taken}): {error}") from None
    return function(*bound.args, **bound.kwargs)


def node_of(tracer: Tracer, value: Any) -> Node:
    """Returns the node of an element or a number."""
    if isinstance(value, Element):
        if value._tracer is not tracer:
            raise ValueError("elements of two row programs cannot be combined")
        return value._node
    return const(*number_of("", value))


def number_of(name: str, value: Any) -> tuple[float, str]:
    """Returns a number and its type."""
    for_name = f" for {name}" if name else ""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(
            "a tensor of one number that needs a gradient must be declared in rows, so that it "
            "gets one"
        )
    given = value.item() if is_tensor else value
    if not isinstance(given, numbers.Real):
        raise TypeError(
            "elements combine with elements and numbers; declare a tensor in rows, keys, pairs or "
            f"columns, got {type(value).__name__}{for_name}"
        )
    if isinstance(given, bool):
        return float(given), BOOL
    if isinstance(given, numbers.Integral):
        if abs(int(given)) > 1 << 53:
            raise ValueError(
                f"{name or 'a number'} must be an integer of at most 2^53, got {given}"
            )
        return float(given), INT
    if math.isnan(given):
        raise ValueError(f"a row program has no NaN constants, got {value!r}{for_name}")
    return float(given), FLOAT


def condition_of(x: Any, where: str) -> Any:
    """Returns an element that is a condition, or a truth value."""
    is_condition = x._dtype == BOOL if isinstance(x, Element) else isinstance(x, bool)
    if not is_condition:
        raise TypeError(f"{where} takes conditions, got a number; compare it first")
    return x
