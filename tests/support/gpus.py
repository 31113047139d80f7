"""The mark of tests that run on a GPU: without one they are deselected, and counted."""

import pytest
import torch

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
