"""The Hopper kernels on a GPU of compute capability 9.0, and who they take and refuse anywhere."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.offline import looks_like
from tests.support.problems import Call, Spec, build
from tests.support.tolerances import budget, check, check_call
from torch_streamkl import attention_kl
from torch_streamkl.attention import heuristics, hopper_tiles, limits, plans
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.program.divergences import DIVERGENCES, Functional, named
from torch_streamkl.runtime.devices import gpu_of

hopper = torch.cuda.is_available() and gpu_of(torch.device("cuda")).is_hopper
on_hopper = pytest.mark.skipif(not hopper, reason="needs a GPU of compute capability 9.0")
PLAIN = Spec(batch=2, heads=4, student_kv_heads=2, teacher_kv_heads=2, dtype=torch.bfloat16)
SIZES = [(1, 1), (1, 300), (63, 64), (65, 129), (128, 640), (200, 333), (257, 512)]


@pytest.fixture
def h200() -> Iterator[None]:
    """Torch tells of an H200, wherever the test runs."""
    with looks_like("sm_90"):
        yield


def spec(head_dim: int, **options: Any) -> Spec:
    return replace(PLAIN, student_dim=head_dim, teacher_dim=head_dim, **options)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (300, 127)])  # the last has rows without keys
def test_sizes(sizes: tuple[int, int], is_causal: bool, head_dim: int) -> None:
    call = build(spec(head_dim, seqlen_q=sizes[0], seqlen_k=sizes[1], is_causal=is_causal))
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strides", ["transposed", "padded"])
def test_forms(strides: str, dtype: torch.dtype, divergence: str, head_dim: int) -> None:
    call = build(
        spec(
            head_dim, divergence=divergence, dtype=dtype, strides=strides,
            seqlen_q=150, seqlen_k=400, is_causal=True, temperature=1.5,
        )
    )  # fmt: skip
    check_call(call, "hopper", "cuda")


# Of each form: head_dim, key heads of 4 and mask (below), divergence and clamp. Any two values of
# two of these meet in a row.
DIMS = [(64, 64), (128, 128), (64, 128), (128, 64)]
MASKED: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "lengths": {"key_lengths": (0, 256, 301)},
    "causal lengths": {"is_causal": True, "key_lengths": (500, 1, 384)},
    "window": {"window": (400, 0)},
    "narrow window": {"window": (3, 2)},
    "left": {"window": (350, None)},
    "right": {"window": (None, 70)},
    "window lengths": {"window": (300, 90), "key_lengths": (450, 0, 130)},
}
FORMS = [
    ((64, 64), (4, 4), "lengths", "forward_kl", 0.0),
    ((128, 128), (2, 2), "lengths", "reverse_kl", 0.0),
    ((64, 128), (1, 4), "lengths", "forward_kl", 1e-3),
    ((128, 64), (4, 2), "lengths", "cross_entropy", 0.0),
    ((64, 64), (2, 1), "causal lengths", "reverse_kl", 1e-3),
    ((128, 128), (4, 1), "causal lengths", "forward_kl", 1e-3),
    ((64, 128), (4, 4), "causal lengths", "cross_entropy", 0.0),
    ((128, 64), (2, 2), "causal lengths", "forward_kl", 0.0),
    ((64, 64), (1, 2), "window", "forward_kl", 1e-3),
    ((128, 128), (4, 4), "window", "forward_kl", 0.0),
    ((64, 128), (2, 2), "window", "reverse_kl", 0.0),
    ((128, 64), (1, 4), "window", "cross_entropy", 1e-3),
    ((64, 64), (2, 2), "narrow window", "cross_entropy", 0.0),
    ((128, 128), (1, 4), "narrow window", "reverse_kl", 1e-3),
    ((64, 128), (4, 2), "narrow window", "forward_kl", 0.0),
    ((128, 64), (4, 4), "narrow window", "forward_kl", 1e-3),
    ((64, 64), (4, 4), "left", "reverse_kl", 0.0),
    ((128, 128), (2, 4), "left", "forward_kl", 0.0),
    ((64, 128), (1, 1), "right", "forward_kl", 0.0),
    ((128, 64), (2, 2), "right", "reverse_kl", 0.0),
    ((64, 64), (1, 4), "window lengths", "forward_kl", 0.0),
    ((128, 128), (2, 1), "window lengths", "cross_entropy", 1e-3),
    ((64, 128), (4, 4), "window lengths", "reverse_kl", 1e-3),
    ((128, 64), (2, 4), "window lengths", "forward_kl", 0.0),
    ((64, 64), (4, 1), "none", "reverse_kl", 1e-3),
    ((128, 128), (1, 4), "none", "forward_kl", 0.0),
    ((64, 128), (2, 4), "none", "forward_kl", 1e-3),
    ((128, 64), (4, 4), "none", "cross_entropy", 0.0),
    ((64, 64), (2, 4), "causal", "cross_entropy", 1e-3),
    ((128, 128), (4, 2), "causal", "reverse_kl", 0.0),
    ((64, 128), (4, 4), "causal", "forward_kl", 0.0),
    ((128, 64), (1, 2), "causal", "forward_kl", 1e-3),
]
Form = tuple[tuple[int, int], tuple[int, int], str, str, float]


def call_of(form: Form, sizes: tuple[int, int], **options: Any) -> Call:
    dims, kv_heads, mask, divergence, clamp = form
    masks = dict(MASKED[mask])
    lengths = masks.pop("key_lengths", None)
    call = build(
        Spec(
            heads=4, student_dim=dims[0], teacher_dim=dims[1],
            student_kv_heads=kv_heads[0], teacher_kv_heads=kv_heads[1], divergence=divergence,
            student_clamp=clamp, seqlen_q=sizes[0], seqlen_k=sizes[1],
            **{"batch": 3, "dtype": torch.bfloat16, **masks, **options},
        )
    )  # fmt: skip
    if lengths is not None:
        given = torch.tensor(lengths, dtype=torch.int32).clamp_max(sizes[1])
        call.options["key_lengths"] = given
    return call


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("sizes", [(700, 700), (129, 500), (500, 129), (1, 130)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_masks_and_sides(form: Form, sizes: tuple[int, int]) -> None:
    call = call_of(form, sizes)
    check_call(call, "hopper", "cuda")


PACKED = ((300, 500), (0, 40), (1, 70), (193, 129), (50, 0), (64, 128), (130, 513))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("dims", "kv_heads", "mask", "divergence", "clamp"),
    [
        ((64, 64), (4, 4), "causal", "forward_kl", 0.0),
        ((128, 128), (2, 2), "causal", "forward_kl", 1e-3),
        ((64, 128), (1, 4), "none", "forward_kl", 0.0),
        ((128, 64), (4, 2), "window", "forward_kl", 0.0),
        ((64, 64), (4, 2), "none", "reverse_kl", 1e-3),
        ((128, 128), (1, 2), "narrow window", "cross_entropy", 0.0),
        ((64, 128), (2, 2), "causal", "reverse_kl", 0.0),
    ],
)
def test_packed(
    dims: tuple[int, int], kv_heads: tuple[int, int], mask: str, divergence: str, clamp: float
) -> None:
    form = (dims, kv_heads, mask, divergence, clamp)
    call = call_of(form, (0, 0), batch=1, packed=PACKED)
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("score_size", [60.0, 1e4])
def test_packed_rows_that_are_computed_again(score_size: float) -> None:
    form = ((64, 128), (2, 4), "causal", "forward_kl", 0.0)
    call = call_of(form, (0, 0), batch=1, packed=PACKED, score_size=score_size)
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mask", ["causal lengths", "window", "packed"])
def test_same_bits_on_every_run_with_masks(mask: str) -> None:
    options: dict[str, Any] = {} if mask != "packed" else {"batch": 1, "packed": PACKED}
    form = ((64, 128), (1, 2), "causal" if options else mask, "forward_kl", 0.0)
    call = call_of(form, (700, 700), **options).to(device="cuda")
    first = call.value_and_gradients("hopper")
    for _ in range(3):
        again = call.value_and_gradients("hopper")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("score_size", [60.0, 1e4])
@pytest.mark.parametrize("mask", ["lengths", "window", "window lengths"])
def test_masked_rows_that_are_computed_again(mask: str, score_size: float) -> None:
    form = ((64, 128), (2, 4), mask, "forward_kl", 0.0)
    call = call_of(form, (500, 700), score_size=score_size)
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("adds_small_queries")
@pytest.mark.parametrize("mask", ["lengths", "causal lengths", "window lengths"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_what_lies_beyond_a_length_does_not_count(mask: str, deterministic: bool) -> None:
    call = call_of(((64, 64), (2, 1), mask, "forward_kl", 0.0), (300, 700)).to(device="cuda")
    call.options["deterministic"] = deterministic
    expected = call.value_and_gradients("hopper")
    with torch.no_grad():
        for side in ("student", "teacher"):
            for b, length in enumerate(call.options["key_lengths"].tolist()):
                call.tensors[f"{side}_k"][b, :, length:] = 1e4
    found = call.value_and_gradients("hopper")
    for name, x in expected.items():
        if deterministic or name != "student_q":
            assert torch.equal(found[name], x), name
        else:
            assert (found[name] - x).norm() <= 4e-3 * x.norm()
    for side in ("student", "teacher"):
        for b, length in enumerate(call.options["key_lengths"].tolist()):
            assert not found[f"{side}_k"][b, :, length:].any()


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("adds_small_queries")
def test_low_scores_beside_absent_keys() -> None:
    """Keys of 0 beyond the last one, next to which every score of a row is far below."""
    q, k = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (150, 200))
    q[..., 0], k[..., 0] = 40.0, -40.0
    q.requires_grad_()
    k.requires_grad_()
    teacher = torch.randn_like(q), torch.randn_like(k)
    options: dict[str, Any] = {"deterministic": False, "student_scale": 1.0}
    value = attention_kl(q, k, *teacher, **options, impl="hopper")
    found = torch.autograd.grad(value.sum(), (q, k))
    value = attention_kl(q, k, *teacher, **options, impl="triton")
    for a, b in zip(found, torch.autograd.grad(value.sum(), (q, k)), strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


TWO_PASSES = [("js", 0.0), ("tv", 0.0), ("forward_kl", 1e-6), ("reverse_kl", 1e-6)]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("sizes", [(700, 700), (129, 500), (500, 129), (1, 130)])
@pytest.mark.parametrize("mask", ["none", "causal", "lengths", "window"])
@pytest.mark.parametrize(("divergence", "eps"), TWO_PASSES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_passes(
    head_dim: int, divergence: str, eps: float, mask: str, sizes: tuple[int, int]
) -> None:
    form = ((head_dim, head_dim), (4, 2), mask, divergence, 0.0)
    call = call_of(form, sizes, student_eps=eps, teacher_eps=eps)
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("score_size", [60.0, 1e4])
def test_two_passes_of_large_scores(score_size: float) -> None:
    call = call_of(((128, 64), (2, 4), "causal", "js", 0.0), (300, 500), score_size=score_size)
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("trained", ["student", "teacher"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_without_a_gradient_may_be_infinite(head_dim: int, trained: str) -> None:
    """The teacher excludes keys in odd rows; what those rows are must not reach a gradient."""
    call = build(spec(head_dim, seqlen_q=150, seqlen_k=333, batch=1))
    operands = {
        name: x.detach().to("cuda").requires_grad_(name.startswith(trained))
        for name, x in call.tensors.items()
        if name in ("student_q", "student_k", "teacher_q", "teacher_k")
    }
    bias = torch.zeros(1, 1, 150, 333, dtype=torch.bfloat16, device="cuda")
    bias[:, :, 1::2, ::3] = -math.inf
    found = []
    for impl in ("hopper", "reference"):
        rows = attention_kl(
            **operands, teacher_bias=bias, divergence="reverse_kl", reduction="none", impl=impl
        )
        assert bool(rows[..., 1::2].isinf().all())
        weight = torch.zeros_like(rows)
        weight[..., ::2] = 1.0
        inputs = [x for x in operands.values() if x.requires_grad]
        found.append(torch.autograd.grad(rows, inputs, weight))
    for x, expected in zip(*found, strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(x, expected, atol=2e-2 * size, rtol=2e-2)


# key heads of 4, options of the mask tensor
TENSORS: list[tuple[int, dict[str, Any]]] = [
    (4, {}),
    (2, {"mask_shape": (False, False, True, True)}),
    (4, {"mask_shape": (False, True, True, True), "window": (200, 30)}),
    (2, {"mask_shape": (True, False, False, True)}),  # padding
    (1, {"mask_density": 0.01, "is_causal": True}),  # rows without keys, empty blocks
    (4, {"student_clamp": 1e-3, "teacher_clamp": 1e-3}),
    (4, {"divergence": "reverse_kl"}),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("sizes", [(700, 700), (129, 500), (500, 129), (1, 130), (257, 65)])
@pytest.mark.parametrize(("kv_heads", "options"), TENSORS)
def test_mask_tensors(
    kv_heads: int, options: dict[str, Any], sizes: tuple[int, int], dims: tuple[int, int]
) -> None:
    call = build(
        Spec(
            batch=2, heads=4, student_dim=dims[0], teacher_dim=dims[1],
            student_kv_heads=kv_heads, teacher_kv_heads=kv_heads, dtype=torch.bfloat16,
            seqlen_q=sizes[0], seqlen_k=sizes[1], **{"mask": "bool", **options},
        )
    )  # fmt: skip
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_mask_of_blocks(head_dim: int) -> None:
    """Blocks that are empty, full and neither."""
    call = build(spec(head_dim, seqlen_q=900, seqlen_k=1100, mask="bool"))
    mask = call.options["attn_mask"]
    mask[:, :, 128:512, 256:640] = False
    mask[:, :, 512:, 128:384] = True
    mask[:, :, 640:768] = False
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("mask", ["none", "causal", "window", "lengths", "packed", "bool"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_turns_change_no_bit(head_dim: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_streamkl.attention.hopper import launches as hopper_attention

    options: dict[str, Any] = {
        "packed": {"batch": 1, "packed": PACKED}, "bool": {"mask": "bool"},
    }.get(mask, {})  # fmt: skip
    form = ((head_dim, head_dim), (2, 2), "none" if options else mask, "forward_kl", 0.0)
    call = call_of(form, (700, 700), **options).to(device="cuda")
    expected = None
    for programs in (10**6, 1, 5):
        monkeypatch.setattr(
            hopper_attention, "_num_programs", lambda _, works, __, n=programs: min(works, n)
        )
        found = call.value_and_gradients("hopper")
        expected = found if expected is None else expected
        assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The last round of blocks is computed in parts however few tiles they have."""
    monkeypatch.setattr(hopper_tiles, "LEAST_TILES_OF_PART", 2)
    plans.clear_plans()
    yield
    plans.clear_plans()


