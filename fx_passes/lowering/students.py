"""Says of a call of `linear_kl` what its student's logits are, for passes that come later.

The lowering of a call writes ``result.meta[STUDENT] = student_of(call)`` on the node of the
operator. passes/shared_logits.py finds cross-entropies of the same logits by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_streamkl.fx_passes.closed_forms.form import Call
from torch_streamkl.fx_passes.closed_forms.recompute import score_of
from torch_streamkl.program.graph import Axis, Node

STUDENT = "streamkl_student"  # of a call's metadata


@dataclass(frozen=True)
class Student:
    """Represents what the student's softmax of a call is of.

    ``rows`` are the axes of the call's tokens, the leading one first: the order in which the
    lowering flattens batch, heads and rows. ``key`` is that of the vocabulary.
    """

    score: Node
    rows: tuple[Axis, ...]
    key: Axis


def student_of(call: Call) -> Student:
    """Returns the student of a call."""
    return Student(score_of(call.student, call.axes.key), call.axes.rows, call.axes.key)
