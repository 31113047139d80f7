"""Kernels that are written for row programs: the interpreter, other GPUs' compilers, a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.offline import TARGETS, compile_launch, looks_like, record_launches
from tests.support.covering import only
from tests.support.interpreter import inside, outside, quiet
from tests.support.row_cases import CASES, EXAMPLES, Sizes, check_errors
from torch_streamkl import row_program
from torch_streamkl.rows import torch_impl
from torch_streamkl.rows.problem import RowProblem

pytestmark = quiet
MOST_SPILLS = 1024  # bytes of a thread: the last of three levels, with its derivatives
NAMES = list(CASES)
# what differs most in the kernels that are written; the others are marked slow
QUICK = ("forward_kl", "top_k_with_ghost", "mask")
slow = pytest.mark.slow
SMALL = Sizes(batch=1, heads=2, rows=19, keys=70, dim=7)


@inside
@pytest.mark.parametrize("name", only(QUICK, NAMES))
def test_example(name: str) -> None:
    check_errors(name, "triton", torch.float32, SMALL)


@inside
@pytest.mark.parametrize("name", only(["weighted_keys"], ["js", "weighted_keys"]))
def test_float16(name: str) -> None:
    check_errors(name, "triton", torch.float16, SMALL)


@inside
def test_key_heads_of_several_heads() -> None:
    """Two key heads of two heads each: with one key head their order cannot be wrong."""
    check_errors("weighted_keys", "triton", torch.float32, Sizes(1, 4, 17, 19, 3))


def _operands(rows: int = 70, keys: int = 67) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"t": ((2, 2, rows, 5), (2, 1, keys, 5)), "s": ((2, 2, rows, 3), (2, 2, keys, 3))}
    return {
        name: tuple(torch.randn(shape).requires_grad_() for shape in pair)
        for name, pair in shapes.items()
    }


def _program(e: Any) -> Any:
    """Captured tensors of every kind, conditions, positions, powers, three levels."""
    hidden = (e.ids == 3) | e.hide & (e.key_index > e.row_index - 9)
    t = torch.where(hidden, -torch.inf, e.t + e.bias)
    p, s = t.softmax("key"), (e.s * e.row).log_softmax("key")
    weight = (p * e.key) / (1e-6 + (p * e.key).sum("key"))
    extra = (e.s.tanh() - weight.detach()) ** 2 + (e.s**2 + 1) ** -1.5 + e.s.abs().log1p()
    kl = (weight * (weight.log() - s)).sum("key")
    return {"kl": kl, "extra": (torch.minimum(extra, e.t.sigmoid()) / 64).sum("key")}


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"window": (20, 3)},
    "left": {"window": (5, None)},
    "lengths": {"key_lengths": torch.tensor([41, 0])},
    "mask": {"mask": torch.rand(2, 1, 1, 67, generator=torch.Generator().manual_seed(0)) > 0.2},
}


def _compare(
    dots: dict[str, Any],
    impl: str,
    differentiated: Sequence[tuple[str, str]] = (("rows", "row"),),
    **options: Any,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows, keys = dots["t"][0].shape[2], dots["t"][1].shape[2]
    device = dots["t"][0].device
    captures = {
        "rows": {"row": torch.rand(2, 2, rows, generator=generator)},
        "keys": {
            "key": torch.rand(1, 1, keys, generator=generator),
            "ids": torch.randint(9, (1, 1, keys), generator=generator),
        },
        "pairs": {
            "bias": torch.randn(1, 2, 1, keys, generator=generator),
            "hide": torch.rand(2, 1, rows, keys, generator=generator) > 0.9,
        },
    }
    moved = {k: {n: x.to(device) for n, x in v.items()} for k, v in captures.items()}
    for kind, name in differentiated:
        moved[kind][name].requires_grad_()
    out = row_program(_program, dots=dots, impl=impl, **moved, **options)
    total = (out["kl"] + out["extra"] ** 2).sum()
    leaves = [x for pair in dots.values() for x in pair]
    leaves += [x for kind in moved.values() for x in kind.values() if x.requires_grad]
    return [*(x.detach() for x in out.values()), *torch.autograd.grad(total, leaves)]


@inside
@pytest.mark.parametrize("name", only(QUICK, MASKS))
def test_masks_and_captures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with 16-bit operands, whose tiles without a mask have a loop of their own."""
    from torch_streamkl.rows.triton import launches as row_kernels

    monkeypatch.setattr(row_kernels, "is_exact", lambda problem: False)
    dots = _operands(rows=21)  # tiles have 16
    double = {n: tuple(x.double() for x in pair) for n, pair in dots.items()}
    truth = _compare(double, "torch", **MASKS[name])
    same = _compare(dots, "torch", **MASKS[name])
    _check(_compare(dots, "triton", **MASKS[name]), same, truth)


