"""The Hopper kernels on a GPU of compute capability 9.0: values, gradients, the same bits.

Who they take and refuse is in test_hopper_choice.py, which runs anywhere.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.problems import Call, Spec, build
from tests.support.tolerances import budget, check, check_call
from torch_streamkl import attention_kl
from torch_streamkl.attention import heuristics, hopper_tiles, plans
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.program.divergences import DIVERGENCES
from torch_streamkl.runtime.devices import gpu_of

is_hopper = torch.cuda.is_available() and gpu_of(torch.device("cuda")).is_hopper
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")
pytestmark = [pytest.mark.gpu, on_hopper]
PACKED = ((300, 500), (0, 40), (1, 70), (193, 129), (50, 0), (64, 128), (130, 513))
# rows and keys; of 500 and 129 some rows have no key
SIZES = [(700, 700), (1, 130), (129, 500), (65, 129), (500, 129), (1, 300), (257, 512), (63, 64)]
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "lengths": {"key_lengths": (0, 256, 301)},
    "causal lengths": {"is_causal": True, "key_lengths": (500, 1, 384)},
    "window": {"window": (400, 0)},
    "narrow window": {"window": (3, 2)},
    "left": {"window": (350, None)},
    "right": {"window": (None, 70)},
    "window lengths": {"window": (300, 90), "key_lengths": (450, 0, 130)},
    "packed": {"batch": 1, "packed": PACKED},
    "packed causal": {"batch": 1, "packed": PACKED, "is_causal": True},
    "packed window": {"batch": 1, "packed": PACKED, "window": (400, 0)},
    "bool": {"mask": "bool"},
    "bool of rows": {"mask": "bool", "mask_shape": (False, False, True, True)},
    "bool of heads": {
        "mask": "bool", "mask_shape": (False, True, True, True), "window": (200, 30),
    },
    "padding": {"mask": "bool", "mask_shape": (True, False, False, True)},
    "empty blocks": {"mask": "bool", "mask_density": 0.01, "is_causal": True},
    # additive masks have -inf, and rows without anything else
    "additive": {"mask": "additive"},
    "additive causal": {"mask": "additive", "is_causal": True},
    "biases": {
        "student_bias": (False, True, True, True), "teacher_bias": (True, False, False, True),
    },
    "student bias": {"student_bias": (True, True, True, True), "window": (300, 90)},
}  # fmt: skip
EPS = {"student_eps": 1e-6, "teacher_eps": 1e-6}
SMALL_CLAMPS = {"student_clamp": 1e-12, "teacher_clamp": 1e-12, "score_size": 4.0}
FP16 = {"dtype": torch.float16}
# head_dims, key heads of 4, mask, divergence, clamp of the student, what else
Form = tuple[tuple[int, int], tuple[int, int], str, str, float, dict[str, Any]]
FORMS: list[Form] = [
    # any two values of two of the first five meet
    ((64, 64), (4, 4), "lengths", "forward_kl", 0.0, {}),
    ((128, 128), (2, 2), "lengths", "reverse_kl", 0.0, {}),
    ((64, 128), (1, 4), "lengths", "forward_kl", 1e-3, {}),
    ((128, 64), (4, 2), "lengths", "cross_entropy", 0.0, {}),
    ((64, 64), (2, 1), "causal lengths", "reverse_kl", 1e-3, {}),
    ((128, 128), (4, 1), "causal lengths", "forward_kl", 1e-3, {}),
    ((64, 128), (4, 4), "causal lengths", "cross_entropy", 0.0, FP16),
    ((128, 64), (2, 2), "window", "forward_kl", 0.0, {}),
    ((64, 64), (1, 2), "window", "forward_kl", 1e-3, {}),
    ((64, 128), (2, 2), "narrow window", "reverse_kl", 0.0, {}),
    ((128, 64), (4, 4), "narrow window", "forward_kl", 1e-3, {}),
    ((64, 64), (4, 4), "left", "reverse_kl", 0.0, {"strides": "padded"}),
    ((128, 128), (2, 4), "left", "forward_kl", 0.0, {}),
    ((64, 128), (1, 1), "right", "forward_kl", 0.0, {}),
    ((128, 64), (2, 2), "right", "reverse_kl", 0.0, {}),
    ((128, 128), (2, 1), "window lengths", "cross_entropy", 1e-3, {}),
    ((64, 64), (1, 4), "window lengths", "forward_kl", 0.0, {}),
    ((64, 64), (4, 1), "none", "reverse_kl", 1e-3, {"strides": "transposed"}),
    ((128, 128), (4, 4), "none", "forward_kl", 0.0, {}),
    ((128, 64), (4, 4), "none", "cross_entropy", 0.0, {"temperature": 1.5, **FP16}),
    ((64, 128), (4, 4), "causal", "forward_kl", 0.0, {"strides": "padded", "temperature": 1.5}),
    ((128, 128), (4, 2), "causal", "reverse_kl", 0.0, {"strides": "transposed"}),
    ((128, 64), (1, 2), "causal", "forward_kl", 1e-3, {}),
    # clamps of one side, and those that only some rows reach
    ((64, 64), (2, 2), "causal", "forward_kl", 0.0, SMALL_CLAMPS),
    ((128, 128), (2, 2), "none", "reverse_kl", 0.0, SMALL_CLAMPS),
    ((64, 64), (2, 2), "causal", "forward_kl", 0.0, {"teacher_clamp": 1e-3}),
    ((128, 128), (2, 2), "none", "reverse_kl", 0.0, {"teacher_clamp": 1e-3}),
    ((128, 128), (2, 2), "none", "cross_entropy", 1e-3, {"teacher_clamp": 1e-3}),
    # rows that are computed again
    ((64, 128), (2, 4), "window lengths", "forward_kl", 0.0, {"score_size": 60.0}),
    ((64, 128), (2, 4), "packed causal", "forward_kl", 0.0, {"score_size": 1e4}),
    ((128, 64), (2, 4), "causal", "js", 0.0, {"score_size": 1e4}),
    ((128, 128), (2, 2), "packed causal", "forward_kl", 1e-3, {}),
    ((64, 128), (1, 4), "packed", "forward_kl", 0.0, {}),
    ((128, 64), (4, 2), "packed window", "forward_kl", 0.0, {}),
    ((64, 64), (4, 2), "packed", "reverse_kl", 1e-3, {}),
    ((64, 128), (2, 2), "packed causal", "reverse_kl", 0.0, {}),
    # two passes
    ((64, 64), (4, 2), "none", "js", 0.0, {}),
    ((128, 128), (4, 2), "causal", "js", 0.0, {}),
    ((128, 128), (4, 2), "lengths", "tv", 0.0, {}),
    ((64, 64), (4, 2), "window", "tv", 0.0, {}),
    ((128, 128), (4, 2), "window", "forward_kl", 0.0, EPS),
    ((64, 64), (4, 2), "causal", "reverse_kl", 0.0, EPS),
    # tensors
    ((64, 64), (4, 4), "bool", "forward_kl", 0.0, {}),
    ((128, 64), (4, 4), "bool", "forward_kl", 1e-3, {"teacher_clamp": 1e-3}),
    ((64, 128), (4, 4), "bool", "reverse_kl", 0.0, {}),
    ((128, 128), (2, 2), "bool of rows", "forward_kl", 0.0, {}),
    ((64, 128), (4, 4), "bool of heads", "forward_kl", 0.0, {}),
    ((128, 128), (2, 2), "padding", "forward_kl", 0.0, {}),
    ((128, 64), (1, 1), "empty blocks", "forward_kl", 0.0, {}),
    ((128, 128), (2, 2), "additive", "forward_kl", 0.0, {}),
    ((64, 64), (2, 2), "additive causal", "reverse_kl", 0.0, {}),
    ((64, 128), (2, 2), "biases", "forward_kl", 1e-3, {}),
    ((128, 64), (2, 2), "student bias", "forward_kl", 0.0, {}),
    ((128, 128), (2, 2), "additive", "forward_kl", 0.0, {"score_size": 60.0}),
    ((64, 64), (2, 2), "additive", "forward_kl", 0.0, FP16),
    # head_dims above 128
    ((256, 256), (4, 4), "causal", "forward_kl", 0.0, {}),
    ((192, 192), (2, 2), "window lengths", "forward_kl", 1e-3, {}),
    ((64, 256), (4, 2), "lengths", "reverse_kl", 0.0, {}),
    ((256, 128), (2, 4), "none", "cross_entropy", 0.0, {}),
    ((192, 64), (1, 4), "left", "reverse_kl", 1e-3, {}),
    ((256, 192), (2, 2), "packed causal", "forward_kl", 0.0, {"score_size": 60.0}),
    # head_dims that tiles fill up with zeros
    ((96, 96), (4, 2), "causal", "forward_kl", 0.0, {}),
    ((80, 80), (2, 2), "none", "reverse_kl", 1e-3, {"strides": "padded"}),
    ((40, 40), (4, 4), "window", "forward_kl", 0.0, {}),
    ((72, 112), (2, 4), "packed causal", "forward_kl", 0.0, {"score_size": 60.0}),
    ((112, 112), (2, 2), "causal", "js", 0.0, {}),
    ((96, 96), (2, 2), "bool", "forward_kl", 1e-3, {"teacher_clamp": 1e-3}),
    ((80, 80), (2, 2), "additive", "forward_kl", 0.0, {}),
    ((32, 64), (4, 1), "lengths", "cross_entropy", 0.0, FP16),
    ((160, 160), (2, 2), "causal lengths", "forward_kl", 0.0, {}),
    ((96, 224), (1, 2), "right", "reverse_kl", 1e-3, {}),
]


def call_of(form: Form, sizes: tuple[int, int], **options: Any) -> Call:
    dims, kv_heads, mask, divergence, clamp, more = form
    given = {
        "batch": 3,
        "heads": 4,
        "dtype": torch.bfloat16,
        "student_clamp": clamp,
        **MASKS[mask],
    }
    given |= more | options
    lengths = given.pop("key_lengths", None)
    call = build(
        Spec(
            student_dim=dims[0], teacher_dim=dims[1], student_kv_heads=kv_heads[0],
            teacher_kv_heads=kv_heads[1], divergence=divergence, seqlen_q=sizes[0],
            seqlen_k=sizes[1], **given,
        )
    )  # fmt: skip
    if lengths is not None:
        call.options["key_lengths"] = torch.tensor(lengths, dtype=torch.int32).clamp_max(sizes[1])
    return call


def plain(head_dim: int, sizes: tuple[int, int], mask: str = "none", **options: Any) -> Call:
    return call_of(((head_dim, head_dim), (2, 2), mask, "forward_kl", 0.0, {}), sizes, **options)


def apart(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()  # squares of tiny ones underflow in float32
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


@pytest.mark.parametrize("number", range(len(FORMS)), ids=lambda i: str(FORMS[i]))
def test_values(number: int) -> None:
    form = FORMS[number]
    sizes = SIZES[number % len(SIZES)], SIZES[(3 * number + 4) % len(SIZES)]
    for each in sizes[:1] if form[2].startswith("packed") else sizes:
        check_call(call_of(form, each), "hopper", "cuda")


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_key(head_dim: int, mask: str) -> None:
    check_call(plain(head_dim, (1, 1), mask), "hopper", "cuda")


# ------------------------------------------------------------------------------------ head means
MEANS = Spec(
    batch=2, heads=2, teacher_heads=6, teacher_kv_heads=2, student_dim=64, teacher_dim=128,
    dtype=torch.bfloat16, is_causal=True, seqlen_q=300, seqlen_k=517,
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seqlen_q": 1, "seqlen_k": 1},
        {"seqlen_q": 65, "seqlen_k": 129, "is_causal": False},
        {"seqlen_q": 300, "seqlen_k": 127},
        {"teacher_dim": 64, "dtype": torch.float16},
        {"teacher_dim": 192, "divergence": "js"},
        {"teacher_dim": 256, "divergence": "reverse_kl", "temperature": 1.5},
        {"window": (100, 0), "is_causal": False},
        {"key_lengths": True},
        {"known_lse": True},
        {"student_softcap": 5.0, "student_sink": True, "strides": "transposed"},
        {"heads": 1, "teacher_heads": 1, "teacher_kv_heads": 1},
        # sums of probabilities that are 0 in float32, whose logarithms a reverse KL needs
        {"score_size": 12.0},
        {"score_size": 20.0, "divergence": "reverse_kl"},
    ],
    ids=str,
)
def test_head_means(options: dict[str, Any]) -> None:
    """Next to the portable kernels: problems of one metadata share a plan, whatever runs."""
    call = build(replace(MEANS, **options))
    allowed, call = budget(call), call.to(device="cuda")
    for impl in ("hopper",) if options else ("hopper", "triton", "hopper"):
        check(call.value_and_gradients(impl), allowed)


# ------------------------------------------------------------------------------------ rare numbers
@pytest.mark.parametrize("clamp", [0.0, 1e-3])
@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.bfloat16).min, -torch.inf])
def test_a_bias_that_is_a_mask(low: float, clamp: float) -> None:
    """The first tiles that come have nothing that a row sees: fixed bases come later."""
    clamps = {"student_clamp": clamp, "teacher_clamp": clamp}
    for rows, keys in ((640, 640), (64, 1024)):
        call = plain(128, (rows, keys), "additive", mask_density=1.0, **clamps)
        place = torch.arange(rows)[:, None] + keys - rows
        seen = (torch.arange(keys) <= place) & (torch.arange(keys) >= 30)
        seen[:, 30] = True  # so that every row sees a key
        bias = call.options["attn_mask"]
        call.options["attn_mask"] = torch.where(seen, bias, bias.new_tensor(low))
        check_call(call, "hopper", "cuda")


def test_mask_of_blocks() -> None:
    """Blocks that are empty, full and neither."""
    call = plain(128, (900, 1100), "bool")
    mask = call.options["attn_mask"]
    mask[:, :, 128:512, 256:640] = False
    mask[:, :, 512:, 128:384] = True
    mask[:, :, 640:768] = False
    check_call(call, "hopper", "cuda")


@pytest.mark.parametrize("trained", ["student", "teacher"])
def test_rows_without_a_gradient_may_be_infinite(trained: str) -> None:
    """The teacher excludes keys in odd rows; what those rows are must not reach a gradient."""
    operands = {
        name: x.detach().to("cuda").requires_grad_(name.startswith(trained))
        for name, x in plain(64, (150, 333), batch=1).tensors.items()
    }
    bias = torch.zeros(1, 1, 150, 333, dtype=torch.bfloat16, device="cuda")
    bias[:, :, 1::2, ::3] = -math.inf
    found = []
    for impl in ("hopper", "reference"):
        rows = attention_kl(**operands, teacher_bias=bias, divergence="reverse_kl", impl=impl)
        assert bool(rows[..., 1::2].isinf().all())
        weight = torch.zeros_like(rows)
        weight[..., ::2] = 1.0
        inputs = [x for x in operands.values() if x.requires_grad]
        found.append(torch.autograd.grad(rows, inputs, weight))
    for x, expected in zip(*found, strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(x, expected, atol=2e-2 * size, rtol=2e-2)


@pytest.fixture
def adds_small_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_tiles, "ATOMIC_LEAST_FLOP", 0.0)


@pytest.mark.usefixtures("adds_small_queries")
@pytest.mark.parametrize("deterministic", [True, False])
def test_what_lies_beyond_a_length_does_not_count(deterministic: bool) -> None:
    call = plain(64, (300, 700), "window lengths").to(device="cuda")
    call.options["deterministic"] = deterministic
    expected = call.value_and_gradients("hopper")
    keys = [call.tensors[f"{side}_k"] for side in ("student", "teacher")]
    lengths = list(enumerate(call.options["key_lengths"].tolist()))
    with torch.no_grad():
        for x in keys:
            for b, length in lengths:
                x[b, :, length:] = 1e4
    found = call.value_and_gradients("hopper")
    for name, x in expected.items():
        if deterministic or name != "student_q":
            assert torch.equal(found[name], x), name
        else:
            assert apart(found[name], x) <= 4e-3
    for side in ("student", "teacher"):
        assert not any(found[f"{side}_k"][b, :, n:].any() for b, n in lengths)


@pytest.mark.usefixtures("adds_small_queries")
def test_low_scores_beside_absent_keys() -> None:
    """Keys of 0 beyond the last one, next to which every score of a row is far below."""
    q, k = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (150, 200))
    q[..., 0], k[..., 0] = 40.0, -40.0
    operands = [q.requires_grad_(), k.requires_grad_(), torch.randn_like(q), torch.randn_like(k)]
    found, expected = (
        torch.autograd.grad(
            attention_kl(*operands, deterministic=False, student_scale=1.0, impl=impl).sum(),
            (q, k),
        )
        for impl in ("hopper", "triton")
    )
    assert all(apart(a, b) <= 1e-2 for a, b in zip(found, expected, strict=True))


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


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Which rows each call marked to be computed again."""
    from torch_streamkl.attention.triton import forward

    seen: list[Tensor] = []
    kernel = forward.recompute_kernel

    class Recording:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> None:
                seen.append(args[kernel.arg_names.index("outputs")].value.isnan())
                kernel[grid](*args, **kwargs)

            return run

    monkeypatch.setattr(forward, "recompute_kernel", Recording())
    return seen


