"""Rewrites graphs of DTensors: analysed as whole tensors, with results restored to DTensors.

`rewriting.py` has the steps: `unshard.py`, the usual pipeline, `agreement.py` between ranks, and
`restore.py`.
"""
