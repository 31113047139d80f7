"""CPU seconds of long tests: `make test` starts the longest first.

    STREAMKL_DURATIONS=build/durations.tsv make test
    python -m tests.support.durations build/durations.tsv  # writes tests/durations.tsv

CPU time is that of the test and of the processes that it started and waited for; on a machine that
does something else as well, it says more than the time on the wall. Only tests of a second and
more are kept.
"""

import resource
import sys
from pathlib import Path

TABLE = Path(__file__).parents[1] / "durations.tsv"
LEAST = 1.0  # seconds of a test that is kept
# one of these starts processes of its own, and runs hundreds of tests in them
FIRST = "tests/kernels/test_in_the_interpreter.py"
ON_RANKS = ("test_on_four_ranks", "test_on_three_ranks", "test_on_two_ranks")


def used():
    """CPU seconds of this process, of those that have ended, and of ranks."""
    ranks = sys.modules.get("tests.support.ranks")  # where a test runs on several
    of_ranks = ranks.Processes.seconds if ranks is not None else 0.0
    own, ended = (resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in (own, ended)) + of_ranks


def read():
    if not TABLE.exists():
        return {}
    rows = (line.split("\t") for line in TABLE.read_text().splitlines())
    return {name: float(seconds) for seconds, name in rows}


def longest_first(items):
    """At the end of a run, a long test would leave the other process without work.

    Tests on as many ranks follow each other: they share the processes.
    """
    known = read()

    def key(item):
        if item.nodeid.startswith(FIRST):
            return 0, 0.0
        for i, name in enumerate(ON_RANKS):
            if item.name.startswith(name):
                return 1 + i, 0.0
        return 9, -known.get(item.nodeid, 0.0)

    return sorted(items, key=key)


def main():
    found = {}
    for path in sys.argv[1:]:
        for line in Path(path).read_text().splitlines():
            seconds, name = line.split("\t")
            found[name] = max(found.get(name, 0.0), float(seconds))
    rows = sorted(((x, name) for name, x in found.items() if x >= LEAST), reverse=True)
    TABLE.write_text("".join(f"{seconds:.1f}\t{name}\n" for seconds, name in rows))


if __name__ == "__main__":
    main()
