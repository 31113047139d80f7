"""Holds what the Triton kernels share: arguments, score tiles, row states, generated helpers."""
