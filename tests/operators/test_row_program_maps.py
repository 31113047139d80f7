"""Row programs by maps of a block of rows: sums over heads, LM heads, columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.offline import TARGETS, compile_launch, record_launches
from tests.support.covering import only
from tests.support.gpus import on_a_gpu
from tests.support.interpreter import inside, outside, quiet
from tests.support.row_cases import Sizes, check_errors, recorded
from torch_streamkl import row_program
from torch_streamkl.rows.problem import RowProblem

pytestmark = quiet
MOST_SPILLS = 1024  # bytes of a thread
slow = pytest.mark.slow


def _all(first: str, *others: str) -> list[Any]:
    """Names, of which all but the first are marked slow."""
    return [first, *(pytest.param(x, marks=slow) for x in others)]


@pytest.fixture
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows, and of vocabulary entries."""
    from torch_streamkl.rows.triton import blocks as row_blocks
    from torch_streamkl.rows.triton import gradients

    monkeypatch.setattr(row_blocks, "_workspace", lambda problem, _: 100 * problem.num_keys * 4)
    monkeypatch.setattr(gradients, "MEMBERS", 2)  # a gradient to keys in several shares


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def _heads() -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """An indexer of many heads on one key head; captured tensors of every kind."""
    given: dict[str, Any] = {
        "dots": {
            "t": (_leaf(2, 2, 21, 5), _leaf(2, 2, 41, 5)),
            "s": (_leaf(2, 4, 21, 3), _leaf(2, 1, 41, 3)),
        },
        "rows": {"w": _leaf(2, 4, 21), "temperature": _leaf(2, 1, 21)},
        "keys": {"key": torch.rand(1, 1, 41, dtype=torch.float64).requires_grad_()},
        "pairs": {"bias": _leaf(2, 1, 21, 41)},
    }

    def kl(e: Any) -> Any:
        p = e.t.softmax("key").sum("head") * e.key
        p = p / (p.sum("key") + 1e-6)
        s = ((e.w * e.s.relu()).sum("head") / (1 + e.temperature**2) + e.bias).log_softmax("key")
        return {"kl": (p * ((p + 1e-10).log() - s)).sum("key"), "z": s.exp().square().sum("key")}

    return given, kl


def _vocab() -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Two LM heads with a bias, a mask of vocabulary entries, ids and values at them."""
    ids = torch.rand(19, 300).argsort(-1)[:, :9]
    ids[:, 7] = ids[:, 2]  # which is summed
    ids[::3, 8] = -1
    given: dict[str, Any] = {
        "dots": {"t": (_leaf(19, 260), _leaf(300, 260)), "s": (_leaf(19, 7), _leaf(300, 7))},
        "rows": {"label": torch.randint(300, (19,))},
        "keys": {"bias": _leaf(300)},
        "pairs": {"extra": _leaf(19, 300)},
        "columns": {"top": ids, "value": (ids, _leaf(19, 9))},
    }

    def sums(e: Any) -> Any:
        t = torch.where(e.top, e.t * 0.05, -torch.inf).log_softmax("key")
        s = (e.s + e.bias + e.extra).log_softmax("key")
        return {
            "kl": (t.exp() * (t - s)).sum("key"),
            "label": torch.where(e.key_index == e.label, s, 0.0).sum("key"),
            "value": torch.where(e.top, e.value * s.exp(), 0.0).sum("key"),
        }

    return given, sums


def _blocks_of_entries() -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Sums over blocks of an LM head's vocabulary entries, whose gradients come by blocks of
    vocabulary entries.
    """
    given: dict[str, Any] = {
        "dots": {"t": (_leaf(51, 7), _leaf(520, 7)), "s": (_leaf(51, 260), _leaf(520, 260))},
        "rows": {"w": _leaf(51)},
    }

    def sums(e: Any) -> Any:
        p, s = e.t.softmax("key"), (e.s * 0.05).softmax("key")
        q = p * e.w / (1 + (p * p).sum("key"))
        return {"kl": (q * s).sum("key", block=48), "z": (s * s).sum("key", block=48)}

    return given, sums


