"""Generates and launches Triton kernels for a row program; imported when first needed."""
