"""Says why the kernels of `attention_topk_kl` cannot compute a problem."""

from __future__ import annotations

from torch_streamkl.attention_topk.problem import ChosenKeys
from torch_streamkl.runtime.devices import kernel_limit, matmul_limit

MAX_STUDENT_HEADS = 128  # one tile holds all heads of a query
MAX_STUDENT_DIM = 256  # the gradient of a query stays in registers


def triton_limit(problem: ChosenKeys) -> str | None:
    """Explains why the Triton kernels cannot run a problem; None if they can."""
    device, heads = problem.student_q.device, problem.num_student_heads
    head_dim = problem.student_q.shape[3]
    limit = kernel_limit(device, problem.compute_dtype)
    if limit is not None:
        return limit
    if heads > MAX_STUDENT_HEADS:
        return f"takes up to {MAX_STUDENT_HEADS} student heads, got {heads}"
    if head_dim > MAX_STUDENT_DIM:
        return f"takes a student head_dim up to {MAX_STUDENT_DIM}, got {head_dim}"
    if device.type != "cuda":
        return None
    return matmul_limit(device, problem.student_q.dtype, head_dim)
