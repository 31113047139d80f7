"""Holds the kernels of `attention_topk_kl`, imported when first needed."""
