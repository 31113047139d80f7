"""The normal form of expressions that are written with `graph.apply`, as the reader makes them."""

from __future__ import annotations

from tests.support.evaluate_program import ordered
from torch_streamkl.program.canonical import (
    FALSE,
    TRUE,
    choose,
    compare,
    linear,
    node,
    numeric,
    product,
    scaled,
    truth,
)
from torch_streamkl.program.functions import function, logarithm, quotient
from torch_streamkl.program.graph import BOOL, Node, const, index
from torch_streamkl.program.identities import log_variable
from torch_streamkl.program.reductions import detached, reduced, remade
from torch_streamkl.program.walks import rebuilt_root


def canonical(x: Node) -> Node:
    """Returns the normal form of an expression, which is its own normal form."""
    return rebuilt_root(x, _of_written)


def _of_written(x: Node, args: tuple[Node, ...]) -> Node:
    match x.op:
        case "const":
            if x.dtype == BOOL:
                return TRUE if x.value else FALSE
            return const(x.value, x.dtype)
        case "add" | "sub":
            return linear(0.0, [(1.0, args[0]), (1.0 if x.op == "add" else -1.0, args[1])])
        case "neg":
            return scaled(-1.0, args[0])
        case "mul" | "mul0":
            return product(*args)
        case "div" | "div0":
            return quotient(*args)
        case "log_div":
            return logarithm(quotient(*args))
        case "pow" if x.value == 2.0:
            return product(args[0], args[0])
        case "float" | "int":
            return numeric(args[0])
        case "detach":
            return detached(args[0])
        case "lt" | "le" | "gt" | "ge" | "eq" | "ne":
            return compare(x.op, *args)
        case "where":
            return choose(truth(args[0]), args[1], args[2])
        case "reduce":
            bound = x.value.axis
            if bound.level or x.value.size:
                return remade(x, args)
            return reduced(x.kind, bound, args[0])
        case "log1p":
            return logarithm(linear(1.0, [(1.0, args[0])]))
        case "P" | "S":  # a probability of a divergence
            log = log_variable(x)
            assert log is not None
            return function("exp", log)
    if not args and x.axes and x.op != "index":  # a leaf of a row program, at its own axes
        at = [index(a) for a in ordered(x.axes)]
        return node(x.op, at, x.value, x.dtype, x.range, x.is_finite)
    return remade(x, args) if args else x
