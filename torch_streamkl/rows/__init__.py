"""Implements row programs: custom streamed reductions of pointwise functions of dot products."""
