"""Rewrites graphs of DTensors: analysed as whole tensors, with results restored to DTensors."""
