"""The Hopper kernels for head_dims above 128, for biases, and for few rows of many keys."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.offline import looks_like
from tests.kernels.test_hopper_kernels import PACKED, PLAIN, call_of, on_hopper
from tests.support.problems import Call, build
from tests.support.tolerances import check_call
from torch_streamkl.attention import heuristics, hopper_tiles, limits
from torch_streamkl.attention.hopper import launches as hopper
from torch_streamkl.attention.ops import problem_of

SIZES = [(700, 700), (129, 500), (500, 129), (1, 130)]


def check_on_gpu(call: Call) -> None:
    check_call(call, "hopper", "cuda")


WIDE = [
    ((256, 256), (4, 4), "causal", "forward_kl", 0.0),
    ((192, 192), (2, 2), "window lengths", "forward_kl", 1e-3),
    ((64, 256), (4, 2), "lengths", "reverse_kl", 0.0),
    ((256, 128), (2, 4), "none", "cross_entropy", 0.0),
    ((192, 64), (1, 4), "left", "reverse_kl", 1e-3),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("form", WIDE, ids=str)
def test_wide_head_dims(form: Any) -> None:
    for sizes in SIZES:
        check_on_gpu(call_of(form, sizes))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("score_size", [1.0, 60.0, 1e4])
def test_wide_packed(score_size: float) -> None:
    form = ((256, 192), (2, 2), "causal", "forward_kl", 0.0)
    check_on_gpu(call_of(form, (0, 0), batch=1, packed=PACKED, score_size=score_size))


# additive masks have -inf, and rows without anything else
BIASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "additive": ((128, 128), {"mask": "additive"}),
    "additive causal": (
        (64, 64),
        {"mask": "additive", "is_causal": True, "divergence": "reverse_kl"},
    ),
    "per head": (
        (64, 128),
        {
            "student_bias": (False, True, True, True),
            "teacher_bias": (True, False, False, True),
            "student_clamp": 1e-3,
        },
    ),
    "student": ((128, 64), {"student_bias": (True, True, True, True), "window": (300, 90)}),
    "large": ((128, 128), {"mask": "additive", "score_size": 60.0}),
    "float16": ((64, 64), {"mask": "additive", "dtype": torch.float16}),
}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", BIASES)
def test_biases(name: str) -> None:
    dims, options = BIASES[name]
    plain = replace(PLAIN, student_dim=dims[0], teacher_dim=dims[1])
    for sizes in SIZES:
        check_on_gpu(build(replace(plain, seqlen_q=sizes[0], seqlen_k=sizes[1], **options)))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("clamp", [0.0, 1e-3])
@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.bfloat16).min, -torch.inf])
def test_a_bias_that_is_a_mask(low: float, clamp: float) -> None:
    """The first tiles that come have nothing that a row sees: fixed bases come later."""
    clamps = {"student_clamp": clamp, "teacher_clamp": clamp}
    for rows, keys in ((640, 640), (700, 700), (64, 1024)):
        call = build(
            replace(PLAIN, student_dim=128, teacher_dim=128, mask="additive", mask_density=1.0,
                    seqlen_q=rows, seqlen_k=keys, **clamps)
        )  # fmt: skip
        place = torch.arange(rows)[:, None] + keys - rows
        seen = (torch.arange(keys) <= place) & (torch.arange(keys) >= 30)
        seen[:, 30] = True  # so that every row sees a key
        bias = call.options["attn_mask"]
        call.options["attn_mask"] = torch.where(seen, bias, bias.new_tensor(low))
        check_on_gpu(call)


@pytest.mark.gpu
@on_hopper
def test_one_bias_is_as_two() -> None:
    """The same numbers in one tensor for both sides, or in two."""
    spec = replace(PLAIN, student_dim=128, teacher_dim=128, mask="additive",
                   seqlen_q=700, seqlen_k=700)  # fmt: skip
    call = build(spec).to(device="cuda")
    bias = call.options.pop("attn_mask")
    found = []
    for other in (bias, bias.clone()):
        call.options |= {"student_bias": bias, "teacher_bias": other}
        found.append(call.value_and_gradients("hopper"))
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], rtol=2e-2, atol=1e-4)


@pytest.mark.gpu
@on_hopper
def test_same_bits_of_wide_heads_and_biases() -> None:
    wide = call_of(WIDE[0], (700, 700))
    biased = build(replace(PLAIN, student_dim=128, teacher_dim=128, mask="additive",
                           seqlen_q=700, seqlen_k=700))  # fmt: skip
    for call in (wide.to(device="cuda"), biased.to(device="cuda")):
        first = call.value_and_gradients("hopper")
        for _ in range(3):
            again = call.value_and_gradients("hopper")
            assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mask", ["none", "causal", "lengths"])
def test_shares_of_query_gradients(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles in (2, 8):
        monkeypatch.setattr(heuristics, "LEAST_TILES_OF_SPLIT", tiles)
        for sizes in ((200, 900), (64, 4000)):
            form = ((128, 128), (2, 2), mask, "forward_kl", 0.0)
            check_on_gpu(call_of(form, sizes))


@pytest.mark.gpu
@on_hopper
def test_heads_that_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristics, "LEAST_TILES_OF_SPLIT", 4)
    for sizes in ((64, 3000), (40, 700), (3, 130)):
        form = ((128, 128), (2, 2), "lengths", "forward_kl", 0.0)
        check_on_gpu(call_of(form, sizes))


def shares_of(rows: int, keys: int, heads: int = 8, **options: Any) -> tuple[int, int]:
    """Programs that share a block of dQ, and a block of dK."""
    with FakeTensorMode(), looks_like("sm_90"):
        q = torch.empty(1, heads, rows, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(1, heads, keys, 128, device="cuda", dtype=torch.bfloat16)
        problem = problem_of(q, k, q, k, **options)[0]
        plan = hopper.plan_of(problem)
        tasks = [hopper.backward_task(problem, plan, True, rows, False) for rows in (True, False)]
    return tasks[0].SPLITS, tasks[1].SPLITS


@pytest.mark.parametrize(
    ("rows", "keys", "expected"),
    [
        (256, 131072, 8),  # 16 blocks of 132 multiprocessors
        (256, 4096, 2),  # at least 32 tiles each
        (256, 2048, 1),
        (4096, 131072, 1),  # enough blocks
    ],
)
def test_who_shares_query_gradients(rows: int, keys: int, expected: int) -> None:
    assert shares_of(rows, keys) == (expected, 1)


BIAS_LIMITS: list[tuple[tuple[int, ...], torch.dtype, dict[str, Any], str]] = [
    ((1, 1, 256, 256), torch.bfloat16, {}, ""),
    ((2, 4, 256, 256), torch.float32, {"window_right": 0}, ""),
    ((2, 1, 1, 256), torch.float16, {}, ""),
    ((2, 1, 256, 1), torch.bfloat16, {}, "whose keys are neighbours"),
    ((1, 1, 256, 256), torch.float64, {}, "a bias of float16, bfloat16 or float32"),
    ((1, 1, 256, 256), torch.bfloat16, {"functional": "(P-S)*(P-S)"}, "two passes"),
]


def test_which_biases_are_one() -> None:
    """Only one that lies in the same memory: it is read once for both sides."""
    q, bias = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 8)
    others = {bias: True, bias.view_as(bias): True, bias.clone(): False, bias[:, :1]: False}
    for other, expected in others.items():
        problem = problem_of(q, q, q, q, student_bias=bias, teacher_bias=other)[0]
        assert hopper_tiles.has_one_bias(problem) == expected


@pytest.mark.parametrize(("shape", "dtype", "options", "reason"), BIAS_LIMITS)
def test_limits_of_biases(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], reason: str
) -> None:
    with FakeTensorMode(), looks_like("sm_90"):
        x = torch.empty(2, 4, 256, 128, device="cuda", dtype=torch.bfloat16)
        bias = torch.empty(shape, dtype=dtype, device="cuda")
        limit = limits.hopper_limit(problem_of(x, x, x, x, student_bias=bias, **options)[0])
    assert limit is None if not reason else reason in str(limit)


@pytest.mark.parametrize(
    ("dims", "options", "reason"),
    [
        ((256, 256), {}, ""),
        ((192, 64), {"window_right": 0, "window_left": 5}, ""),
        ((256, 64), {"functional": "(P-S)*(P-S)"}, "up to 128 with a mask tensor, a bias or two"),
        ((160, 256), {}, "a head_dim of (64, 128, 192, 256) on each side"),
    ],
)
def test_limits_of_wide_head_dims(
    dims: tuple[int, int], options: dict[str, Any], reason: str
) -> None:
    with FakeTensorMode(), looks_like("sm_90"):
        s, t = (torch.empty(2, 4, 256, dim, device="cuda", dtype=torch.bfloat16) for dim in dims)
        limit = limits.hopper_limit(problem_of(s, s, t, t, **options)[0])
    assert limit is None if not reason else reason in str(limit)


@pytest.mark.parametrize(
    ("biases", "expected"),
    [("one", "hopper hopper"), ("two", "hopper triton"), ("student", "hopper triton")],
)
def test_values_and_gradients_are_chosen_apart(biases: str, expected: str) -> None:
    with FakeTensorMode(), looks_like("sm_90"):
        x = torch.empty(1, 32, 8192, 128, device="cuda", dtype=torch.bfloat16)
        bias, other = (
            torch.empty(1, 1, 8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "st"
        )
        teacher = {"one": bias, "two": other, "student": None}[biases]
        problem = problem_of(x, x, x, x, student_bias=bias, teacher_bias=teacher)[0]
        chosen = [
            heuristics.select_implementation(problem, "auto", backward)
            for backward in (False, True)
        ]
    assert chosen == expected.split()


CHOICES: list[tuple[int, tuple[int, int], tuple[int, int], dict[str, Any], str]] = [
    # head_dim, rows and keys, heads and key heads
    (256, (8192, 8192), (32, 32), {}, "hopper"),
    (192, (8192, 8192), (32, 8), {"window_right": 0}, "hopper"),
    (256, (256, 8192), (32, 8), {"functional": "(P-S)*(P-S)"}, "triton"),
    (128, (8192, 8192), (32, 32), {"has_bias": True}, "hopper"),  # one bias for both sides
    (128, (64, 131072), (32, 8), {}, "hopper"),  # 256 rows of 8 heads, in parts
    (128, (64, 131072), (32, 32), {}, "triton"),  # a third of a block of rows
    (128, (16, 131072), (32, 8), {}, "triton"),  # as well
    (128, (64, 131072), (32, 8), {"window_left": 5000, "window_right": 0}, "triton"),
]


@pytest.mark.parametrize(("head_dim", "sizes", "heads", "options", "expected"), CHOICES)
def test_choice_of_rare_forms(
    head_dim: int,
    sizes: tuple[int, int],
    heads: tuple[int, int],
    options: dict[str, Any],
    expected: str,
) -> None:
    options = dict(options)
    with FakeTensorMode(), looks_like("sm_90"):
        q, k = (
            torch.empty(1, h, n, head_dim, device="cuda", dtype=torch.bfloat16)
            for h, n in zip(heads, sizes, strict=True)
        )
        if options.pop("has_bias", False):
            bias = torch.empty(1, 1, *sizes, device="cuda", dtype=torch.bfloat16)
            options |= {"student_bias": bias, "teacher_bias": bias}
        problem = problem_of(q, k, q, k, **options)[0]
        assert heuristics.select_implementation(problem, "auto") == expected
