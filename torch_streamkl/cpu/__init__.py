"""What a CPU computes faster that is, and what Inductor compiles for it."""
