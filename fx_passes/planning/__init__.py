"""Plans operator calls for recognised losses, without touching the graph.

`losses.py` has the order. `divergences.py` chooses which values are divergences, `row_plans.py`
which are row programs. `profitability.py` says which losses are too small, and `special_values.py`
where eager code has NaN or infinity.
"""