@pytest.mark.parametrize(
    ("options", "some"),
    [
        ({}, False),
        ({"score_size": 60.0}, True),
        ({"student_clamp": 1e-12}, False),
        ({"student_clamp": 1e-3}, True),
        ({"teacher_clamp": 1e-3, "divergence": "reverse_kl"}, True),
        # 64 keys are one tile, which is masked, and the loop over the rest does not run
        ({"teacher_clamp": 1e-12, "divergence": "reverse_kl", "seqlen_k": 64}, False),
        ({"student_clamp": 1e-2, "seqlen_k": 64}, True),
    ],
    ids=str,
)
def test_only_rows_that_need_it_are_repeated(
    options: dict[str, Any], some: bool, marked: list[Tensor]
) -> None:
    call = build(replace(plain(64, (310, 500)).spec, **options))
    check_call(call, "hopper", "cuda")
    assert bool(marked[0].any()) == some


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("clamp", [0.0, 1e-3])
def test_incoming_gradients(clamp: float, head_dim: int) -> None:
    """What is folded and what is left: NOTE [Folded gradients] in backward.py."""
    call = plain(head_dim, (200, 333), "causal", student_clamp=clamp, teacher_clamp=clamp)
    call = call.to(device="cuda")
    torch.manual_seed(0)
    x = torch.randn(call.run("hopper").shape, device="cuda")
    sizes = torch.where(x.abs() < 0.3, 0.0, (3 * x).exp())  # from 1e-5 to 1e5, and zeros
    inputs = list(call.tensors.values())
    for factor in (1.0, -1.0, x.roll(1).sign(), 1e-30, 0.0):
        found, expected = (
            torch.autograd.grad(call.run(impl), inputs, sizes * factor)
            for impl in ("hopper", "triton")
        )
        assert all(apart(a, b) <= 5e-3 for a, b in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------------ same bits
def same_bits(call: Call, change: Callable[[], None] = lambda: None) -> None:
    first = call.value_and_gradients("hopper")
    for _ in range(3):
        change()
        again = call.value_and_gradients("hopper")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(128, "none"), (64, "causal lengths"), (256, "causal"), (128, "additive")],
)
def test_same_bits_on_every_run(head_dim: int, mask: str) -> None:
    same_bits(plain(head_dim, (700, 700), mask).to(device="cuda"))


