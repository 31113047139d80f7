"""Kernels for GPUs that are not here: they compile, fit, do not spill, keep wgmma asynchronous."""

import re
from collections import Counter
from typing import Any

import pytest
import torch

from bench.offline import (
    TARGETS,
    Launch,
    check_frontend,
    compile_launch,
    ptxas_messages,
    record_launches,
    stack_in_main_loops,
)
from torch_streamkl.attention.hopper_tiles import HopperLaunch
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.problem import AttentionProblem, NeedsGrad, RowStatistics
from torch_streamkl.program.divergences import DIVERGENCES, named

CLAMPED = named("forward_kl", student_clamp=1e-12, teacher_clamp=1e-12).text
SQUARES = "(P-S)*(P-S)"
JS = named("js").text
# Compiling one kernel takes five seconds, and `make test` has few: `make test-slow` compiles the
# forms that are only read by Triton there, and test_offline_matrix.py has those of the record.
slow = pytest.mark.slow


def problem(
    head_dim: int,
    divergence: str = "forward_kl",
    seqlen: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
    student_dim: int = 0,
    key_heads: tuple[int, int] = (8, 8),
    has_lengths: bool = False,
    is_packed: bool = False,
    has_mask: bool = False,
    has_bias: bool = False,
    **options: Any,
) -> AttentionProblem:
    tensors = [
        torch.empty(1, heads, seqlen, dim, dtype=dtype, device="cuda")
        for dim, kv in zip((student_dim or head_dim, head_dim), key_heads, strict=True)
        for heads in (32, kv)
    ]
    scale = head_dim**-0.5
    scales = {"student_scale": scale, "teacher_scale": scale}
    if has_lengths:
        options["key_lengths"] = torch.empty(1, dtype=torch.int32, device="cuda")
    if is_packed:
        offsets = torch.empty(4, dtype=torch.int32, device="cuda")
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= {"max_seqlen_q": seqlen // 2, "max_seqlen_k": seqlen // 2}
    if has_mask:
        mask = torch.empty(1, 1, seqlen, seqlen, dtype=torch.bool, device="cuda")
        options["mask"] = mask
    if has_bias:
        bias = torch.empty(1, 1, seqlen, seqlen, dtype=dtype, device="cuda")
        options |= {"student_bias": bias, "teacher_bias": bias}
    functional = DIVERGENCES.get(divergence, divergence)
    return problem_of(*tensors, functional=functional, **scales, **options)[0]


# Bytes of the stack that a kernel may use, where the faster tiles (measured on an H200) take some.
STACK = 88
BIASED_STACK = 176  # of gradients with a bias, which impl="hopper" asks for; no main loop reads it
WIDER_TEACHER_STACK = 128  # of a clamped dQ whose teacher has another head_dim
# Triton keeps numbers of the block's place there: check_hopper sees that no main loop reads them.
HOPPER_FORWARD_STACK = 72
# of those that go by tiles, whose programs keep what they need for the next block or pass
HOPPER_TURNS_STACK = {"forward": 288, "two passes": 376, "backward": 128}
# of the kernel that repeats blocks, where a program looks at several: it keeps what is the same
# for all of them, and no program reads it that has nothing to repeat
AGAIN_STACK = 128
HEAD_MEAN_STACK = 8  # two registers of sums at sm_100


def of_student(module: Any, p: AttentionProblem, stats: RowStatistics | None = None) -> None:
    """Launches both gradients of the student, after a forward where there are no statistics."""
    stats = module.forward(p)[1] if stats is None else stats
    grad = torch.empty(stats.student.shape[1:], device="cuda")
    module.backward(p, stats, grad, NeedsGrad(True, True, False, False))


@pytest.mark.parametrize("is_aligned", [True, False])
def test_elements_that_lie_together(is_aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads of 26 pairs, which no stride tells Triton, where tensors are aligned."""
    from torch_streamkl.attention import plans
    from torch_streamkl.attention.triton import launches as portable

    monkeypatch.setattr(plans, "_aligned", lambda _: is_aligned)
    with record_launches("sm_90") as launches:
        tensors = [
            torch.empty(32, n, 12, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            for dim in (26, 64)
            for n in (128, 300)
        ]
        p = problem_of(*tensors, functional=CLAMPED, student_scale=0.1, teacher_scale=0.1)[0]
        of_student(portable, p, RowStatistics.allocate(p)[1])
    dq, _ = launches
    built = compile_launch(dq, "sm_90")
    assert ("ld.global.b16" in built.asm["ptx"]) == (not is_aligned)


@pytest.mark.parametrize(
    ("target", "is_compiled"),
    [("sm_90", False), *(pytest.param(x, True, marks=slow) for x in ("sm_80", "sm_90", "sm_100"))],
)
def test_head_mean(target: str, is_compiled: bool) -> None:
    from torch_streamkl.attention import head_mean_launches

    shapes = ((1, 128), (1, 128), (128, 192), (128, 192))  # heads and head_dim of both sides
    given = {"student_scale": 0.1, "teacher_scale": 0.1, "functional": DIVERGENCES["forward_kl"]}
    with record_launches(target) as launches:
        tensors = [
            torch.empty(1, heads, 4096, dim, dtype=torch.bfloat16, device="cuda")
            for heads, dim in shapes
        ]
        of_student(
            head_mean_launches, problem_of(*tensors, window_right=0, head_mean=True, **given)[0]
        )
    assert Counter(launch.kernel.__name__ for launch in launches) == {
        "lse_kernel": 2,  # of both sides
        "mean_kernel": 2,  # forward and backward
        "mean_sums_kernel": 1,
        "mean_dq_kernel": 1,
        "mean_dk_kernel": 1,
    }
    for launch in launches:
        name = launch.kernel.__name__
        if name != "lse_kernel":  # a student of one head fills the GPU, too
            assert launch.grid[0] * launch.grid[1] >= 2 * TARGETS[target].multiprocessors
        if not is_compiled:
            check_frontend(launch, target)
            continue
        built = compile_launch(launch, target)
        assert built.shared_bytes <= TARGETS[target].shared_bytes, name
        assert built.spill_bytes <= HEAD_MEAN_STACK, name


def arrivals_alone(ptx: str) -> list[str]:
    """Arrivals of one thread at an mbarrier that its warps, which used the memory, do not meet.

    NOTE [What racecheck does not follow] in bench/offline/sanitize.py.
    """
    found, used = [], False
    for line in ptx.splitlines():
        if re.search(r"\b(bar|barrier)\.(warp\.)?sync\b", line):
            used = False
        elif "ld.shared" in line or "st.shared" in line:
            used = True
        elif "mbarrier.arrive.shared" in line and used:
            found.append(line)
    return found


def test_an_arrival_alone_is_found() -> None:
    store, meet, arrive = (
        "st.shared.b32 [a], r;",
        "bar.warp.sync -1;",
        "mbarrier.arrive.shared::cta",
    )
    assert not arrivals_alone("\n".join((store, meet, arrive)))
    assert arrivals_alone("\n".join((meet, store, arrive))) == [arrive]


def check_hopper(launch: Launch, stack: int) -> None:
    built = compile_launch(launch, "sm_90")
    assert built.shared_bytes <= TARGETS["sm_90"].shared_bytes
    assert built.spill_bytes <= stack
    assert built.asm["ptx"].count("wgmma.mma_async") > 0
    if launch.kernel.__name__ == "forward_kernel":
        task = launch.args["TASK"]
        has_plain_loop = not (task.SECOND or task.CONFIG.HAS_MASK or task.OTHER.BIASED)
        assert not (has_plain_loop and stack_in_main_loops(built.asm["cubin"]))
    assert "mbarrier.arrive.shared" in built.asm["ptx"]
    assert not arrivals_alone(built.asm["ptx"])
    said = built.said or ptxas_messages(built.asm["ptx"])
    assert not re.search(r"C75\d\d", said), "wgmma is serialised"


# key heads of the student, then of the teacher, next to 8 of both elsewhere
OTHER_SIDES = {"student_dim": 64, "key_heads": (4, 8)}
PACKED = OTHER_SIDES | {"window_right": 0, "is_packed": True}
WINDOW = {"window_left": 511, "window_right": 0}


def without_tables(launches: list[Launch]) -> list[Launch]:
    """Those that do not list the blocks of packed sequences."""
    tables = [launch for launch in launches if launch.kernel.__name__ == "table_kernel"]
    assert all(compile_launch(launch, "sm_90").spill_bytes == 0 for launch in tables)
    return [launch for launch in launches if launch.kernel.__name__ != "table_kernel"]


CAUSAL, LENGTHS, MASK = {"window_right": 0}, {"has_lengths": True}, {"has_mask": True}
BIAS = {"has_bias": True}


@slow
@pytest.mark.parametrize(
    ("head_dim", "divergence", "options", "seqlen"),
    [
        (128, "forward_kl", CAUSAL, 1024),
        (64, "reverse_kl", LENGTHS, 1024),
        (128, CLAMPED, PACKED, 1024),
        (64, "forward_kl", WINDOW | LENGTHS, 1024),
        (128, CLAMPED, WINDOW | LENGTHS, 1024),
        (64, CLAMPED, {}, 8192),
        (128, "forward_kl", {}, 8192),
        (128, "forward_kl", MASK, 1024),
        (64, CLAMPED, MASK | CAUSAL, 1024),
        (64, JS, MASK | CAUSAL, 1024),
        (128, JS, CAUSAL, 1024),
        (64, SQUARES, LENGTHS, 8192),
        (128, SQUARES, {}, 8192),
        (64, "tv", WINDOW, 1024),
        (256, "forward_kl", CAUSAL, 1024),
        (192, CLAMPED, WINDOW | LENGTHS, 1024),
        (64, "reverse_kl", BIAS, 1024),
        (128, "forward_kl", BIAS, 1024),
    ],
)
def test_hopper(head_dim: int, divergence: str, options: dict[str, Any], seqlen: int) -> None:
    from torch_streamkl.attention.hopper import launches as hopper

    with record_launches("sm_90") as launches:
        hopper.forward(problem(head_dim, divergence, seqlen, **options))
    if options.get("has_mask"):
        for launch in launches[:2]:
            assert compile_launch(launch, "sm_90").spill_bytes <= 8
        launches = launches[2:]
    forward, *others = without_tables(launches)
    by_tiles, is_wide = forward.args["TASK"].PERSISTENT, forward.args["TASK"].WIDE
    assert is_wide == (head_dim > 128)
    asks = "window_left" in options or "has_mask" in options or divergence in (JS, "tv")
    assert by_tiles == (asks and not is_wide)
    two_passes = "two passes" if divergence in (JS, "tv") else "forward"
    check_hopper(forward, HOPPER_TURNS_STACK[two_passes] if by_tiles else HOPPER_FORWARD_STACK)
    expected = ["recompute_kernel"]
    if not {"window_right", "has_mask", "has_bias"} & set(options):
        expected.insert(0, "combine_kernel")  # the last round is less than half full
    assert [launch.kernel.__name__ for launch in others] == expected
    for launch in others:
        stack = AGAIN_STACK if launch.args.get("EACH", 1) > 1 else 0
        assert compile_launch(launch, "sm_90").spill_bytes <= stack


@slow
@pytest.mark.parametrize(
    ("head_dim", "divergence", "options", "seqlen", "of_student"),
    [
        (128, "forward_kl", CAUSAL, 1024, True),
        (64, "reverse_kl", WINDOW | LENGTHS, 1024, True),
        (64, "forward_kl", CAUSAL, 1, False),
        (64, CLAMPED, CAUSAL, 1024, True),
        (128, CLAMPED, OTHER_SIDES, 1024, True),
        (64, CLAMPED, {"is_packed": True}, 1024, False),
        (128, CLAMPED, CAUSAL, 1024, False),
        (128, "forward_kl", MASK, 1024, True),
        (64, "reverse_kl", MASK, 1024, True),
        (64, JS, MASK, 1024, True),
        (128, JS, {}, 1024, True),
        (64, SQUARES, {}, 1024, True),
        (128, SQUARES, {}, 1024, True),
        (256, "forward_kl", CAUSAL, 1024, True),
        (192, CLAMPED, {"is_packed": True}, 1024, False),
        (64, "forward_kl", BIAS, 1024, True),
        (128, "forward_kl", BIAS, 1024, True),
    ],
)
def test_hopper_backward(
    head_dim: int, divergence: str, options: dict[str, Any], seqlen: int, of_student: bool
) -> None:
    from torch_streamkl.attention.hopper import launches as hopper

    with record_launches("sm_90") as launches:
        p = problem(head_dim, divergence, seqlen, **options)
        _, stats = RowStatistics.allocate(p)
        grad = torch.empty(1, 32, seqlen, device="cuda")
        wanted = NeedsGrad(of_student, of_student, not of_student, not of_student)
        hopper.backward(p, stats, grad, wanted)
    if options.get("has_mask"):
        names = [launch.kernel.__name__ for launch in launches[:2]]
        assert names == ["bit_mask_kernel", "lists_kernel"]
        launches = launches[2:]
    launches = without_tables(launches)
    assert len(launches) == 2
    stack = WIDER_TEACHER_STACK if "student_dim" in options else STACK
    if options.get("has_bias"):
        stack = BIASED_STACK
    for launch in launches:
        if launch.args["TASK"].PERSISTENT:
            stack = HOPPER_TURNS_STACK["backward"]
        check_hopper(launch, stack)


@pytest.mark.parametrize(
    ("head_dim", "divergence", "options"),
    [
        (128, CLAMPED, PACKED),
        (64, SQUARES, LENGTHS),
        (64, JS, MASK | CAUSAL),
        (256, "forward_kl", CAUSAL),
        (64, "forward_kl", BIAS),
    ],
)
def test_forms_reach_triton(head_dim: int, divergence: str, options: dict[str, Any]) -> None:
    """Kernels that `make test-slow` compiles are read, by a sixth of the time."""
    from torch_streamkl.attention.hopper import launches as hopper

    with record_launches("sm_90") as launches:
        of_student(hopper, problem(head_dim, divergence, **options))
    main = {x.kernel.__name__: x for x in launches if x.kernel.is_gluon()}
    assert {"forward_kernel", "backward_kernel"} <= main.keys()
    for launch in main.values():
        check_frontend(launch, "sm_90")


@pytest.mark.parametrize(
    ("window_right", "divergence"),
    [
        (0, CLAMPED),
        pytest.param(None, CLAMPED, marks=slow),
        pytest.param(0, "forward_kl", marks=slow),
        pytest.param(None, "forward_kl", marks=slow),
    ],
)
def test_hopper_sums_in_any_order(window_right: int | None, divergence: str) -> None:
    from torch_streamkl.attention.hopper import launches as hopper

    with record_launches("sm_90") as launches:
        p = problem(64, divergence, 4096, window_right=window_right, deterministic=False)
        of_student(hopper, p, RowStatistics.allocate(p)[1])
    both, in_order = launches
    check_hopper(both, 0)
    assert in_order.kernel.__name__ == "gradient_kernel"
    assert compile_launch(in_order, "sm_90").spill_bytes == 0
    # 16 bytes a thread, a warp in a row: otherwise the memory takes three times as long
    assert compile_launch(both, "sm_90").asm["ptx"].count("add.v4.f32") == 64 * 64 // 128 // 4


@pytest.mark.parametrize("groups", [2, pytest.param(4, marks=slow)])
def test_other_hopper_launch(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_streamkl.attention.hopper import launches as hopper

    launch = HopperLaunch(64, 64, groups, slots=2)
    monkeypatch.setattr(hopper, "hopper_launch", lambda _: launch)
    with record_launches("sm_90") as launches:
        hopper.forward(problem(64, window_right=0))
    check_hopper(launches[0], HOPPER_FORWARD_STACK)
    assert launches[0].grid == (32 * 1024 // (groups * 64), 1, 1)
