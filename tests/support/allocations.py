"""Measures which large tensors a program materializes once its graphs are rewritten."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import torch_streamkl
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.fx_utils.mutation import has_effect


class Allocations(TorchDispatchMode):
    """Shapes of the new tensors of at least ``least`` entries that operations return.

    What our operators use inside is not seen: a tile is no tensor of the program. The bodies of
    higher-order operators (torch.cond) are seen.
    """

    supports_higher_order_operators = True

    def __init__(self, least):
        super().__init__()
        self.least = least
        self.shapes: list[tuple[int, ...]] = []
        self._seen: dict[int, Tensor] = {}  # kept alive, so that no address is used again

    def known(self, tensors):
        for x in tensors:
            if isinstance(x, Tensor):
                self._seen[x.untyped_storage().data_ptr()] = x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_flatten(result)[0]:
            if isinstance(x, Tensor) and _capacity(x) >= self.least:
                place = x.untyped_storage().data_ptr()
                if place not in self._seen:
                    self._seen[place] = x
                    self.shapes.append(tuple(x.shape))
        return result


def _capacity(x):
    """Entries that fit the memory of a tensor: an expanded one has few."""
    return x.untyped_storage().nbytes() // x.element_size()


def measure(fn, inputs, least, **options):
    """The report, and the shapes of large tensors made in the forward and in the backward."""
    torch._dynamo.reset()
    found = Allocations(least)
    found.known(inputs)

    def compiler(gm, example_inputs):
        ours = {"streamkl.inner": "eager", "streamkl.min_mib": 0.0}
        forward = backend.streamkl(gm, example_inputs, options=ours)
        gm.graph.eliminate_dead_code(has_effect)  # as every compiler does
        gm.recompile()

        def run(*args):
            found.known(args)
            with found:
                return forward(*args)

        return run

    with torch_streamkl.reports() as report:
        outputs = torch.compile(fn, backend=compiler, **options)(*inputs)
    outputs = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor) and x.requires_grad]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if outputs and leaves:
        gradients = [torch.ones_like(x) for x in outputs]
        found.known(gradients)
        with found:
            torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    return report, found.shapes
