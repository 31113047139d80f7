"""Holds faster paths for a CPU: row kernels that Inductor compiles, and elementwise operations."""
