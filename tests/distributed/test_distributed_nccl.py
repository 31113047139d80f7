"""What two processes agree on with gloo, on two GPUs with NCCL and in bfloat16.

    python -m pytest -m gpu -s tests/distributed/test_distributed_nccl.py

prints a line for each check as it ends, so that a run that is cut off says what it saw.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.support.ranks import assert_passed, checks_of, outcomes

MODULES = [  # what takes longest comes last
    "tests.distributed.test_traced_fsdp",
    "tests.distributed.test_distributed_attention",
    "tests.distributed.test_rewritten_dtensors",
    "tests.distributed.test_rewritten_attention_dtensors",
    "tests.distributed.test_distributed_linear",
]
NAMES = [name for module in MODULES for name in checks_of(importlib.import_module(module))]


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return outcomes(MODULES, "cuda")


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_on_two_gpus(found: dict[str, list[str]], name: str) -> None:
    assert_passed(found, name)
