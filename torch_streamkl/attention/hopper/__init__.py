"""Holds the kernels of `attention_kl` for compute capability 9.0; imported when first needed."""
