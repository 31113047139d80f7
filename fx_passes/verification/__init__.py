"""Runs the comparisons of verify(): eager, compiled and float64."""
