"""Reads the user's graph into programs (torch_streamkl/program)."""
