"""Implements `linear_kl`, the divergence of two language models' heads.

`interface.py` has the public function, `problem.py` the arguments as a value, `ops.py` the
operators, `chunks.py` the loops over tokens and vocabulary, and `reference.py` the meaning. Rows
of logits are computed by `rows.py` (plain torch), `token_tiles.py` (compiled graphs on a CPU) or
`triton/`.
"""
