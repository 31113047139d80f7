"""Runs the comparisons of verify(): eager, compiled and float64.

`program_state.py` finds what a program can change, `running.py` runs it from the same state, and
`comparing.py` compares the results.
"""
