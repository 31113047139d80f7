"""The kernels of attention_topk_kl without a GPU: Triton's interpreter against float64.

The interpreter has to be chosen before a kernel is imported: test_in_the_interpreter.py does. Its
products of bfloat16 are wrong, so only a GPU multiplies those.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.offline.compile import check_frontend, record_launches
from tests.operators.test_attention_topk_kl import (
    check_nearly_no_probability,
    formula,
    given,
    leaves,
    outcome,
)
from tests.support.gpus import on_a_gpu
from tests.support.interpreter import inside, outside, quiet
from torch_streamkl import attention_topk_kl
from torch_streamkl.attention_topk.problem import ChosenKeys, NeedsGrad
from torch_streamkl.attention_topk.triton import launches as kernels

pytestmark = quiet
# heads of the student, the teacher and its keys, and both head_dims
FORMS: dict[str, dict[str, Any]] = {
    "mqa": {"heads": (3, 20, 1), "dims": (24, 16)},
    "gqa": {"heads": (4, 4, 2), "dims": (16, 40)},
    "one head": {"heads": (1, 1, 1), "dims": (8, 16)},
    "head_dim in parts": {"heads": (2, 2, 1), "dims": (16, 192)},
}
SIZES = {"batch": 2, "queries": 3, "keys": 30, "topk": 20}


def check(tensors: dict[str, Tensor], device: str, **options: Any) -> list[Tensor]:
    """At most twice the error of plain torch in the same dtype, and a few roundings."""
    dtype, results = tensors["student_q"].dtype, {}
    hidden = tensors["student_k"].shape[1] - tensors["ids"].shape[1]
    grad = torch.linspace(0.5, 1.5, tensors["ids"][..., 0].numel(), dtype=torch.float64)
    grad = grad.view(tensors["ids"].shape[:2])
    grad[-1, 0] = 0.0  # a query whose gradient is not wanted
    scale = tensors["student_q"].shape[-1] ** -0.5
    scales = {
        "student_scale": 1.0 if "student_head_weights" in tensors else scale,
        "teacher_scale": tensors["teacher_q"].shape[-1] ** -0.5,
    }
    for impl in ("truth", "torch", "triton"):
        mine = leaves(tensors, torch.float64 if impl == "truth" else dtype)
        if impl == "truth":
            value = formula(mine, **scales, last_key=lambda i: i + hidden)
        else:
            mine = {
                k: x.detach().to(device).requires_grad_(x.requires_grad) for k, x in mine.items()
            }
            value = attention_topk_kl(**mine, is_causal=True, impl=impl, **options)
        results[impl] = [x.cpu() for x in outcome(value, mine, grad.to(value.device))]
    for i, want in enumerate(results["truth"]):
        error, plain = ((results[x][i].double() - want).abs().max() for x in ("triton", "torch"))
        # gradients of scores are rounded to the operands' dtype, values are not
        eps = torch.finfo(dtype if i else torch.float32).eps
        assert error <= 2 * plain + 4 * eps * (1 + want.abs().max()), (i, error, plain)
    return results["triton"]


@inside
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.float16):
        check(given(**SIZES, **FORMS[name], dtype=dtype), "cpu")


@inside
def test_sums_in_any_order() -> None:
    """Gradients of keys in 64-bit integers: more exact than sums of float32."""
    tensors = given(**SIZES, **FORMS["mqa"], dtype=torch.float32)
    check(tensors, "cpu", deterministic=True)
    tensors["student_head_weights"] *= 1e-20  # within float32, at any size
    check(tensors, "cpu", deterministic=True)


@inside
def test_packed_bnhd_and_known_log_sum_exps() -> None:
    tensors = given(**{**SIZES, "batch": 1}, **FORMS["gqa"], dtype=torch.float32)
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([0, 9, 30]).int()
    packed = {
        name: x[0] if name in ("ids", "student_k") else x[0].transpose(0, 1)
        for name, x in tensors.items()
    }
    packed["teacher_lse"] = torch.randn(4, 3)
    results = []
    for impl in ("triton", "reference"):
        mine = {k: x.detach() for k, x in packed.items()}
        for name in ("student_q", "student_k", "student_head_weights"):
            mine[name].requires_grad_()
        value = attention_topk_kl(
            **mine, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], is_causal=True, impl=impl,
        )  # fmt: skip
        results.append(outcome(value, mine, torch.ones(())))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@inside
def test_a_teacher_of_nearly_no_probability() -> None:
    check_nearly_no_probability("triton")


@inside
def test_rows_that_do_not_count_and_ids_out_of_range() -> None:
    tensors = given(**SIZES, **FORMS["mqa"], dtype=torch.float32)
    counted = torch.tensor([True, False, True])
    tensors["student_q"][:, :, 1] = math.inf
    tensors["teacher_q"][:, :, 1] = math.nan
    tensors["student_k"][0, 5] = math.nan  # of a key that no query of it chose
    tensors["ids"][0][tensors["ids"][0] == 5] = 6
    want = attention_topk_kl(**tensors, row_mask=counted, impl="torch")
    mine = leaves(tensors)
    value = attention_topk_kl(**mine, row_mask=counted, impl="triton")
    torch.testing.assert_close(value, want)
    value.sum().backward()
    for name in ("student_q", "student_k", "student_head_weights"):
        assert mine[name].grad.isfinite().all()
    assert not mine["student_q"].grad[:, :, 1].any()


@inside
def test_an_id_out_of_range_makes_its_row_nan() -> None:
    """On a GPU, where an error would have to wait; no key is read there."""
    tensors = given(**SIZES, **FORMS["mqa"], dtype=torch.float32)
    q, ids = tensors["student_q"].requires_grad_(), tensors["ids"]
    ids[1, 2, 7] = 30
    weights = tensors["student_head_weights"]
    problem = ChosenKeys(
        q.detach(), tensors["student_k"], weights, tensors["teacher_q"], tensors["teacher_k"],
        ids, None, None,
    )  # fmt: skip
    stats = kernels.forward(problem)
    assert stats.value.isnan().nonzero().tolist() == [[1, 2]]
    grads = kernels.backward(problem, stats, torch.ones(2, 3), NeedsGrad(True, True, True), False)
    of_q = grads.q.isnan().any(-1).any(1)
    assert of_q.nonzero().tolist() == [[1, 2]]


def _problem(
    dtype: torch.dtype, heads: tuple[int, int, int], dims: tuple[int, int], device: str
) -> ChosenKeys:
    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=device)

    weights = empty(1, heads[0], 64, of=torch.float32) if heads[0] > 1 else None
    return ChosenKeys(
        empty(1, heads[0], 64, dims[0]), empty(1, 96, dims[0]), weights,
        empty(1, heads[1], 64, dims[1]), empty(1, heads[2], 96, dims[1]),
        empty(1, 64, 48, of=torch.int32), None, empty(2, 1, 64, of=torch.int32),
    )  # fmt: skip


@outside
@pytest.mark.parametrize("name", FORMS)
def test_the_kernels_compile(name: str) -> None:
    """The interpreter runs code that compilers refuse."""
    with record_launches("sm_90") as launches:
        problem = _problem(torch.bfloat16, **FORMS[name], device="cpu")
        stats = kernels.forward(problem)
        grad, needs = torch.empty(1, 64), NeedsGrad(True, True, True)
        for deterministic in (False, True):
            kernels.backward(problem, stats, grad, needs, deterministic)
    assert len(launches) == 4
    for launch in launches:
        check_frontend(launch, "sm_90")


@outside
def test_tiles_fit_every_gpu() -> None:
    dtypes = {"sm_90": torch.bfloat16, "sm_75": torch.float16, "gfx942": torch.float32}
    for target, dtype in dtypes.items():
        with record_launches(target):
            for heads, dims in (((64, 64, 1), (128, 128)), ((128, 128, 1), (128, 576))):
                problem = _problem(dtype, heads, dims, "cuda")
                for kernel in kernels.TILES:
                    config, options = kernels._config(problem, kernel)
                    tile = kernels.Tile(config.BLOCK_N, **options)
                    room = kernels.gpu_of(problem.student_q.device).shared_bytes
                    size = kernels.shared_elements(kernel, tile, config) * dtype.itemsize
                    assert size <= room or tile.block_n == kernels.LEAST, (target, kernel)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_forms_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Larger ones; deterministic sums have the same bits every time."""
    sizes = {"batch": 2, "queries": 40, "keys": 300, "topk": 150}
    tensors = given(**sizes, **FORMS[name], dtype=dtype)
    check(tensors, "cuda")
    first, again = (check(tensors, "cuda", deterministic=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
