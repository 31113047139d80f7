"""The operators of shared vocabularies and sequences under opcheck, in a group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.library import opcheck

from tests.operators.test_operators import Arguments, check_fake, detached, linear_arguments
from tests.support.covering import every
from torch_streamkl.distributed.linear_ops import linear_kl_sharded, linear_kl_sharded_sum
from torch_streamkl.distributed.ring_ops import attention_kl_ring, attention_kl_ring_backward
from torch_streamkl.program.divergences import named
from torch_streamkl.registration import WITHOUT_AUTOGRAD


@pytest.fixture(scope="module")
def group_name() -> Iterator[str]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD.group_name
    distributed.destroy_process_group()


OF_SUM = (None, torch.rand(4), [True] * 6)
SAMPLES: dict[str, tuple[Any, Arguments, dict[str, Any]]] = {
    "plain": (linear_kl_sharded, linear_arguments(1, False, False), {}),
    "labels and biases": (linear_kl_sharded, linear_arguments(), {}),
    "two passes": (linear_kl_sharded, linear_arguments(), {"functional": named("js").text}),
    "sum": (linear_kl_sharded_sum, (*linear_arguments(), *OF_SUM), {}),
    "sum of a frozen teacher": (
        linear_kl_sharded_sum,
        (*detached(linear_arguments()), None, None, [True, True, *[False] * 4]),
        {},
    ),
}


def _maps() -> list[torch.Tensor]:
    """Queries and keys of grouped heads that differ in width between the sides."""
    shapes = (2, 4, 6, 8), (2, 2, 6, 8), (2, 4, 6, 16), (2, 1, 6, 16)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


_STATISTICS = (torch.randn(2, 4, 6), torch.randn(2, 2, 4, 6), torch.randn(2, 2, 4, 6))
SAMPLES |= {
    "ring": (attention_kl_ring, _maps(), {"window_right": 0}),
    "ring of packed sequences": (
        attention_kl_ring,
        [x[:1].detach().requires_grad_() for x in _maps()],
        {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), "max_seqlen": 4},
    ),
    "ring backward": (
        attention_kl_ring_backward,
        (*_STATISTICS, [True, True, False, True], *detached(tuple(_maps()))),
        {"key_lengths": torch.tensor([3, 6])},
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", every(2, SAMPLES))
def test_opcheck(name: str, group_name: str) -> None:
    operator, args, options = SAMPLES[name]
    options = {**options, "group_name": group_name}
    opcheck(operator, args, options)
    opcheck(WITHOUT_AUTOGRAD[operator], detached(args), options)
    check_fake(operator, detached(args), options)
