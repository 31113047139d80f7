"""Computes gradients to per-row values of a known loss in one kernel, one thread for each row.

Plain torch takes forty launches for them, one after the other, between the sums and the gradients
of every chunk of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_streamkl.kernels.tiles import TritonLaunch, ceil_div
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.steps import used_by
from torch_streamkl.rows import derive, losses
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem, Slices, part
from torch_streamkl.rows.program import Program
from torch_streamkl.rows.torch_impl import Result
from torch_streamkl.rows.triton import launches as row_kernels
from torch_streamkl.rows.triton.writer import Source

ROWS = TritonLaunch(128, 1, 4, 1)
# that a kernel computes as torch does, NaN and infinities included
EXACT = {"add", "sub", "mul", "mul0", "div", "div0", "neg", "float", "log", "exp", "where"}
EXACT |= {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "detach"}


def cotangents_of(
    problem: RowProblem,
    result: Result,
    loss: RowLoss,
    tensors: Sequence[Tensor],
    at: Slices,
) -> dict[int, Tensor]:
    """Returns the gradient to every reduction of a block, of the loss that its rows add to."""
    program = problem.program
    source = _source(program, loss)
    if source is None:
        grads = losses.gradients(problem, loss, dict(enumerate(result.reductions)), tensors, at)
        ordered = [grads.get(c) for c in program.outputs]
        return row_kernels.cotangents_of(problem.of_block(*at), result, ordered)
    num_rows = at[1].stop - at[1].start
    size = (len(program.reductions), 1, 1, num_rows)
    out = result.reductions[0].new_empty(size, dtype=problem.compute_dtype)
    arguments: dict[str, Any] = {"num_rows": num_rows, "out": out}
    arguments |= {f"r{c}": x for c, x in enumerate(result.reductions)}
    arguments |= {f"j{k}": x for k, x in enumerate(result.jacobians)}
    for i, x in enumerate(tensors):
        if f"t{i}" not in source.arguments:  # those of keys have no rows
            continue
        mine = part(x, at[0], slice(None), at[1])
        arguments |= {f"t{i}": mine, f"t{i}_m": 0 if mine.shape[2] == 1 else mine.stride(2)}
    blocks = ceil_div(num_rows, ROWS.block_m)
    row_kernels.start(source, ROWS, blocks, 1, 1, arguments)
    return dict(enumerate(out.unbind(0)))


@functools.lru_cache(maxsize=256)
def _source(program: Program, loss: RowLoss) -> Source | None:
    """Writes the kernel; returns None if it would not compute exactly what torch does."""
    nodes, slopes = loss.slopes
    arguments, lines = ["num_rows", "out"], []

    def take(*names: str) -> None:
        arguments.extend(name for name in names if name not in arguments)

    for i in used_by(nodes, slopes.values()):
        node = nodes[i]
        number = int(node.value) if node.op in ("reduction", "capture") else 0
        match node.op:
            case "const" if node.dtype == "float":
                lines.append(f"v{i} = tl.full([BLOCK_M], float('{node.value!r}'), tl.float32)")
            case "reduction":
                take(f"r{number}")
                lines.append(f"v{i} = tl.load(r{number} + m, mask=inside, other=0.0)")
            case "capture":
                take(f"t{number}", f"t{number}_m")
                cast = {"float": ".to(tl.float32)", "bool": " != 0", "int": ""}[node.dtype]
                place = f"t{number} + m * t{number}_m"
                lines.append(f"v{i} = tl.load({place}, mask=inside, other=0){cast}")
            case op if op in EXACT and node.dtype != "int":
                values = [f"v{a}" for a in node.args]
                lines.append(f"v{i} = {OPERATIONS[op].triton.format(*values)}")
            case _:
                return None
    count = len(program.reductions)
    for c in range(count):
        value = f"v{slopes[c]}.to(tl.float64)" if c in slopes else "0.0 * m.to(tl.float64)"
        lines.append(f"d{c} = {value}")
    jacobians = derive.forward_plan(program, True).jacobians
    for c in range(count - 1, -1, -1):
        for k, jacobian in enumerate(jacobians):
            if jacobian.reduction == c:
                take(f"j{k}")
                lines.append(f"x = tl.load(j{k} + m, mask=inside, other=0.0)")
                lines.append(f"d{jacobian.by} += tl.where(d{c} == 0, 0.0, d{c} * x)")
    for c in range(count):
        lines.append(f"tl.store(out + {c} * num_rows + m, d{c}.to(tl.float32), mask=inside)")
    head = ["m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)", "inside = m < num_rows"]
    body = "\n    ".join([*head, *lines])
    name = "row_program_seeds"
    text = f"@triton.jit\ndef {name}({', '.join(arguments)}, BLOCK_M: tl.constexpr):\n    {body}\n"
    return Source(text, name, (*arguments, "BLOCK_M"), 1)
