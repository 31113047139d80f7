"""Masks that compare integers: of narrow types, and next to the ends of wide ones.

An expression is one of exact integers, and a comparison in it is ``sum >= 0``. Torch code that
computes the sum would wrap around: 0 - 1 is 255 among bytes.
"""

import pytest
import torch

from tests.support.comparing import compare
from tests.support.losses import kd

TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FIRST, FEW = torch.arange(9) < 1, torch.arange(9) < 5
# of a tensor x with a value per row, and the same in the opposite order
MASKS = {
    "above 3": lambda x, y: (x > 3)[:, None] & FEW,
    "below 100": lambda x, y: (x < 100)[:, None] | FEW,
    "at most 0": lambda x, y: (x <= 0)[:, None] | FEW,
    "above another": lambda x, y: (x > y)[:, None] | FEW,
    "above positions": lambda x, y: (x[:, None] > torch.arange(9)) | FIRST,
    "a wider type": lambda x, y: (x[:, None].int() // 4 * 2 - 1 > torch.arange(9)) | FIRST,
}


def heads():
    shapes = ((6, 5), (9, 5), (6, 3), (9, 3))
    return [
        torch.randn(*n, dtype=torch.float64, requires_grad=i < 2) for i, n in enumerate(shapes)
    ]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MASKS)
def test_integers_are_compared_as_they_are(name, dtype):
    def loss(h, w, ht, wt, x):
        mask = MASKS[name](x, x.flip(0))
        return kd(*(z.masked_fill(~mask, -1e4) for z in (h @ w.T, ht @ wt.T)))

    ends = torch.iinfo(dtype)
    x = torch.tensor([0, 1, ends.min, ends.max, 3, 100], dtype=dtype)
    outcome = compare(loss, [*heads(), x], verify="never", largest_score=1e4)
    assert outcome.check().num_fused, outcome.report


def test_an_integer_with_more_digits_than_float64_has():
    def loss(h, w, ht, wt, x):
        kept = (x[:, None] + torch.arange(9) != 2**53 + 1).double()
        return kd((h @ w.T) * kept, (ht @ wt.T) * kept)

    x = torch.tensor([0, 2**53, 2**53 + 1, 3, 2**53 - 4, 1])
    compare(loss, [*heads(), x], verify="never", largest_score=8.0).check()
