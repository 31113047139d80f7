"""Every call that cannot be is refused before anything runs, with the rule and the value."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_streamkl import attention_kl, attention_kl_varlen
from torch_streamkl.attention import heuristics, ops, reference
from torch_streamkl.runtime import devices


def inputs(**changed: Tensor) -> dict[str, Tensor]:
    x = torch.randn(2, 4, 6, 8)
    return {"student_q": x, "student_k": x, "teacher_q": x, "teacher_k": x} | changed


def packed(**changed: Any) -> dict[str, Any]:
    x, offsets = torch.randn(6, 4, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    named = dict.fromkeys(("student_q", "student_k", "teacher_q", "teacher_k"), x)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    return named | lengths | {"max_seqlen_q": 4, "max_seqlen_k": 4} | changed


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an implementation was reached")

    monkeypatch.setattr(ops.torch_impl, "forward", refuse)
    monkeypatch.setattr(reference, "attention_kl_rows", refuse)


NO_HEADS = torch.randn(2, 0, 6, 8)
CASES: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "not a tensor": (TypeError, "student_q must be a tensor, got list", inputs(student_q=[1.0])),
    "dimensions": (
        ValueError,
        r"student_k must have 4 dimensions, got shape \(4, 6, 8\)",
        inputs(student_k=torch.randn(4, 6, 8)),
    ),
    "integers": (
        TypeError,
        "teacher_q must be float64, float32, bfloat16 or float16, got torch.int64",
        inputs(teacher_q=torch.ones(2, 4, 6, 8, dtype=torch.int64)),
    ),
    "last stride": (
        ValueError,
        r"the last dimension of teacher_k must be contiguous, got strides \(192, 48, 1, 6\)",
        inputs(teacher_k=torch.randn(2, 4, 8, 6).transpose(2, 3)),
    ),
    "dtypes": (
        ValueError,
        "must share dtype, got torch.float32, torch.float32, torch.float64 and torch.float32",
        inputs(teacher_q=torch.randn(2, 4, 6, 8).double()),
    ),
    "devices": (
        ValueError,
        "all tensors must be on one device; student_q is on cpu, teacher_k on meta",
        inputs(teacher_k=torch.randn(2, 4, 6, 8, device="meta")),
    ),
    "batch": (
        ValueError,
        "must share batch size, got 2, 2, 3 and 2",
        inputs(teacher_q=torch.randn(3, 4, 6, 8)),
    ),
    "seqlen_q": (
        ValueError,
        "student_q and teacher_q must share seqlen_q, got 6 and 5",
        inputs(teacher_q=torch.randn(2, 4, 5, 8)),
    ),
    "seqlen_k": (
        ValueError,
        "student_k and teacher_k must share seqlen_k, got 6 and 5",
        inputs(teacher_k=torch.randn(2, 4, 5, 8)),
    ),
    "head_dim": (
        ValueError,
        "student_q and student_k must share head_dim, got 8 and 16",
        inputs(student_k=torch.randn(2, 4, 6, 16)),
    ),
    "groups": (
        ValueError,
        "heads of student_q must be a multiple of that of student_k, got 4 and 3",
        inputs(student_k=torch.randn(2, 3, 6, 8)),
    ),
    "heads": (
        ValueError,
        "must share number of heads, got 4 and 8",
        inputs(teacher_q=torch.randn(2, 8, 6, 8)),
    ),
    "empty": (
        ValueError,
        r"student_q must have at least one head, got .* \(2, 0, 6, 8\)",
        inputs(student_q=NO_HEADS, student_k=NO_HEADS, teacher_q=NO_HEADS, teacher_k=NO_HEADS),
    ),
    "divergence": (
        ValueError,
        "divergence must be one of 'forward_kl'.*got 'kl'",
        inputs() | {"divergence": "kl"},
    ),
    "reduction": (
        ValueError,
        "reduction must be one of 'none'.*got 'max'",
        inputs() | {"reduction": "max"},
    ),
    "layout": (
        ValueError,
        "layout must be one of 'bhnd', 'bnhd', got 'sbhd'",
        inputs() | {"layout": "sbhd"},
    ),
    "deterministic": (
        TypeError,
        "deterministic must be True or False, got 'no'",
        inputs() | {"deterministic": "no"},
    ),
    "impl": (ValueError, "impl must be one of 'auto'.*got 'cuda'", inputs() | {"impl": "cuda"}),
    "beta": (
        ValueError,
        "beta must lie between 0 and 1, got 1.5",
        inputs() | {"divergence": "js", "beta": 1.5},
    ),
    "beta without js": (
        ValueError,
        "beta is the teacher's share in divergence='js' and means nothing for 'tv', got 0.3",
        inputs() | {"divergence": "tv", "beta": 0.3},
    ),
    "temperature": (
        ValueError,
        "temperature must be positive and finite in float32, got 0.0",
        inputs() | {"temperature": 0.0},
    ),
    "softcap": (
        ValueError,
        "teacher_softcap must be positive and finite in float32, got -1",
        inputs() | {"teacher_softcap": -1.0},
    ),
    "eps": (
        ValueError,
        "student_eps must lie between 0 and 1, got -0.1",
        inputs() | {"student_eps": -0.1},
    ),
    "clamp": (
        ValueError,
        "teacher_clamp must lie between 0 and 1, got 2",
        inputs() | {"teacher_clamp": 2.0},
    ),
    "tv with guards": (
        ValueError,
        "'tv' takes no logarithm, so eps and clamp do not apply",
        inputs() | {"divergence": "tv", "student_eps": 1e-3},
    ),
    "scale": (
        ValueError,
        "student_scale must be finite in float32, got nan",
        inputs() | {"student_scale": math.nan},
    ),
    "window": (
        ValueError,
        "window's right bound must be at least 0, got -1",
        inputs() | {"window": (None, -1)},
    ),
    "mask shape": (
        ValueError,
        r"attn_mask must broadcast to \(2, 4, 6, 6\), got \(2, 6, 6\)",
        inputs() | {"attn_mask": torch.ones(2, 6, 6, dtype=torch.bool)},
    ),
    "mask dimensions": (
        ValueError,
        "attn_mask must broadcast to .* got 5 dimensions",
        inputs() | {"attn_mask": torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)},
    ),
    "mask dtype": (
        TypeError,
        "attn_mask must be boolean or floating point, got torch.int64",
        inputs() | {"attn_mask": torch.ones(6, 6, dtype=torch.int64)},
    ),
    "mask device": (
        ValueError,
        "all tensors must be on one device; attn_mask is on meta, the operands on cpu",
        inputs() | {"attn_mask": torch.ones(6, 6, device="meta")},
    ),
    "mask gradient": (
        NotImplementedError,
        "attn_mask gets no gradient from this operator; pass attn_mask.detach()",
        inputs() | {"attn_mask": torch.zeros(6, 6, requires_grad=True)},
    ),
    "mask and bias": (
        NotImplementedError,
        "an additive attn_mask cannot be combined with a bias; add them up",
        inputs() | {"attn_mask": torch.zeros(6, 6), "student_bias": torch.zeros(6, 6)},
    ),
    "bias gradient": (
        NotImplementedError,
        "teacher_bias gets no gradient from this operator; pass teacher_bias.detach()",
        inputs() | {"teacher_bias": torch.zeros(6, 6, requires_grad=True)},
    ),
    "bias dtype": (
        TypeError,
        "student_bias must be floating point, got torch.int32",
        inputs() | {"student_bias": torch.zeros(6, 6, dtype=torch.int32)},
    ),
    "lengths shape": (
        ValueError,
        r"key_lengths must have shape \(2,\), got \(3,\)",
        inputs() | {"key_lengths": torch.ones(3, dtype=torch.int32)},
    ),
    "lengths dtype": (
        TypeError,
        "key_lengths must have dtype torch.int32 or torch.int64, got torch.float32",
        inputs() | {"key_lengths": torch.ones(2)},
    ),
    "row mask dtype": (
        TypeError,
        "row_mask must be boolean, got torch.float32",
        inputs() | {"row_mask": torch.ones(6)},
    ),
    "row mask shape": (
        ValueError,
        r"row_mask must broadcast to \(2, 4, 6\), got \(5,\)",
        inputs() | {"row_mask": torch.ones(5, dtype=torch.bool)},
    ),
    "slopes shape": (
        ValueError,
        r"student_alibi_slopes must have shape \(4,\), got \(2,\)",
        inputs() | {"student_alibi_slopes": torch.ones(2)},
    ),
    "slopes gradient": (
        NotImplementedError,
        "teacher_alibi_slopes gets no gradient",
        inputs() | {"teacher_alibi_slopes": torch.ones(4, requires_grad=True)},
    ),
    "sink shape": (
        ValueError,
        r"teacher_sink must have shape \(4,\), got \(4, 1\)",
        inputs() | {"teacher_sink": torch.ones(4, 1)},
    ),
    "sink dtype": (
        TypeError,
        "student_sink must have dtype .* got torch.int64",
        inputs() | {"student_sink": torch.ones(4, dtype=torch.int64)},
    ),
    "head reduction": (
        ValueError,
        "head_reduction must be one of None, 'mean', got 'sum'",
        inputs() | {"head_reduction": "sum"},
    ),
    "head reduction heads": (
        ValueError,
        "teacher heads must be a multiple of the student's, got 6 and 4",
        inputs(teacher_q=torch.randn(2, 6, 6, 8), teacher_k=torch.randn(2, 6, 6, 8))
        | {"head_reduction": "mean"},
    ),
    "head reduction and additive mask": (
        NotImplementedError,
        "must have one head, got 4; pass student_bias and teacher_bias",
        inputs(teacher_q=torch.randn(2, 8, 6, 8))
        | {"head_reduction": "mean", "attn_mask": torch.zeros(4, 6, 6)},
    ),
    "lse alone": (
        ValueError,
        "teacher_lse is used with head_reduction='mean' only",
        inputs() | {"teacher_lse": torch.zeros(2, 4, 6)},
    ),
    "lse shape": (
        ValueError,
        r"teacher_lse must have shape \(2, 4, 6\), got \(4, 6\)",
        inputs() | {"head_reduction": "mean", "teacher_lse": torch.zeros(4, 6)},
    ),
    "lse dtype": (
        TypeError,
        "teacher_lse must be float32",
        inputs() | {"head_reduction": "mean", "teacher_lse": torch.zeros(2, 4, 6).half()},
    ),
    "triton without a GPU": (
        NotImplementedError,
        "impl='triton' needs a GPU .*got device cpu; impl='torch' computes it",
        inputs() | {"impl": "triton"},
    ),
}

PACKED_CASES: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "dimensions": (
        ValueError,
        "student_q must have 3 dimensions",
        packed(student_q=torch.randn(1, 6, 4, 8)),
    ),
    "offsets dtype": (
        TypeError,
        "cu_seqlens_q must have dtype torch.int32, got torch.int64",
        packed(cu_seqlens_q=torch.tensor([0, 2, 6])),
    ),
    "offsets length": (
        ValueError,
        r"cu_seqlens_k must have shape \(3,\), got \(2,\)",
        packed(cu_seqlens_k=torch.tensor([0, 6], dtype=torch.int32)),
    ),
    "no sequence": (
        ValueError,
        "must have num_sequences \\+ 1 >= 2 entries, got 1",
        packed(
            cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
            cu_seqlens_k=torch.zeros(1, dtype=torch.int32),
        ),
    ),
    "longest": (ValueError, "max_seqlen_k must be at least 1, got 0", packed(max_seqlen_k=0)),
    "lse shape": (
        ValueError,
        r"teacher_lse must have shape \(4, 6\), got \(6, 4\)",
        packed(head_reduction="mean", teacher_lse=torch.zeros(6, 4)),
    ),
    "row mask": (
        ValueError,
        r"row_mask must broadcast to \(1, 4, 6\), got \(5,\)",
        packed(row_mask=torch.ones(5, dtype=torch.bool)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    _refused(attention_kl, *CASES[name])


@pytest.mark.parametrize("name", PACKED_CASES)
def test_refused_when_packed(name: str) -> None:
    _refused(attention_kl_varlen, *PACKED_CASES[name])


def _refused(
    function: Callable[..., Tensor],
    error: type[Exception],
    message: str,
    arguments: dict[str, Any],
) -> None:
    for _ in range(2):  # a verdict that is remembered is not a way around
        with pytest.raises(error, match=message):
            function(**arguments)


@pytest.mark.parametrize(
    ("dtype", "dim", "message"),
    [
        (torch.float64, 8, "takes float16, bfloat16 and float32, got torch.float64"),
        (torch.float32, 272, "takes head_dim up to 256, got 272"),
    ],
)
def test_kernel_limits(
    dtype: torch.dtype, dim: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(1, 1, 2, dim, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"{message}; impl='torch' computes it"):
        attention_kl(x, x, x, x, impl="triton")


def test_slower_choice_on_a_device_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(1, 1, 2, 8, device="meta")
    problem, _ = ops.problem_of(x, x, x, x)
    devices.warn_once.cache_clear()
    with caplog.at_level("WARNING", logger="torch_streamkl"):
        assert heuristics.select_implementation(problem, "auto") == "torch"
    assert "which is slower: the kernel needs a GPU" in caplog.text


NUMBERS = ("beta", "temperature", "student_softcap", "teacher_eps", "student_clamp")


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_tensors(name: str) -> None:
    """What is read once is not what is in it later, and has no gradient."""
    for _ in range(2):
        with pytest.raises(TypeError, match=f"{name} must be a number, got a tensor"):
            attention_kl(**inputs(), **{name: torch.tensor(0.5)})
