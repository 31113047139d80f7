"""Runs kernels: the one launch function, captured launches, device limits, and side streams."""
