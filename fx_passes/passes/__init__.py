"""Holds the passes that run on a graph after its losses are fused."""
