"""Computes distillation losses on several devices, with PyTorch's process groups and DTensors.

`linear_kl` and `attention_kl` take DTensors themselves. This package adds sharded sequences
(`attention_kl_context_parallel`, `shard_sequence`), moves vocabulary shards (`reshard_vocab`), and
traces FSDP2 into one graph (`trace_fully_shard`).
"""

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
