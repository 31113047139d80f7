"""Benchmarks: naive code, torch.compile, peers and torch_streamkl side by side.

`python -m bench SUITE` takes the cases of a suite (`suites.py`), and gives each to every provider.

- A `Case` says what is computed (`case.py`): attention maps (`attention.py`), indexers
  (`indexer.py`), LM heads (`heads.py`), training steps (`steps.py`), and what ranks share
  (`sharded.py`, `sharded_models.py`; what they receive is in `costs.py`).
- A `Provider` is a way to compute it (`providers.py`, CUDA graphs in `cuda_graphs.py`).
- `runner.py` builds, judges, weighs and times; how is in `measure.py`. `ranks.py` does so in
  processes that share a problem.
- A `Row` is a provider's result of a case, and a `Record` holds those of a run (`records.py`).
  `table.py` prints them, `results.py` writes RESULTS.md, and `plots.py` draws pictures.
- `demo.py` is `make demo`, `first_step.py` times compilation, and `offline/` compiles for absent
  GPUs and runs the sanitizer.

A new way to compute something is a function in `providers.py`. A new shape is a line in
`suites.py`. A new loss is a function in the module of its family, which its `naive` finds.
"""

import os

# Read by torch's C++ code when torch is imported: lines of the profiler that every measurement of
# memory would print, and warnings of the CPU's allocator about tensors older than a profile.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
