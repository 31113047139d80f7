"""Holds the kernels of `linear_topk_kl`, imported when first needed."""
