"""Runs kernels: the one launch function, and side streams."""
