"""reference.py means what the textbook code means, for every feature, in float64."""

from dataclasses import replace

import pytest
import torch

from tests.support.naive import naive
from tests.support.problems import CASES, build, value_and_gradients


@pytest.mark.parametrize("name", CASES)
def test_feature(name: str) -> None:
    call = build(replace(CASES[name], dtype=torch.float64)).to(torch.float64)
    truth = value_and_gradients(call, naive)
    got = call.value_and_gradients("reference")
    for output, expected in truth.items():
        torch.testing.assert_close(
            got[output], expected, rtol=1e-9, atol=1e-10, msg=lambda m, o=output: f"{o}: {m}"
        )
    if name != "row_mask":
        assert all(x.count_nonzero() > 0 for x in truth.values())  # the case is about something
