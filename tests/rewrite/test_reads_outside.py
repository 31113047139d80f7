"""What is padded, concatenated or written in part, and read in another order after that.

Such a tensor is read outside of itself where its values are not chosen. A view is padded there.
An index is moved inside, so that no selection fails that eager code does not make.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.losses import rows_of_kl
from tests.support.table import Table
from torch_streamkl.fx_passes.capture.settings import CAPTURE

# scores: h @ w.T, and t = g @ v.T; r: values per row; order: a permutation of rows
PROGRAMS = Table("h w g v r order", {"t": lambda g, v: (g @ v.mT,)})


def kl(t, s):
    return F.kl_div(s.log_softmax(-1), t.log_softmax(-1), reduction="batchmean", log_target=True)


@PROGRAMS()
def concatenated_and_rolled(h, w, t):
    return kl(t, torch.cat([h[1:] @ w.mT, h[:1] @ w.mT]).roll(1, 0))


@PROGRAMS()
def concatenated_and_reordered(h, w, t, order):
    return kl(t, torch.cat([h[1:] @ w.mT, h[:1] @ w.mT])[order])


@PROGRAMS()
def concatenated_and_selected(h, w, t, order):
    return kl(t, torch.cat([h @ w.mT, h[2:] @ w.mT]).index_select(0, order + 2))


@PROGRAMS()
def concatenated_and_read_at_computed_rows(h, w, t, order):
    return kl(t, torch.cat([h @ w.mT, (h * 2) @ w.mT])[order * 2 % 10])


@PROGRAMS()
def concatenated_blocks_that_are_rolled(h, w, g, v):
    h, g = h.view(2, 3, 4), g.view(2, 3, 4)
    s = torch.cat([h @ w.mT, h[:1] @ w.mT]).flatten(0, 1).roll(1, 0)
    return kl(torch.cat([g, g[:1]]).flatten(0, 1) @ v.mT, s)


@PROGRAMS()
def padded_and_rolled(h, w, t):
    return kl(t, F.pad(h @ w.mT, (0, 0, 1, 0)).roll(1, 0)[1:])


@PROGRAMS()
def a_vocabulary_in_parts_that_is_rolled(h, w, t):
    return kl(t, torch.cat([h @ w[1:].mT, h @ w[:1].mT], -1).roll(2, -1))


@PROGRAMS()
def repeated_and_padded(h, w, t, r):
    weight = F.pad(r.repeat_interleave(2, 0), (1, 1))
    return (weight * F.pad(rows_of_kl(h @ w.mT, t).repeat_interleave(2), (1, 1))).sum()


@PROGRAMS()
def computed_rows_that_are_padded(h, w, t, r, order):
    weight = F.pad(r.index_select(0, (order + 1) % 6), (1, 1))[2:]
    return (weight * rows_of_kl(h @ w.mT, t)).sum()


@PROGRAMS()
def written_in_part_and_rolled(h, w, t, r):
    weight = torch.zeros_like(r)
    weight[1:4] = r.repeat_interleave(2)[1:4]
    return (weight.roll(1) * rows_of_kl(h @ w.mT, t)).sum()


@PROGRAMS()
def selected_by_a_mask_concatenated_and_rolled(h, w, t, r, order):
    m = order > 2
    loss = rows_of_kl((h @ w.mT)[m], t[m])
    return (torch.cat([r[m], r[m]]).roll(1) * torch.cat([loss, loss])).sum()


SELECTED_AND_ROLLED = {"selected_by_a_mask_concatenated_and_rolled"}


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@PROGRAMS.parametrized()
def test_is_what_eager_code_computes(row, dynamic):
    h, g = (torch.randn(6, 4) for _ in range(2))
    w, v = (torch.randn(11, 4) for _ in range(2))
    r = torch.rand(6)
    inputs = *(x.requires_grad_() for x in (h, w, g, v, r)), torch.tensor([3, 0, 5, 1, 4, 2])
    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(row.program, inputs, dynamic=dynamic).check()
    is_view_of_unknown_size = bool(dynamic) and row.name == "padded_and_rolled"
    # before torch 2.13, a roll breaks the graph where data decides the size
    is_broken = row.name in SELECTED_AND_ROLLED and torch.__version__ < (2, 13)
    is_fused = not is_view_of_unknown_size and not is_broken
    assert outcome.report.num_fused == is_fused, str(outcome.report)


def test_an_index_out_of_range_is_an_error():
    """Ids are the user's, and no bounds of ours hide a mistake in them."""
    h, w = torch.randn(6, 4), torch.randn(11, 4)

    def step(ids):
        return kl(h @ w.mT, (h[1:] @ w.mT).index_select(0, ids))

    with pytest.raises((IndexError, RuntimeError), match="out of"):
        compile_rewritten(step)(torch.tensor([0, 1, 2, 3, 4, 7]))
