"""Kernels that are written for row programs: the interpreter, other GPUs' compilers, a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.offline import TARGETS, looks_like
from tests.support.covering import only
from tests.support.gpus import on_a_gpu
from tests.support.interpreter import inside, outside, quiet
from tests.support.naive_rows import check
from tests.support.row_cases import CASES, Sizes, check_errors, recorded
from torch_streamkl import row_program
from torch_streamkl.program.graph import apply
from torch_streamkl.program.masks import Keys
from torch_streamkl.rows.op import row_program as row_program_of
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.trace import Tracer

pytestmark = quiet
NAMES = list(CASES)
# what differs most in the kernels that are written; the others are marked slow
QUICK = ("forward_kl", "top_k_with_ghost", "mask")
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


@inside
@pytest.mark.parametrize("exponent", [0.5, 1.5, 3.0, 3.5, 4.0, -0.5, -1.0, -1.5, -3.0])
def test_powers_are_as_accurate_as_those_of_torch(exponent: float) -> None:
    """Through a logarithm of float32, the cube of 1,000 is off by ten of its roundings."""
    numbers = torch.logspace(-4, 4, 41).view(1, 1, 41, 1)
    signed = torch.cat([numbers, -numbers], 2) if exponent == int(exponent) else numbers
    dots = {"s": (signed, torch.ones(1, 1, 1, 1))}
    options: dict[str, Any] = {"dots": dots, "impl": "triton"}
    found = row_program(lambda e: {"power": (e.s**exponent).sum("key")}, **options)["power"]
    exact = signed.double().flatten() ** exponent
    torch.testing.assert_close(found.double().flatten(), exact, rtol=4e-7, atol=0)


@inside
def test_powers_of_special_numbers() -> None:
    special = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, -2.0]).view(1, 1, 5, 1)
    exponents = (0.5, 1.5, 2.5, 3.0, -0.5, -1.0, -1.5, -2.0, 5.0, -7.0, 0.3)
    found = row_program(
        lambda e: {str(x): (e.row**x + 0 * e.s).sum("key") for x in exponents},
        dots={"s": (torch.ones(1, 1, 5, 1), torch.ones(1, 1, 1, 1))},
        rows={"row": special[..., 0]},
        impl="triton",
    )
    for x in exponents:
        torch.testing.assert_close(found[str(x)], special[..., 0] ** x, equal_nan=True)


@inside
def test_whole_powers_keep_the_sign_of_zero() -> None:
    zeros = torch.tensor([0.0, -0.0]).view(1, 1, 2)
    for x in (1.0, 3.0, -1.0, -2.0, -3.0):
        found = row_program(
            lambda e, x=x: {"power": (e.row**x).sum("key") + 0 * e.s.sum("key")},
            dots={"s": (torch.ones(1, 1, 2, 1), torch.ones(1, 1, 1, 1))},
            rows={"row": zeros},
            impl="triton",
        )
        assert torch.equal(found["power"], zeros**x), x


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


Dots = dict[str, tuple[Tensor, Tensor]]
Run = Callable[[Dots, str], list[Tensor]]


def _compare(
    options: dict[str, Any], differentiated: Sequence[tuple[str, str]], dots: Dots, impl: str
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    (q, k), device = dots["t"], dots["t"][0].device
    rows, keys = q.shape[2], k.shape[2]
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


def _check(run: Run, dots: Dots, rounding: float) -> None:
    """Errors of at most twice those of blocks in plain torch in the same dtype, and roundings."""
    double = {n: tuple(x.double() for x in pair) for n, pair in dots.items()}
    results = run(dots, "triton"), run(dots, "torch"), run(double, "torch")
    for got, same, exact in zip(*results, strict=True):
        assert got.shape == exact.shape
        allowed = 2 * float((same - exact).abs().max()) + rounding * float(exact.abs().max())
        assert float((got - exact).abs().max()) <= allowed


def _on_gpu(name: str) -> tuple[dict[str, Any], Dots]:
    """The options of a mask, and operands."""
    options = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in MASKS[name].items()}
    dots = {
        n: tuple(x.detach().cuda().requires_grad_() for x in pair)
        for n, pair in _operands().items()
    }
    return options, dots


OF_ROWS = (("rows", "row"),)


@inside
@pytest.mark.parametrize("name", only(QUICK, MASKS))
def test_masks_and_captures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with 16-bit operands, whose tiles without a mask have a loop of their own."""
    from torch_streamkl.rows.triton import launches as row_kernels

    monkeypatch.setattr(row_kernels, "is_exact", lambda problem: False)
    differentiated = (("rows", "row"), ("keys", "key"), ("pairs", "bias"))
    # tiles have 16 rows
    _check(partial(_compare, MASKS[name], differentiated), _operands(rows=21), 2e-6)


