"""Head-averaged teachers on Hopper: right on a GPU, compiled for it here, and who takes them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.offline import (
    TARGETS,
    compile_launch,
    looks_like,
    ptxas_messages,
    record_launches,
    signature_of,
)
from tests.support.covering import only
from tests.support.problems import Call, Spec, build
from tests.support.tolerances import budget, check
from torch_streamkl.attention import heuristics, limits, ops
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.plans import Plan
from torch_streamkl.attention.problem import AttentionProblem, NeedsGrad
from torch_streamkl.program.divergences import DIVERGENCES, named
from torch_streamkl.runtime.devices import gpu_of

hopper = torch.cuda.is_available() and gpu_of(torch.device("cuda")).is_hopper
on_hopper = pytest.mark.skipif(not hopper, reason="needs a GPU of compute capability 9.0")
MEANS = Spec(
    batch=2, heads=2, teacher_heads=6, teacher_kv_heads=2, student_dim=64, teacher_dim=128,
    dtype=torch.bfloat16, is_causal=True,
)  # fmt: skip
SIZES = [(1, 1), (1, 300), (63, 64), (65, 129), (128, 640), (200, 333), (257, 512), (300, 127)]


def results(call: Call) -> dict[str, torch.Tensor]:
    return call.to(device="cuda").value_and_gradients("hopper")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sizes(sizes: tuple[int, int], is_causal: bool) -> None:
    spec = replace(MEANS, seqlen_q=sizes[0], seqlen_k=sizes[1], is_causal=is_causal)
    call = build(spec)
    check(results(call), budget(call))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "options",
    [
        {"teacher_dim": 64, "dtype": torch.float16},
        {"teacher_dim": 192, "divergence": "js"},
        {"teacher_dim": 256, "divergence": "reverse_kl", "temperature": 1.5},
        {"window": (100, 0), "is_causal": False},
        {"key_lengths": True},
        {"known_lse": True},
        {"student_softcap": 5.0, "student_sink": True, "strides": "transposed"},
        {"heads": 1, "teacher_heads": 1, "teacher_kv_heads": 1},
    ],
)
def test_forms(options: dict[str, Any]) -> None:
    call = build(replace(MEANS, seqlen_q=300, seqlen_k=517, **options))
    check(results(call), budget(call))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("score_size", [12.0, 20.0])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_small_means(divergence: str, score_size: float) -> None:
    # sums of probabilities that are 0 in float32, whose logarithms a reverse KL needs
    spec = replace(MEANS, score_size=score_size, divergence=divergence, seqlen_q=200, seqlen_k=400)
    call = build(spec)
    check(results(call), budget(call))


@pytest.mark.gpu
@on_hopper
def test_same_bits_on_every_run() -> None:
    call = build(replace(MEANS, seqlen_q=300, seqlen_k=517))
    first, second = results(call), results(call)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@on_hopper
def test_beside_the_portable_kernels() -> None:
    # problems of one metadata share a plan, whatever computes them
    call = build(replace(MEANS, seqlen_q=300, seqlen_k=517)).to(device="cuda")
    for impl in ("hopper", "triton", "hopper", "triton"):
        check(call.value_and_gradients(impl), budget(build(call.spec)))


def of_indexer(teacher_dim: int, seqlen: int = 4096, **options: Any) -> AttentionProblem:
    shapes = ((1, 128), (1, 128), (128, teacher_dim), (128, teacher_dim))
    tensors = [
        torch.empty(1, heads, seqlen, dim, dtype=torch.bfloat16, device="cuda")
        for heads, dim in shapes
    ]
    given = {"functional": DIVERGENCES["forward_kl"], "window_right": 0, "head_mean": True}
    return problem_of(*tensors, **(given | options))[0]


@pytest.mark.parametrize("teacher_dim", only([64], (64, 128, 192, 256)))
def test_compiled(teacher_dim: int) -> None:
    from torch_streamkl.attention.hopper import launches as kernels

    with record_launches("sm_90") as launches:
        p = of_indexer(teacher_dim)
        _, stats = kernels.forward(p)
        grad = torch.empty(1, 1, 4096, device="cuda")
        kernels.backward(p, stats, grad, NeedsGrad(True, True, False, False))
    own = [x for x in launches if x.kernel.is_gluon()]
    names = [x.kernel.__name__ for x in own]
    assert names == ["heads_lse_kernel", "heads_mean_kernel", "heads_mean_kernel"]
    for found in own[:2]:
        built = compile_launch(found, "sm_90")
        assert built.shared_bytes <= TARGETS["sm_90"].shared_bytes
        assert built.spill_bytes == 0
        assert "wgmma.mma_async" in built.asm["ptx"]
        assert "C75" not in ptxas_messages(built.asm["ptx"]), "wgmma is serialised"


@pytest.fixture
def h200() -> Iterator[None]:
    with looks_like("sm_90"):
        yield


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({}, ""),
    "window": ({"window_left": 5}, ""),
    "softcap of the student": ({"student_softcap": 20.0}, ""),
    "softcap": ({"teacher_softcap": 20.0}, "without bias, alibi, sink, softcap"),
    "filled": ({"mask_value": -1e4}, "masks that remove keys"),
    "js": ({"functional": named("js").text}, ""),
}


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    options, reason = LIMITS[name]
    with FakeTensorMode():
        limit = limits.hopper_limit(of_indexer(192, **options))
    assert limit is None if not reason else reason in str(limit)


@pytest.mark.usefixtures("h200")
def test_choice() -> None:
    with FakeTensorMode():
        assert heuristics.select_implementation(of_indexer(192), "auto", False) == "hopper"
        assert heuristics.select_implementation(of_indexer(192), "auto", True) == "hopper"
        assert (
            heuristics.select_implementation(of_indexer(192, seqlen=512), "auto", False)
            == "triton"
        )
        assert heuristics.select_implementation(of_indexer(96), "auto", False) == "triton"
        assert heuristics.LSE_UNIT["hopper"] == heuristics.LSE_UNIT["triton"] == math.log(2.0)


@pytest.mark.parametrize("seqlens", [(1, 278), (30, 268), (300, 640)])
@pytest.mark.parametrize(
    "options",
    [
        {"head_mean": True, "window_right": 0},
        {"head_mean": True, "functional": named("js").text, "window_left": 3},
        {},
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
    heads = 4 if options.get("head_mean") else 2
    with record_launches("sm_90") as launches:
        tensors = [
            torch.empty(2, h, n, 64, dtype=torch.bfloat16, device="cuda")
            for h, n in zip((2, 2, heads, 1), (*seqlens, *seqlens), strict=True)
        ]
        for impl in ("triton", "hopper", "triton"):
            problem = problem_of(*tensors, **options, impl=impl)[0]
            _, stats = ops.forward(problem)
            grad = torch.empty(2, 2, seqlens[0], device="cuda")
            ops.backward(problem, stats, grad, [True] * 4)
    assert len({name for _, name in compiled}) > 4
