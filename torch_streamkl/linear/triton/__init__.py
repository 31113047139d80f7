"""Holds the Triton kernels of `linear_kl`'s rows; imported when first needed."""
