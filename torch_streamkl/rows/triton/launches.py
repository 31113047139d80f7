"""Launches the kernels that rows/triton/source.py generates for a row program."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_streamkl.kernels.arguments import Sequence as KeySequence
from torch_streamkl.kernels.arguments import Window
from torch_streamkl.kernels.generated import function_of
from torch_streamkl.kernels.row_state import tile_coordinates
from torch_streamkl.kernels.scores import keys_of_rows, load_tile, rows_of_keys
from torch_streamkl.kernels.tiles import (
    LEAST,
    Operands,
    TritonLaunch,
    ceil_div,
    padded_dim,
    row_program_launch,
    shared_bytes,
)
from torch_streamkl.program.graph import BLOCK_SUM, SUM
from torch_streamkl.program.steps import used_by
from torch_streamkl.rows import derive, torch_impl
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import ROW, Program
from torch_streamkl.rows.torch_impl import Result
from torch_streamkl.rows.triton import source as row_source
from torch_streamkl.rows.triton.lanes import (
    first_largest,
    lane_maxima,
    lane_sums,
    merged_lanes,
    over_lanes,
    store_blocks,
    store_last_block,
)
from torch_streamkl.rows.triton.writer import Source
from torch_streamkl.runtime import launch as runtime
from torch_streamkl.runtime.devices import dot_precision, gpu_limit, gpu_of, matmul_limit

MAX_DIM = 256  # of operands, which a tile holds whole
INTERPRETED = TritonLaunch(32, 16, 4, 1)  # rows and keys of a tile differ, to be told apart
MARGIN = 2048  # bytes of shared memory next to the operands, for reductions


def why_unsupported(problem: RowProblem, is_differentiated: bool) -> str:
    """Explains why a problem has no kernels; empty if it has."""
    plan = derive.backward_plan(problem.program) if is_differentiated else None
    found = row_source.why_unsupported(problem.program, plan)
    if found:
        return f"programs with {found} have no kernels"
    dim = max(q.shape[-1] for q, _ in problem.operands)
    if dim > MAX_DIM:
        return f"operands have at most {MAX_DIM} dimensions in kernels, got {dim}"
    if problem.compute_dtype == torch.float64:
        return "kernels compute in float32, and operands are float64"
    return why_unsupported_on_gpu(problem, range(len(problem.operands)))


def why_unsupported_on_gpu(problem: RowProblem, dots: Sequence[int]) -> str:
    """Explains why no kernel's tiles fit these dot products on the GPU; empty if one fits."""
    q = problem.like
    if q.device.type != "cuda":
        return ""
    if not dots:
        limit = gpu_limit(q.device)
        return "" if limit is None else f"a kernel {limit}"
    limit = matmul_limit(q.device, q.dtype, max(problem.operands[i][0].shape[-1] for i in dots))
    gpu, operands = gpu_of(q.device), operands_of(problem, dots)
    if limit is None and shared_bytes(LEAST, "dk", operands, gpu) + MARGIN > gpu.shared_bytes:
        room = gpu.shared_bytes // 1024
        limit = f"holds tiles of all dots in {room} KiB, got {len(dots)} of them"
    return "" if limit is None else f"a kernel {limit}"


def launch_of(problem: RowProblem, kernel: str) -> TritonLaunch:
    """Returns tiles of "forward", "dq" or "dk": those of the portable kernels, with all dots'
    operands.
    """
    q = problem.like
    if q.device.type != "cuda":
        return INTERPRETED
    operands = operands_of(problem, range(len(problem.operands)))
    return row_program_launch(kernel, operands, gpu_of(q.device))


def operands_of(problem: RowProblem, dots: Sequence[int]) -> Operands:
    """Describes the operands of some dots, by which tiles are chosen."""
    q = problem.like
    dims = tuple(padded_dim(problem.operands[i][0].shape[-1]) for i in dots)
    return Operands(dims, q.element_size(), dot_precision(q) == "ieee")


def is_exact(problem: RowProblem) -> bool:
    """Returns whether operands are float32 (Writer)."""
    return problem.like.element_size() == 4


