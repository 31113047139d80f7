"""Triton kernels written for a row program; imported when first needed."""
