"""Which words of a vocabulary each rank holds, and whether student and teacher fit.

A rank compares the words that it has of both sides, so both must begin with the same word there,
and one may end before the other only where its vocabulary ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_streamkl.distributed.agreement import DisagreementError, listed

BY_RANK = -1  # first word not given: the ranks hold consecutive words, in their order


@dataclass(frozen=True)
class WordRange:
    """Words ``start`` to ``stop`` of a vocabulary."""

    start: int
    stop: int

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True)
class Shards:
    """The ranges of every rank."""

    student: list[WordRange]
    teacher: list[WordRange]

    @property
    def num_student_words(self) -> int:
        return max(r.stop for r in self.student)

    def first_word(self, rank: int) -> int:
        """The first word that the rank compares."""
        student, teacher = self.student[rank], self.teacher[rank]
        return teacher.start if student.is_empty else student.start

    @staticmethod
    def of(facts: list[dict[str, int]]) -> Shards:
        """From every rank's numbers of words and first words; raises where they do not fit."""
        student, teacher = (
            _ranges(
                side,
                [fact[f"{side}_first_word"] for fact in facts],
                [fact[f"{side}_words"] for fact in facts],
            )
            for side in ("student", "teacher")
        )
        ends = [max(r.stop for r in side) for side in (student, teacher)]
        for s, t in zip(student, teacher, strict=True):
            starts_together = s.is_empty or t.is_empty or s.start == t.start
            if starts_together and _ends_fit(s, t, *ends):
                continue
            raise DisagreementError(
                "every rank must hold the same words of student and teacher (one may lack those "
                "beyond the end of its vocabulary), got student words "
                f"{listed(student)} and teacher words {listed(teacher)}; "
                "torch_streamkl.distributed.reshard_words moves a weight to given ranges, once "
                "for a frozen teacher"
            )
        return Shards(student, teacher)


def _ranges(side: str, firsts: list[int], sizes: list[int]) -> list[WordRange]:
    given = [first != BY_RANK for first in firsts]
    if any(given) and not all(given):
        raise DisagreementError(
            f"{side}_first_word must be given on every rank or on none, got "
            f"{listed([first if first != BY_RANK else None for first in firsts])}"
        )
    if not any(given):
        firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    ranges = [WordRange(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
    end = 0
    for r in sorted((r for r in ranges if not r.is_empty), key=lambda r: r.start):
        if r.start != end:
            raise DisagreementError(
                f"the ranks' words of {side}_weight must make up a whole vocabulary, each word "
                f"once, got {listed(ranges)}"
            )
        end = r.stop
    if not end:
        raise DisagreementError(
            f"{side}_weight must have words on some rank, got none on all of them"
        )
    return ranges


def _ends_fit(s: WordRange, t: WordRange, student_end: int, teacher_end: int) -> bool:
    if s.is_empty and t.is_empty:
        return True
    if s.is_empty:
        return t.start >= student_end
    if t.is_empty:
        return s.start >= teacher_end
    return s.stop == t.stop or (
        s.stop == student_end if s.stop < t.stop else t.stop == teacher_end
    )