def _linear() -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Tensors that all heads share: keys that take no part add nothing to their gradients."""
    ids = torch.rand(2, 1, 40, 41).argsort(-1)[..., :3]
    given: dict[str, Any] = {
        "dots": {"s": (_leaf(2, 3, 40, 5), _leaf(2, 3, 41, 5))},
        "keys": {"key": _leaf(2, 1, 41)},
        "pairs": {"pair": _leaf(2, 1, 40, 41)},
        "columns": {"value": (ids, _leaf(2, 1, 40, 3))},
    }
    return given, lambda e: {"kl": (e.s * (e.key + e.pair + e.value)).sum("key")}


RECORDED = Sizes(1, 4, 16, 300, 8)
PROBLEMS = {"heads": _heads, "linear": _linear, "vocab": _vocab, "blocks": _blocks_of_entries}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window": (20, 3)},
    "lengths": {"key_lengths": torch.tensor([41, 20])},
}


def _run(
    name: str, dtype: torch.dtype, impl: str, device: str = "cpu", **options: Any
) -> list[Tensor]:
    torch.manual_seed(3)
    given, function = PROBLEMS[name]()

    def moved(x: Tensor) -> Tensor:
        wanted = dtype if x.is_floating_point() else x.dtype
        return x.detach().to(device, wanted).requires_grad_(x.requires_grad)

    given = tree_map_only(Tensor, moved, given)
    out = row_program(function, impl=impl, **given, **options)
    weight = torch.linspace(-1, 2, out["kl"].numel(), dtype=dtype, device=device)
    total = sum((x * weight.view(x.shape)).sum() for x in out.values())
    leaves = [x for x in tree_leaves(given) if x.requires_grad]
    return [*(x.detach() for x in out.values()), *torch.autograd.grad(total, leaves)]


def _check(name: str, device: str = "cpu", **options: Any) -> None:
    """Twice naive code's error: the blocked form's, which is less, is luck at rows that cancel."""
    truth = _run(name, torch.float64, "reference", device, **options)
    same = _run(name, torch.float32, "reference", device, **options)
    found = _run(name, torch.float32, "triton", device, **options)
    for i, (got, a, exact) in enumerate(zip(found, same, truth, strict=True)):
        allowed = 2 * float((a - exact).abs().max()) + 2e-6 * float(exact.abs().max())
        assert float((got - exact).abs().max()) <= allowed, i


@inside
@pytest.mark.parametrize("mask", _all("causal", "window", "lengths"))
@pytest.mark.parametrize("name", ["heads", "linear"])
def test_sums_over_heads(name: str, mask: str, small_workspace: None) -> None:
    _check(name, **MASKS[mask])


@inside
def test_sums_over_heads_that_are_kept(
    small_workspace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_streamkl.rows.triton import blocks as row_blocks

    monkeypatch.setattr(row_blocks, "KEPT_SHARE", 100.0)
    _check("heads", **MASKS["causal"])


@inside
@pytest.mark.parametrize("name", ["vocab", "blocks"])
def test_lm_heads(name: str, small_workspace: None) -> None:
    _check(name)


def test_which_sums_over_heads_are_kept() -> None:
    """The teacher's first, which have the most products, as many as fit."""
    from torch_streamkl.rows.triton import blocks as row_blocks

    program = recorded("indexer", RECORDED).program

    def count(size: int) -> int:
        with FakeTensorMode():
            shapes = [(1, 128, size, 128)] * 2 + [(1, 64, size, 128), (1, 1, size, 128)]
            tensors = [
                torch.empty(shape, dtype=torch.bfloat16) for shape in [*shapes, (1, 64, size)]
            ]
            problem = RowProblem.of(program.text, tensors)
            kept = row_blocks.kept_tensors(problem)
            insides = [program.nodes[program.nodes[i].args[0]].head for i in kept]
            assert insides == sorted(insides)  # the teacher's axis is the first
            return len(row_blocks.allocate(problem, True).materialized)

    assert [count(size) for size in (2048, 4096, 4224)] == [2, 1, 0]


@inside
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("top_k_with_ghost", torch.float32),
        ("policy_loss", torch.float16),
        *(pytest.param(x, torch.float32, marks=slow) for x in ("policy_loss", "z_loss", "dkd")),
    ],
)
def test_wide_heads(name: str, dtype: torch.dtype, small_workspace: None) -> None:
    check_errors(name, "triton", dtype, Sizes(2, 4, 9, 300, 257, 0.05))


def test_one_mask_holds_for_the_blocks_of_a_program(small_workspace: None) -> None:
    """The workspace is as large as it says, and not a row is left out."""
    from torch_streamkl.rows.triton import blocks as row_blocks

    problem = recorded("top_k_with_ghost", RECORDED)
    covered = torch.zeros(problem.num_rows, problem.num_keys)
    for _, rows, keys in row_blocks._vocab_blocks(problem, 9):
        covered[rows, keys] += 1
    assert (covered == 1).all()


SHAPES: dict[str, tuple[int, list[tuple[int, int, int]]]] = {  # keys; heads, key heads, dim
    "indexer": (1024, [(128, 8, 128), (64, 1, 128)]),
    "top_k_with_ghost": (32000, [(1, 1, 5120), (1, 1, 3584)]),
    "cached_top_k": (32000, [(1, 1, 3584)]),
    "policy_loss": (32000, [(1, 1, 3584)]),
}


@outside
@pytest.mark.parametrize("target", _all("sm_90", "sm_80"))
@pytest.mark.parametrize("name", only(["indexer", "cached_top_k"], SHAPES))
def test_compiles(name: str, target: str) -> None:
    from torch_streamkl.rows.triton import blocks as row_blocks

    small = recorded(name, RECORDED)
    keys, dots = SHAPES[name]
    rows = 1024
    heads = {axis: dot[0] for axis, dot in zip(small.program.dot_heads, dots, strict=True)}
    ends = {"row": (rows,), "key": (keys,), "columns": (rows, 64), "values": (rows, 64)}
    with record_launches(target) as launches:
        tensors = [
            torch.empty(1, n, size, dim, dtype=torch.bfloat16, device="cuda")
            for q_heads, k_heads, dim in dots
            for n, size in ((q_heads, rows), (k_heads, keys))
        ]
        for c in small.program.captures:
            dtype = torch.float32 if c.dtype == "float" else torch.int64
            shape = (1, heads[c.head] if c.head else 1, *ends[c.kind])
            tensors.append(torch.empty(shape, dtype=dtype, device="cuda"))
        problem = RowProblem.of(small.program.text, tensors)
        result = row_blocks.forward(problem, True)
        grads = [torch.empty(problem.row_shape(0), device="cuda") for _ in problem.program.outputs]
        row_blocks.backward(problem, result, grads, [x.is_floating_point() for x in tensors])
    for launch in {id(x.kernel): x for x in launches}.values():
        built = compile_launch(launch, target)
        assert built.shared_bytes <= TARGETS[target].shared_bytes, launch.kernel.__name__
        assert built.spill_bytes <= MOST_SPILLS, launch.kernel.__name__


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBLEMS)
def test_on_a_gpu(name: str, small_workspace: None) -> None:
    _check(name, device="cuda")
    if name == "heads":
        lengths = MASKS["lengths"]["key_lengths"].cuda()
        _check(name, device="cuda", is_causal=True, key_lengths=lengths)
