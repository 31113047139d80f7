"""Caches the launch arguments that all problems with the same metadata share.

Choosing tiles, grouping arguments, and Triton's look-up of a compiled kernel take several times as
long as a small kernel runs. A `Plan` keeps all of it, and a later call passes pointers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from torch.nn import Parameter

from torch_streamkl.attention.heuristics import triton_launch
from torch_streamkl.attention.hopper_tiles import HopperLaunch, has_one_bias
from torch_streamkl.attention.problem import AttentionProblem, RowStatistics, Side
from torch_streamkl.caches import Bounded
from torch_streamkl.kernels.arguments import Config, Form, MaskArgs, Outputs, SideArgs, SideConfig
from torch_streamkl.kernels.pointwise import helper
from torch_streamkl.kernels.tiles import TritonLaunch, padded_dim
from torch_streamkl.runtime import capture, launch_table
from torch_streamkl.runtime.devices import dot_precision, matmul_precision
from torch_streamkl.runtime.launch import APART, launch

T = TypeVar("T")
LOG2E = 1.4426950408889634
LOWEST_FILL = -1e29
NUM_STATE_FIELDS = 9  # of arguments.State
NUM_SUMS = 4  # f, h, g and the count of allowed keys


@dataclass(frozen=True)
class Stage:
    """Configures one kernel of a problem: tiles, compile-time configuration and grid."""

    launch: TritonLaunch
    options: dict[str, int]
    config: Config
    num_blocks: int  # of query rows, in a sequence
    num_key_blocks: int
    programs: int  # blocks of rows of all sequences and heads
    keys_per_split: int


class Plan:
    """Converts the metadata of a problem into kernel arguments."""

    def __init__(self, problem: AttentionProblem) -> None:
        functional = problem.functional
        self.form = Form.of(functional.closed_form)
        pointwise = functional.bilinear is None or problem.head_mean
        self.helper = helper(functional.text) if pointwise else None
        # of Hopper's forward alone (launch.sums_squares)
        self.squares = Form(*[0.0] * 6, functional.squares) if functional.squares else None
        self.inv_temperature = LOG2E / problem.temperature
        # finfo.min is a usual fill, and would be -inf times log2(e)
        fill = problem.mask_value
        self.fill = 0.0 if fill == -math.inf else max(fill, LOWEST_FILL)
        self.stats_stride = problem.batch * problem.num_heads * problem.seqlen_q
        self.num_sequences = num_sequences(problem)
        self._sides = tuple(_side_metadata(problem, side) for side in problem.sides)
        tensors = (
            problem.mask, problem.key_lengths, problem.cu_seqlens_q, problem.cu_seqlens_k
        )  # fmt: skip
        self._mask_strides = _broadcast_strides(problem.mask)
        without_tensors = all(x is None for x in tensors)  # a plan keeps no tensor alive
        self._masks = _masks(problem, self._mask_strides) if without_tensors else None
        self._has_jumps = functional.has_jumps
        self._compiled: dict[Any, Any] = {}
        self._kept: dict[Any, Any] = {}

    def stage(self, problem: AttentionProblem, kernel: str) -> Stage:
        """Returns the configuration of a kernel, by its name in `heuristics.triton_launch`."""
        return self.kept(
            ("stage", kernel), lambda: _stage_of(problem, triton_launch(problem, kernel))
        )

    def kept(self, key: Any, make: Callable[[], T]) -> T:
        """Returns what make() returned the first time. It may depend on metadata only."""
        found: T | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
        return found

    def arguments(self, problem: AttentionProblem) -> tuple[SideArgs, SideArgs, MaskArgs]:
        """Returns the three grouped arguments that every kernel starts with."""
        masks = self._masks or _masks(problem, self._mask_strides)
        student, teacher = self._sides
        return _side(problem.student, student), _side(problem.teacher, teacher), masks

    def outputs(self, value: Tensor, stats: RowStatistics) -> Outputs:
        """Returns the grouped arguments of values and statistics."""
        return Outputs(value, stats.student, stats.teacher, self.stats_stride)

    def run(
        self,
        name: Any,
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
        tensors: tuple[Tensor | None, ...],
    ) -> None:
        """Launches a kernel; ``constants`` are its compile-time arguments, last in its signature.

        A name stands for one kernel with numbers that Triton compiles alike: whether one is 1 or a
        multiple of 16 is compiled in. ``tensors`` are those whose pointers may not be aligned to
        16 bytes, which Triton compiles another kernel for.
        """
        is_aligned = _aligned(tensors)
        if not is_aligned:
            constants = tuple(map(_of_any_address, constants))
        # calls of one plan choose among kernels by what its key does not have, as `deterministic`
        name = name, id(kernel)
        known = self._compiled.get(name) if is_aligned else None
        if self._has_jumps:
            options = {**options, **APART}
        compiled = launch(kernel, grid, arguments, constants, options, known)
        if is_aligned and compiled is not None:  # None from the interpreter
            self._compiled[name] = compiled


_plans: Bounded[Plan] = Bounded()


def plan_of(problem: AttentionProblem) -> Plan:
    """Returns the plan of a problem's metadata, kept for the next one."""
    key = _key(problem)
    try:
        plan = _plans.get(key)
    except TypeError:  # symbolic sizes have no hash
        return Plan(problem)
    if plan is None:
        plan = Plan(problem)
        _plans[key] = plan
    return plan


