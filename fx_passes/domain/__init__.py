"""Defines the values of the analysis: scores, masks, distributions, sums over keys.

`values.py` has the values, `scores.py` and `score_form.py` the operations on scores, `masks.py`
masks, `layout.py` axes, `tensor_ref.py` references to the user's tensors, and `row_elements.py`
the formulas of row programs.
"""
