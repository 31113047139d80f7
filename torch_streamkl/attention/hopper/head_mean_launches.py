"""Launches the Hopper kernels of a head-averaged teacher (head_mean.py).

The portable kernels read the mean, and compute the student's log-sum-exps.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch_streamkl.attention import head_mean_launches as portable
from torch_streamkl.attention.hopper import head_mean
from torch_streamkl.attention.hopper.descriptors import descriptor
from torch_streamkl.attention.hopper_tiles import HOPPER_HEAD_LSE, HOPPER_HEAD_MEAN, HopperLaunch
from torch_streamkl.attention.plans import LOG2E, Stage, config_of
from torch_streamkl.kernels.arguments import Mean
from torch_streamkl.kernels.tiles import ceil_div

CHUNK = head_mean.CHUNK.value


class Launcher(portable.Launcher):
    """Launches the kernels of one call."""

    def stage_of_mean(self) -> Stage:
        launch = HOPPER_HEAD_MEAN
        rows = launch.groups * launch.block_m
        like = self.plan.stage(self.problem, "mean")
        assert like.launch.block_n == launch.block_n and rows % like.launch.block_m == 0
        num_blocks = ceil_div(self.problem.seqlen_q, rows)
        return replace(
            like,
            launch=replace(like.launch, block_m=rows),
            num_blocks=num_blocks,
            programs=num_blocks * self.problem.num_heads * self.plan.num_sequences,
        )

    def teacher_log_sum_exps(self) -> None:
        launch = HOPPER_HEAD_LSE
        teacher = self.problem.teacher
        blocks = ceil_div(self.problem.seqlen_q, launch.groups * launch.block_m)
        self.run(
            "hopper lse",
            head_mean.heads_lse_kernel,
            (blocks * teacher.num_heads * self.plan.num_sequences, 1, 1),
            (
                *self.operands(launch), self.stats.teacher, blocks, teacher.num_heads,
                teacher.group, *self.masks_and_scale(),
            ),
            (launch.groups, *self.chunks_and_slots(launch), self.config(launch)),
            {"num_warps": 4},
            (*self.tensors,),
        )  # fmt: skip

    def write_mean(self, mean: Mean, first: int, stop: int) -> None:
        launch, stage = HOPPER_HEAD_MEAN, self.mean_stage
        teacher = self.problem.teacher
        rows = (stop - first) * stage.launch.block_m
        # written by a kernel of torch's: descriptors need a context, which a thread of autograd's
        # has from its first launch on
        small = self.stats.teacher.new_zeros((stage.num_key_blocks, rows))
        self.run(
            "hopper mean",
            head_mean.heads_mean_kernel,
            ((stop - first) * stage.num_key_blocks, 1, 1),
            (
                *self.operands(launch), mean, small, first, self.stats.teacher, stage.num_blocks,
                stage.num_key_blocks, rows, self.problem.num_heads, self.ratio,
                teacher.group, *self.masks_and_scale(),
            ),
            (launch.groups, *self.chunks_and_slots(launch), self.config(launch)),
            {"num_warps": 4},
            (*self.tensors,),
        )  # fmt: skip
        of_portable = stage.launch.block_m // self.plan.stage(self.problem, "mean").launch.block_m
        self.run_mean(
            mean,
            first * of_portable,
            (stop - first) * of_portable,
            stage.num_blocks * of_portable,
            small,
        )

    def operands(self, launch: HopperLaunch) -> tuple[Any, Any]:
        teacher, plan = self.problem.teacher, self.plan
        return (
            descriptor(plan, teacher.q, launch.block_m, CHUNK),
            descriptor(plan, teacher.k, launch.block_n, CHUNK),
        )

    def chunks_and_slots(self, launch: HopperLaunch) -> tuple[int, int]:
        """Returns the chunks of a tile of keys, and the stages that fit in shared memory."""
        chunks = self.problem.teacher.head_dim // CHUNK
        return chunks, launch.slots if launch is HOPPER_HEAD_MEAN else max(2, 9 // chunks)

    def config(self, launch: HopperLaunch) -> Any:
        return self.plan.kept(
            ("head mean", launch.block_n, launch.groups), lambda: config_of(self.problem, launch)
        )

    def masks_and_scale(self) -> tuple[Any, ...]:
        problem = self.problem
        return (
            problem.seqlen_q, problem.seqlen_k, problem.key_lengths,
            problem.window_left or 0, problem.window_right or 0,
            problem.teacher.scale * LOG2E / problem.temperature,
        )  # fmt: skip


forward, backward = (
    functools.partial(function, kernels=Launcher)
    for function in (portable.forward, portable.backward)
)
