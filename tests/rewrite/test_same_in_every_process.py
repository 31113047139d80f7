"""A program has the same graph and report in every process, whatever that has compiled before.

Ranks compare what they have made, and caches of kernels and graphs are keyed by it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.corpus.naive_losses import ALL_CASES
from torch_streamkl.fx_passes import pipeline
from torch_streamkl.program.fresh_axes import fresh_axis

CASES = {case["name"]: case for case in ALL_CASES}
# symmetric losses, programs of several products, and what stays
NAMES = (
    "attn_double_softmax_T2", "attndistill_vit_cls", "distillm2_contrastive",
    "hass_kl_and_topk/lm_head", "mdistiller_dkd/lm_head", "r3f_symmetric/lm_head",
    "temperature_by_entropy", "tilelang_dsa_sparse",
)  # fmt: skip


def graphs_of(name: str, before: int = 0) -> list[str]:
    """The rewritten graphs of a program, and their reports; ``before`` axes belong to others."""
    found: list[str] = []
    kept = [fresh_axis(3) for _ in range(before)]

    def rewritten(gm: Any, _: Any) -> Any:
        report = pipeline.rewrite(gm)
        found.append(f"{gm.code}\n{report.details()}")
        return gm.forward

    torch._dynamo.reset()
    inputs = CASES[name]["make_inputs"](torch.float32)
    torch.compile(CASES[name]["fn"], backend=rewritten, dynamic=False)(*inputs)
    assert len(kept) == before
    return found


@pytest.mark.parametrize("name", NAMES)
def test_whatever_was_compiled_before(name: str) -> None:
    first = graphs_of(name)
    assert any("torch_streamkl" in text for text in first)
    for before in (1, 6, 50):
        assert graphs_of(name, before) == first


def test_whatever_the_order_of_sets_is() -> None:
    code = f"import {__name__} as m; print(*(x for n in m.NAMES for x in m.graphs_of(n)))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    first, second = (process.communicate(timeout=300)[0] for process in running)
    assert all(process.returncode == 0 for process in running)
    assert first == second and "torch_streamkl" in first
