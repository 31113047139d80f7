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
from torch_streamkl.linear import problem as linear_problem
from torch_streamkl.program.divergences import DIVERGENCES, Functional, named

CLAMPED = named("forward_kl", student_clamp=1e-12, teacher_clamp=1e-12).text
SQUARES = "(P-S)*(P-S)"
JS = named("js").text
# Compiling one kernel takes ten seconds. Those that `make test` compiles are a plain forward and
# backward of Hopper, those with two passes and masks, by tiles, and one of each other kind of GPU.
# Triton reads the other forms there (`test_forms_reach_triton`); `make test-slow` compiles them.
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


def portable_launches(
    target: str, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> list[Launch]:
    from torch_streamkl.attention.triton import launches as portable

    with record_launches(target) as launches:
        p = problem(head_dim, window_right=0, dtype=dtype)
        _, stats = portable.forward(p)
        grad = torch.empty(1, 32, 1024, device="cuda")
        portable.backward(p, stats, grad, NeedsGrad(True, True, False, False))
    return launches


# Bytes of the stack that a kernel may use, where the faster tiles (measured on an H200) take some.
# dK on Hopper with one query head a program (every one of a model without groups) takes the most.
STACK = {("sm_90", "dk_kernel"): 64, ("sm_90", "backward_kernel"): 88}
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


# one of each kind of matrix unit; the others are in bench/results/gpus.csv
KINDS = ("sm_80", "sm_90", "sm_100", "gfx942")


@slow  # test_offline_matrix.py compiles the same kernels, and expects its record
@pytest.mark.parametrize(
    ("target", "head_dim"),
    [("sm_100", 64), *((target, 128) for target in KINDS)],
)
def test_portable(target: str, head_dim: int) -> None:
    launches = portable_launches(target, head_dim)
    assert len(launches) == 3
    for launch in launches:
        built = compile_launch(launch, target)
        assert built.shared_bytes <= TARGETS[target].shared_bytes, launch.kernel.__name__
        assert built.spill_bytes <= STACK.get((target, launch.kernel.__name__), 0)


def gradient_launches(
    target: str, keys: int, head_dim: int = 64, rows: int = 128, batch: int = 32, **options: Any
) -> list[Launch]:
    """Both gradients of the student, 12 heads next to a teacher's 64, as models have them."""
    from torch_streamkl.attention.triton import launches as portable

    with record_launches(target) as launches:
        q, k, tq, tk = (
            torch.empty(batch, n, 12, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            for dim in (head_dim, 64)
            for n in (rows, keys)
        )
        given = {"functional": CLAMPED, "student_scale": 0.1, "teacher_scale": 0.1} | options
        p = problem_of(q, k, tq, tk, **given)[0]
        _, stats = RowStatistics.allocate(p)
        grad = torch.empty(batch, 12, rows, device="cuda")
        portable.backward(p, stats, grad, NeedsGrad(True, True, False, False))
    return launches


@pytest.mark.parametrize("is_aligned", [True, pytest.param(False, marks=slow)])
def test_elements_that_lie_together(is_aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads of 26 pairs, which no stride tells Triton, where tensors are aligned."""
    from torch_streamkl.attention import plans

    monkeypatch.setattr(plans, "_aligned", lambda _: is_aligned)
    for launch in gradient_launches("sm_90", 300, 26):
        built = compile_launch(launch, "sm_90")
        assert ("ld.global.b16" in built.asm["ptx"]) == (not is_aligned), launch.kernel.__name__


@slow  # test_offline_matrix.py has one of another GPU
@pytest.mark.parametrize("head_dim", [64, 128])
def test_full_float32(head_dim: int) -> None:
    # operands of these products lie in registers: shared by two loops they took 4.7 KB of stack
    for launch in portable_launches("sm_90", head_dim, torch.float32):
        assert compile_launch(launch, "sm_90").spill_bytes <= 256, launch.kernel.__name__


@pytest.mark.parametrize(
    "target", [pytest.param("sm_80", marks=slow), "sm_90", pytest.param("sm_100", marks=slow)]
)
def test_head_mean(target: str) -> None:
    from torch_streamkl.attention import head_mean_launches

    shapes = ((1, 128), (1, 128), (128, 192), (128, 192))  # heads and head_dim of both sides
    scales = {"student_scale": 0.1, "teacher_scale": 0.1}
    kl = DIVERGENCES["forward_kl"]
    with record_launches(target) as launches:
        q, k, tq, tk = (
            torch.empty(1, heads, 4096, dim, dtype=torch.bfloat16, device="cuda")
            for heads, dim in shapes
        )
        p = problem_of(q, k, tq, tk, functional=kl, window_right=0, head_mean=True, **scales)[0]
        _, stats = head_mean_launches.forward(p)
        grad = torch.empty(1, 1, 4096, device="cuda")
        head_mean_launches.backward(p, stats, grad, NeedsGrad(True, True, False, False))
    assert Counter(launch.kernel.__name__ for launch in launches) == {
        "lse_kernel": 2,  # of both sides
        "mean_kernel": 2,  # forward and backward
        "mean_sums_kernel": 1,
        "mean_dq_kernel": 1,
        "mean_dk_kernel": 1,
    }
    for launch in launches:
        built = compile_launch(launch, target)
        assert built.shared_bytes <= TARGETS[target].shared_bytes, launch.kernel.__name__
        assert built.spill_bytes <= HEAD_MEAN_STACK, launch.kernel.__name__
        if launch.kernel.__name__ != "lse_kernel":  # a student of one head fills the GPU, too
            assert launch.grid[0] * launch.grid[1] >= 2 * TARGETS[target].multiprocessors


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


@pytest.mark.parametrize(
    ("head_dim", "divergence", "options", "seqlen"),
    [
        pytest.param(128, "forward_kl", {"window_right": 0}, 1024, marks=slow),
        pytest.param(128, "forward_kl", {}, 1024, marks=slow),
        pytest.param(64, "reverse_kl", {"has_lengths": True}, 1024, marks=slow),
        pytest.param(128, CLAMPED, PACKED, 1024, marks=slow),
        pytest.param(64, "forward_kl", WINDOW | {"has_lengths": True}, 1024, marks=slow),
        pytest.param(128, CLAMPED, WINDOW | {"has_lengths": True}, 1024, marks=slow),
        pytest.param(64, CLAMPED, {}, 8192, marks=slow),
        pytest.param(128, "forward_kl", {}, 8192, marks=slow),
        pytest.param(128, "forward_kl", {"has_mask": True}, 1024, marks=slow),
        pytest.param(64, CLAMPED, {"has_mask": True, "window_right": 0}, 1024, marks=slow),
        (64, JS, {"has_mask": True, "window_right": 0}, 1024),
        pytest.param(128, JS, {"window_right": 0}, 1024, marks=slow),
        pytest.param(64, SQUARES, {"has_lengths": True}, 8192, marks=slow),
        pytest.param(128, SQUARES, {}, 8192, marks=slow),
        pytest.param(64, "tv", WINDOW, 1024, marks=slow),
        pytest.param(256, "forward_kl", {"window_right": 0}, 1024, marks=slow),
        pytest.param(192, CLAMPED, WINDOW | {"has_lengths": True}, 1024, marks=slow),
        pytest.param(64, "reverse_kl", {"has_bias": True}, 1024, marks=slow),
        pytest.param(128, "forward_kl", {"has_bias": True}, 1024, marks=slow),
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
    whole = not {"window_right", "has_mask", "has_bias"} & set(options)
    if whole and seqlen > 1:  # the last round is less than half full
        expected.insert(0, "combine_kernel")
    assert [launch.kernel.__name__ for launch in others] == expected
    for launch in others:
        stack = AGAIN_STACK if launch.args.get("EACH", 1) > 1 else 0
        assert compile_launch(launch, "sm_90").spill_bytes <= stack


@pytest.mark.parametrize(
    ("head_dim", "divergence", "options", "seqlen", "of_student"),
    [
        pytest.param(128, "forward_kl", {"window_right": 0}, 1024, True, marks=slow),
        pytest.param(64, "reverse_kl", WINDOW | {"has_lengths": True}, 1024, True, marks=slow),
        pytest.param(64, "forward_kl", {"window_right": 0}, 1, False, marks=slow),
        pytest.param(128, "forward_kl", {"window_right": 0}, 1, False, marks=slow),
        pytest.param(64, CLAMPED, {"window_right": 0}, 1024, True, marks=slow),
        pytest.param(128, CLAMPED, OTHER_SIDES, 1024, True, marks=slow),
        pytest.param(64, CLAMPED, {"is_packed": True}, 1024, False, marks=slow),
        pytest.param(128, CLAMPED, {"window_right": 0}, 1024, False, marks=slow),
        pytest.param(128, "forward_kl", {"has_mask": True}, 1024, True, marks=slow),
        pytest.param(64, "reverse_kl", {"has_mask": True}, 1024, True, marks=slow),
        (64, JS, {"has_mask": True}, 1024, True),
        pytest.param(128, JS, {}, 1024, True, marks=slow),
        pytest.param(64, SQUARES, {}, 1024, True, marks=slow),
        pytest.param(128, SQUARES, {}, 1024, True, marks=slow),
        pytest.param(256, "forward_kl", {"window_right": 0}, 1024, True, marks=slow),
        pytest.param(192, CLAMPED, {"is_packed": True}, 1024, False, marks=slow),
        pytest.param(64, "forward_kl", {"has_bias": True}, 1024, True, marks=slow),
        pytest.param(128, "forward_kl", {"has_bias": True}, 1024, True, marks=slow),
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
    stack = WIDER_TEACHER_STACK if "student_dim" in options else STACK["sm_90", "backward_kernel"]
    if options.get("has_bias"):
        stack = BIASED_STACK
    for launch in launches:
        if launch.args["TASK"].PERSISTENT:
            stack = HOPPER_TURNS_STACK["backward"]
        check_hopper(launch, stack)


FORMS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "packed": (128, CLAMPED, PACKED),
    "squares": (64, SQUARES, {"has_lengths": True}),
    "wide": (256, "forward_kl", {"window_right": 0}),
    "bias": (64, "forward_kl", {"has_bias": True}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_reach_triton(name: str) -> None:
    """Kernels that `make test-slow` compiles are read, by a sixth of the time."""
    from torch_streamkl.attention.hopper import launches as hopper

    head_dim, divergence, options = FORMS[name]
    with record_launches("sm_90") as launches:
        p = problem(head_dim, divergence, **options)
        _, stats = hopper.forward(p)
        grad = torch.empty(1, 32, 1024, device="cuda")
        hopper.backward(p, stats, grad, NeedsGrad(True, True, False, False))
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
        _, stats = RowStatistics.allocate(p)
        grad = torch.empty(1, 32, 4096, device="cuda")
        hopper.backward(p, stats, grad, NeedsGrad(True, True, False, False))
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


def head(width: int) -> linear_problem.Head:
    hidden, weight = (
        torch.empty(rows, width, dtype=torch.bfloat16, device="cuda") for rows in (512, 152064)
    )
    return linear_problem.Head(hidden, weight)


@pytest.mark.parametrize(
    ("target", "divergence"),
    [
        ("gfx942", "forward_kl"),
        ("sm_90", "tv"),
        *(
            pytest.param(target, divergence, marks=slow)
            for target in KINDS
            for divergence in ("forward_kl", "tv")
            if (target, divergence) not in (("gfx942", "forward_kl"), ("sm_90", "tv"))
        ),
    ],
)
def test_rows_of_logits(target: str, divergence: str) -> None:
    from torch_streamkl.linear.triton import launches as row_kernels

    with record_launches(target) as launches:
        p = linear_problem.LinearProblem(
            head(3584), head(5120), Functional.of(DIVERGENCES[divergence])
        )
        student, teacher = (torch.empty(512, 152064, device="cuda").bfloat16() for _ in range(2))
        weights = linear_problem.RowWeights(torch.empty(512, device="cuda"), None)
        wanted = linear_problem.NeedsGrad(student_hidden=True, student_weight=True)
        out = linear_problem.RowValues.allocate(p)
        row_kernels.values_and_gradient(p, student, teacher, out, weights, wanted)
    (launch,) = launches
    built = compile_launch(launch, target)
    assert built.shared_bytes <= TARGETS[target].shared_bytes
    assert built.spill_bytes == 0
