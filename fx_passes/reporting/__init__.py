"""Builds the report: what was fused, how it runs, and what to change.

`report.py` has the data, `sites.py`, `large_tensors.py` and `unrecognized.py` find what is not
fused, `hints.py` maps reasons to hints, and `text.py` formats everything.
"""
