"""Computes distillation losses on several devices, with PyTorch's process groups and DTensors."""

from torch_streamkl.distributed.agreement import DisagreementError
from torch_streamkl.distributed.context_parallel import attention_kl_context_parallel
from torch_streamkl.distributed.reshard import reshard_vocab
from torch_streamkl.distributed.sequence import shard_sequence
from torch_streamkl.fsdp import trace_fully_shard

__all__ = [
    "DisagreementError",
    "attention_kl_context_parallel",
    "reshard_vocab",
    "shard_sequence",
    "trace_fully_shard",
]