def clear_plans() -> None:
    """Forgets every plan. Call it when the choice of launches changes."""
    _plans.clear()
    capture.CacheEpoch.number += 1


launch_table.ON_CHANGE.append(clear_plans)


def tensors_of(problem: AttentionProblem) -> tuple[Tensor | None, ...]:
    """Returns the problem's tensors, in the order of the operators' arguments."""
    s, t = problem.student, problem.teacher
    return (
        s.q, s.k, t.q, t.k, s.bias, t.bias, s.alibi_slopes, t.alibi_slopes, s.sink, t.sink,
        problem.mask, problem.key_lengths, problem.cu_seqlens_q, problem.cu_seqlens_k,
        problem.teacher_lse,
    )  # fmt: skip


def _key(problem: AttentionProblem) -> Any:
    s, t = problem.student, problem.teacher
    return (
        s.q.device, matmul_precision(), problem.functional.text,
        s.scale, s.softcap, t.scale, t.softcap, problem.temperature, problem.mask_value,
        problem.window_left, problem.window_right, problem.head_mean,
        problem.max_seqlen_q, problem.max_seqlen_k, has_one_bias(problem),
        *[None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors_of(problem)],
    )  # fmt: skip


def _aligned(tensors: tuple[Tensor | None, ...]) -> bool:
    address = 0
    for x in tensors:
        if x is not None:
            if type(x) is not Tensor and type(x) is not Parameter:  # a fake one has no address
                return False
            address |= x.data_ptr()
    return address % 16 == 0


def _of_any_address(constant: Any) -> Any:
    """Sets a kernel's constant for tensors that may begin at any address."""
    if isinstance(constant, Config):
        student, teacher = constant.STUDENT, constant.TEACHER
        return constant._replace(
            STUDENT=student._replace(TOGETHER=1), TEACHER=teacher._replace(TOGETHER=1)
        )
    return constant