SCOPE = {
    "triton": triton,
    "tl": tl,
    "Sequence": KeySequence,
    "Window": Window,
    "first_largest": first_largest,
    "keys_of_rows": keys_of_rows,
    "lane_maxima": lane_maxima,
    "lane_sums": lane_sums,
    "load_tile": load_tile,
    "merged_lanes": merged_lanes,
    "over_lanes": over_lanes,
    "tile_coordinates": tile_coordinates,
    "rows_of_keys": rows_of_keys,
    "store_blocks": store_blocks,
    "store_last_block": store_last_block,
}


@functools.lru_cache(maxsize=512)
def compiled(source: Source) -> Any:
    """Returns the jit function of a text, created once."""
    return function_of(source.text, source.name, "row program", SCOPE)


@functools.lru_cache(maxsize=512)
def _sums(
    program: Program, is_differentiated: bool, level: int, axis: int, is_exact: bool
) -> Source | None:
    """Returns the pass of a level over the heads of an axis, or None if it sums nothing."""
    plan = derive.forward_plan(program, is_differentiated)
    slots = slots_of(program, plan, level)
    own = {slot: slots[slot][:2] for slot in slots if slots[slot][2] == axis}
    return row_source.sums_kernel(program, plan.nodes, own, is_exact) if own else None


def slots_of(
    program: Program, plan: derive.ForwardPlan, level: int
) -> dict[int, tuple[int, str, int]]:
    """Returns reductions, then Jacobians, that a level gathers: node, kind and axis of heads."""
    slots = {
        c: (r.node, r.kind, r.head)
        for c, r in enumerate(program.reductions)
        if program.levels[c] == level
    }
    for slot, jacobian in enumerate(plan.jacobians, start=len(program.reductions)):
        if jacobian.level == level:
            slots[slot] = (jacobian.node, BLOCK_SUM if jacobian.size else SUM, jacobian.head)
    return slots


@functools.lru_cache(maxsize=512)
def _rows(program: Program, dots: tuple[int, ...], is_exact: bool) -> Source:
    plan = derive.backward_plan(program)
    gradients = {i: node_of(plan, i) for i in dots}
    return row_source.rows_kernel(program, plan.nodes, gradients, {}, is_exact)


@functools.lru_cache(maxsize=512)
def _capture(program: Program, node: int, is_exact: bool) -> Source:
    plan = derive.backward_plan(program)
    return row_source.sums_kernel(program, plan.nodes, {0: (node, SUM)}, is_exact)


@functools.lru_cache(maxsize=512)
def _columns(program: Program, dot: int, is_exact: bool) -> Source:
    plan = derive.backward_plan(program)
    return row_source.columns_kernel(program, plan.nodes, dot, node_of(plan, dot), is_exact)


def node_of(plan: derive.BackwardPlan, dot: int) -> int:
    """Returns the node of a dot product's gradient, which there is."""
    node = plan.dots[dot]
    assert node is not None
    return node


allocate = torch_impl.allocate


def forward(problem: RowProblem, is_differentiated: bool) -> Result:
    """Launches a kernel for each level and number of heads."""
    program = problem.program
    result = torch_impl.allocate(problem, is_differentiated)
    plan = derive.forward_plan(program, is_differentiated)
    arguments = {**arguments_of(problem, result, {}), **outputs_of(problem, result)}
    for level in range(1, plan.num_passes + 1):
        for axis in range(len(program.dot_heads) + 1):
            source = _sums(program, is_differentiated, level, axis, is_exact(problem))
            if source is not None:
                launch = launch_of(problem, "forward")
                launch_rows(source, problem, problem.num_heads(axis), launch, arguments)
    return result


def outputs_of(problem: RowProblem, result: Result) -> dict[str, Any]:
    """Allocates the outputs of the forward's passes."""
    found: dict[str, Any] = {}
    for c, parts in zip(problem.program.logsumexps, result.parts, strict=True):
        found.update({f"outp{c}": parts[0], f"outs{c}": parts[1]})
    for slot, x in enumerate([*result.reductions, *result.jacobians]):
        found.update(row_argument(f"out{slot}", x))
    return found


