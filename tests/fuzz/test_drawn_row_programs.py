"""Random row programs against plain torch on materialized products: values and gradients.

    python -m tests.fuzz.test_drawn_row_programs --calls 3000
    python -m tests.fuzz.test_drawn_row_programs --calls 1000 --device cuda
    python -m tests.fuzz.test_drawn_row_programs --calls 200 --interpreter

A failure prints its seed: ``--first S --calls 1`` runs that one again. On a GPU,
``--few-shapes --processes 16 --seconds 500`` draws few programs with many values each.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz.drawn import processes
from tests.support.drawn_rows import Drawing
from tests.support.interpreter import inside, outside, quiet

IN_CI = 60


def difference(
    seed: int, impl: str, device: str, dtype: torch.dtype, program: int | None = None
) -> str:
    """What is wrong with a program; "refused: ..." where an implementation does not run it.

    The numbers are the seed's, the program too unless another one's is given.
    """
    import torch_streamkl

    drawn = Drawing(seed, program).drawn()
    exact, leaves = drawn.arguments(torch.float64, device)
    expected = drawn.naive(exact)
    mine, own = drawn.arguments(dtype, device)
    try:
        got = torch_streamkl.row_program(drawn.function, impl=impl, **mine)
    except (NotImplementedError, ValueError) as reason:
        if isinstance(reason, NotImplementedError) or "sum over heads" in str(reason):
            return f"refused: {type(reason).__name__}"
        raise
    naive = None
    if dtype != torch.float64:
        other, others = drawn.arguments(dtype, device)
        naive = drawn.naive(other)
    weights = {
        n: torch.linspace(0.5, 1.5, max(x.numel(), 1), dtype=torch.float64, device=device)[
            : x.numel()
        ]
        for n, x in expected.items()
    }

    def total(values: dict[str, Tensor]) -> Tensor:
        sums = [(x.reshape(-1) * weights[n].to(x.dtype)).sum() for n, x in values.items()]
        return torch.stack(sums).sum()

    def gradients(values: dict[str, Tensor], of: list[Tensor]) -> list[Tensor]:
        loss = total(values)
        if not loss.requires_grad:
            return [torch.zeros_like(x) for x in of]
        found = torch.autograd.grad(loss, of, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(of, found, strict=True)]

    for name, x in expected.items():
        if got[name].shape != x.shape:
            return f"{name} has shape {tuple(got[name].shape)}, torch {tuple(x.shape)}"
    names = [*expected, *(f"gradient {i}" for i in range(len(leaves)))]
    want = [*expected.values(), *gradients(expected, leaves)]
    have = [*got.values(), *gradients(got, own)]
    near = [None] * len(want) if naive is None else [*naive.values(), *gradients(naive, others)]
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
        limit = 2 * (naive.double() - expected).abs().max().item()
        limit += 64 * torch.finfo(torch.float32).eps * scale
    off = (got - expected).abs().max().item()
    return "" if off <= limit else f"is off by {off:g} of {scale:g}, {limit:g} are allowed"


@outside
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_drawn(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_streamkl.rows import torch_impl

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--impl", default=None, help="auto on a GPU, blocked elsewhere")
    parser.add_argument("--interpreter", action="store_true", help="impl='triton' on a CPU")
    processes.add_options(parser)
    given = parser.parse_args()
    if given.interpreter and os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        os.execv(
            sys.executable,
            [sys.executable, "-m", "tests.fuzz.test_drawn_row_programs", *sys.argv[1:]],
        )
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    module = "tests.fuzz.test_drawn_row_programs"
    return processes.run(module, given, lambda tally: _draw(given, tally))


def _draw(given: argparse.Namespace, tally: processes.Tally) -> None:
    is_kernel = given.interpreter or given.device != "cpu"
    impl = given.impl or ("triton" if given.interpreter else "auto" if is_kernel else "torch")
    dtype = torch.float32 if is_kernel else torch.float64
    for seed in processes.seeds_of(given, given.calls):
        if tally.is_over():
            return
        program = processes.structure_of(given, seed)
        try:
            found = difference(seed, impl, given.device, dtype, program)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:300]}"
        tally.num_calls += 1
        refused = found.startswith("refused")
        tally.counts["refused" if refused else "wrong" if found else "right"] += 1
        if found and not refused:
            tally.differs(f"seed {seed}", f"{found}, impl={impl!r}, {dtype}")


if __name__ == "__main__":
    raise SystemExit(main())