def _check(
    every: list[torch.Tensor], of_blocks: list[torch.Tensor], truth: list[torch.Tensor]
) -> None:
    """Errors of at most twice those of blocks in the same dtype, and some roundings."""
    for got, same, exact in zip(every, of_blocks, truth, strict=True):
        allowed = 2 * float((same - exact).abs().max()) + 2e-6 * float(exact.abs().max())
        assert float((got - exact).abs().max()) <= allowed


@inside
def test_every_captured_tensor_gets_its_gradient() -> None:
    differentiated = (("rows", "row"), ("keys", "key"), ("pairs", "bias"))
    dots = _operands(rows=21)
    truth, same, got = (
        _compare(
            {n: tuple(x.to(t) for x in pair) for n, pair in dots.items()}, impl, differentiated
        )
        for impl, t in (
            ("torch", torch.float64),
            ("torch", torch.float32),
            ("triton", torch.float32),
        )
    )
    _check(got, same, truth)


BLOCKS = {"window": 4, "causal": 5, "lengths": 16, "left": 24, "mask": 32, "none": 96}


@inside
@pytest.mark.parametrize("name", only(["left", "mask", "lengths"], BLOCKS))
def test_sums_over_blocks_of_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that divide a tile of 16 keys, that it divides, and others."""
    from torch_streamkl.rows.triton import launches as row_kernels

    if name in ("window", "causal", "left"):  # tiles without a mask have a loop of their own
        monkeypatch.setattr(row_kernels, "is_exact", lambda problem: False)
    _check_blocks(_operands(24), BLOCKS[name], MASKS[name])


def _check_blocks(dots: dict[str, Any], size: int, options: dict[str, Any]) -> None:
    """Errors of at most twice those of blocks in plain torch, and roundings of the scores."""
    got, same, truth = (
        _of_blocks(dots, impl, dtype, size, options)
        for impl, dtype in (
            ("triton", torch.float32),
            ("torch", torch.float32),
            ("torch", torch.float64),
        )
    )
    for a, b, exact in zip(got, same, truth, strict=True):
        assert a.shape == exact.shape
        allowed = 2 * float((b - exact).abs().max()) + 1e-5 * float(exact.abs().max())
        assert float((a - exact).abs().max()) <= allowed


def _of_blocks(
    dots: dict[str, Any], impl: str, dtype: torch.dtype, size: int, options: dict[str, Any]
) -> list[torch.Tensor]:
    """Sums over blocks of both levels, with a Jacobian of each, next to one over all keys."""
    pairs = {n: tuple(x.to(dtype) for x in pair) for n, pair in dots.items()}
    device = pairs["t"][0].device
    key = torch.rand(1, 1, 67, generator=torch.Generator().manual_seed(2)).to(device)

    def function(e: Any) -> Any:
        p, s = e.t.softmax("key") * e.key, e.s.softmax("key")
        q = p / (p.sum("key") + 1e-3)
        return {
            "p": (p * e.key).sum("key", block=size),
            "square": ((q - s) ** 2).sum("key", block=size),
            "row": (q * s).sum("key"),
        }

    out = row_program(function, dots=pairs, keys={"key": key}, impl=impl, **options)
    make = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=make).to(x)).sum() for x in out.values())
    leaves = [x for pair in dots.values() for x in pair]
    return [*(x.detach() for x in out.values()), *torch.autograd.grad(loss, leaves)]


def test_what_has_no_kernels_says_why() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    wide = (torch.randn(1, 2, 3, 260), torch.randn(1, 2, 5, 260))
    for pair, match in (
        ((q.double(), k.double()), "operands are float64"),
        (wide, "dimensions in kernels, got 260"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            row_program(lambda e: e.s.sum("key"), dots={"s": pair}, impl="triton")
    ids = torch.zeros(1, 2, 3, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="columns that differ between heads"):
        row_program(
            lambda e: torch.where(e.c, e.s, 0.0).sum("key"),
            dots={"s": (q, k)},
            columns={"c": ids},
            impl="triton",
        )


@outside
@pytest.mark.parametrize(
    ("target", "head_dim"),
    [
        pytest.param("sm_80", 64, marks=slow),
        pytest.param("sm_80", 128, marks=slow),
        ("sm_90", 64),
        pytest.param("sm_90", 128, marks=slow),
        pytest.param("sm_86", 256, marks=slow),
    ],
)
def test_compiles(target: str, head_dim: int) -> None:
    from torch_streamkl.rows.triton import launches as row_kernels

    text, tensors = _recorded()
    for launch in _launches(text, tensors, target, head_dim, row_kernels):
        built = compile_launch(launch, target)
        assert built.shared_bytes <= TARGETS[target].shared_bytes, launch.kernel.__name__
        assert built.spill_bytes <= MOST_SPILLS, launch.kernel.__name__


@outside
def test_tiles_fit_every_gpu() -> None:
    from torch_streamkl.rows.triton import launches as row_kernels

    text, _ = _recorded()

    def why_unsupported(target: str, head_dim: int, dtype: torch.dtype) -> str:
        with looks_like(target), FakeTensorMode():
            x = torch.empty(1, 2, 64, head_dim, dtype=dtype, device="cuda")
            weight = torch.empty(1, 1, 64, device="cuda")
            return row_kernels.why_unsupported(RowProblem.of(text, [*[x] * 4, weight]), True)

    for target, head_dim in itertools.product(TARGETS, (32, 80, 128, 256)):
        for dtype in (torch.float16, torch.float32):
            fits = (target, head_dim, dtype) != ("sm_75", 256, torch.float32)
            assert ("KiB" not in why_unsupported(target, head_dim, dtype)) >= fits


@outside
def test_a_gpu_without_matrix_units_for_a_dtype() -> None:
    from torch_streamkl.rows.triton import blocks as row_blocks
    from torch_streamkl.rows.triton import launches as row_kernels

    text, _ = _recorded()
    with looks_like("sm_75"), FakeTensorMode():
        x = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
        problem = RowProblem.of(text, [*[x] * 4, torch.empty(1, 1, 64, device="cuda")])
        for module in (row_kernels, row_blocks):
            limit = module.why_unsupported(problem, True)
            assert "takes bfloat16 from compute capability 8.0 on" in limit


@outside
def test_maps_that_fit_no_gpu() -> None:
    """Operands of both dot products are in one tile where both have heads."""
    from torch_streamkl.rows.triton import blocks as row_blocks

    text, _ = _recorded()
    for dim, room in ((256, "64 KiB"), (128, "")):
        with looks_like("sm_75"), FakeTensorMode():
            x = torch.empty(1, 2, 64, dim, dtype=torch.float32, device="cuda")
            problem = RowProblem.of(text, [*[x] * 4, torch.empty(1, 1, 64, device="cuda")])
            assert room in row_blocks.why_unsupported(problem, True)
            assert bool(row_blocks.why_unsupported(problem, True)) == bool(room)


def _recorded() -> tuple[str, list[torch.Tensor]]:
    """The text of weighted, renormalised KL, and its tensors."""
    seen: list[Any] = []
    original = torch_impl.forward

    def spy(problem: RowProblem, is_differentiated: bool) -> Any:
        seen.append(problem)
        return original(problem, is_differentiated)

    case = CASES["weighted_keys"](SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "forward", spy)
        EXAMPLES["weighted_keys"](**case.tensors)
    problem = seen[0]
    return problem.program.text, [*(x for p in problem.operands for x in p), *problem.captures]


def _launches(
    text: str, tensors: list[torch.Tensor], target: str, head_dim: int, module: Any
) -> list[Any]:
    shape = (1, 32, 1024, head_dim)
    with record_launches(target) as launches:
        operands = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        weight = torch.empty(1, 1, 1024, device="cuda")
        problem = RowProblem.of(text, [*operands, weight])
        result = module.forward(problem, True)
        grads = [torch.empty(1, 32, 1024, device="cuda") for _ in problem.program.outputs]
        module.backward(problem, result, grads, [True] * 4 + [False])
    assert len(launches) == 7  # three levels, rows and columns of both dots
    return launches


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_example_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    # naive code in float16 has no numbers at the scores of the other types
    spread = 0.1 if dtype == torch.float16 else 1.0
    sizes = Sizes(batch=2, heads=4, rows=193, keys=259, dim=64, spread=spread)
    check_errors(name, "triton", dtype, sizes, "cuda")
    check_errors(name, "torch", dtype, sizes, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 8, 48, 64, 100, 256])
@pytest.mark.parametrize("name", MASKS)
def test_sums_over_blocks_of_keys_on_a_gpu(name: str, size: int) -> None:
    dots = {
        n: tuple(x.detach().cuda().requires_grad_() for x in pair)
        for n, pair in _operands().items()
    }
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in MASKS[name].items()}
    _check_blocks(dots, size, options)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_captures_on_a_gpu(name: str) -> None:
    dots = {
        n: tuple(x.detach().cuda().requires_grad_() for x in pair)
        for n, pair in _operands().items()
    }
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in MASKS[name].items()}
    results = (_compare(dots, impl, **options) for impl in ("triton", "torch"))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
