"""Makes axes that no other expression has."""

from __future__ import annotations

import itertools
import threading

from torch_streamkl.program.graph import Axis, Size

FIRST_PLACE = 10**6  # numbers of one length sort by age
_every = itertools.count()
_analysis = threading.local()


class _Age(int):
    """A number that no other axis has, shown as the place among those of the same analysis.

    Terms and factors are sorted by digests of what they show. In a symmetric loss the order
    decides which side comes first. It has to be the same on all ranks and in the next process,
    whatever each of them has compiled before.
    """

    place: int

    def __repr__(self) -> str:
        return str(FIRST_PLACE + self.place)


def begin_analysis() -> None:
    """Counts the axes of this thread's next analysis from the beginning."""
    _analysis.places = itertools.count()


def fresh_axis(size: Size | None) -> Axis:
    """Returns an axis that no other expression has."""
    if not hasattr(_analysis, "places"):
        begin_analysis()
    age = _Age(next(_every))
    age.place = next(_analysis.places)
    return Axis(("fresh", age), size)
