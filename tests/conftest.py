"""What every test starts from: the same inputs in every run, so that a failure can be repeated."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("streamkl", derandomize=True, deadline=None)
settings.load_profile("streamkl")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
