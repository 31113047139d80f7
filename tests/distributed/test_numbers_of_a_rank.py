"""Numbers that ranks may have otherwise, next to DTensors: not fused, or the same on all ranks.

A program does with whole logits what the rank's own code says. The truth is eager code on ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.distributed.test_rewritten_dtensors import (
    AS_IT_IS,
    COPIED,
    EVERY,
    NUM_TOKENS,
    NUM_WORDS,
    OF_ROWS,
    Case,
    kl,
    of_logits,
    whole,
)
from tests.support.ranks import Rank, on_ranks, on_two_ranks

OF_WORDS: dict[str, list[Any]] = {"x_s": COPIED, "x_t": COPIED}


def scaled(factor: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    """A loss of whole logits times a factor that the program computes."""

    def loss(s: Any, t: Any) -> Any:
        by = factor()
        return kl(whole(s) * by, whole(t) * by)

    return loss


def positions(first: int) -> Any:
    return (torch.arange(NUM_TOKENS) + first)[:, None] * 0.1 + 1


@on_ranks
def constants_that_a_rank_computes(me: Rank) -> None:
    def masked(s: Any, t: Any) -> Any:
        hidden = (torch.arange(NUM_WORDS) + me.rank) % 3 == 0
        return kl(whole(s).masked_fill(hidden, -1e4), whole(t).masked_fill(hidden, -1e4))

    def by_hand(s: Any, t: Any) -> Any:
        """No operation in it has the name of a loss."""
        p, q = ((whole(x) * positions(me.rank)).softmax(-1) for x in (s, t))
        return (p * (p / q).log()).sum(-1).mean()

    Case(of_logits(by_hand)).is_left(me, "rank 1 compiles another graph than rank 0")
    own = scaled(lambda: positions(me.rank))
    for loss, placements in ((own, OF_WORDS), (own, OF_ROWS), (masked, OF_ROWS)):
        case = Case(of_logits(loss), placements)
        case.is_left(me, "rank 1 compiles another graph than rank 0")
    for placements in (OF_WORDS, OF_ROWS):
        Case(of_logits(scaled(lambda: positions(1))), placements, wanted=EVERY).fuses(me)


@on_ranks
def random_numbers_that_a_rank_draws(me: Rank) -> None:
    for draw in (
        lambda: torch.rand(NUM_TOKENS, 1),
        lambda: torch.normal(1.0, 0.5, (NUM_TOKENS, 1)),
        lambda: torch.poisson(torch.full((NUM_TOKENS, 1), 3.0)),
    ):
        _, report = Case(of_logits(scaled(draw))).compiled(me, AS_IT_IS)
        assert not report.num_fused, str(report)
        assert "is a plain tensor next to DTensors" in str(report), str(report)


@on_ranks
def symbols_that_a_rank_is_given(me: Rank) -> None:
    """The compiler does not know an argument's number, so ranks cannot compare it."""

    def given(number: Any, loss: Callable[..., Any]) -> Case:
        def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any, number: Any = number) -> Any:
            return loss(x_s @ w_s.T, x_t @ w_t.T, number)

        return Case(program, dynamo={"dynamic": True})

    def by_number(s: Any, t: Any, number: Any) -> Any:
        return kl(whole(s) * number, whole(t) * number)

    def by_position(s: Any, t: Any, number: Any) -> Any:
        return kl(whole(s) * positions(number), whole(t) * positions(number))

    for number in (2 + me.rank, 1.5 + me.rank):
        case = given(number, by_number)
        case.is_left(me, "is a number next to plain tensors of DTensors")
        given(number, by_position).is_left(me, "is a plain tensor next to DTensors")
    # what scales a DTensor is the same everywhere by its own rules
    given(2.5, lambda s, t, number: whole(kl(s * number, t * number))).fuses(me)


test_on_two_ranks = on_two_ranks(__name__)
