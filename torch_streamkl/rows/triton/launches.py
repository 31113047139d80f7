"""Launches of the kernels that rows/triton/source.py writes for a row program."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_streamkl.launches.devices import gpu_of
from torch_streamkl.launches.launch import matmul_limit
from torch_streamkl.rows import blocked, derive
from torch_streamkl.rows.blocked import Result
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import Program
from torch_streamkl.rows.triton import source as row_source
from torch_streamkl.rows.triton.source import Source

BLOCKS = (64, 32, 16)  # rows, and keys, of a tile
# of a block's rows of all dots, whose gradients are registers: beyond, kilobytes of a thread spill
MOST_ELEMENTS = 64 * 256
MOST_ELEMENTS_OF_AMD = 32 * 256
WIDEST_OF_REGISTERS = 128  # of a tile of 64, where matrix units read operands from registers
MOST_ELEMENTS_OF_FLOAT32 = 16 * 256
MAX_DIM = 256  # of operands, which a tile holds whole


def obstacle(problem: RowProblem, is_differentiated: bool) -> str:
    """Why a problem has no kernels; empty if it has."""
    plan = derive.backward_plan(problem.program) if is_differentiated else None
    found = row_source.obstacle(problem.program, plan)
    if found:
        return f"programs with {found} have no kernels"
    dim = max(q.shape[-1] for q, _ in problem.operands)
    if dim > MAX_DIM:
        return f"operands have at most {MAX_DIM} dimensions in kernels, got {dim}"
    if problem.compute_dtype == torch.float64:
        return "kernels compute in float32, and operands are float64"
    q = problem.operands[0][0]
    limit = matmul_limit(q.device, q.dtype, dim) if q.device.type == "cuda" else None
    if limit is None and block_of(problem) == 0:
        room = gpu_of(q.device).shared_bytes // 1024
        limit = f"holds tiles of all dots in {room} KiB, got {len(problem.operands)} of them"
    return "" if limit is None else f"a kernel {limit}"


def block_of(problem: RowProblem) -> int:
    """Rows and keys of a tile: the most that registers and shared memory hold, 0 if none fits."""
    q = problem.operands[0][0]
    width = sum(_padded(x.shape[-1]) for x, _ in problem.operands)
    gpu = gpu_of(q.device) if q.device.type == "cuda" else None
    if gpu is None:
        return BLOCKS[0]
    # the tiles that stream by are there twice but on AMD GPUs; those that stay, where matrix units
    # read them from shared memory; and a tile of weights
    copies = 1 if gpu.is_hip else 2 if gpu.operands_in_registers else 3
    most = MOST_ELEMENTS_OF_AMD if gpu.is_hip else MOST_ELEMENTS
    if _is_float32(q):
        most = MOST_ELEMENTS_OF_FLOAT32
    is_wide = gpu.operands_in_registers and width > WIDEST_OF_REGISTERS
    for block in BLOCKS[1:] if is_wide else BLOCKS:
        shared = (copies * width + block) * block * q.element_size() + 2048
        is_narrow = block * width <= most or block == BLOCKS[-1]
        if is_narrow and shared <= gpu.shared_bytes:
            return block
    return 0


def _is_float32(q: Tensor) -> bool:
    """Whether operands are multiplied in float32, where they lie in registers."""
    on_gpu = q.device.type == "cuda"
    return q.element_size() == 4 or (on_gpu and not gpu_of(q.device).multiplies_half)


@functools.lru_cache(maxsize=512)
def _compiled(source: Source) -> Any:
    """The jit function of a text, created once."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:16]
    filename = f"<streamkl row program {digest}>"
    # Triton reads the source of a jit function through inspect, which asks linecache
    linecache.cache[filename] = (
        len(source.text), None, source.text.splitlines(keepends=True), filename,
    )  # fmt: skip
    scope = {"triton": triton, "tl": tl, "__name__": f"torch_streamkl.kernels.generated_{digest}"}
    exec(compile(source.text, filename, "exec"), scope)
    return scope[source.name]


@functools.lru_cache(maxsize=512)
def _level(program: Program, is_differentiated: bool, level: int) -> tuple[Source, list[int]]:
    plan = derive.forward_plan(program, is_differentiated)
    return row_source.level_kernel(program, plan, level)


@functools.lru_cache(maxsize=512)
def _rows(program: Program, dots: tuple[int, ...]) -> Source:
    return row_source.rows_kernel(program, derive.backward_plan(program), dots)


@functools.lru_cache(maxsize=512)
def _columns(program: Program, dot: int) -> Source:
    return row_source.columns_kernel(program, derive.backward_plan(program), dot)


def forward(problem: RowProblem, is_differentiated: bool) -> Result:
    """A launch for each level."""
    program = problem.program
    result = blocked.allocate(problem, is_differentiated)
    arguments_of_parts: dict[str, Any] = {}
    every = [*result.reductions, *result.jacobians]
    for c, parts in zip(program.logsumexps, result.parts, strict=True):
        arguments_of_parts.update({f"outp{c}": parts[0], f"outs{c}": parts[1]})
    plan = derive.forward_plan(program, is_differentiated)
    arguments = {**_arguments(problem, result, {}), **arguments_of_parts}
    heads = problem.max_heads
    for slot, x in enumerate(every):
        arguments.update(_row_argument(f"out{slot}", x))
    grid = (triton.cdiv(problem.num_rows, arguments["BLOCK_M"]), problem.batch * heads)
    for level in range(1, plan.num_passes + 1):
        source, slots = _level(program, is_differentiated, level)
        if slots:
            _launch(source, grid, {**arguments, "num_heads": heads})
    return result