def backward(
    problem: RowProblem,
    result: Result,
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Returns gradients to operands and tensors of rows.

    Those to tensors of keys and pairs are the blocked implementation's.
    """
    program = problem.program
    plan = derive.backward_plan(program)
    arguments = arguments_of(problem, result, cotangents_of(problem, result, grads))
    count = 2 * len(problem.operands)
    of_captures = needs_grad[count:]
    own = [bool(need) and _is_of_rows(program, i) for i, need in enumerate(of_captures)]
    rest = [False] * count + [a and not b for a, b in zip(of_captures, own, strict=True)]
    if any(rest):
        out = torch_impl.backward(problem, result, grads, rest)
    else:
        out = [None] * (count + len(problem.captures))
    for i, pair in enumerate(problem.operands):
        for side, x in enumerate(pair):
            if needs_grad[2 * i + side]:
                make = torch.zeros_like if plan.dots[i] is None else torch.empty_like
                out[2 * i + side] = make(x, memory_format=torch.contiguous_format)
    for i, node in enumerate(plan.dots):
        dq, dk = out[2 * i], out[2 * i + 1]
        if node is not None and dq is not None:
            arguments.update(operand_argument(f"da{i}", dq, f"da{i}_out"))
            launch = launch_of(problem, "dq")
            launch_rows(
                _rows(program, (i,), is_exact(problem)), problem, dq.shape[1], launch, arguments
            )
        if node is not None and dk is not None:
            arguments.update(operand_argument(f"db{i}", dk, f"db{i}_out"))
            arguments[f"db{i}_share"] = 0
            launch = launch_of(problem, "dk")
            launch_columns(
                _columns(program, i, is_exact(problem)), problem, dk.shape[1], launch, arguments
            )
    for i, x in enumerate(problem.captures):
        if own[i]:
            out[count + i] = _row_gradient(problem, i, x, arguments)
    return out


def _is_of_rows(program: Program, capture: int) -> bool:
    """Whether the gradient to a captured tensor is a sum over keys that a kernel can gather."""
    plan = derive.backward_plan(program)
    node = plan.captures[capture]
    if node is None or program.captures[capture].kind != ROW:
        return False
    inside = used_by(plan.nodes, [node])
    return not any(plan.nodes[i].op in derive.HEAD_OPERATIONS for i in inside)


def _row_gradient(
    problem: RowProblem, capture: int, x: Tensor, arguments: Mapping[str, Any]
) -> Tensor:
    """Computes the gradient to a captured tensor of rows."""
    plan = derive.backward_plan(problem.program)
    node = plan.captures[capture]
    assert node is not None
    heads = problem.num_heads(plan.nodes[node].head)
    size = (problem.batch, heads, problem.num_rows)
    total = x.new_empty(size, dtype=torch.float32)
    launch = launch_of(problem, "forward")
    given = {**arguments, **row_argument("out0", total)}
    launch_rows(_capture(problem.program, node, is_exact(problem)), problem, heads, launch, given)
    return total.sum_to_size(x.shape).to(x.dtype)


def cotangents_of(
    problem: RowProblem, result: Result, grads: Sequence[Tensor | None]
) -> dict[int, Tensor]:
    """Returns the cotangents of torch_impl.cotangents_of, in memory as kernels read them."""
    seeds = torch_impl.cotangents_of(problem, result, grads)
    return {c: x.contiguous() for c, x in seeds.items()}


def arguments_of(
    problem: RowProblem, result: Result, seeds: Mapping[int, Tensor]
) -> dict[str, Any]:
    """Returns every argument that a kernel of the problem may have, by name."""
    found: dict[str, Any] = {
        "num_rows": problem.num_rows,
        "num_keys": problem.num_keys,
        "first_row": 0,
        "first_key": 0,
        "lengths_b": 0 if problem.lengths is None else problem.lengths.stride(0),
        "num_splits": 1,
        "ADD": False,
        "LANES": 1,
        "WIDTH": 1,
        "offset": problem.num_keys - problem.num_rows,
        "lengths": problem.lengths,
        "PRECISION": dot_precision(problem.like),
    }
    for i, (q, k) in enumerate(problem.operands):
        found.update(operand_argument(f"a{i}", q, f"a{i}"))
        found.update(operand_argument(f"b{i}", k, f"b{i}"))
        found[f"group{i}"] = q.shape[1] // k.shape[1]
        found[f"SIZE{i}"] = q.shape[-1]
        found[f"DIM{i}"] = padded_dim(q.shape[-1])
    for i, (x, declared) in enumerate(
        zip(problem.captures, problem.program.captures, strict=True)
    ):
        if declared.kind in CAPTURED:
            found.update(_capture_argument(f"c{i}", x, declared.kind))
    for c, (peak, row_sum) in zip(problem.program.logsumexps, result.parts, strict=True):
        found.update({f"rp{c}": peak, f"rs{c}": row_sum})  # which lie as the reduction does
    for prefix, values in (("r", dict(enumerate(result.reductions))), ("g", seeds)):
        for i, x in values.items():
            found.update(row_argument(f"{prefix}{i}", x))
    if problem.mask is not None:
        found.update(_capture_argument("mask", problem.mask, "pair"))
    return found


def _stride(x: Tensor, dim: int) -> int:
    """Returns a dimension's stride, 0 if it broadcasts."""
    return 0 if x.shape[dim] == 1 else x.stride(dim)


def operand_argument(name: str, x: Tensor, pointer: str) -> dict[str, Any]:
    """Returns a kernel's arguments for an operand: pointer and strides."""
    strides = {f"{name}_{s}": x.stride(dim) for dim, s in enumerate("bhmd")}
    # one head stays where it is, whatever the grid's
    return {pointer: x, **strides, f"{name}_h": _stride(x, 1)}


CAPTURED: dict[str, dict[str, int]] = {"row": {"m": 2}, "key": {"n": 2}, "pair": {"m": 2, "n": 3}}


def _capture_argument(name: str, x: Tensor, kind: str) -> dict[str, Any]:
    dims = CAPTURED[kind]
    places = {f"{name}_{s}": _stride(x, dims[s]) if s in dims else 0 for s in "mn"}
    return {name: x, f"{name}_b": _stride(x, 0), f"{name}_h": _stride(x, 1), **places}


def row_argument(name: str, x: Tensor) -> dict[str, Any]:
    """Returns a kernel's arguments for per-row values: pointer and strides."""
    found = {name: x, f"{name}_b": x.stride(0), f"{name}_h": _stride(x, 1)}
    return found if x.dim() == 3 else {**found, f"{name}_m": x.stride(2)}  # of rows and blocks


def launch_rows(
    source: Source,
    problem: RowProblem,
    num_heads: int,
    launch: TritonLaunch,
    arguments: Mapping[str, Any],
) -> None:
    """Launches a program for each block of rows of each head."""
    num_blocks = ceil_div(problem.num_rows, launch.block_m)
    start(source, launch, num_blocks, num_heads, problem.batch * num_heads, arguments)


def launch_columns(
    source: Source,
    problem: RowProblem,
    num_heads: int,
    launch: TritonLaunch,
    arguments: Mapping[str, Any],
) -> None:
    """Launches a program for each block of keys of each key head, and each split of its query
    heads.
    """
    num_blocks = ceil_div(problem.num_keys, launch.block_n)
    start(source, launch, num_blocks, num_heads, problem.batch * num_heads, arguments)


def start(
    source: Source,
    launch: TritonLaunch,
    num_blocks: int,
    num_heads: int,
    each: int,
    arguments: Mapping[str, Any],
) -> None:
    """Launch ``each`` programs for every block of a kernel, with the arguments that it has."""
    every = {
        **arguments,
        "num_blocks": num_blocks,
        "num_heads": num_heads,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
    }
    given = tuple([every[name] for name in source.arguments])
    count = len(given) - source.num_constants
    kernel, grid, options = compiled(source), (num_blocks * each, 1, 1), launch.options()
    runtime.launch(kernel, grid, given[:count], given[count:], options)
