"""Graphs that run as they are: a sum that has its gradients from the forward has one derivative.

Its backward reads no input of the graph, so autograd would leave a second derivative out and say
nothing. The public functions tell the sum what it is of; here the calls of a graph do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.registration import remember_inputs
from torch_streamkl.rows import op as row_op


def linear_kl_sum(*args: Any, **kwargs: Any) -> Any:
    """The operator; its second derivative is an error."""
    return _once(linear_ops.linear_kl_sum, args, kwargs)


def row_program_sum(*args: Any, **kwargs: Any) -> Any:
    """The operator; its second derivative is an error."""
    return _once(row_op.row_program_sum, args, kwargs)


def _once(operator: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    results = operator(*args, **kwargs)
    remember_inputs(results[0], _flat([*args, *kwargs.values()]))
    return results


def _flat(arguments: Iterable[Any]) -> Iterator[Any]:
    """Arguments, and what is in those that are lists."""
    for x in arguments:
        if isinstance(x, list | tuple):
            yield from x
        else:
            yield x


CALLS = {
    linear_ops.linear_kl_sum: linear_kl_sum,
    row_op.row_program_sum: row_program_sum,
}


def refuse_second_derivatives(gm: fx.GraphModule) -> None:
    """Let the sums of a graph that no compiler sees raise where they are differentiated twice."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in CALLS:
            node.target = CALLS[node.target]
    gm.recompile()
