"""Inserts the planned operator calls into the user's graph.

`divergences.py` inserts a divergence, by calls that `attention_call.py` and `linear_call.py` make,
and `row_calls.py` a row program. `writer.py` writes expressions as torch code, from the tensors
that `captured.py` and `placed.py` arrange.
"""
