"""Implements `attention_kl`, the divergence of two models' attention probabilities.

`interface.py` has the public functions, `problem.py` the arguments as a value, `ops.py` the
operators, and `reference.py` their meaning. Implementations: `torch_impl.py` (plain torch),
`query_tiles.py` (compiled graphs on a CPU), `triton/` (portable kernels) and `hopper/`.
"""
