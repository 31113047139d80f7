"""Computes `attention_topk_kl`: the KL of attention probabilities over chosen keys of each query.

`interface.py` is the public function, and `reference.py` the naive definition. `torch_impl.py`
computes blocks of queries in plain torch, and `triton/` has the kernels.
"""
