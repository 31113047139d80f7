"""Holds what a CPU computes in a faster way, and what Inductor compiles for it."""
