"""Chooses implementation and launch configuration, and captures launches for replay.

`launch.py` decides, from limits (`devices.py`), default tiles (`tiles.py`) and measured tables
(`launch_table.py`). `capture.py` and `replay.py` record the launches of repeated calls.
"""
