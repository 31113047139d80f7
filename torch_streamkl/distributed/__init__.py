"""Distillation losses on several devices, on PyTorch's own process groups and DTensors."""

from torch_streamkl.distributed.agreement import DisagreementError
from torch_streamkl.distributed.reshard import reshard_words

__all__ = ["DisagreementError", "reshard_words"]
