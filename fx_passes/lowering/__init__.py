"""Inserts the planned operator calls into the user's graph.

`calls.py` and `lm_head.py` insert divergences, `row_programs.py` row programs, and `operands.py`
the views of their operands.
"""