@pytest.mark.parametrize("mask", ["none", "causal", "window", "lengths", "packed", "bool"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_same_bits_of_any_number_of_programs(
    head_dim: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_streamkl.attention.hopper import launches as hopper_attention

    numbers = iter((1, 5, 10**6))

    def change() -> None:
        n = next(numbers)
        monkeypatch.setattr(hopper_attention, "_num_programs", lambda _, works, __: min(works, n))

    same_bits(plain(head_dim, (700, 700), mask).to(device="cuda"), change)


def test_same_bits_of_head_means() -> None:
    same_bits(build(MEANS).to(device="cuda"))


def test_one_bias_is_as_two() -> None:
    """The same numbers in one tensor for both sides, or in two."""
    call = plain(128, (700, 700), "additive").to(device="cuda")
    bias = call.options.pop("attn_mask")
    found = []
    for other in (bias, bias.clone()):
        call.options |= {"student_bias": bias, "teacher_bias": other}
        found.append(call.value_and_gradients("hopper"))
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], rtol=2e-2, atol=1e-4)


# ------------------------------------------------------------------------------------ sums
@contextmanager
def torch_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("adds_small_queries")
@pytest.mark.parametrize("sizes", [(1, 1), (300, 127), (257, 512)])
@pytest.mark.parametrize(
    ("kv_heads", "mask", "options"),
    [(4, "none", {}), (4, "causal", {"student_clamp": 1e-3, **FP16}), (2, "causal", {}),
     (1, "none", {"student_clamp": 1e-3})],
)  # fmt: skip
def test_sums_in_any_order(
    kv_heads: int, mask: str, options: dict[str, Any], sizes: tuple[int, int]
) -> None:
    form = ((64, 64), (kv_heads, kv_heads), mask, "forward_kl", 0.0, {"temperature": 1.5})
    call = call_of(form, sizes, **options)
    for name in ("teacher_q", "teacher_k"):
        call.tensors[name].requires_grad_(False)
    expected = budget(call)
    call = call.to(device="cuda")
    call.options["deterministic"] = False
    check(call.value_and_gradients("hopper"), expected)


@pytest.mark.usefixtures("adds_small_queries")
def test_sums_in_any_order_differ_by_order_only() -> None:
    call = plain(64, (600, 2000)).to(device="cuda")
    expected = call.value_and_gradients("hopper")
    call.options["deterministic"] = False
    found = call.value_and_gradients("hopper")
    for name in ("value", "teacher_q", "teacher_k"):
        assert torch.equal(found[name], expected[name])
    assert not torch.equal(found["student_q"], expected["student_q"])
    assert all(apart(found[x], expected[x]) <= 4e-3 for x in ("student_q", "student_k"))
    with torch_deterministic():
        again = call.value_and_gradients("hopper")
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.fixture
def no_plans() -> Iterator[None]:
    plans.clear_plans()
    yield
    plans.clear_plans()


# divergence, clamp, head_dim, sizes: from 1 to 5 parts, of whole tiles or not
@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize(
    ("divergence", "clamp", "head_dim", "sizes"),
    [
        ("forward_kl", 0.0, 64, (300, 640)),
        ("reverse_kl", 0.0, 128, (200, 600)),
        ("cross_entropy", 0.0, 64, (193, 257)),
        ("forward_kl", 1e-3, 128, (150, 333)),
        ("reverse_kl", 1e-12, 64, (1, 500)),
    ],
)
def test_parts(
    divergence: str, clamp: float, head_dim: int, sizes: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The last round of blocks is computed in parts, however few tiles they have."""
    monkeypatch.setattr(hopper_tiles, "LEAST_TILES_OF_PART", 2)
    form = ((head_dim, head_dim), (2, 2), "none", divergence, clamp, {"teacher_clamp": clamp})
    check_call(call_of(form, sizes, batch=2), "hopper", "cuda")


def test_whole_blocks_and_parts() -> None:
    # 135 blocks on 132 multiprocessors: 132 whole ones, and 3 of 4 parts each
    call = build(
        Spec(batch=1, heads=27, student_dim=64, teacher_dim=64, dtype=torch.bfloat16,
             seqlen_q=960, seqlen_k=2100)
    ).to(device="cuda")  # fmt: skip
    torch.testing.assert_close(call.run("hopper"), call.run("triton"), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("clamp", [0.0, 1e-3])  # the second has another kernel
@pytest.mark.parametrize("num_splits", [4, 1])
def test_keys_are_shared(clamp: float, num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dK of eight grouped heads (GQA): in four shares, and in one."""
    from torch_streamkl.attention.hopper import tasks

    monkeypatch.setattr(tasks, "key_splits", lambda *_, **__: num_splits)
    form = ((128, 128), (1, 1), "causal", "reverse_kl", clamp, {})
    check_call(call_of(form, (150, 333), heads=8), "hopper", "cuda")


@pytest.mark.parametrize(
    ("mask", "least", "sizes"),
    [("none", 2, (200, 900)), ("causal", 8, (200, 900)), ("lengths", 2, (64, 4000)),
     ("lengths", 4, (64, 3000)), ("lengths", 4, (3, 130))],  # heads become rows
)  # fmt: skip
def test_shares_of_query_gradients(
    mask: str, least: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "LEAST_TILES_OF_SPLIT", least)
    check_call(plain(128, sizes, mask), "hopper", "cuda")
