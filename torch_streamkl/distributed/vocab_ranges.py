"""Finds each rank's range of the vocabulary, and checks that student and teacher fit.

A rank compares the entries that it has of both sides. So the shards of both sides begin at the
same entry, and one may end before the other only at the end of its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_streamkl.distributed.agreement import DisagreementError, listed

BY_RANK = -1  # start not given: the ranks hold consecutive shards, in their order


@dataclass(frozen=True)
class VocabRange:
    """Holds the range of vocabulary entries from ``start`` to ``stop``."""

    start: int
    stop: int

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True)
class Shards:
    """Holds the ranges of every rank."""

    student: list[VocabRange]
    teacher: list[VocabRange]

    @property
    def student_vocab_size(self) -> int:
        return max(r.stop for r in self.student)

    def vocab_start(self, rank: int) -> int:
        """Returns the first vocabulary entry that the rank compares."""
        student, teacher = self.student[rank], self.teacher[rank]
        return teacher.start if student.is_empty else student.start

    @staticmethod
    def of(facts: list[dict[str, int]]) -> Shards:
        """Builds shards from every rank's vocabulary sizes and starts; raises if they clash."""
        student, teacher = (
            ranges_of(
                f"{side}_",
                [fact[f"{side}_vocab_start"] for fact in facts],
                [fact[f"{side}_vocab"] for fact in facts],
            )
            for side in ("student", "teacher")
        )
        ends = [max(r.stop for r in side) for side in (student, teacher)]
        for s, t in zip(student, teacher, strict=True):
            starts_together = s.is_empty or t.is_empty or s.start == t.start
            if starts_together and _ends_fit(s, t, *ends):
                continue
            raise DisagreementError(
                "every rank must hold the same vocabulary entries of student and teacher (one may "
                "lack those "
                "beyond the end of its vocabulary), got student vocabulary entries "
                f"{listed(student)} and teacher vocabulary entries {listed(teacher)}; "
                "torch_streamkl.distributed.reshard_vocab moves a weight to given ranges, once "
                "for a frozen teacher"
            )
        return Shards(student, teacher)


def ranges_of(prefix: str, firsts: list[int], sizes: list[int]) -> list[VocabRange]:
    """Returns every rank's range; raises if they make up no vocabulary."""
    given = [first != BY_RANK for first in firsts]
    if any(given) and not all(given):
        raise DisagreementError(
            f"{prefix}vocab_start must be given on every rank or on none, got "
            f"{listed([first if first != BY_RANK else None for first in firsts])}"
        )
    if not any(given):
        firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    ranges = [VocabRange(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
    end = 0
    for r in sorted((r for r in ranges if not r.is_empty), key=lambda r: r.start):
        if r.start != end:
            raise DisagreementError(
                f"the ranks' vocabulary shards of {prefix}weight must make up a whole vocabulary, "
                "each vocabulary entry "
                f"once, got {listed(ranges)}"
            )
        end = r.stop
    if not end:
        raise DisagreementError(
            f"{prefix}weight must have vocabulary entries on some rank, got none on all of them"
        )
    return ranges


def _ends_fit(s: VocabRange, t: VocabRange, student_end: int, teacher_end: int) -> bool:
    if s.is_empty and t.is_empty:
        return True
    if s.is_empty:
        return t.start >= student_end
    if t.is_empty:
        return s.start >= teacher_end
    return s.stop == t.stop or (
        s.stop == student_end if s.stop < t.stop else t.stop == teacher_end
    )
