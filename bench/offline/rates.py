"""What the instructions of the attention kernels allow on a GPU that is not here.

    python -m bench.offline.rates            # writes the table of docs/evidence/gpus.md

The kernels are compiled, and the loop over tiles without masks is counted in the machine code:
instructions for a pair of query and key (one student and one teacher score). A multiprocessor
issues 128 of them a clock, has a unit for exponentials and one for matmuls; the slowest of the
three bounds the rate. No clock of waiting is in it: it is a ceiling, and the measured share of it
on an H200 says how far away a kernel is.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from bench.offline.cells import Cell, launches_of, name_of
from bench.offline.compile import compile_launch, loops_of
from bench.offline.matrix import DOCUMENT
from bench.table import between, markdown_lines, number

ISSUED = 128  # instructions of threads that a multiprocessor issues in a clock
EXPONENTIALS = 16  # of its special-function units in a clock
MATMULS = {"forward": 2, "dq": 3, "dk": 3}
MATRIX = r"\b(HMMA|HGMMA|UTC\w*MMA)\b"


@dataclass(frozen=True)
class Chip:
    """What a vendor says of a GPU: bfloat16 without sparsity, sums in float32."""

    name: str
    multiprocessors: int
    clock_ghz: float
    matmul_tflops: float

    @property
    def matmul_flop(self) -> float:
        """Of a multiprocessor in a clock."""
        return self.matmul_tflops * 1e3 / self.multiprocessors / self.clock_ghz


CHIPS = {
    "sm_80": Chip("A100", 108, 1.41, 312),
    "sm_86": Chip("A10", 72, 1.695, 125),
    "sm_89": Chip("L40S", 142, 2.52, 362),
    "sm_90": Chip("H200", 132, 1.83, 989),
    "sm_100": Chip("B200", 148, 1.85, 2250),
    "sm_120": Chip("RTX 5090", 170, 2.41, 209.5),
}


@dataclass(frozen=True)
class Count:
    """Instructions of threads for a pair."""

    all: float
    exponentials: float
    shared: float  # loads and stores of shared memory


def count(cubin: bytes, block_m: int, block_n: int, num_warps: int) -> Count | None:
    """Of the shortest loop with matmuls: the one without masks. None where there is none."""
    loops = [body for body in loops_of(cubin) if any(re.search(MATRIX, x) for x in body)]
    if not loops:
        return None
    body = min(loops, key=len)
    kinds: Counter[str] = Counter()
    for instruction in body:
        words = instruction.split()
        operation = words[1] if words[0].startswith("@") else words[0]
        kinds[operation.split(".")[0]] += 1
    size = block_m * block_n / (32 * num_warps)  # of a tile, pairs of a thread
    # a loop may be unrolled: two exponentials for a pair say by how much
    pairs = max(1.0, kinds["MUFU"] / 2 / size) * size
    shared = sum(n for kind, n in kinds.items() if kind in ("LDS", "LDSM", "STS", "STSM"))
    return Count(sum(kinds.values()) / pairs, kinds["MUFU"] / pairs, shared / pairs)


def tflops(found: Count, kernel: str, head_dim: int, chip: Chip) -> tuple[float, str]:
    """The rate that the slowest unit allows, and which it is."""
    flop = 2.0 * head_dim * MATMULS[kernel]
    pairs = {  # in a clock of a multiprocessor
        "instructions": ISSUED / found.all,
        "exponentials": EXPONENTIALS / max(found.exponentials, 1e-9),
        "matmuls": chip.matmul_flop / flop,
    }
    slowest = min(pairs, key=pairs.__getitem__)
    return pairs[slowest] * flop * chip.multiprocessors * chip.clock_ghz * 1e-3, slowest


COLUMNS = (
    "GPU", "kernel", "head_dim", "tile", "instructions per pair", "exponentials per pair",
    "shared-memory accesses per pair", "upper bound, TFLOP/s", "of the matmul peak", "limited by",
)  # fmt: skip


def rows() -> list[tuple[str, ...]]:
    found = []
    for target, chip in CHIPS.items():
        for head_dim in (128, 64):
            for launch in launches_of(Cell(target, "attention", "bf16", head_dim, "plain")):
                config, warps = launch.args["CONFIG"], launch.options["num_warps"]
                cubin = compile_launch(launch, target).asm["cubin"]
                counted = count(cubin, config.BLOCK_M, config.BLOCK_N, warps)
                kernel = name_of(launch).split()[0]
                what = (f"{chip.name} ({target})", kernel, f"{head_dim}",
                        f"{config.BLOCK_M} x {config.BLOCK_N}, {warps} warps")  # fmt: skip
                if counted is None:
                    found.append((*what, *("not found",), *("",) * 5))
                    continue
                rate, bound = tflops(counted, kernel, head_dim, chip)
                share = f"{rate / chip.matmul_tflops:.0%}"
                numbers = (counted.all, counted.exponentials, counted.shared, rate)
                found.append((*what, *(number(x) for x in numbers), share, bound))
    return found


if __name__ == "__main__":
    table = markdown_lines(COLUMNS, rows())
    print("\n".join(table))
    DOCUMENT.write_text(between(DOCUMENT.read_text(), "rates", table))
