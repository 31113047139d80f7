"""Rewrites Dynamo graphs so that distillation losses call the streaming operators.

Installed as `torch_streamkl.fx_passes`. `pipeline.py` has the order of the stages for one graph;
`backend.py`, `enable.py`, `explain.py` and `verify.py` are the ways in. Public names are those of
`torch_streamkl.__all__`.
"""
