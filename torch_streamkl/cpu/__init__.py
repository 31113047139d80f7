"""What a CPU computes faster in other words, and what Inductor compiles for it."""
