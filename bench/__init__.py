"""Benchmarks: naive code, torch.compile, peers and torch_streamkl side by side."""
