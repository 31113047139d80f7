"""Defines the values of the analysis: scores, masks, distributions, sums over keys."""
