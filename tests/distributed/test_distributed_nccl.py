"""What two processes agree on with gloo, on two GPUs with NCCL and in bfloat16.

    python -m pytest -m gpu -s tests/distributed/test_distributed_nccl.py

prints a line for each check as it ends, so that a run that is cut off says what it saw.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.support.ranks import checks_of, run_check

MODULES = [  # what takes longest comes last
    "tests.distributed.test_traced_fsdp",
    "tests.distributed.test_distributed_attention",
    "tests.distributed.test_rewritten_dtensors",
    "tests.distributed.test_rewritten_attention_dtensors",
    "tests.distributed.test_distributed_linear",
]
CHECKS = [
    (module, name) for module in MODULES for name in checks_of(importlib.import_module(module))
]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("module", "name"), CHECKS)
def test_on_two_gpus(module: str, name: str) -> None:
    run_check(module, name, device="cuda")
