"""Builds the report: what was fused, how it runs, and what to change.

`report.py` has the data. `described.py` names what is fused, `unfused.py` and `unrecognized.py`
what is not, `large_tensors.py` what remains. `hints.py` maps reasons to hints, and `text.py`
formats everything.
"""
