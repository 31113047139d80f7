"""Plans operator calls for recognised losses, without touching the graph.

`plan.py` and `dimensions.py` plan divergences, `row_plan.py` and `row_programs.py` row programs.
`candidates.py` chooses which values are replaced, and `profitability.py` which losses are too
small.
"""