def backward(
    problem: RowProblem,
    result: Result,
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients to operands; those to captured tensors are the blocked implementation's."""
    program = problem.program
    if any(wanted[2 * len(problem.operands) :]):
        return blocked.backward(problem, result, grads, wanted)
    plan = derive.backward_plan(program)
    seeds = blocked.row_gradients(problem, result, grads)
    for c, reduction in enumerate(program.reductions):
        if c not in seeds:
            seeds[c] = result.reductions[c].new_zeros(problem.row_shape(reduction.head))
        seeds[c] = seeds[c].contiguous()
    arguments = _arguments(problem, result, seeds)
    out: list[Tensor | None] = [None] * (2 * len(problem.operands) + len(problem.captures))
    for i, pair in enumerate(problem.operands):
        for side, x in enumerate(pair):
            if wanted[2 * i + side]:
                make = torch.zeros_like if plan.dots[i] is None else torch.empty_like
                out[2 * i + side] = make(x, memory_format=torch.contiguous_format)
    active = [i for i, node in enumerate(plan.dots) if node is not None]
    dots = tuple(i for i in active if out[2 * i] is not None)
    if dots:
        for i in dots:
            arguments.update(_operand_argument(f"da{i}", out[2 * i], f"da{i}_out"))
        num_blocks = triton.cdiv(problem.num_rows, arguments["BLOCK_M"])
        grid = (num_blocks, problem.batch * problem.max_heads)
        _launch(_rows(program, dots), grid, {**arguments, "num_heads": problem.max_heads})
    for i in active:
        target = out[2 * i + 1]
        if target is None:
            continue
        arguments.update(_operand_argument(f"db{i}", target, f"db{i}_out"))
        kv_heads = target.shape[1]
        grid = (triton.cdiv(problem.num_keys, arguments["BLOCK_N"]), problem.batch * kv_heads)
        _launch(_columns(program, i), grid, {**arguments, "num_heads": kv_heads})
    return out


def _arguments(problem: RowProblem, result: Result, seeds: Mapping[int, Tensor]) -> dict[str, Any]:
    """Every argument that a kernel of the problem may have, by name."""
    is_full = torch.get_float32_matmul_precision() == "highest"
    found: dict[str, Any] = {
        "num_warps": 8 if _is_float32(problem.operands[0][0]) else 4,
        "num_rows": problem.num_rows,
        "num_keys": problem.num_keys,
        "lengths": problem.lengths,
        "PRECISION": "ieee" if is_full else "tf32",
        "BLOCK_M": block_of(problem),
        "BLOCK_N": block_of(problem),
    }
    for i, (q, k) in enumerate(problem.operands):
        found.update(_operand_argument(f"a{i}", q, f"a{i}"))
        found.update(_operand_argument(f"b{i}", k, f"b{i}"))
        found[f"group{i}"] = q.shape[1] // k.shape[1]
        found[f"SIZE{i}"] = q.shape[-1]
        found[f"DIM{i}"] = _padded(q.shape[-1])
    for i, (x, declared) in enumerate(
        zip(problem.captures, problem.program.captures, strict=True)
    ):
        found.update(_capture_argument(f"c{i}", x, declared.kind))
    for c, (peak, mass) in zip(problem.program.logsumexps, result.parts, strict=True):
        found.update({f"rp{c}": peak, f"rs{c}": mass})  # which lie as the reduction does
    for prefix, values in (("r", dict(enumerate(result.reductions))), ("g", seeds)):
        for i, x in values.items():
            found.update(_row_argument(f"{prefix}{i}", x))
    if problem.mask is not None:
        found.update(_capture_argument("mask", problem.mask, "pair"))
    return found


def _padded(dim: int) -> int:
    """Dimensions of a tile."""
    return max(16, triton.next_power_of_2(dim))


def _stride(x: Tensor, dim: int) -> int:
    """0 where a dimension broadcasts."""
    return 0 if x.shape[dim] == 1 else x.stride(dim)


def _operand_argument(name: str, x: Tensor | None, pointer: str) -> dict[str, Any]:
    assert x is not None
    strides = {f"{name}_{s}": x.stride(dim) for dim, s in enumerate("bhmd")}
    # one head stays where it is, whatever the grid's
    return {pointer: x, **strides, f"{name}_h": _stride(x, 1)}


def _capture_argument(name: str, x: Tensor, kind: str) -> dict[str, Any]:
    dims = {"row": {"m": 2}, "key": {"n": 2}, "pair": {"m": 2, "n": 3}}[kind]
    places = {f"{name}_{s}": _stride(x, dims[s]) if s in dims else 0 for s in "mn"}
    return {name: x, f"{name}_b": _stride(x, 0), f"{name}_h": _stride(x, 1), **places}


def _row_argument(name: str, x: Tensor) -> dict[str, Any]:
    return {name: x, f"{name}_b": x.stride(0), f"{name}_h": _stride(x, 1)}


def _launch(source: Source, grid: tuple[int, int], arguments: Mapping[str, Any]) -> None:
    given = {name: arguments[name] for name in source.arguments}
    num_warps = arguments["num_warps"]
    _compiled(source)[grid](**given, num_warps=num_warps, num_stages=2, enable_fp_fusion=True)
