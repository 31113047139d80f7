"""Masks made of indices: clamped slices, single entries that broadcast, narrow dtypes."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.misleading.registry import misleading, plain, register

Mask = Callable[[int, int], Tensor]


def ones(n, m):
    return torch.ones(n, m, dtype=torch.bool)


def compared(i, j):
    return i[:, None] >= j


def indices(dtype, start=0, change=lambda i: i):
    """Numbers of queries and keys in a dtype, in which they may be rounded or wrap."""

    def mask(n, m):
        i, j = (torch.arange(start, start + x, dtype=dtype) for x in (n, m))
        return compared(change(i), j)

    return mask


def differences(dtype):
    return lambda n, m: torch.arange(n, dtype=dtype)[:, None] - torch.arange(m, dtype=dtype) >= 0


def apart(n, m):
    return torch.arange(n)[:, None] - torch.arange(m)


def narrowed(n, m):
    return ones(64, m).tril().narrow(0, -n, n)


# masks of [queries, keys] or what broadcasts to it, from their numbers
MASKS = {
    "W3": {
        "last_rows_of_fewer": lambda n, m: ones(n, m).tril(m - n)[-64:],
        "last_of_fewer_indices": lambda n, m: compared(torch.arange(n)[-100:], torch.arange(m)),
        "last_columns_of_fewer": lambda n, m: ones(n, m).tril()[:, -64:],
        "narrowed_by_a_large_buffer": lambda n, m: ones(64, 64).tril()[-n - 64 : n][:, :m],
        "past_the_end": lambda n, m: ones(n, m).tril()[: n + 20, : m + 9],
        "from_minus_its_size": lambda n, m: compared(torch.arange(n)[-n:], torch.arange(m)[-m:]),
    },
    "W4": {
        "one_row_lowered": lambda n, m: ones(1, m).tril(20),
        "one_index_against_many": lambda n, m: compared(torch.arange(1) + 20, torch.arange(m)),
        "one_index_expanded": lambda n, m: compared(
            torch.arange(1).expand(n) + 20, torch.arange(m)),
        "one_key_expanded": lambda n, m: compared(torch.arange(n), torch.arange(1) + 3),
        "one_row_expanded": lambda n, m: ones(1, m).tril(20).expand(n, m),
        "one_row_raised": lambda n, m: ~ones(1, m).triu(9),
        "one_column_raised": lambda n, m: ones(n, 1).triu(-30),
        "one_row_sliced": lambda n, m: ones(n, m).tril()[9:10],
    },
    "W6": {
        "bfloat16_indices": indices(torch.bfloat16, 300),
        "float16_indices": indices(torch.float16, 4000),
        "uint8_difference": differences(torch.uint8),
        "int8_sum": indices(torch.int8, change=lambda i: i + 100),
        "int8_product": indices(torch.int8, change=lambda i: i * 7),
        "uint8_negative": lambda n, m: compared(
            -torch.arange(n, dtype=torch.uint8), -torch.arange(m, dtype=torch.uint8) - 1),
        "cast_to_uint8": lambda n, m: apart(n, m).to(torch.uint8) <= 30,
        "cast_to_bool": lambda n, m: apart(n, m).bool(),
        "bfloat16_buffer": lambda n, m: compared(
            (torch.arange(n) + 300).bfloat16(), (torch.arange(m) + 300).bfloat16()),
    },
    "X13": {"narrowed_from_the_end": narrowed},
    "": {
        "tril": lambda n, m: ones(n, m).tril(m - n),
        "indices": indices(torch.int64),
        "shifted_indices": indices(torch.int64, change=lambda i: i + 8),
        "window": lambda n, m: (apart(n, m) >= 0) & (apart(n, m) < 5),
        "int16_indices": differences(torch.int16),
        "float32_indices": differences(torch.float32),
        "last_rows": lambda n, m: ones(m, m).tril()[-n:],
        "first_rows": lambda n, m: ones(m, m).tril()[:n],
        "buffer": lambda n, m: ones(64, 64).tril()[:n, :m],
        "all_keys": ones,
        "halves": lambda n, m: compared(torch.arange(n) // 2, torch.arange(m) // 2),
        "checkerboard": lambda n, m: (torch.arange(n)[:, None] + torch.arange(m)) % 2 == 0,
        "flipped": lambda n, m: ones(n, m).tril(8).flip(1),
        "every_second_key": lambda n, m: (torch.arange(m) % 2 == 0)[None],
        "strided_indices": lambda n, m: compared(torch.arange(0, 2 * n, 2), torch.arange(m)),
        "descending": lambda n, m: torch.arange(n - 1, -1, -1)[:, None] <= torch.arange(m),
        "diagonal": lambda n, m: torch.eye(n, m, dtype=torch.bool),
        "transposed": lambda n, m: ones(m, n).triu(-3).T,
        "of_floats": lambda n, m: torch.ones(n, m).tril(8) > 0,
        "of_differences": lambda n, m: apart(n, m).abs() < 9,
    },
}  # fmt: skip
NOT_PROMISED = ("strided_indices", "descending")


def masked(s, t, *, mask):
    keep = mask(s.shape[2], s.shape[3])
    return kd(s.masked_fill(~keep, -1e9), t.masked_fill(~keep, -1e9))


for _fault, _masks in MASKS.items():
    for _name, _mask in _masks.items():
        for _kind in ("", "_dynamic"):
            _fuses = not (_fault or _kind or _name in NOT_PROMISED)
            register(
                f"mask_{_name}{_kind}",
                functools.partial(masked, mask=_mask),
                "s t",
                fault=_fault,
                dynamic=bool(_kind),
                fuses=1 if _fuses else None,
                place=("masks", _name, _kind),
            )
misleading("W6", {
    "mask_of_400_bfloat16_indices": lambda s, t: masked(s, t, mask=indices(torch.bfloat16)),
}, shapes=dict.fromkeys(("q", "k", "qt", "kt"), (1, 1, 400, 4)))  # fmt: skip


# ---------------------------------------------------------------------- starts and widths
def padded(z, to, value=-1e9):
    return F.pad(z, (0, to.shape[-1] - z.shape[-1]), value=value)


def causal(x):
    return x.masked_fill(~ones(*x.shape[2:]).tril(8), -1e9)


FEWER = {"wt": (48, 12)}
# fmt: off
misleading("X12", {
    "student_padded_to_fewer_words": lambda z, zt: kd(padded(z, zt), zt),
    "student_padded_to_fewer_words_with_infinity": lambda z, zt: kd(
        padded(z, zt, -float("inf")), zt),
}, shapes=FEWER)
misleading("X12", {
    "student_padded_to_fewer_words_dynamic": lambda z, zt: kd(padded(z, zt), zt),
}, shapes=FEWER, dynamic=True)
misleading("X12", {
    "both_padded_to_fewer_words": lambda z, zt: kd(
        *(F.pad(x, (0, -16), value=-1e9) for x in (z, zt))),
    "scores_padded_to_fewer_keys": lambda s, t: kd(
        *(F.pad(x, (-8, 0), value=-1e9) for x in (s, t))),
})
misleading("X12", {
    "teacher_cropped_by_padding": lambda z, zt: kd(z, padded(zt, z)),
}, shapes={"w": (48, 16)})
misleading("X13", {
    "last_rows_of_causal_scores_narrowed": lambda s, t: kd(
        *(causal(x).narrow(2, -16, 16) for x in (s, t))),
    "last_rows_of_causal_scores_sliced": lambda s, t: kd(
        *(causal(x)[:, :, -16:] for x in (s, t))),
    "last_keys_of_causal_scores_narrowed": lambda s, t: kd(
        *(causal(x).narrow(-1, -20, 20) for x in (s, t))),
    "last_row_selected": lambda s, t: kd(*(causal(x).select(2, -3) for x in (s, t))),
})
# fmt: on
# ------------------------------------------------------------------------------- right ones
# fmt: off
plain({
    "student_padded_to_more_words": lambda z, p_zt: -(
        p_zt[:, :48] * padded(z, p_zt).log_softmax(-1)[:, :48]).sum(-1).mean(),
}, shapes={"w": (48, 16)})
plain({
    "teacher_sliced_to_the_student_s_words": lambda z, zt: kd(z, zt[:, : z.shape[-1]]),
}, shapes={"w": (48, 16)}, fuses=1)
# fmt: on
plain({"padded_by_nothing": lambda z, zt: kd(F.pad(z, (0, 0), value=-1e9), zt)})
