"""Launches the portable kernels of a head-averaged teacher (head_mean.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.attention.heuristics import head_mean_splits
from torch_streamkl.attention.plans import LOG2E, Plan, Stage, plan_of, tensors_of
from torch_streamkl.attention.problem import AttentionProblem, NeedsGrad, RowStatistics, Side
from torch_streamkl.attention.triton import head_mean, head_mean_gradients, head_mean_sums
from torch_streamkl.kernels.arguments import Mean
from torch_streamkl.kernels.splits import combine_splits, gradient_args, new_splits, num_splits
from torch_streamkl.kernels.tiles import ceil_div

MEAN_BYTES = 64 << 20  # of the mean in memory, unless one block of rows takes more
# of the student, and to its queries; in the order of Wanted
GRADIENTS = ((True, True), (True, False), (False, True), (False, False))


@dataclass(frozen=True)
class Chunk:
    """Holds blocks of rows whose mean is in memory, numbered as the kernels that read it do."""

    mean: Mean
    first: int
    stop: int


class Launcher:
    """Launches the kernels of one call."""

    def __init__(self, problem: AttentionProblem, stats: RowStatistics) -> None:
        self.problem = problem
        self.stats = stats
        self.plan: Plan = plan_of(problem)
        self.ratio = problem.teacher.num_heads // problem.num_heads
        self.student, self.teacher, self.masks = self.plan.arguments(problem)
        self.tensors = (*tensors_of(problem), stats.student, stats.teacher)
        self.stage: Stage = self.plan.stage(problem, "forward")  # of what reads the mean
        self.mean_stage: Stage = self.stage_of_mean()
        mean = self.mean_stage.launch
        # blocks of what reads the mean to one of the mean's, and in a sequence (some without rows)
        self.finer = mean.block_m // self.stage.launch.block_m
        self.num_blocks = self.mean_stage.num_blocks * self.finer
        self.keys = self.mean_stage.num_key_blocks * mean.block_n
        most = max(1, MEAN_BYTES // (4 * mean.block_m * self.keys))
        self.num_chunks = ceil_div(self.mean_stage.programs, most)
        self.mean_blocks = ceil_div(self.mean_stage.programs, self.num_chunks)  # of a chunk
        self.blocks = self.mean_blocks * self.finer

    def run(self, name: Any, *launch: Any) -> None:
        """Launches a kernel that is compiled for this launcher's numbers of blocks.

        They depend on the kernel that writes the mean, which is another one on Hopper, and may be
        1 here and 2 there.
        """
        self.plan.run((name, self.mean_stage.launch.block_m), *launch)

    def log_sum_exps(self) -> None:
        """Computes the log-sum-exps of all rows of both sides."""
        problem, stats = self.problem, self.stats
        self._log_sum_exps(self.student, stats.student, 1, student=True)
        if problem.teacher_lse is None:
            self.teacher_log_sum_exps()
        else:
            torch.mul(problem.teacher_lse, LOG2E, out=stats.teacher_lse)

    def teacher_log_sum_exps(self) -> None:
        self._log_sum_exps(self.teacher, self.stats.teacher, self.ratio, student=False)

    def stage_of_mean(self) -> Stage:
        return self.plan.stage(self.problem, "mean")

    def _log_sum_exps(self, side: Any, out: Tensor, ratio: int, student: bool) -> None:
        stage = self.plan.stage(self.problem, "lse")
        self.run(
            ("lse", student),
            head_mean.lse_kernel,
            (stage.programs * ratio, 1, 1),
            (
                side, self.masks, out, stage.num_blocks, self.problem.num_heads * ratio, ratio,
                self.plan.inv_temperature, self.plan.fill,
            ),
            (student, stage.config),
            stage.options,
            self.tensors,
        )  # fmt: skip

    def chunks(self) -> Iterator[Chunk]:
        """Yields chunks of row blocks, whose means replace each other in memory."""
        stage, total = self.mean_stage, self.mean_stage.programs
        rows = self.mean_blocks * stage.launch.block_m
        mean = Mean(self.stats.student.new_empty((rows, self.keys)), self.keys)
        for first in range(0, total, self.mean_blocks):
            stop = min(first + self.mean_blocks, total)
            self.write_mean(mean, first, stop)
            yield Chunk(mean, first * self.finer, stop * self.finer)

    def write_mean(self, mean: Mean, first: int, stop: int) -> None:
        """Writes the blocks of the mean from first to stop."""
        self.run_mean(mean, first, stop - first, self.mean_stage.num_blocks)

    def run_mean(
        self, mean: Mean, first: int, blocks: int, num_blocks: int, small: Tensor | None = None
    ) -> None:
        """Runs the portable kernel on num_blocks blocks a sequence: all, or those of `small`."""
        stage = self.plan.stage(self.problem, "mean")
        self.run(
            "mean" if small is None else "some means",  # compiled apart
            head_mean.mean_kernel,
            (blocks * stage.num_key_blocks, 1, 1),
            (
                self.teacher, self.masks, mean, first, self.stats.teacher, num_blocks,
                stage.num_key_blocks, self.problem.num_heads, self.ratio,
                self.plan.inv_temperature, small, 0 if small is None else small.shape[1],
            ),
            (stage.config,),
            stage.options,
            self.tensors,
        )  # fmt: skip

    def sums(self, chunk: Chunk, value: Tensor, student_delta: Tensor, splits: int) -> None:
        """Writes values and the student's delta of a chunk, for each split of the keys."""
        self.run(
            "sums",
            head_mean_sums.mean_sums_kernel,
            (chunk.stop - chunk.first, splits, 1),
            (
                self.student, self.masks, chunk.mean, chunk.first, value, student_delta,
                self.stats.student, self.stats.teacher, self.stats.student_delta.numel(),
                self.num_blocks, self.problem.num_heads, self.ratio, self.keys_of(splits),
                self.plan.inv_temperature, self.plan.fill,
            ),
            (self.plan.helper, self.stage.config),
            self.stage.options,
            (*self.tensors, value, student_delta),
        )  # fmt: skip

    def group_sums(self, chunk: Chunk, sums: Tensor) -> None:
        """Writes the teacher's delta of a chunk, for all teacher heads."""
        self.run(
            "group_sums",
            head_mean_sums.group_sums_kernel,
            ((chunk.stop - chunk.first) * self.ratio, 1, 1),
            (
                self.student, self.teacher, self.masks, chunk.mean, chunk.first, sums,
                self.stats.student, self.stats.teacher, self.num_blocks, self.problem.num_heads,
                self.ratio, self.plan.inv_temperature, self.plan.fill,
            ),
            (self.plan.helper, self.stage.config),
            self.stage.options,
            (*self.tensors, sums),
        )  # fmt: skip

    def dq(
        self, chunk: Chunk, sums: Tensor, grad: Tensor, partials: Tensor, student: bool
    ) -> None:
        """Writes a chunk's rows of dQ."""
        side, own_ratio = self.own(student)
        splits = num_splits(partials)
        self.run(
            ("dq", student),
            head_mean_gradients.mean_dq_kernel,
            ((chunk.stop - chunk.first) * own_ratio, splits, 1),
            (
                self.student, self.teacher, self.masks, chunk.mean, chunk.first, grad,
                self.stats.student, self.stats.teacher, sums,
                gradient_args(partials, side.scale / self.problem.temperature), self.num_blocks,
                self.problem.num_heads, self.ratio, self.keys_of(splits),
                self.plan.inv_temperature,
            ),
            (student, self.plan.helper, self.stage.config),
            self.stage.options,
            (*self.tensors, sums, grad),
        )  # fmt: skip

    def dk(
        self, chunk: Chunk, sums: Tensor, grad: Tensor, partials: Tensor, student: bool
    ) -> None:
        """Adds a chunk's rows to dK."""
        side, _ = self.own(student)
        splits = num_splits(partials)
        rows_of_split = ceil_div(self.num_blocks, splits) * self.stage.launch.block_m
        self.run(
            ("dk", student),
            head_mean_gradients.mean_dk_kernel,
            (self.key_programs(side), splits, 1),
            (
                self.student, self.teacher, self.masks, chunk.mean, chunk.first, chunk.stop, grad,
                self.stats.student, self.stats.teacher, sums,
                gradient_args(partials, side.scale / self.problem.temperature), self.num_blocks,
                self.stage.num_key_blocks, self.problem.num_heads, self.ratio, side.num_kv_heads,
                side.group, rows_of_split, self.plan.inv_temperature,
            ),
            (student, self.plan.helper, self.stage.config),
            self.stage.options,
            (*self.tensors, sums, grad),
        )  # fmt: skip

    def new_splits(self, student: bool, queries: bool) -> Tensor:
        """Allocates the splits to which dQ or dK of a side is written."""
        problem, stage = self.problem, self.stage
        side, own_ratio = self.own(student)
        if queries:
            programs = self.blocks * own_ratio
            return new_splits(side.q, head_mean_splits(problem, programs, stage.num_key_blocks))
        splits = head_mean_splits(problem, self.key_programs(side), self.num_blocks)
        return new_splits(side.k, splits, adds=self.num_chunks > 1)

    def own(self, student: bool) -> tuple[Side, int]:
        """Returns a side, and its number of heads for each head of the student."""
        return (self.problem.student, 1) if student else (self.problem.teacher, self.ratio)

    def key_programs(self, side: Side) -> int:
        return self.stage.num_key_blocks * side.num_kv_heads * self.plan.num_sequences

    def keys_of(self, splits: int) -> int:
        """Returns the keys of one split."""
        return ceil_div(self.stage.num_key_blocks, splits) * self.stage.launch.block_n