# divergence, clamp, head_dim, seqlen_q, seqlen_k: from 1 to 5 parts, of whole tiles or not
PARTS = [
    ("forward_kl", 0.0, 64, 300, 640),
    ("reverse_kl", 0.0, 128, 200, 600),
    ("cross_entropy", 0.0, 64, 193, 257),
    ("forward_kl", 1e-3, 128, 150, 333),
    ("reverse_kl", 1e-12, 64, 1, 500),
    ("forward_kl", 0.0, 128, 65, 129),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("case", PARTS)
def test_parts(case: tuple[str, float, int, int, int]) -> None:
    divergence, clamp, head_dim, seqlen_q, seqlen_k = case
    call = build(
        spec(
            head_dim, divergence=divergence, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            student_clamp=clamp, teacher_clamp=clamp,
        )
    )  # fmt: skip
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
def test_whole_blocks_and_parts() -> None:
    # 135 blocks on 132 multiprocessors: 132 whole ones, and 3 of 4 parts each
    call = build(spec(64, batch=1, heads=27, student_kv_heads=27, teacher_kv_heads=27,
                      seqlen_q=960, seqlen_k=2100)).to(device="cuda")  # fmt: skip
    torch.testing.assert_close(call.run("hopper"), call.run("triton"), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("h200")
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


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Which rows each call marked to be computed again."""
    from torch_streamkl.attention.triton import forward

    seen: list[torch.Tensor] = []
    kernel = forward.recompute_kernel

    class Recording:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> None:
                seen.append(args[kernel.arg_names.index("value_ptr")].isnan())
                kernel[grid](*args, **kwargs)

            return run

    monkeypatch.setattr(forward, "recompute_kernel", Recording())
    return seen


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("score_size", "some"), [(1.0, False), (60.0, True), (1e4, True)])
def test_both_sides_of_the_condition(
    score_size: float, some: bool, head_dim: int, marked: list[torch.Tensor]
) -> None:
    call = build(spec(head_dim, seqlen_q=300, seqlen_k=400, score_size=score_size))
    check_call(call, "hopper", "cuda")
    assert bool(marked[0].any()) == some


# divergence, clamps of student and teacher, head_dim, is_causal
CLAMPED = [
    ("forward_kl", 1e-12, 1e-12, 64, True),
    ("forward_kl", 1e-12, 1e-12, 128, False),
    ("forward_kl", 1e-3, 1e-3, 64, False),
    ("forward_kl", 1e-3, 1e-3, 128, True),
    ("forward_kl", 1e-3, 0.0, 128, False),
    ("forward_kl", 0.0, 1e-3, 64, True),
    ("reverse_kl", 1e-12, 1e-12, 64, False),
    ("reverse_kl", 1e-12, 1e-12, 128, True),
    ("reverse_kl", 1e-3, 1e-3, 64, True),
    ("reverse_kl", 1e-3, 0.0, 64, True),
    ("reverse_kl", 0.0, 1e-3, 128, False),
    ("cross_entropy", 1e-12, 0.0, 64, True),
    ("cross_entropy", 1e-3, 1e-3, 128, False),
]


@pytest.mark.gpu
@on_hopper
def test_a_late_key_far_above_the_first_tile() -> None:
    from torch_streamkl.attention.hopper import launches as hopper_attention

    # sums of 2^125 and 2^110 relative to the bases: they are finite, their products are not
    q, k_s, k_t = (
        torch.zeros(1, 1, 512, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)
    )
    q[..., 0], k_s[..., 0, 0], k_t[..., 0, 0] = 1.0, 76.5, 86.5
    problem = problem_of(
        q, k_s, q, k_t, functional=DIVERGENCES["forward_kl"], student_scale=1.0, teacher_scale=1.0
    )[0]
    value, _ = hopper_attention.forward(problem)
    torch.testing.assert_close(value, torch.zeros_like(value), rtol=0.0, atol=1e-5)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("sizes", [(1, 1), (65, 129), (300, 127), (200, 333), (257, 512)])
@pytest.mark.parametrize("case", CLAMPED)
def test_clamps(case: tuple[str, float, float, int, bool], sizes: tuple[int, int]) -> None:
    divergence, student_clamp, teacher_clamp, head_dim, is_causal = case
    # some rows reach the clamp and others do not
    score_size = 4.0 if max(student_clamp, teacher_clamp) < 1e-6 else 1.0
    call = build(
        spec(
            head_dim, divergence=divergence, is_causal=is_causal,
            student_clamp=student_clamp, teacher_clamp=teacher_clamp, score_size=score_size,
            seqlen_q=sizes[0], seqlen_k=sizes[1],
        )
    )  # fmt: skip
    check_call(call, "hopper", "cuda")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("clamped", ["student", "teacher"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize(
    ("seqlen_k", "clamp", "some"),
    [(500, 1e-12, False), (500, 1e-3, True), (64, 1e-12, False), (64, 1e-2, True)],
)
def test_only_rows_that_reach_a_clamp_are_repeated(
    seqlen_k: int, clamp: float, some: bool, divergence: str, clamped: str,
    marked: list[torch.Tensor],
) -> None:  # fmt: skip
    options: dict[str, Any] = {f"{clamped}_clamp": clamp}
    # 64 keys are one tile, which is masked, and the loop over the rest does not run
    call = build(spec(64, divergence=divergence, seqlen_q=310, seqlen_k=seqlen_k, **options))
    check_call(call, "hopper", "cuda")
    assert bool(marked[0].any()) == some


@pytest.mark.gpu
@on_hopper
def test_same_bits_on_every_run() -> None:
    call = build(spec(128, seqlen_q=300, seqlen_k=500)).to(device="cuda")
    first = call.value_and_gradients("hopper")
    for _ in range(3):
        again = call.value_and_gradients("hopper")
        assert all(torch.equal(first[name], again[name]) for name in first)


@contextmanager
def torch_deterministic(asks: bool = True) -> Iterator[None]:
    torch.use_deterministic_algorithms(asks)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def adds_small_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_tiles, "ATOMIC_LEAST_FLOP", 0.0)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("adds_small_queries")
@pytest.mark.parametrize("sizes", [(1, 1), (65, 129), (300, 127), (200, 333), (257, 512)])
@pytest.mark.parametrize(
    ("kv_heads", "clamp", "is_causal", "dtype"),
    [
        (4, 0.0, False, torch.bfloat16),
        (4, 1e-3, True, torch.float16),
        (2, 0.0, True, torch.bfloat16),
        (1, 1e-3, False, torch.bfloat16),
    ],
)
def test_sums_in_any_order(
    kv_heads: int, clamp: float, is_causal: bool, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    call = build(
        spec(
            64, student_kv_heads=kv_heads, teacher_kv_heads=kv_heads, seqlen_q=sizes[0],
            seqlen_k=sizes[1], is_causal=is_causal, student_clamp=clamp, dtype=dtype,
            temperature=1.5,
        )
    )  # fmt: skip
    for name in ("teacher_q", "teacher_k"):
        call.tensors[name].requires_grad_(False)
    expected = budget(call)
    call = call.to(device="cuda")
    call.options["deterministic"] = False
    check(call.value_and_gradients("hopper"), expected)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("adds_small_queries")
def test_sums_in_any_order_differ_by_order_only() -> None:
    call = build(spec(64, seqlen_q=600, seqlen_k=2000)).to(device="cuda")
    expected = call.value_and_gradients("hopper")
    call.options["deterministic"] = False
    found = call.value_and_gradients("hopper")
    for name in ("value", "teacher_q", "teacher_k"):
        assert torch.equal(found[name], expected[name])
    assert not torch.equal(found["student_q"], expected["student_q"])
    for name in ("student_q", "student_k"):
        assert (found[name] - expected[name]).norm() <= 4e-3 * expected[name].norm()
    with torch_deterministic():
        again = call.value_and_gradients("hopper")
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"deterministic": True}, False), ({"head_dim": 128}, False),
     ({"seqlen": 512}, False), ({"divergence": "reverse_kl"}, False),
     ({"asks_torch": True}, False)],
)  # fmt: skip
def test_who_sums_in_any_order(change: dict[str, Any], expected: bool) -> None:
    options: dict[str, Any] = {"head_dim": 64, "seqlen": 2048, "divergence": "forward_kl"}
    options |= {"deterministic": False, "asks_torch": False, **change}
    with FakeTensorMode():
        q = torch.empty(1, 32, options["seqlen"], options["head_dim"])
    functional = DIVERGENCES[options["divergence"]]
    given = {"functional": functional, "deterministic": options["deterministic"]}
    p = problem_of(q, q, q, q, window_right=0, **given)[0]
    with torch_deterministic(options["asks_torch"]):
        assert hopper_tiles.adds_queries(p) is expected


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("clamp", [0.0, 1e-3])
@pytest.mark.parametrize("kind", ["positive", "negative", "mixed", "tiny", "none"])
def test_incoming_gradients(kind: str, clamp: float, head_dim: int) -> None:
    # what is folded and what is left: NOTE [Folded gradients] in backward.py
    call = build(
        spec(
            head_dim, seqlen_q=200, seqlen_k=333, is_causal=True,
            student_clamp=clamp, teacher_clamp=clamp,
        )
    ).to(device="cuda")  # fmt: skip
    torch.manual_seed(0)
    x = torch.randn(call.run("hopper").shape, device="cuda")
    sizes = torch.where(x.abs() < 0.3, 0.0, (3 * x).exp())  # from 1e-5 to 1e5, and zeros
    factors = {"positive": 1.0, "negative": -1.0, "mixed": x.roll(1).sign(), "tiny": 1e-30}
    gradient = sizes * factors.get(kind, 0.0)
    inputs = list(call.tensors.values())
    found, expected = (
        torch.autograd.grad(call.run(impl), inputs, gradient, allow_unused=True)
        for impl in ("hopper", "triton")
    )
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = a.double(), b.double()  # squares of tiny ones underflow in float32
            assert (a - b).norm() <= 5e-3 * b.norm()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("clamp", [0.0, 1e-3])  # the second has another kernel
def test_keys_are_shared(clamp: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """dK of eight grouped heads (GQA): in four shares, and in one."""
    from torch_streamkl.attention.hopper import tasks

    case = spec(
        128, heads=8, student_kv_heads=1, teacher_kv_heads=1, seqlen_q=150, seqlen_k=333,
        is_causal=True, student_clamp=clamp, divergence="reverse_kl",
    )  # fmt: skip
    call = build(case)
    for num_splits in (4, 1):
        monkeypatch.setattr(tasks, "key_splits", lambda *_, n=num_splits, **__: n)
        plans.clear_plans()
        check_call(call, "hopper", "cuda")
    plans.clear_plans()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("group", "blocks", "is_causal", "expected"),
    [(32, 64, True, 4), (32, 64, False, 2), (4, 512, True, 1), (4, 128, True, 2), (6, 60, True, 6),
     (1, 1, False, 1), (7, 40, False, 7)],
)  # fmt: skip
def test_key_shares(group: int, blocks: int, is_causal: bool, expected: int) -> None:
    with FakeTensorMode():
        q, k = (torch.empty(1, heads, 8192, 64, device="cuda") for heads in (group, 1))
    problem = problem_of(q, k, q, k, window_right=0 if is_causal else None)[0]
    assert heuristics.key_splits(problem, group, blocks, resident=1) == expected


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("group", "other_group", "blocks", "expected"),
    [(8, 4, 512, 2), (4, 8, 512, 1), (6, 4, 512, 3), (32, 1, 512, 32), (8, 8, 33, 4),
     (8, 4, 33, 4), (12, 9, 512, 4)],
)  # fmt: skip
def test_shares_have_one_key_head_of_each_side(
    group: int, other_group: int, blocks: int, expected: int
) -> None:
    with FakeTensorMode():
        x = torch.empty(1, 1, 8192, 64, device="cuda")
    problem = problem_of(x, x, x, x)[0]
    found = heuristics.key_splits(problem, group, blocks, resident=1, together=other_group)
    assert found == expected


@pytest.mark.gpu
@on_hopper
def test_cuda_graph() -> None:
    # kernels that begin next to the one before stay so in a graph
    call = build(spec(64, seqlen_q=300, seqlen_k=500)).to(device="cuda")
    inputs = list(call.tensors.values())

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call.run("hopper").sum(), inputs, allow_unused=True)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_needs_a_hopper_gpu() -> None:
    x = torch.randn(1, 1, 8, 64)
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0, got device cpu"):
        attention_kl(x, x, x, x, impl="hopper")


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("batch", "rows", "keys", "expected"),
    [
        (1, 8192, 16384, "hopper"),
        (1, 64, 16384, "triton"),  # few blocks of rows: the portable kernels split the keys
        (16, 64, 16384, "triton"),  # enough, but a third of a block of rows is used
        (1, 640, 640, "triton"),  # launches would take longer than kernels
    ],
)
def test_choice(batch: int, rows: int, keys: int, expected: str) -> None:
    with FakeTensorMode():
        q, k = (
            torch.empty(batch, 32, n, 128, device="cuda", dtype=torch.bfloat16)
            for n in (rows, keys)
        )
    problem = problem_of(q, k, q, k)[0]
    assert heuristics.select_implementation(problem, "hopper") == "hopper"
    assert heuristics.select_implementation(problem, "auto") == expected


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("head_dim", "options", "expected"),
    [
        (128, {"functional": named("js").text}, "hopper"),
        (128, {"functional": named("js", beta=0.1).text, "window_right": 0}, "hopper"),
        (64, {"functional": named("js").text}, "triton"),  # not measured
        (128, {"functional": DIVERGENCES["tv"]}, "hopper"),
        (64, {"functional": DIVERGENCES["tv"]}, "triton"),
        (128, {"functional": named("forward_kl", student_eps=1e-8).text}, "hopper"),
        (128, {"functional": "sqrt(P)*logS"}, "triton"),  # nor this
        (128, {"has_mask": True}, "hopper"),
        (64, {"has_mask": True}, "triton"),
    ],
)
def test_choice_of_what_was_measured(
    head_dim: int, options: dict[str, Any], expected: str
) -> None:
    options = dict(options)
    has_mask = options.pop("has_mask", False)
    with FakeTensorMode():
        x = torch.empty(1, 32, 8192, head_dim, device="cuda", dtype=torch.bfloat16)
        if has_mask:
            options["mask"] = torch.empty(1, 1, 8192, 8192, device="cuda", dtype=torch.bool)
    problem = problem_of(x, x, x, x, **options)[0]
    assert heuristics.select_implementation(problem, "hopper") == "hopper"
    assert heuristics.select_implementation(problem, "auto") == expected


def guarded(divergence: str, **guards: float) -> dict[str, Any]:
    return {"functional": named(divergence, **guards).text}


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "fits": ({}, ""),
    "causal": ({"window_right": 0}, ""),
    "window": ({"window_left": 5, "window_right": 3}, ""),
    "left": ({"window_left": 5}, ""),
    "jeffreys": ({"functional": DIVERGENCES["jeffreys"]}, "logarithms under one of P and S"),
    "tv": ({"functional": DIVERGENCES["tv"]}, ""),
    "softcap": ({"student_softcap": 20.0}, "takes no alibi"),
    "filled": ({"window_right": 0, "mask_value": -1e4}, "masks that remove keys"),
    "clamps": (guarded("forward_kl", student_clamp=1e-12, teacher_clamp=1e-12), ""),
    "reverse_clamp": (guarded("reverse_kl", student_clamp=1e-3), ""),
    "jeffreys_clamp": (
        guarded("jeffreys", student_clamp=1e-12),
        "logarithms under one of P and S",
    ),
    "eps": (guarded("forward_kl", student_eps=1e-12), ""),
    "js": (guarded("js"), ""),
    "js_clamp": (guarded("js", student_clamp=1e-12), ""),
}


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    options, reason = LIMITS[name]
    with FakeTensorMode():
        x = torch.empty(1, 2, 256, 128, device="cuda", dtype=torch.bfloat16)
    problem = problem_of(x, x, x, x, **options)[0]
    limit = limits.hopper_limit(problem)
    assert limit is None if not reason else reason in str(limit)
    if reason:
        with pytest.raises(NotImplementedError, match=reason):
            heuristics.select_implementation(problem, "hopper")


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("options", "mask_heads", "kv_heads", "reason"),
    [
        ({}, 1, 2, ""),
        ({}, 4, 4, ""),
        ({}, 4, 2, "a mask per head with as many key heads as heads"),
        ({"functional": DIVERGENCES["tv"]}, 1, 4, "with a divergence of two passes"),
        ({"mask_value": -1e4}, 1, 4, "masks that remove keys"),
    ],
)
def test_limits_of_mask_tensors(
    options: dict[str, Any], mask_heads: int, kv_heads: int, reason: str
) -> None:
    with FakeTensorMode():
        q, k = (
            torch.empty(2, heads, 256, 128, device="cuda", dtype=torch.bfloat16)
            for heads in (4, kv_heads)
        )
        mask = torch.empty(2, mask_heads, 256, 256, device="cuda", dtype=torch.bool)
    limit = limits.hopper_limit(problem_of(q, k, q, k, mask=mask, **options)[0])
    assert limit is None if not reason else reason in str(limit)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("options", "seqlen", "expected"),
    [
        ({"window_left": 1023, "window_right": 0}, 8192, (True, True)),
        ({"window_right": 0}, 8192, (False, False)),  # blocks of unequal length
        ({"window_right": 0}, 512, (True, True)),
        ({"window_left": 100}, 512, (False, False)),
        ({}, 512, (False, False)),
        ({}, 8192, (False, False)),
    ],
)
def test_who_takes_turns(
    options: dict[str, Any], seqlen: int, expected: tuple[bool, bool]
) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 4, seqlen, 128, device="cuda", dtype=torch.bfloat16)
    problem = problem_of(x, x, x, x, **options)[0]
    assert (
        tuple(hopper_tiles.is_persistent(problem, backward) for backward in (False, True))
        == expected
    )


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims", "reason"),
    [
        (8, (8, 2), (64, 128), ""),
        (8, (1, 8), (128, 64), ""),
        (256, (1, 1), (64, 64), ""),
        (256, (1, 256), (64, 64), "at most 128 shares, got 256"),
        (8, (8, 8), (64, 96), "takes a head_dim of"),
    ],
)
def test_limits_of_sides(
    heads: int, kv_heads: tuple[int, int], dims: tuple[int, int], reason: str
) -> None:
    with FakeTensorMode():
        q, k, tq, tk = (
            torch.empty(2, h, 256, dim, device="cuda", dtype=torch.bfloat16)
            for kv, dim in zip(kv_heads, dims, strict=True)
            for h in (heads, kv)
        )
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
    limit = limits.hopper_limit(problem_of(q, k, tq, tk, key_lengths=lengths)[0])
    assert limit is None if not reason else reason in str(limit)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("clamp", "expected"), [(1e-12, "hopper"), (1e-3, "triton")])
def test_choice_with_clamps(clamp: float, expected: str) -> None:
    with FakeTensorMode():
        x = torch.empty(1, 32, 8192, 128, device="cuda", dtype=torch.bfloat16)
    functional = named("forward_kl", student_clamp=clamp, teacher_clamp=1e-12)
    problem = problem_of(x, x, x, x, functional=functional.text)[0]
    # every row of 8192 keys has a probability below 1e-3: each would be computed twice
    assert heuristics.select_implementation(problem, "auto") == expected


@pytest.mark.parametrize(
    ("functional", "floor"),
    [
        (named("forward_kl"), -math.inf),
        (named("cross_entropy"), -math.inf),
        (named("forward_kl", teacher_clamp=1e-3), -math.inf),
        (named("forward_kl", student_clamp=1e-12, teacher_clamp=1e-3), math.log(1e-12)),
        (named("cross_entropy", student_clamp=1e-3), math.log(1e-3)),
        (named("reverse_kl"), None),
        (named("reverse_kl", teacher_clamp=1e-3), None),
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


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("head_dim", "row_stride", "dtype", "reason"),
    [
        (96, 96, torch.bfloat16, "takes a head_dim of"),
        (128, 128, torch.float32, "takes float16 and bfloat16"),
        (128, 129, torch.bfloat16, "aligned to 16 bytes"),
    ],
)
def test_limits_of_tensors(
    head_dim: int,
    row_stride: int,
    dtype: torch.dtype,
    reason: str,
) -> None:
    strides = (512 * row_stride, 256 * row_stride, row_stride, 1)
    with FakeTensorMode():
        x = torch.empty_strided((1, 2, 256, head_dim), strides, device="cuda", dtype=dtype)
    limit = limits.hopper_limit(problem_of(x, x, x, x)[0])
    assert reason in str(limit)
