"""The comparison that every example prints. It needs tqdm.

`pip install -e ".[examples]"` in the clone installs what all examples need.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable

import torch

import torch_streamkl
from examples.clock import Clock


def compare(train: Callable[[bool, Clock], object]) -> None:
    """Train uncompiled, then compiled with `torch_streamkl.enable`, and print both and the report.

    ``train(compiles, clock)`` trains for ``clock.num_steps`` steps. Both begin with the same seed:
    the same weights, the same data.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--steps", type=int, default=10, help="4 or more")
    num_steps = max(parser.parse_args().steps, 4)
    libraries = r"(torch|transformers|accelerate|trl|peft|lightning)\b"
    warnings.filterwarnings("ignore", module=libraries)
    eager = Clock("uncompiled", num_steps, "first step")
    compiled = Clock("streamkl", num_steps, "compiling")
    torch.manual_seed(0)
    eager.start()
    train(False, eager)
    torch.manual_seed(0)
    # a graph that a cache has from an earlier run would not be analysed, nor reported
    again = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch_streamkl.enable(), again, torch_streamkl.reports() as report:
        compiled.start()
        train(True, compiled)
    pairs = list(zip(eager.losses, compiled.losses, strict=True))
    print(f"uncompiled {eager}\nstreamkl   {compiled}")
    print(f"loss       {pairs[0][0]:.6f} and {pairs[0][1]:.6f} in the first step, ", end="")
    print(f"{pairs[-1][0]:.6f} and {pairs[-1][1]:.6f} in the last")
    largest = max(abs(a - b) / abs(a) for a, b in pairs)
    print(f"           largest relative difference {largest:.1e}\n{report}")
