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
    "Inductor compiles C++ for seconds; test_through_inductor has attention beside a loss": [
        "rewrite/test_safety.py::test_attention_beside_the_loss_compiles",
    ],
    "Inductor compiles C++ for seconds; through AOTAutograd an operator makes the same tensors": [
        "operators/test_settings_of_torch.py::test_another_default_device[inductor]",
    ],
    "Inductor compiles C++ for autocast; the row of inductor_options has the calls": [
        "operators/test_attention_operator.py"
        "::test_compiled_graphs_call_operators_without_autograd[None-False-True]",
    ],
    "interpreted for ten seconds; the rows of a vocabulary record as many launches": [
        "kernels/test_replayed_launches.py::test_same_bits[rows-indexer]",
    ],
    "through AOTAutograd takes half as long again; test_equals_eager has those that it changes": [
        "rewrite/test_row_program_counterexamples.py::test_equals_eager_through_aot_autograd",
    ],
    "compiles for a third of a minute; test_arguments_of_one.py has Triton read such a kernel": [
        "operators/test_row_program_maps.py::test_compiles[indexer-sm_90]",
    ],
}
NAMES = {name for names in LISTED.values() for name in names}


def mark(items: Iterable[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in NAMES or name.split("[")[0] in NAMES:
            item.add_marker(pytest.mark.slow)
