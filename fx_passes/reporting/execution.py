"""Describes how the operators of a rewritten graph will run, for each fused loss."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, fx

from torch_streamkl.attention import ops, query_tiles
from torch_streamkl.attention.heuristics import select_implementation
from torch_streamkl.attention.hopper_tiles import adds_queries
from torch_streamkl.attention.limits import triton_limit
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    FakeTensorMode,
    GuardOnDataDependentSymNode,
)
from torch_streamkl.fx_passes.lowering.sites import SITE
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear import token_tiles
from torch_streamkl.rows import op as row_op
from torch_streamkl.topk import log_probs, logits

IMPLEMENTATIONS = {
    "torch": "in plain torch, by blocks of queries and keys",
    "triton": "as Triton kernels",
    "hopper": "as kernels for Hopper GPUs",
}
PROGRAMS = {
    row_op.CLOSED: "as the divergence that it is, by the operator of attention_kl or linear_kl",
    "torch": "in plain torch, by blocks of rows and keys: bounded memory, no kernels",
    "triton": "as Triton kernels written for it",
}
PLAIN_ROWS = "in plain torch"
QUERY_TILES = "by query tiles, compiled by Inductor"  # of a compiled graph on a CPU
COMPILED_ROWS = "as blocks of rows, compiled by Inductor"
MEAN_AGAIN = (
    "the mean of {} distributions is computed again in the backward: if all probabilities fit "
    "into memory, code that is not fused may be faster"
)
ANY_ORDER = "gradients in any order of sums"
BY_SIZE = "as the number of selected rows decides in each call"
IN_FORWARD = "gradients in the forward, by chunks of tokens"
IN_BACKWARD = "logits computed again in the backward"


def how_sites_run(graph: fx.Graph, mode: FakeTensorMode, is_compiled: bool) -> dict[str, str]:
    """Returns, by loss, the implementation on this device, and when gradients are computed."""
    found: dict[str, dict[str, None]] = {}
    shapes = mode.shape_env
    with shapes.suppress_guards() if shapes is not None else contextlib.nullcontext():
        for node in graph.nodes:
            if SITE in node.meta:
                found.setdefault(node.meta[SITE], {})[_how_known(node, is_compiled)] = None
    return {site: " and ".join(ways) for site, ways in found.items()}


def shared_with(graph: fx.Graph) -> dict[str, str]:
    """Returns, by loss, what its operator also returns."""
    heads = (linear_ops.linear_kl, linear_ops.linear_kl_sum)
    return {
        node.meta[SITE]: "cross-entropy with labels in the same pass"
        for node in graph.nodes
        if SITE in node.meta and node.target in heads and node.kwargs.get("labels") is not None
    }


def _how_known(call: fx.Node, is_compiled: bool) -> str:
    try:
        return _how(call, is_compiled)
    except GuardOnDataDependentSymNode:
        return BY_SIZE


def _how(call: fx.Node, is_compiled: bool) -> str:
    look_up: Any = example
    given: Any = fx.map_arg((call.args, call.kwargs), look_up)
    args, kwargs = given
    if call.target == row_op.row_program:
        return PROGRAMS[row_op.chosen(*args)]
    if call.target == row_op.row_program_sum:
        return f"{PROGRAMS[row_op.chosen_of_sum(*args)]}, {IN_FORWARD}"
    if call.target == log_probs.entry_log_probs:
        return IMPLEMENTATIONS["triton"] if log_probs.runs_kernels(*args) else PLAIN_ROWS
    if call.target == logits.entry_logits:
        return PLAIN_ROWS
    if call.target == ops.attention_kl:
        problem, impl = ops.problem_of(*args, **kwargs)
        implementation = select_implementation(problem, impl)
        how = IMPLEMENTATIONS[implementation]
        if is_compiled and implementation == "torch" and query_tiles.limit(problem) is None:
            how = QUERY_TILES
        if implementation == "torch":
            how += _because(problem.student.q, triton_limit(problem))
        if implementation == "hopper" and adds_queries(problem):
            how += f", {ANY_ORDER}"
        if problem.head_mean:
            ratio = problem.teacher.num_heads // problem.num_heads
            how += ", " + MEAN_AGAIN.format(ratio)
        return how
    only_sum = ("row_weight", "hard_row_weight", "needs_grad")
    options = {name: x for name, x in kwargs.items() if name not in only_sum}
    heads, _, impl = linear_ops.problem_of(*args, **options)
    rows = linear_ops.rows_of(is_compiled, heads, impl)
    if rows is token_tiles and not token_tiles.is_even(heads):
        rows = linear_rows
    names = {linear_rows: PLAIN_ROWS, token_tiles: COMPILED_ROWS}
    where = names.get(rows, IMPLEMENTATIONS["triton"])
    if rows is linear_rows:
        where += _because(heads.student.hidden, linear_ops.triton_limit(heads))
    if call.target == linear_ops.linear_kl_sum:
        return f"{where}, {IN_FORWARD}"
    value = example(call)
    assert isinstance(value, tuple)
    needs_gradient = isinstance(value[0], Tensor) and value[0].requires_grad
    return f"{where}, {IN_BACKWARD}" if needs_gradient else where


def _because(x: Tensor, limit: str | None) -> str:
    """Explains why an available GPU has no kernel for a loss, which makes it slower."""
    return "" if x.device.type == "cpu" or limit is None else f" (the kernel {limit})"
