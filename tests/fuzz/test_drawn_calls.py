"""Random calls of attention_kl, attention_kl_varlen and linear_kl against independent formulas.

A small part runs with the tests; ``python -m tests.fuzz.test_drawn_calls --calls 10000`` draws
more, on a GPU with ``--device cuda``, of kernels in the interpreter with TRITON_INTERPRET=1. On a
GPU, ``--few-shapes --processes 16 --seconds 500`` lets calls share compiled kernels, and divides
them.
"""

from __future__ import annotations

import sys

import pytest

from tests.fuzz.drawn import attention, linear, processes
from tests.fuzz.drawn.formulas import AmbiguousError
from tests.fuzz.drawn.judge import Drawn, difference, leaves, results, truth_of
from tests.support.gpus import on_a_gpu
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
        truth = truth_of(
            call,
            lambda given, naive: module.formula(call, given, naive),
            of_kernels=INTERPRETED or device != "cpu",
        )
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


# seeds of calls that once differed
ONCE_WRONG = [
    ("linear", 2000703),  # -inf times a weight of 0: its gradient was +inf
    ("attention", 2002021),  # the reference rounded log-sum-exps of 1e5
    ("attention", 2012670),  # values with a mean of teachers did
]


@outside
@pytest.mark.parametrize(("kind", "seed"), ONCE_WRONG)
def test_calls_that_once_differed(kind: str, seed: int) -> None:
    test_drawn_calls(kind, seed)


@outside
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_a_structure_share_compiled_kernels(kind: str) -> None:
    free = {"student_scale", "teacher_scale", "row_weight", "row_mask", "reduction"}
    free |= {"student_logit_scale", "teacher_logit_scale", "temperature", "layout"}

    def structure(seed: int) -> tuple[object, ...]:
        call = KINDS[kind].draw(seed, "cuda", 4)
        given = {**call.tensors, **call.options}
        dtypes = {n: getattr(x, "dtype", None) for n, x in given.items() if n not in free}
        options = {n: call.options.get(n) for n in ("divergence", "student_eps", "window")}
        return call.dtype, dtypes, options

    for first in range(4):
        assert structure(first + 8) == structure(first + 4 * 25)


@outside
def test_every_seed_is_drawn_by_one_process() -> None:
    parser = processes.options(None)
    for structures in ([], ["--structures", "5"]):
        seeds = []
        for share in range(3):
            options = ["--first", "7", "--processes", "3", "--share", str(share), *structures]
            seeds += list(processes.seeds_of(parser.parse_args(options), 50))
        assert sorted(seeds) == list(range(7, 57))


@inside
@quiet
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls_interpreted(kind: str, seed: int) -> None:
    call = KINDS[kind].draw(seed, "interpreter")
    wrong = {impl: x for impl, x in judge(call).items() if x not in ("right", "not taken")}
    assert not wrong, f"{call}\n{wrong}"


@inside
@quiet
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("attention", 2200223),  # a mean of teachers, rows at infinity with the gradient 0: NaN
        ("attention", 2220072),  # a sink of -inf beside one that is above all keys: infinite
    ],
)
def test_calls_that_once_differed_interpreted(kind: str, seed: int) -> None:
    test_drawn_calls_interpreted(kind, seed)


# total variation: P and S of keys that have nearly all of a row, forward and backward disagreed
# on which one is larger; head means by Hopper's kernels after those of the portable ones
@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("seed", [20459, 32030, 4000065, 4000166, 4000016, 4000112])
def test_calls_that_once_differed_on_a_gpu(seed: int) -> None:
    call = attention.draw(seed, "cuda", processes.STRUCTURES if seed > 4000000 else None)
    wrong = {k: x for k, x in judge(call, "cuda").items() if x not in ("right", "not taken")}
    assert not wrong, f"{call}\n{wrong}"


def main() -> int:
    """Draw many calls of each kind and print each that differs; 1 if one does."""
    parser = processes.options(__doc__)
    parser.add_argument("--kind", choices=list(KINDS), help="only this one")
    given = parser.parse_args()
    drawn_for = "interpreter" if INTERPRETED else given.device

    def outcomes(seed: int) -> processes.Outcomes:
        for kind in [given.kind] if given.kind else KINDS:
            call = KINDS[kind].draw(seed, drawn_for, processes.structures_of(given))
            found = judge(call, given.device, given.impl)
            if not found:
                yield "left out: rounding decides", "", ""
            for impl, outcome in found.items():
                is_known = outcome in ("right", "not taken")
                name = "" if is_known else f"{kind} {seed} {impl}"
                counted = f"{kind} {impl}: {outcome if is_known else 'DIFFERS'}"
                yield counted, name, f"{outcome}\n    {call}"

    return processes.run("tests.fuzz.test_drawn_calls", given, outcomes)


if __name__ == "__main__":
    sys.exit(main())
