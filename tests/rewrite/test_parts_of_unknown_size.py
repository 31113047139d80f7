"""Slices of dynamic sizes, as label shifts and prompts make them, are read where they are inside.

One graph serves all sizes. A part that may begin or end outside of its tensor stays unfused.
"""

import torch
import torch.nn.functional as F

from tests.support.compiling import compile_rewritten
from tests.support.table import Table
from torch_streamkl.fx_passes import backend

# s: scores of [batch, length, hidden] and a weight, t: the teacher's; n: the size of a prompt
PROGRAMS = Table("h w g v prompt", {
    "s": lambda h, w: (h @ w.mT,),
    "t": lambda g, v: (g @ v.mT,),
    "n": lambda prompt: (prompt.shape[1],),
}, is_fused=True)  # fmt: skip
LENGTHS = (12, 3), (20, 5), (7, 2), (9, 8), (5, 3), (31, 30)


def kl(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")


# fmt: off
PROGRAMS.add("labels", lambda s, t: kl(s[:, :-1], t[:, :-1]))
PROGRAMS.add("first_token", lambda s, t: kl(s[:, 1:], t[:, 1:]))
PROGRAMS.add("copied", lambda s, t: kl(*(
    x[..., :-1, :].contiguous().flatten(0, 1) for x in (s, t))))
PROGRAMS.add("rows_of_a_sum", lambda s, t: F.kl_div(
    s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)[:, 1:-1].mean())
PROGRAMS.add("both_halves", lambda s, t: kl(
    s[:, : s.shape[1] // 2], t[:, s.shape[1] // 2 : 2 * (s.shape[1] // 2)]))
PROGRAMS.add("completion", lambda s, t, n: kl(s[:, n - 1 : -1], t[:, n - 1 : -1]))
PROGRAMS.add("shifted_and_padded", lambda s, t: kl(s, F.pad(t[:, 1:], (0, 0, 0, 1))))
PROGRAMS.add("a_part_of_a_part", lambda s, t: kl(s[:, 1:][:, :-2][:, 1:], t[:, 2:-2]))
# what begins before its tensor, by a number that is not known
PROGRAMS.add("padded_before", is_fused=False, program=lambda s, t, n: kl(s, torch.cat(
    [t.new_zeros(t.shape[0], n, t.shape[2]), t], 1)[:, : s.shape[1]]))
# fmt: on


@PROGRAMS.parametrized()
def test_one_graph_serves_all_lengths(row):
    make = torch.Generator().manual_seed(0)
    w, v = (
        torch.randn(11, 4, generator=make, dtype=torch.float64, requires_grad=i == 0)
        for i in range(2)
    )
    with backend.collected() as report:
        program = compile_rewritten(row.program, dynamic=True, min_mib=0, verify="never")
        for length, prompt in LENGTHS:
            h, g = (
                torch.randn(2, length, 4, generator=make, dtype=torch.float64, requires_grad=True)
                for _ in range(2)
            )
            inputs = h, w, g, v, torch.zeros(2, prompt)
            found, expected = program(*inputs), row.program(*inputs)
            torch.testing.assert_close(found, expected)
            gradients = [torch.autograd.grad(x, [h, w, g]) for x in (found, expected)]
            torch.testing.assert_close(*gradients)
    assert bool(report.num_fused) == row.is_fused, str(report)
