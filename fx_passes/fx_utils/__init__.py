"""Holds helpers for FX graphs: nodes, sizes, effects, insertion and removal."""
