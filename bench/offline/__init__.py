"""Kernels without timing: compiled for GPUs that are not here, and sanitised."""

from bench.offline.compile import (
    TARGETS,
    Launch,
    check_frontend,
    compile_launch,
    looks_like,
    ptxas_messages,
    record_launches,
    signature_of,
    stack_in_main_loops,
)

__all__ = [
    "TARGETS",
    "Launch",
    "check_frontend",
    "compile_launch",
    "looks_like",
    "ptxas_messages",
    "record_launches",
    "signature_of",
    "stack_in_main_loops",
]  # fmt: skip
