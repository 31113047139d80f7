"""torch.special has softmaxes and logarithms by names of its own: they are the same functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, special

from torch_streamkl.fx_passes.backend import collected

SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax, log_softmax": lambda s, t: F.kl_div(
        special.log_softmax(s, -1), special.softmax(t, dim=-1, dtype=torch.float64)
    ),
    "logsumexp": lambda s, t: (
        special.softmax(t, -1) * (special.logsumexp(s, -1, keepdim=True) - s)
    ).sum(-1),
    "xlogy": lambda s, t: (
        special.xlogy(t.softmax(-1), t.softmax(-1)) - t.softmax(-1) * s.log_softmax(-1)
    ).sum(-1),
    "expit": lambda s, t: (special.expit(s) * t.softmax(-1)).sum(-1),
    "log1p": lambda s, t: (t.softmax(-1) * special.log1p(s.softmax(-1))).sum(-1),
    "keywords of torch": lambda s, t: F.kl_div(
        torch.log_softmax(input=s, dim=-1), F.softmax(input=t, dim=-1, _stacklevel=5)
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_it_fuses(name: str) -> None:
    x = [torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=i < 2) for i in range(4)]

    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        return SPELLINGS[name](q @ k.mT, qt @ kt.mT).mean()

    torch._dynamo.reset()
    options = {"streamkl.inner": "eager", "streamkl.min_mib": 0}
    with collected() as report:
        got = torch.compile(step, backend="streamkl", options=options)(*x)
    assert report.num_fused == len(report.sites) == 1, report
    want = step(*x)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(y, x[:2]) for y in (got, want))
    torch.testing.assert_close(*grads)
