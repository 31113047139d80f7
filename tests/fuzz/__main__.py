"""``python -m tests.fuzz``: random programs, the wrong ones shrunk, and rules that none met."""

from __future__ import annotations

import argparse

import torch
from tqdm import tqdm

from tests.fuzz.judge import Invalid, judge
from tests.fuzz.run import Outcome, outcomes, program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--inner", default="eager", choices=("eager", "aot_eager", "inductor"))
    parser.add_argument("--verify", default="never", choices=("never", "auto", "always"))
    parser.add_argument(
        "--divergences", action="store_true", help="with streamkl.row_programs=False"
    )
    parser.add_argument("--show", action="store_true", help="print the program of --seed")
    parser.add_argument("--reasons", type=int, default=0, help="how many to print")
    parser.add_argument("--output", help="file that failures are written to as they are found")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.show:
        return _show(arguments.seed, arguments.inner, arguments.verify)
    total = Outcome()
    options = {
        "inner": arguments.inner,
        "verify": arguments.verify,
        "row_programs": not arguments.divergences,
    }
    with tqdm(total=arguments.programs, unit="program") as progress:
        for size, part in outcomes(arguments.seed, arguments.programs, arguments.jobs, options):
            total.add(part)
            progress.update(size)
            progress.set_postfix_str(total.summary())
            for failure in part.failures:
                progress.write(f"\n{failure}")
                if arguments.output:
                    with open(arguments.output, "a") as file:
                        file.write(f"{failure}\n")
    print(total.summary())
    for reason, count in total.reasons.most_common(arguments.reasons):
        print(f"{count:>6} {reason}")
    silent, open_, unmet = total.coverage.missing()
    print(f"rules that never fired: {', '.join(silent) or 'none'}")
    print(f"rules that always fired: {', '.join(open_) or 'none'}")
    print(f"overloads that no program has: {', '.join(unmet) or 'none'}")
    return 1 if total.failures else 0


def _show(seed: int, inner: str, verify: str) -> int:
    drawn = program(seed)
    print(drawn.describe())
    try:
        verdict = judge(drawn, inner, verify)
    except Invalid as error:
        print(f"invalid: {error}")
        return 0
    print(verdict)
    return 1 if verdict.difference else 0


if __name__ == "__main__":
    raise SystemExit(main())
