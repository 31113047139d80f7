"""Implements row programs: custom streamed reductions of pointwise functions of dot products.

`interface.py` has `row_program`, `program.py` its representation and algebra, `derive.py` its
derivatives, `op.py` the operators, and `reference.py` the meaning. Implementations:
`torch_impl.py` (plain torch), `triton/` (generated kernels), and `named.py` for divergences that
the other operators have.
"""
