"""Random calls of attention_kl, attention_kl_varlen and linear_kl against independent formulas.

A small part runs with the tests; ``python -m tests.test_drawn_calls --calls 10000`` draws more, on
a GPU with ``--device cuda``, of kernels in the interpreter with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

import pytest
import torch

from tests.drawn import attention, linear
from tests.drawn.formulas import AmbiguousError
from tests.drawn.judge import Drawn, difference, leaves, results, truth_of
from tests.support.interpreter import INTERPRETED, inside, outside, quiet

KINDS = {"attention": attention, "linear": linear}
SEEDS = 40  # of each kind in the tests


def implementations(kind: str, device: str = "cpu") -> tuple[str, ...]:
    """What computes a call; "compiled" and "shards" are the CPU's inner parts by themselves."""
    if device != "cpu":
        return ("auto", "hopper", "triton") if kind == "attention" else ("auto", "triton")
    if INTERPRETED:
        return ("triton",)
    of_kind = ("reference", "torch", "compiled")
    return of_kind if kind == "attention" else (*of_kind, "shards")


def judge(call: Drawn, device: str = "cpu", only: str | None = None) -> dict[str, str]:
    """Outcome by implementation: "right", "not taken" or what is wrong. {} where rounding decides.

    Only an explicit choice may decline a call, and only as not implemented.
    """
    module = KINDS[call.kind]
    try:
        truth = truth_of(call, lambda given, naive: module.formula(call, given, naive))
    except AmbiguousError:
        return {}
    outcomes = {}
    for impl in implementations(call.kind, device):
        if only is not None and impl != only:
            continue
        given = leaves(call, None, device)
        try:
            with module.small_blocks(call), module.running(impl):
                value = module.run(call, given, impl)
                found = results(call, given, value, truth.grad)
        except NotImplementedError as error:
            is_choice = impl in ("hopper", "triton")
            outcomes[impl] = "not taken" if is_choice else f"NotImplementedError: {error}"
        except Exception as error:
            outcomes[impl] = f"{type(error).__name__}: {error}"
        else:
            outcomes[impl] = difference(found, truth) or "right"
    return outcomes


@outside
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls(kind: str, seed: int) -> None:
    call = KINDS[kind].draw(seed)
    wrong = {impl: x for impl, x in judge(call).items() if x != "right"}
    assert not wrong, f"{call}\n{wrong}"


@inside
@quiet
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls_interpreted(kind: str, seed: int) -> None:
    call = KINDS[kind].draw(seed, "interpreter")
    wrong = {impl: x for impl, x in judge(call).items() if x not in ("right", "not taken")}
    assert not wrong, f"{call}\n{wrong}"


def main() -> int:
    """Draw many calls and print each that differs; 1 if one does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=int(os.environ.get("DRAWN_CALLS", "1000")))
    parser.add_argument("--first", type=int, default=0, help="seed of the first call")
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--impl", help="only this implementation")
    parser.add_argument("--show", type=int, default=20, help="differences that are printed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds = list(KINDS) if given.kind == "both" else [given.kind]
    counts: Counter[str] = Counter()
    num_wrong = 0
    for i in range(given.calls):
        kind = kinds[i % len(kinds)]
        drawn_for = "interpreter" if INTERPRETED else given.device
        call = KINDS[kind].draw(given.first + i // len(kinds), drawn_for)
        outcomes = judge(call, given.device, given.impl)
        counts["left out: rounding decides"] += not outcomes
        for impl, outcome in outcomes.items():
            is_known = outcome in ("right", "not taken")
            counts[f"{kind} {impl}: {outcome if is_known else 'DIFFERS'}"] += 1
            if not is_known:
                num_wrong += 1
                if num_wrong <= given.show:
                    print(f"{impl}: {outcome}\n    {call}", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:7d}  {name}")
    print(f"{given.calls} calls, {num_wrong} differences")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
