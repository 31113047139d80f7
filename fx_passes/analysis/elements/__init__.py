"""Reads a graph as formulas of dot products, from which row programs are made."""
