"""Reads a graph as formulas of dot products, which become row programs.

`reading.py` walks the graph, `registry.py` is the table of rules, and each other file has the
rules of one kind of operation.
"""
