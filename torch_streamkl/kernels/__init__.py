"""Holds what all Triton kernels share: arguments, score tiles, row states, generated helpers."""