def _hashed(e: Any) -> Any:
    """A mask by integers that are more than int32 holds."""
    t = torch.where((e.row_index * e.key_index * 829348951) % 31 < 20, e.t, -1e9)
    return {"value": (t.softmax("key") * t).sum("key")}


@inside
def test_large_integers() -> None:
    dots = {"t": (torch.randn(1, 1, 21, 3), torch.randn(1, 1, 33, 3))}
    found = [row_program(_hashed, dots=dots, impl=x)["value"] for x in ("triton", "torch")]
    torch.testing.assert_close(*found)


BLOCKS = {"window": 4, "causal": 5, "lengths": 16, "left": 24, "mask": 32, "none": 96}


@inside
@pytest.mark.parametrize("name", only(["left", "mask", "lengths"], BLOCKS))
def test_sums_over_blocks_of_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that divide a tile of 16 keys, that it divides, and others."""
    from torch_streamkl.rows.triton import launches as row_kernels

    if name in ("window", "causal", "left"):  # tiles without a mask have a loop of their own
        monkeypatch.setattr(row_kernels, "is_exact", lambda problem: False)
    # and roundings of the scores
    _check(partial(_of_blocks, BLOCKS[name], MASKS[name]), _operands(24), 1e-5)


def _of_blocks(size: int, options: dict[str, Any], dots: Dots, impl: str) -> list[Tensor]:
    """Sums over blocks of both levels, with a Jacobian of each, next to one over all keys."""
    key = torch.rand(1, 1, 67, generator=torch.Generator().manual_seed(2)).to(dots["t"][0].device)

    def function(e: Any) -> Any:
        p, s = e.t.softmax("key") * e.key, e.s.softmax("key")
        q = p / (p.sum("key") + 1e-3)
        return {
            "p": (p * e.key).sum("key", block=size),
            "square": ((q - s) ** 2).sum("key", block=size),
            "row": (q * s).sum("key"),
        }

    out = row_program(function, dots=dots, keys={"key": key}, impl=impl, **options)
    make = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=make).to(x)).sum() for x in out.values())
    leaves = [x for pair in dots.values() for x in pair]
    return [*(x.detach() for x in out.values()), *torch.autograd.grad(loss, leaves)]


def _of_other_keys(dots: Dots, impl: str) -> list[Tensor]:
    """The log-sum-exp of the keys that no id of a row names, of which one row has none."""
    rows, keys = dots["s"][0].shape[2], dots["s"][1].shape[2]
    ids = torch.randint(keys, (1, 1, rows, keys), generator=torch.Generator().manual_seed(0))
    ids[..., 3:] = ids[..., :1]
    ids[:, :, 1] = torch.arange(keys)

    def function(e: Any) -> Any:
        return torch.where(e.ids, -torch.inf, e.s * 3).logsumexp("key")

    out = row_program(function, dots=dots, columns={"ids": ids}, impl=impl)
    assert out[:, :, 1].isneginf().all()
    out = out.masked_fill(torch.arange(rows) == 1, 0.0)
    leaves = [x for pair in dots.values() for x in pair]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@inside
def test_keys_that_no_id_names() -> None:
    make = torch.Generator().manual_seed(1)
    s = tuple(torch.randn(1, 1, n, 5, generator=make).requires_grad_() for n in (19, 37))
    _check(_of_other_keys, {"s": (s[0], s[1])}, 2e-6)


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _by_columns(e: Any) -> Any:
    return (e.v * e.s.softmax("key")).sum("key")


def _largest_scores(device: str, rows: int, keys: int) -> None:
    """A maximum that a program returns has no gradient, and the sum beside it has."""
    tracer = Tracer((1,), (), Keys(), {})
    score = tracer.dot(0)
    largest, total = tracer.reduce("max", score).args[0], tracer.reduce("logsumexp", score)
    program, _ = tracer.program([largest, total])
    make = torch.Generator().manual_seed(0)
    operands = [torch.randn(1, 2, n, 16, generator=make).to(device) for n in (rows, keys)]
    found = []
    for impl in ("triton", "reference"):
        given = [x.detach().clone().requires_grad_() for x in operands]
        values = row_program_of(given, program.text, True, impl)[:2]
        gradients = torch.autograd.grad(values[1].square().sum(), given)
        assert (values[0] <= values[1]).all()
        found.append([*values, *gradients])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@inside
def test_a_maximum_is_returned() -> None:
    _largest_scores("cpu", 19, 70)


def _places(
    device: str, rows: int, keys: int, heads: int, dtype: torch.dtype = torch.float32
) -> None:
    """The first of the largest elements is at the place that torch has, also of NaN and ties."""
    tracer = Tracer((1 if heads else 0,), (), Keys(), {})
    score = tracer.dot(0)
    if dtype != torch.float32:
        score = apply(str(dtype).removeprefix("torch."), score)
    place, total = tracer.reduce("argmax", score), tracer.reduce("logsumexp", tracer.dot(0))
    program, _ = tracer.program([total, place])
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-2, 3, (1, heads or 1, n, 4), generator=make) for n in (rows, keys))
    q, k = q.to(device, dtype), k.to(device, dtype)  # with many ties: products are whole numbers
    q[0, :, 1], k[0, :, keys // 2] = 0.0, -2.0
    for special in (None, torch.inf, -torch.inf, torch.nan):
        if special is not None:
            q[0, :, 2, 0], k[0, :, 5] = special, 1.0
        given = [q.detach().requires_grad_(), k.detach().requires_grad_()]
        found = row_program_of(given, program.text, True, "triton")[1]
        assert torch.equal(found, (q @ k.mT).argmax(-1))
        assert found.dtype == torch.int64 and not found.requires_grad
        assert torch.equal(found, row_program_of(given, program.text, True, "torch")[1])
        assert torch.equal(found, row_program_of(given, program.text, True, "reference")[1])


PLACES = [(19, 70, 2), (3, 16, 1), (5, 131, 0)]


@inside
@pytest.mark.parametrize(("rows", "keys", "heads"), PLACES)
def test_places_of_maxima(rows: int, keys: int, heads: int) -> None:
    _places("cpu", rows, keys, heads)


@inside
def test_scores_of_a_narrow_type_are_rounded() -> None:
    """1.0 and 1.0002 are one number of float16, of which the first place is that of torch."""
    tracer = Tracer((1,), (), Keys(), {})
    score = apply("float16", tracer.dot(0))
    largest = tracer.reduce("max", score).args[0]
    program, _ = tracer.program([tracer.reduce("argmax", score), largest])
    q = torch.tensor([1.0, 2.0**-12]).half().expand(1, 1, 16, 2)
    k = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).half()[None, None]
    for impl in ("triton", "torch", "reference"):
        place, largest = row_program_of([q, k], program.text, False, impl)[:2]
        assert (place == 1).all() and (largest == 1.0).all(), impl


@inside
@pytest.mark.parametrize("shape", [(1, 1, 19), (2, 1, 1)])
def test_columns_broadcast(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = _leaf(*shape, 4)
    ids = torch.randint(-1, 20, values.shape)
    dots = {"s": (_leaf(2, 1, 19, 5), _leaf(2, 1, 17, 5))}
    check(_by_columns, dots, impl="triton", columns={"v": (ids, values)}, rtol=1e-5, atol=1e-6)


def _weighted_by_rows_and_keys(e: Any) -> Any:
    return e.row * (e.s + e.key).logsumexp("key")


@inside
def test_a_sum_of_more_tokens_than_entries() -> None:
    """Tensors of keys have no rows, which the loss of rows reads."""
    torch.manual_seed(0)
    captured: dict[str, Any] = {"rows": {"row": torch.rand(9)}, "keys": {"key": _leaf(5)}}
    dots = {"s": (_leaf(9, 3), _leaf(5, 3))}
    check(_weighted_by_rows_and_keys, dots, impl="triton", reduction="mean", rtol=1e-5, atol=1e-6,
          **captured)  # fmt: skip


def test_what_has_no_kernels_says_why() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    wide = (torch.randn(1, 2, 3, 260), torch.randn(1, 2, 5, 260))
    ids = {"c": torch.zeros(1, 2, 3, 1, dtype=torch.int64)}
    for pair, columns, match in (
        ((q.double(), k.double()), {}, "operands are float64"),
        (wide, {}, "dimensions in kernels, got 260"),
        ((q, k), ids, "columns that differ between heads"),
    ):

        def function(e: Any, has_columns: bool = bool(columns)) -> Any:
            return (torch.where(e.c, e.s, 0.0) if has_columns else e.s).sum("key")

        with pytest.raises(NotImplementedError, match=match):
            row_program(function, dots={"s": pair}, columns=columns, impl="triton")


def _problem(target: str, dim: int, dtype: torch.dtype) -> RowProblem:
    """A weighted, renormalised KL on a GPU that is not here."""
    text = recorded("weighted_keys", SMALL).program.text
    with looks_like(target), FakeTensorMode():
        x = torch.empty(1, 2, 64, dim, dtype=dtype, device="cuda")
        return RowProblem.of(text, [*[x] * 4, torch.empty(1, 1, 64, device="cuda")])


def _why_unsupported(module: Any, target: str, dim: int, dtype: torch.dtype) -> str:
    problem = _problem(target, dim, dtype)
    with looks_like(target), FakeTensorMode():
        text: str = module.why_unsupported(problem, True)
    return text


@outside
def test_tiles_fit_every_gpu() -> None:
    from torch_streamkl.rows.triton import launches as in_tiles

    for target, dim in itertools.product(TARGETS, (32, 80, 128, 256)):
        for dtype in (torch.float16, torch.float32):
            fits = (target, dim, dtype) != ("sm_75", 256, torch.float32)
            assert ("KiB" not in _why_unsupported(in_tiles, target, dim, dtype)) >= fits


@outside
def test_a_gpu_that_has_not_what_kernels_take() -> None:
    """Matrix units for a dtype; room for the operands of two dot products of heads."""
    from torch_streamkl.rows.triton import blocks as by_maps
    from torch_streamkl.rows.triton import launches as in_tiles

    for module in (in_tiles, by_maps):
        limit = _why_unsupported(module, "sm_75", 64, torch.bfloat16)
        assert "takes bfloat16 from compute capability 8.0 on" in limit
    assert "64 KiB" in _why_unsupported(by_maps, "sm_75", 256, torch.float32)
    assert not _why_unsupported(by_maps, "sm_75", 128, torch.float32)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_example_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    # naive code in float16 has no numbers at the scores of the other types
    spread = 0.1 if dtype == torch.float16 else 1.0
    sizes = Sizes(batch=2, heads=4, rows=193, keys=259, dim=64, spread=spread)
    check_errors(name, "triton", dtype, sizes, "cuda")
    check_errors(name, "torch", dtype, sizes, "cuda")


@on_a_gpu
@pytest.mark.gpu
def test_a_maximum_is_returned_on_a_gpu() -> None:
    _largest_scores("cuda", 193, 259)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "keys", "heads"), [*PLACES, (193, 2059, 2), (193, 5059, 0)])
def test_places_of_maxima_on_a_gpu(rows: int, keys: int, heads: int, dtype: torch.dtype) -> None:
    _places("cuda", rows, keys, heads, dtype)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "size"), [*BLOCKS.items(), ("none", 1), ("none", 64)])
def test_masks_captures_and_blocks_of_keys_on_a_gpu(name: str, size: int) -> None:
    options, dots = _on_gpu(name)
    _check(partial(_of_blocks, size, options), dots, 1e-5)
    results = (_compare(options, OF_ROWS, dots, impl) for impl in ("triton", "torch"))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
