"""Defines divergences between two rows of probabilities: expressions, names, and row states."""
