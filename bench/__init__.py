"""Benchmarks: naive code, torch.compile, peers and torch_streamkl side by side."""

import os

# Read by torch's C++ code when torch is imported: lines of the profiler that every measurement of
# memory would print, and warnings of the CPU's allocator about tensors older than a profile.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