def forward(
    problem: AttentionProblem, kernels: type[Launcher] = Launcher
) -> tuple[Tensor, RowStatistics]:
    """Returns per-row values and statistics, float32."""
    value, stats = RowStatistics.allocate(problem)
    launcher = kernels(problem, stats)
    launcher.log_sum_exps()
    splits = head_mean_splits(problem, launcher.blocks, launcher.stage.num_key_blocks)
    sums = (value, stats.student_delta)
    partials = sums
    if splits > 1:
        values, student_sums = value.new_empty((2, splits, *value.shape))
        partials = (values, student_sums)
    has_sink = problem.teacher.sink is not None  # whose gradient is computed from the statistics
    if not has_sink:  # it costs a pass over all heads, and few teachers have gradients
        stats.teacher_delta.zero_()
    for chunk in launcher.chunks():
        launcher.sums(chunk, *partials, splits)
        if has_sink:
            launcher.group_sums(chunk, stats.teacher_delta)
    if splits > 1:
        for out, parts in zip(sums, partials, strict=True):
            torch.sum(parts, 0, out=out)
    return value, stats


def backward(
    problem: AttentionProblem,
    stats: RowStatistics,
    grad: Tensor,
    needs_grad: NeedsGrad,
    kernels: type[Launcher] = Launcher,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the needed gradients, each summed in a fixed order."""
    grad = grad.to(torch.float32).contiguous()
    launcher = kernels(problem, stats)
    group = stats.teacher_delta
    makes_group_sums = needs_grad.teacher and problem.teacher.sink is None
    if makes_group_sums:
        group = torch.empty_like(group)
    inputs = problem.queries_and_keys
    partials = [
        launcher.new_splits(student, queries) if is_needed else None
        for (student, queries), is_needed in zip(GRADIENTS, needs_grad, strict=True)
    ]
    for chunk in launcher.chunks():
        if makes_group_sums:
            launcher.group_sums(chunk, group)
        for (student, queries), out in zip(GRADIENTS, partials, strict=True):
            if out is not None:
                gradient = launcher.dq if queries else launcher.dk
                gradient(chunk, stats.student_delta if student else group, grad, out, student)
    dq, dk, teacher_dq, teacher_dk = (
        None if out is None else combine_splits(out, x)
        for out, x in zip(partials, inputs, strict=True)
    )
    return dq, dk, teacher_dq, teacher_dk
