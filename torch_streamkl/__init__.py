"""Streaming distillation losses for PyTorch: fused operators and the torch.compile backend "streamkl"."""

from torch_streamkl.attention import attention_kl, attention_kl_varlen
from torch_streamkl.version import __version__

__all__ = ["__version__", "attention_kl", "attention_kl_varlen"]
