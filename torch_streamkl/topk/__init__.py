"""Computes `linear_topk_kl`: the divergence of an LM head from a teacher's top-k entries.

`interface.py` is the public function, and `reference.py` the naive definition. `chunks.py` has the
loops over tokens. `entries.py` computes the divergence of k entries. `rows.py` and
`triton/rows.py` read whole rows of logits. `sparse.py` multiplies by the weight rows of the
entries alone.
"""
