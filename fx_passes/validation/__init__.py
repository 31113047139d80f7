"""Runs replaced code and its replacement on the same inputs before a rewrite is taken.

`changes.py` finds what was replaced, `regions.py` chooses what to run, `inputs.py` draws inputs,
`running.py` runs both versions, and `compare.py` compares. `check.py` has the order.
"""
