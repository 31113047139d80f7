"""Masks that compare integers: of narrow types, and next to the ends of wide ones.

An expression is one of exact integers, and a comparison in it is ``sum >= 0``. Torch code that
computes the sum would wrap around: 0 - 1 is 255 among bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare

LEAST, MOST = -(2**63), 2**63 - 1
VALUES = {
    torch.uint8: [0, 1, 200, 255, 3, 128],
    torch.int8: [0, 1, -128, 127, -3, 100],
    torch.int16: [0, 1, -(2**15), 2**15 - 1, -3, 100],
    torch.int32: [0, 1, -(2**31), 2**31 - 1, -3, 100],
    torch.int64: [0, 1, LEAST, MOST, -3, 100],
}
# of a tensor x with a value per row, and the same in the opposite order
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "above 3": lambda x, y: (x > 3)[:, None] & (torch.arange(9) < 5),
    "below 100": lambda x, y: (x < 100)[:, None] | (torch.arange(9) < 5),
    "at most 0": lambda x, y: (x <= 0)[:, None] | (torch.arange(9) < 5),
    "above another": lambda x, y: (x > y)[:, None] | (torch.arange(9) < 5),
    "above positions": lambda x, y: (x[:, None] > torch.arange(9)) | (torch.arange(9) < 1),
    "a wider type": lambda x, y: (
        (x[:, None].int() // 4 * 2 - 1 > torch.arange(9)) | (torch.arange(9) < 1)
    ),
}


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("name", MASKS)
def test_integers_are_compared_as_they_are(name: str, dtype: torch.dtype) -> None:
    def fn(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, x: Tensor) -> Tensor:
        mask = MASKS[name](x, x.flip(0))
        s = (h @ w.T).masked_fill(~mask, -1e4)
        t = (ht @ wt.T).masked_fill(~mask, -1e4)
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")

    made = torch.Generator().manual_seed(0)
    shapes = ((6, 5), (9, 5), (6, 3), (9, 3))
    heads = [torch.randn(*n, generator=made, dtype=torch.float64) for n in shapes]
    inputs = [*(x.requires_grad_(i < 2) for i, x in enumerate(heads))]
    x = torch.tensor(VALUES[dtype], dtype=dtype)
    options = {"streamkl.verify": "never"}
    outcome = compare(fn, [*inputs, x], options=options, largest_score=1e4)
    assert outcome.check().num_fused, outcome.report


def test_an_integer_with_more_digits_than_float64_has() -> None:
    def fn(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, x: Tensor) -> Tensor:
        kept = (x[:, None] + torch.arange(9) != 2**53 + 1).double()
        s, t = (h @ w.T) * kept, (ht @ wt.T) * kept
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")

    shapes = ((6, 5), (9, 5), (6, 3), (9, 3))
    inputs = [torch.randn(*n, dtype=torch.float64) for n in shapes]
    x = torch.tensor([0, 2**53, 2**53 + 1, 3, 2**53 - 4, 1])
    compare(fn, [*inputs, x], options={"streamkl.verify": "never"}, largest_score=8.0).check()
