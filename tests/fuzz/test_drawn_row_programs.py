"""Random row programs against plain torch on materialized products: values and gradients.

    python -m tests.fuzz.test_drawn_row_programs --calls 3000
    python -m tests.fuzz.test_drawn_row_programs --calls 1000 --device cuda
    TRITON_INTERPRET=1 python -m tests.fuzz.test_drawn_row_programs --calls 200

A failure prints its seed: ``--first S --calls 1`` runs that one again. On a GPU,
``--few-shapes --processes 16 --seconds 500`` draws few programs with many values each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz.drawn import processes
from tests.support.drawn_rows import Drawing
from tests.support.interpreter import INTERPRETED, inside, outside, quiet
from tests.support.naive_rows import gradients_of
from torch_streamkl import row_program
from torch_streamkl.rows import torch_impl

IN_CI = 60


def difference(
    seed: int, impl: str, device: str, dtype: torch.dtype, program: int | None = None
) -> str:
    """What is wrong with a program; "refused: ..." where an implementation does not run it.

    The numbers are the seed's, the program too unless another one's is given.
    """
    drawn = Drawing(seed, program).drawn()
    exact, leaves = drawn.arguments(torch.float64, device)
    expected = drawn.naive(exact)
    mine, own = drawn.arguments(dtype, device)
    try:
        got = row_program(drawn.function, impl=impl, **mine)
    except (NotImplementedError, ValueError) as reason:
        if isinstance(reason, NotImplementedError) or "sum over heads" in str(reason):
            return f"refused: {type(reason).__name__}"
        raise
    naive = None
    if dtype != torch.float64:
        other, others = drawn.arguments(dtype, device)
        naive = drawn.naive(other)
    for name, x in expected.items():
        if got[name].shape != x.shape:
            return f"{name} has shape {tuple(got[name].shape)}, torch {tuple(x.shape)}"
    names = [*expected, *(f"gradient {i}" for i in range(len(leaves)))]
    want = [*expected.values(), *gradients_of(expected, leaves)]
    have = [*got.values(), *gradients_of(got, own)]
    near = [None] * len(want) if naive is None else [*naive.values(), *gradients_of(naive, others)]
    for name, a, b, c in zip(names, have, want, near, strict=True):
        if wrong := _off(a.double(), b, c):
            return f"{name} {wrong}"
    return ""


def _off(got: Tensor, expected: Tensor, naive: Any) -> str:
    """Twice what naive code of the type is off, plus roundings of the largest number."""
    if not expected.isfinite().all():
        return "" if torch.equal(got.isfinite(), expected.isfinite()) else "is finite elsewhere"
    if not expected.numel():
        return ""
    scale = expected.abs().max().item() + 1.0
    limit = 1e-10 * scale
    if naive is not None:
        limit = 64 * torch.finfo(torch.float32).eps * scale
        if naive.isfinite().all():  # in a narrow type it may be worse than any limit
            limit += 2 * (naive.double() - expected).abs().max().item()
    off = (got - expected).abs().max().item()
    return "" if off <= limit else f"is off by {off:g} of {scale:g}, {limit:g} are allowed"


@outside
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_drawn(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 24)
    monkeypatch.setattr(torch_impl, "MAX_KEYS", 3)
    wrong = {seed: difference(seed, impl, "cpu", torch.float64) for seed in range(IN_CI)}
    assert not {s: w for s, w in wrong.items() if w and not w.startswith("refused")}
    assert sum(w.startswith("refused") for w in wrong.values()) < IN_CI // 4


@inside
@quiet
def test_drawn_kernels() -> None:
    wrong = {seed: difference(seed, "triton", "cpu", torch.float32) for seed in range(8)}
    assert not {s: w for s, w in wrong.items() if w and not w.startswith("refused")}


def main() -> int:
    parser = processes.options(__doc__)
    given = parser.parse_args()
    is_kernel = INTERPRETED or given.device != "cpu"
    impl = given.impl or ("triton" if INTERPRETED else "auto" if is_kernel else "torch")
    dtype = torch.float32 if is_kernel else torch.float64

    def outcomes(seed: int) -> processes.Outcomes:
        program = processes.structure_of(given, seed)
        try:
            found = difference(seed, impl, given.device, dtype, program)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:300]}"
        if found.startswith("refused") or not found:
            yield "refused" if found else "right", "", ""
        else:
            yield "wrong", f"seed {seed}", f"{found}, impl={impl!r}, {dtype}"

    return processes.run("tests.fuzz.test_drawn_row_programs", given, outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
