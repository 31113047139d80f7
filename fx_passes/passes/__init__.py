"""Holds the passes that run on a graph after its losses are fused.

They handle what is left: attention of the same scores, cross-entropy of the same logits, weighted
sums of rows, and reads of shapes.
"""
