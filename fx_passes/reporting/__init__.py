"""Builds the report: what was fused, how it runs, and what to change.

`report.py` has the data. `described.py` names what is fused, `unfused.py` and `unrecognized.py`
what is not, and `refusals.py` why; `divergence_sites.py` says where distributions meet.
`large_tensors.py` has what remains. `hints.py` maps reasons to hints, and `text.py` formats
everything.
"""
