"""Tests of every feature, for each way in which a CPU computes attention_kl.

A file that imports them defines the fixture `small_parts`: parts so small that a small problem has
several of each kind.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from tests.support.problems import CASES, Spec, build
from tests.support.strategies import specs
from tests.support.tolerances import check_call

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
in_parts = pytest.mark.usefixtures("small_parts")


def check_spec(spec, frozen=False):
    call = build(spec)
    for name, x in call.tensors.items():
        if frozen and name.startswith("teacher"):
            x.requires_grad_(False)
    check_call(call, "torch")


@in_parts
@pytest.mark.parametrize("name", CASES)
def test_feature(name):
    check_spec(CASES[name])


@in_parts
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_student_alone(name):
    """A frozen teacher takes shorter ways through the backward."""
    check_spec(CASES[name], frozen=True)


@in_parts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["forward_kl", "js", "clamp_reached", "mask_additive"])
def test_dtype(name, dtype):
    check_spec(replace(CASES[name], dtype=dtype))


@in_parts
@pytest.mark.parametrize("num_calls", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_any_call(num_calls):
    @given(specs(dtypes=DTYPES))
    @settings(max_examples=num_calls)
    def any_call(spec: Spec) -> None:
        check_spec(spec)

    any_call()
