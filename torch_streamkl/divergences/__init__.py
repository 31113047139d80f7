"""Divergences between two rows of probabilities: expressions, names, and the state of a row."""
