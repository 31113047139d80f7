"""Who the Hopper kernels take, who they are chosen for, and how their blocks are shared: anywhere.

Torch tells of an H200, wherever a test runs, and tensors are fake.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.offline import check_frontend, looks_like, record_launches, signature_of
from torch_streamkl import attention_kl
from torch_streamkl.attention import heuristics, hopper_tiles, limits, ops
from torch_streamkl.attention.hopper import launches as hopper
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.plans import Plan
from torch_streamkl.attention.problem import AttentionProblem, NeedsGrad
from torch_streamkl.program.divergences import DIVERGENCES, Functional, named

BF16 = torch.bfloat16
SQUARES = "(P-S)*(P-S)"


@pytest.fixture
def h200() -> Iterator[None]:
    with looks_like("sm_90"), FakeTensorMode():
        yield


on_h200 = pytest.mark.usefixtures("h200")


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def problem(
    dims: tuple[int, int] = (128, 128),
    heads: tuple[int, ...] = (4, 4),
    sizes: tuple[int, int] = (256, 256),
    batch: int = 2,
    dtype: torch.dtype = BF16,
    mask_heads: int = 0,
    mask_rows: int | None = None,
    biases: tuple[Any, ...] = (),
    has_lengths: bool = False,
    **options: Any,
) -> AttentionProblem:
    """``heads`` are those of queries and keys, of the student and, if it differs, the teacher.

    Of ``biases``, shapes and dtypes, one is both sides'; None leaves a side without.
    """
    (rows, keys), (student, teacher) = sizes, (heads[:2], heads[-2:])
    tensors = [
        empty(batch, n, length, dim, dtype=dtype)
        for dim, of_side in zip(dims, (student, teacher), strict=True)
        for n, length in zip(of_side, sizes, strict=True)
    ]
    if mask_heads:
        options["mask"] = empty(batch, mask_heads, mask_rows or rows, keys, dtype=torch.bool)
    if biases:
        made = [None if x is None else empty(*x[0], dtype=x[1]) for x in biases]
        options |= {"student_bias": made[0], "teacher_bias": made[-1]}
    if has_lengths:
        options["key_lengths"] = empty(batch, dtype=torch.int32)
    return problem_of(*tensors, **options)[0]


def of(divergence: str, **guards: float) -> dict[str, Any]:
    return {"functional": named(divergence, **guards).text}


MEANS = {"dims": (128, 192), "heads": (1, 1, 128, 128), "sizes": (4096, 4096), "batch": 1,
         "head_mean": True, "window_right": 0}  # fmt: skip
# what a problem is, and why it is refused
LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "window": ({"window_left": 5, "window_right": 3}, ""),
    "left": ({"window_left": 5}, ""),
    "softcap": ({"student_softcap": 20.0}, "takes no alibi"),
    "filled": ({"window_right": 0, "mask_value": -1e4}, "masks that remove keys"),
    # divergences
    "jeffreys": (of("jeffreys"), "logarithms under one of P and S"),
    "tv": (of("tv"), ""),
    "clamps": (of("forward_kl", student_clamp=1e-12, teacher_clamp=1e-12), ""),
    "clamp of reverse": (of("reverse_kl", student_clamp=1e-3), ""),
    "eps": (of("forward_kl", student_eps=1e-12), ""),
    "clamp of js": (of("js", student_clamp=1e-12), ""),
    # mask tensors
    "mask": ({"mask_heads": 1, "heads": (4, 2)}, ""),
    "mask of heads": ({"mask_heads": 4}, ""),
    "mask of grouped heads": (
        {"mask_heads": 4, "heads": (4, 2)}, "a mask per head with as many key heads as heads",
    ),
    "mask of two passes": ({"mask_heads": 1, **of("tv")}, "with a divergence of two passes"),
    # both sides
    "groups": ({"heads": (8, 8, 8, 2), "dims": (64, 128), "has_lengths": True}, ""),
    "more groups": ({"heads": (8, 1, 8, 8), "dims": (128, 64)}, ""),
    "many heads": ({"heads": (256, 1), "dims": (64, 64)}, ""),
    "shares": ({"heads": (256, 1, 256, 256), "dims": (64, 64)}, "at most 128 shares, got 256"),
    # tensors
    "head_dims that zeros fill up": ({"dims": (8, 200)}, ""),
    "odd head_dim": ({"dims": (64, 100)}, "up to 256, multiples of 8, got (64, 100)"),
    "head_dim": ({"dims": (264, 64)}, "up to 256, multiples of 8, got (264, 64)"),
    "wide": ({"dims": (256, 256)}, ""),
    "wide window": ({"dims": (192, 64), "window_right": 0, "window_left": 5}, ""),
    "wide of two passes": (
        {"dims": (256, 64), "functional": SQUARES}, "up to 128 with a mask tensor, a bias or two",
    ),
    "float32": ({"dtype": torch.float32}, "takes float16 and bfloat16"),
    # biases of the student
    "bias": ({"biases": (((1, 1, 256, 256), BF16), None)}, ""),
    "bias of heads": ({"biases": (((2, 4, 256, 256), torch.float32), None)}, ""),
    "bias of keys": ({"biases": (((2, 1, 1, 256), torch.float16), None)}, ""),
    "bias of rows": ({"biases": (((2, 1, 256, 1), BF16), None)}, "whose keys are neighbours"),
    "bias of float64": (
        {"biases": (((1, 1, 256, 256), torch.float64), None)},
        "a bias of float16, bfloat16 or float32",
    ),
    "bias of two passes": (
        {"biases": (((1, 1, 256, 256), BF16), None), "functional": SQUARES}, "two passes",
    ),
    # head means
    "mean": (MEANS, ""),
    "mean of window": (MEANS | {"window_left": 5}, ""),
    "mean, softcap of the student": (MEANS | {"student_softcap": 20.0}, ""),
    "mean, softcap": (MEANS | {"teacher_softcap": 20.0}, "without bias, alibi, sink, softcap"),
    "mean, filled": (MEANS | {"mask_value": -1e4}, "masks that remove keys"),
    "mean, js": (MEANS | of("js"), ""),
}  # fmt: skip


@on_h200
@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    options, reason = LIMITS[name]
    p = problem(**options)
    limit = limits.hopper_limit(p)
    assert limit is None if not reason else reason in str(limit)
    if reason:
        with pytest.raises(NotImplementedError) as error:
            heuristics.select_implementation(p, "hopper")
        assert reason in str(error.value)


@on_h200
def test_rows_that_are_not_aligned_are_refused() -> None:
    strides = (512 * 129, 256 * 129, 129, 1)
    x = torch.empty_strided((1, 2, 256, 128), strides, device="cuda", dtype=BF16)
    assert "aligned to 16 bytes" in str(limits.hopper_limit(problem_of(x, x, x, x)[0]))


def test_needs_a_hopper_gpu() -> None:
    x = torch.randn(1, 1, 8, 64)
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0, got device cpu"):
        attention_kl(x, x, x, x, impl="hopper")


LONG = {"heads": (32, 32), "sizes": (8192, 8192), "batch": 1}
OF_64 = LONG | {"dims": (64, 64)}
FEW = LONG | {"sizes": (64, 131072)}
BIAS = ((1, 1, 8192, 8192), BF16)
# what the default chooses for values and for gradients
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "long": (LONG | {"sizes": (8192, 16384)}, "hopper hopper"),
    # few blocks of rows: the portable kernels split the keys
    "few blocks": (LONG | {"sizes": (64, 16384)}, "triton triton"),
    # enough, but a third of a block of rows is used
    "parts of blocks": (LONG | {"sizes": (64, 16384), "batch": 16}, "triton triton"),
    # launches would take longer than kernels
    "short": (LONG | {"sizes": (640, 640)}, "triton triton"),
    # what was measured
    "js": (LONG | of("js"), "hopper hopper"),
    "js of beta": (LONG | of("js", beta=0.1) | {"window_right": 0}, "hopper hopper"),
    "js of 64": (OF_64 | of("js"), "hopper hopper"),
    "eps of 64": (OF_64 | of("forward_kl", student_eps=1e-8), "triton triton"),
    "tv": (LONG | of("tv"), "hopper hopper"),
    "tv of 64": (OF_64 | of("tv"), "triton triton"),
    "eps": (LONG | of("forward_kl", student_eps=1e-8), "hopper hopper"),
    "another": (LONG | {"functional": "sqrt(P)*logS"}, "triton triton"),
    "mask": (LONG | {"mask_heads": 1}, "hopper hopper"),
    "mask of 64": (OF_64 | {"mask_heads": 1}, "hopper hopper"),
    "mask of keys of 64": (OF_64 | {"mask_heads": 1, "mask_rows": 1}, "triton triton"),
    "clamps under a mask of 64": (
        OF_64 | {"mask_heads": 1} | of("forward_kl", student_clamp=1e-12), "triton triton",
    ),
    "short mask of 64": (OF_64 | {"mask_heads": 1, "sizes": (2048, 2048)}, "triton triton"),
    "one bias of 64": (OF_64 | {"biases": (BIAS,)}, "hopper hopper"),
    "two biases of 64": (OF_64 | {"biases": (BIAS, BIAS)}, "triton triton"),
    "clamps": (LONG | of("forward_kl", student_clamp=1e-12), "hopper hopper"),
    # every row of 8192 keys has a probability below 1e-3: each would be computed twice
    "clamps that are reached": (LONG | of("forward_kl", student_clamp=1e-3), "triton triton"),
    "wide": (LONG | {"dims": (256, 256)}, "hopper hopper"),
    # tiles of 64, 128 and 256 columns
    "head_dim of 40": (LONG | {"dims": (40, 40)}, "hopper hopper"),
    "head_dim of 96": (LONG | {"dims": (96, 96), "window_right": 0}, "hopper hopper"),
    "head_dim of 160": (LONG | {"dims": (160, 160)}, "hopper hopper"),
    "32 next to 64": (LONG | {"dims": (32, 64)}, "hopper hopper"),
    "half of the columns": (LONG | {"dims": (32, 32)}, "triton triton"),
    "mask of 72": (LONG | {"dims": (72, 112), "mask_heads": 1}, "hopper hopper"),
    "js of 72 next to 64": (LONG | {"dims": (72, 64)} | of("js"), "triton triton"),
    "wide of groups": (LONG | {"dims": (192, 192), "heads": (32, 8), "window_right": 0},
                       "hopper hopper"),
    "wide of two passes": (LONG | {"dims": (256, 256), "functional": SQUARES}, "triton triton"),
    "one bias": (LONG | {"biases": (BIAS,)}, "hopper hopper"),
    "two biases": (LONG | {"biases": (BIAS, BIAS)}, "hopper triton"),
    "bias of the student": (LONG | {"biases": (BIAS, None)}, "hopper triton"),
    # 256 rows of 8 heads, in parts
    "groups as rows": (FEW | {"heads": (32, 8)}, "hopper hopper"),
    "no groups": (FEW, "triton triton"),
    "fewer rows": (FEW | {"sizes": (16, 131072), "heads": (32, 8)}, "triton triton"),
    "few rows of a window": (
        FEW | {"heads": (32, 8), "window_left": 5000, "window_right": 0}, "triton triton",
    ),
    "mean": (MEANS, "hopper hopper"),
    "short mean": (MEANS | {"sizes": (512, 512)}, "triton triton"),
    "mean of another head_dim": (MEANS | {"dims": (128, 96)}, "triton triton"),
}  # fmt: skip


@on_h200
@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    options, expected = CHOICES[name]
    p = problem(**options)
    found = [heuristics.select_implementation(p, "auto", backward) for backward in (False, True)]
    assert found == expected.split()
    assert heuristics.LSE_UNIT["hopper"] == heuristics.LSE_UNIT["triton"] == math.log(2.0)


# ------------------------------------------------------------------------------------ blocks
@on_h200
@pytest.mark.parametrize(
    ("blocks", "tiles", "expected"),
    [
        (1376, 128, (1320, 2)),  # 56 blocks for 132 multiprocessors
        (1320, 128, (1320, 1)),
        (1419, 128, (1419, 1)),  # 99 blocks fill the round well
        (1364, 256, (1320, 3)),
        (1330, 256, (1320, 8)),  # 13 would fill the round better, and be one kernel more
        (1330, 47, (1320, 4)),
        (1330, 24, (1320, 3)),  # parts of fewer tiles would take longer
        (60, 15, (60, 1)),
        (60, 16, (0, 2)),
    ],
)
def test_parts_of_last_round(blocks: int, tiles: int, expected: tuple[int, int]) -> None:
    assert hopper_tiles.splits_of_last_wave(blocks, tiles, torch.device("cuda")) == expected


@on_h200
@pytest.mark.parametrize(
    ("group", "blocks", "options", "expected"),
    [
        (32, 64, {"window_right": 0}, 4),
        (32, 64, {}, 2),
        (4, 512, {"window_right": 0}, 1),
        (4, 128, {"window_right": 0}, 2),
        (6, 60, {"window_right": 0}, 6),
        (1, 1, {}, 1),
        (7, 40, {}, 7),
        # shares have one key head of each side
        (8, 512, {"together": 4}, 2),
        (4, 512, {"together": 8}, 1),
        (6, 512, {"together": 4}, 3),
        (32, 512, {"together": 1}, 32),
        (8, 33, {"together": 8}, 4),
        (12, 512, {"together": 9}, 4),
    ],
)
def test_key_shares(group: int, blocks: int, options: dict[str, Any], expected: int) -> None:
    options = dict(options)
    together = {k: options.pop(k) for k in ("together",) if k in options}
    p = problem((64, 64), (1 if together else group, 1), (8192, 8192), 1, **options)
    assert heuristics.key_splits(p, group, blocks, resident=1, **together) == expected


@pytest.mark.parametrize(
    ("rows", "keys", "expected"),
    [
        (256, 131072, 8),  # 16 blocks of 132 multiprocessors
        (256, 4096, 2),  # at least 32 tiles each
        (256, 2048, 1),
        (4096, 131072, 1),  # enough blocks
    ],
)
@on_h200
def test_who_shares_query_gradients(rows: int, keys: int, expected: int) -> None:
    """Programs that share a block of dQ; a block of dK has one."""
    p = problem(heads=(8, 8), sizes=(rows, keys), batch=1)
    plan = hopper.plan_of(p)
    tasks = [hopper.backward_task(p, plan, True, rows, False) for rows in (True, False)]
    assert [task.SPLITS for task in tasks] == [expected, 1]


@on_h200
@pytest.mark.parametrize(
    ("options", "seqlen", "expected"),
    [
        ({"window_left": 1023, "window_right": 0}, 8192, True),
        ({"window_right": 0}, 8192, False),  # blocks of unequal length
        ({"window_right": 0}, 512, True),
        ({"window_left": 100}, 512, False),
        ({}, 512, False),
        ({}, 8192, False),
    ],
)
def test_who_is_persistent(options: dict[str, Any], seqlen: int, expected: bool) -> None:
    p = problem(sizes=(seqlen, seqlen), **options)
    assert all(hopper_tiles.is_persistent(p, backward) is expected for backward in (False, True))


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"deterministic": True}, False), ({"dims": (128, 128)}, False),
     ({"sizes": (512, 512)}, False), (of("reverse_kl"), False), ({"asks_torch": True}, False)],
)  # fmt: skip
@on_h200
def test_who_sums_in_any_order(change: dict[str, Any], expected: bool) -> None:
    options: dict[str, Any] = {"dims": (64, 64), "sizes": (2048, 2048), "heads": (32, 32)}
    options |= {"batch": 1, "window_right": 0, "deterministic": False, **change}
    torch.use_deterministic_algorithms(options.pop("asks_torch", False))
    try:
        assert hopper_tiles.adds_queries(problem(**options)) is expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_which_biases_are_one() -> None:
    """Only one that lies in the same memory: it is read once for both sides."""
    q, bias = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 8)
    others = {bias: True, bias.view_as(bias): True, bias.clone(): False, bias[:, :1]: False}
    for other, expected in others.items():
        p = problem_of(q, q, q, q, student_bias=bias, teacher_bias=other)[0]
        assert hopper_tiles.has_one_bias(p) == expected


@pytest.mark.parametrize(
    ("functional", "floor"),
    [
        (named("forward_kl"), -math.inf),
        (named("forward_kl", teacher_clamp=1e-3), -math.inf),
        (named("forward_kl", student_clamp=1e-12, teacher_clamp=1e-3), math.log(1e-12)),
        (named("cross_entropy", student_clamp=1e-3), math.log(1e-3)),
        (named("reverse_kl"), None),
        (named("forward_kl", student_eps=1e-3), None),
        (Functional.of("max(P,0.001)*(logP-logS)"), None),  # the form of forward_kl, but not h
        (Functional.of("P*(logP-max(logS,-2))-P*max(logS,-3)"), None),
    ],
)
def test_which_student_gradients_need_no_logarithms(
    functional: Functional, floor: float | None
) -> None:
    assert functional.plain_student_floor == floor
    if floor is None:
        return
    log_p, log_s = torch.randn(2, 1000, dtype=torch.float64).mul(3).log_softmax(-1)
    log_s[0] = max(floor, -50.0)  # at the clamp the gradient passes
    variables = {"P": log_p.exp(), "S": log_s.exp(), "logP": log_p, "logS": log_s}
    form = functional.bilinear or functional.guarded.form
    expected = torch.where(log_s >= floor, form.ts * log_p.exp(), 0.0)
    torch.testing.assert_close(functional.sums(variables)[1], expected)


# ------------------------------------------------------------------------------------ launches
def test_kernels_of_head_means() -> None:
    with record_launches("sm_90") as launches:
        p = problem(**MEANS | {"functional": DIVERGENCES["forward_kl"]})
        _, stats = hopper.forward(p)
        grad = torch.empty(1, 1, 4096, device="cuda")
        hopper.backward(p, stats, grad, NeedsGrad(True, True, False, False))
    own = [x for x in launches if x.kernel.is_gluon()]
    names = [x.kernel.__name__ for x in own]
    assert names == ["heads_lse_kernel", "heads_mean_kernel", "heads_mean_kernel"]
    for found in own[:2]:
        check_frontend(found, "sm_90")


@pytest.mark.parametrize("seqlens", [(1, 278), (300, 640)])
@pytest.mark.parametrize(
    "options",
    [
        {"head_mean": True, "window_right": 0},
        {"head_mean": True, "functional": named("js").text, "window_left": 3},
        {"functional": named("js").text},
        {"functional": named("forward_kl", student_clamp=1e-3).text, "window_right": 0},
    ],
)
def test_launches_of_one_name_are_compiled_alike(
    options: dict[str, Any], seqlens: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan keeps compiled kernels by name: implementations in turn must not share other ones."""
    compiled: dict[tuple[int, Any], Any] = {}
    run = Plan.run

    def run_and_compare(self: Plan, name: Any, *args: Any) -> None:
        run(self, name, *args)
        source = signature_of(launches[-1])
        assert compiled.setdefault((id(self), name), source) == source, name

    monkeypatch.setattr(Plan, "run", run_and_compare)
    heads = (2, 2, 4 if options.get("head_mean") else 2, 1)
    with record_launches("sm_90") as launches:
        for impl in ("triton", "hopper", "triton"):
            p = problem((64, 64), heads, seqlens, **options, impl=impl)
            _, stats = ops.forward(p)
            ops.backward(p, stats, torch.empty(2, 2, seqlens[0], device="cuda"), [True] * 4)
    assert len({name for _, name in compiled}) > 4