def _together(side: Side) -> int:
    """Counts the elements of q and k that one aligned load may read together.

    Triton knows of strides only whether they are multiples of 16. If some are not, as with a
    head_dim of 26, it would load elements one by one. 1 if Triton knows enough, or the alignment
    is unknown.
    """
    *outer_q, inner_q = side.q.stride()
    *outer_k, inner_k = side.k.stride()
    numbers = (side.head_dim, *outer_q, *outer_k, inner_q, inner_k)
    if not all(isinstance(n, int) for n in numbers) or inner_q != 1 or inner_k != 1:
        return 1
    if all(n % 16 == 0 for n in (*outer_q, *outer_k)):
        return 1
    return math.gcd(16 // side.q.element_size(), side.head_dim, *outer_q, *outer_k)


def _stage_of(problem: AttentionProblem, launch: TritonLaunch) -> Stage:
    config = config_of(problem, launch)
    rows, keys = problem.longest
    num_blocks = triton.cdiv(rows, launch.block_m)
    num_key_blocks = triton.cdiv(keys, launch.block_n)
    return Stage(
        launch,
        launch.options(),
        config,
        num_blocks,
        num_key_blocks,
        num_blocks * problem.num_heads * num_sequences(problem),
        triton.cdiv(num_key_blocks, launch.num_splits) * launch.block_n,
    )


def num_sequences(problem: AttentionProblem) -> int:
    """Counts the sequences: packed ones, or batch elements."""
    if problem.cu_seqlens_q is not None:
        return problem.cu_seqlens_q.shape[0] - 1
    return problem.batch


def _side_metadata(problem: AttentionProblem, side: Side) -> tuple[tuple[Any, ...], ...]:
    scale = side.scale if side.softcap else side.scale * LOG2E / problem.temperature
    return (
        side.q.stride(),
        side.k.stride(),
        _broadcast_strides(side.bias),
        (scale, side.softcap, side.group),
    )


def _side(side: Side, metadata: tuple[tuple[Any, ...], ...]) -> SideArgs:
    q, k, bias, factors = metadata
    return SideArgs(
        side.q, *q, side.k, *k, side.bias, *bias, side.alibi_slopes, side.sink, *factors
    )


def _masks(problem: AttentionProblem, strides: tuple[int, ...]) -> MaskArgs:
    mask = problem.mask
    return MaskArgs(
        None if mask is None else mask.view(torch.uint8),
        *strides,
        problem.key_lengths,
        problem.window_left or 0,
        problem.window_right or 0,
        problem.cu_seqlens_q,
        problem.cu_seqlens_k,
        problem.seqlen_q,
        problem.seqlen_k,
    )


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Returns the strides of a tensor, with 0 for dimensions of size 1, so that it need not be
    expanded.
    """
    if x is None:
        return (0, 0, 0, 0)
    return tuple(
        0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def config_of(problem: AttentionProblem, launch: TritonLaunch | HopperLaunch) -> Config:
    """Returns compile-time choices of a kernel."""
    functional = problem.functional
    guarded = functional.guarded
    return Config(
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        STUDENT=_side_config(problem.student, guarded.student_floor if guarded else 0.0),
        TEACHER=_side_config(problem.teacher, guarded.teacher_floor if guarded else 0.0),
        HAS_MASK=problem.mask is not None,
        KEY_MASK=problem.has_key_mask,
        HAS_LEFT=problem.window_left is not None,
        HAS_RIGHT=problem.window_right is not None,
        DENSE=_looks_at_every_tile(problem),
        FILLED=problem.mask_value != -math.inf,
        FILL_VANISHES=functional.absent == 0.0,
        TWO_PASS=functional.bilinear is None,
        GUARDED=guarded is not None,
        PRECISION=dot_precision(problem.student.q),
    )


def _side_config(side: Side, floor: float) -> SideConfig:
    return SideConfig(
        DIM=side.head_dim,
        BLOCK_D=padded_dim(side.head_dim),
        TOGETHER=_together(side),
        SOFTCAP=side.softcap != 0.0,
        BIAS=side.bias is not None,
        ALIBI=side.alibi_slopes is not None,
        SINK=side.sink is not None,
        FLOOR=floor,
    )


def _looks_at_every_tile(problem: AttentionProblem) -> bool:
    """Whether all tiles are masked element by element.

    Next to products in full float32 that costs nothing. A second loop for tiles without a mask
    makes compilers keep what both share in registers, which spills: 149 instead of 45 ms for dQ
    and dK of 8 heads of 64 at 8192 on an H200.
    """
    student, teacher, q = problem.student, problem.teacher, problem.student.q
    if problem.mask is not None and not problem.has_key_mask:
        return True
    if student.bias is not None or teacher.bias is not None:
        return True
    # the interpreter compiles nothing, and its tests are of all loops
    is_compiled = q.device.type == "cuda"
    return is_compiled and q.dtype == torch.float32 and dot_precision(q) == "ieee"
