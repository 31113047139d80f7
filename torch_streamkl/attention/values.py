"""Checks the values of key lengths and of the offsets of packed sequences, on a CPU.

On a GPU nobody waits for them: a length below 0 is one of 0, and one beyond the keys is all keys.
Wrong offsets read and write other rows there, as those of FlashAttention do.
"""

from __future__ import annotations

from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.bounds import check_key_lengths, check_offsets


def check(problem: AttentionProblem) -> None:
    """Raises for lengths and offsets that are none of the keys or queries."""
    if problem.key_lengths is not None:
        check_key_lengths(problem.key_lengths, problem.seqlen_k)
    if problem.cu_seqlens_q is not None and problem.cu_seqlens_k is not None:
        longest_q, longest_k = problem.longest
        check_offsets("_q", problem.cu_seqlens_q, problem.seqlen_q, longest_q)
        check_offsets("_k", problem.cu_seqlens_k, problem.seqlen_k, longest_k)
