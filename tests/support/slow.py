"""Rows that `make test` omits and `make test-slow` runs, each with the reason.

Marks next to a test say the same of rows that its own file knows to be alike. This list has what
is too long for a quick suite, with the quick row that holds the promise.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

# reason -> tests below tests/, or single rows of them
LISTED = {
    "an AOTInductor package compiles C++ for most of a minute; test_cpp_wrapper has the calls": [
        "rewrite/test_exported.py::test_loss_of_naive_code[cpu]",
    ],
    "Inductor compiles C++ twice; one_mask_twice meets the same error of Inductor": [
        "rewrite/test_enable.py::test_what_compiles_without_it_compiles_with_it[a_condition_twice]",
    ],
    "Inductor compiles C++ for autocast; the row of inductor_options has the calls": [
        "operators/test_attention_operator.py"
        "::test_compiled_graphs_call_operators_without_autograd[None-False-True]",
    ],
    "bisections of fifty steps; mixed_probabilities is as long, in a quarter of the time": [
        "rewrite/test_long_programs.py::test_fifty_steps_of_a_bisection[bisected_entmax]",
    ],
    "interpreted for ten seconds; the rows of a vocabulary record as many launches": [
        "kernels/test_replayed_launches.py::test_same_bits_of_a_row_program[indexer]",
    ],
    "compiles for a third of a minute; test_arguments_of_one.py has Triton read such a kernel": [
        "operators/test_row_program_maps.py::test_compiles[indexer-sm_90]",
        "kernels/test_row_program_kernels.py::test_compiles[sm_90-64]",
    ],
}
NAMES = {name for names in LISTED.values() for name in names}


def mark(items: Iterable[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in NAMES or name.split("[")[0] in NAMES:
            item.add_marker(pytest.mark.slow)
