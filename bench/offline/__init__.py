"""Kernels without timing: compiled for GPUs that are not here, sanitised, and their counters."""

from bench.offline.compile import (
    KIB,
    OPTIONS,
    TARGETS,
    Descriptor,
    Launch,
    Resources,
    Target,
    check_frontend,
    compile_launch,
    looks_like,
    loops_of,
    ptxas_messages,
    record_launches,
    signature_of,
    stack_in_main_loops,
)

__all__ = [
    "KIB",
    "OPTIONS",
    "TARGETS",
    "Descriptor",
    "Launch",
    "Resources",
    "Target",
    "check_frontend",
    "compile_launch",
    "looks_like",
    "loops_of",
    "ptxas_messages",
    "record_launches",
    "signature_of",
    "stack_in_main_loops",
]  # fmt: skip
