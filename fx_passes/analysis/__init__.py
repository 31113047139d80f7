"""Finds the meaning of every node of a region, by one rule per operator overload.

`interpreter.py` walks the graph, `registry.py` is the table of rules, `rules/` has the rules for
scores and distributions, and `elements/` reads the same graph as formulas for row programs.
"""
