"""Graphs of DTensors: seen as the whole tensors that they stand for, rewritten, put back."""
