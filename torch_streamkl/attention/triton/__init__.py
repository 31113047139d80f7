"""Holds the portable Triton kernels of `attention_kl` and their launchers."""
