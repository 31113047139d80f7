"""Decides what is added to all scores of a row and leaves a softmax as it is in floating point.

Over real numbers everything does. But scores next to 1e9 have no digits left, and next to the
lowest number they are nothing: a softmax of them is uniform. So code that drops what is added, or
moves it elsewhere, asks here first.
"""

from __future__ import annotations

from torch_streamkl.program.graph import CONTRACT, FLOAT, Node
from torch_streamkl.program.ranges import times
from torch_streamkl.program.walks import walk

# In float32, scores next to a larger number have less than three decimals left.
LARGEST_SHIFT = 1e4
LARGE = 1e3  # what a tensor of 1 and 0 is multiplied with to be a mask


def is_small(c: float, x: Node) -> bool:
    """Returns whether scores keep their digits next to ``c * x``.

    So they do next to what is bounded, and next to what is made of products and reductions, which
    are as large as scores are. A captured tensor and a mask may be of any size.
    """
    if all(abs(times(c, bound)) <= LARGEST_SHIFT for bound in x.range):
        return True
    for y in walk([x], lambda y: y.op not in (CONTRACT, "reduce", "capture")):
        if y.op == "const" and not abs(y.value) <= LARGEST_SHIFT:
            return False
        if y.op == "capture" and y.dtype == FLOAT:
            return False
    return True
