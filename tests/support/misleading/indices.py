"""Masks made of indices: clamped slices, single entries that broadcast, narrow dtypes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.misleading.registry import misleading, plain, register, student


def masked(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, keep: Tensor) -> Tensor:
    s, t = student(q, k), student(qt, kt)
    return kd(s.masked_fill(~keep, -1e9), t.masked_fill(~keep, -1e9))


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int]:
    return q.shape[2], k.shape[2]


# masks of [queries, keys] or what broadcasts to it, from their numbers
MASKS = {
    "W3": {
        "last_rows_of_fewer": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(m - n)[-64:],
        "last_of_fewer_indices": lambda n, m: torch.arange(n)[-100:][:, None] >= torch.arange(m),
        "last_columns_of_fewer": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril()[:, -64:],
        "last_keys_of_fewer": lambda n, m: torch.arange(n)[:, None] >= torch.arange(m)[-70:],
        "narrowed_by_a_large_buffer": lambda n, m: torch.ones(64, 64, dtype=torch.bool).tril()[
            -n - 64 : n
        ][:, :m],
        "past_the_end": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril()[: n + 20, : m + 9],
        "from_minus_its_size": lambda n, m: torch.arange(n)[-n:][:, None] >= torch.arange(m)[-m:],
    },
    "W4": {
        "one_row_lowered": lambda n, m: torch.ones(1, m, dtype=torch.bool).tril(20),
        "one_index_against_many": lambda n, m: torch.arange(1)[:, None] + 20 >= torch.arange(m),
        "one_index_expanded": lambda n, m: (
            torch.arange(1).expand(n)[:, None] + 20 >= torch.arange(m)
        ),
        "one_key_expanded": lambda n, m: torch.arange(n)[:, None] >= torch.arange(1) + 3,
        "one_row_expanded": lambda n, m: torch.ones(1, m, dtype=torch.bool).tril(20).expand(n, m),
        "one_row_raised": lambda n, m: ~torch.ones(1, m, dtype=torch.bool).triu(9),
        "one_column_raised": lambda n, m: torch.ones(n, 1, dtype=torch.bool).triu(-30),
        "one_row_sliced": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril()[9:10],
    },
    "W6": {
        "bfloat16_indices": lambda n, m: _indices(torch.bfloat16, n, m),
        "float16_indices": lambda n, m: _indices(torch.float16, n, m, 4000),
        "uint8_difference": lambda n, m: _difference(torch.uint8, n, m),
        "int8_sum": lambda n, m: (
            torch.arange(n, dtype=torch.int8)[:, None] + 100 >= torch.arange(m, dtype=torch.int8)
        ),
        "int8_product": lambda n, m: (
            torch.arange(n, dtype=torch.int8)[:, None] * 7 >= torch.arange(m, dtype=torch.int8)
        ),
        "uint8_negative": lambda n, m: (
            -torch.arange(n, dtype=torch.uint8)[:, None] >= -torch.arange(m, dtype=torch.uint8) - 1
        ),
        "cast_to_uint8": lambda n, m: (
            (torch.arange(n)[:, None] - torch.arange(m)).to(torch.uint8) <= 30
        ),
        "cast_to_bool": lambda n, m: (torch.arange(n)[:, None] - torch.arange(m)).bool(),
        "bfloat16_buffer": lambda n, m: (
            (torch.arange(n) + 300).bfloat16()[:, None] >= (torch.arange(m) + 300).bfloat16()
        ),
    },
}


def _indices(dtype: torch.dtype, n: int, m: int, start: int = 300) -> Tensor:
    i = torch.arange(start, start + n, dtype=dtype)
    return i[:, None] >= torch.arange(start, start + m, dtype=dtype)


def _difference(dtype: torch.dtype, n: int, m: int) -> Tensor:
    return torch.arange(n, dtype=dtype)[:, None] - torch.arange(m, dtype=dtype) >= 0


for _fault, _masks in MASKS.items():
    for _name, _mask in _masks.items():

        def _static(q, k, qt, kt, mask=_mask):
            return masked(q, k, qt, kt, mask(*_sizes(q, k)))

        for _kind in ("", "_dynamic"):
            register(
                f"mask_{_name}{_kind}", _static, "q k qt kt", fault=_fault,
                dynamic=bool(_kind), place=("masks", _name, _kind),
            )  # fmt: skip


@misleading(
    "W6",
    shapes={"q": (1, 1, 400, 4), "k": (1, 1, 400, 4), "qt": (1, 1, 400, 4), "kt": (1, 1, 400, 4)},
)
def mask_of_400_bfloat16_indices(q, k, qt, kt):
    i = torch.arange(400, dtype=torch.bfloat16)
    return masked(q, k, qt, kt, i[:, None] >= i)


# ---------------------------------------------------------------------- starts and widths
@misleading("X12", name="student_padded_to_fewer_words_dynamic", dynamic=True)
@misleading("X12")
def student_padded_to_fewer_words(h, w, ht, wt_short):
    z, t = h @ w.T, ht @ wt_short.T
    z = F.pad(z, (0, t.shape[-1] - z.shape[-1]), value=-1e9)
    return kd(z, t)


@misleading("X12")
def student_padded_to_fewer_words_with_infinity(h, w, ht, wt_short):
    z, t = h @ w.T, ht @ wt_short.T
    z = F.pad(z, (0, t.shape[-1] - z.shape[-1]), value=-float("inf"))
    return kd(z, t)


@misleading("X12")
def both_padded_to_fewer_words(z, t):
    return kd(F.pad(z, (0, -16), value=-1e9), F.pad(t, (0, -16), value=-1e9))


@misleading("X12")
def scores_padded_to_fewer_keys(q, k, qt, kt):
    s, t = (F.pad(x, (-8, 0), value=-1e9) for x in (student(q, k), student(qt, kt)))
    return kd(s, t)


@misleading("X12")
def teacher_cropped_by_padding(h, w_short, ht, wt):
    z, t = h @ w_short.T, ht @ wt.T
    return kd(z, F.pad(t, (0, z.shape[-1] - t.shape[-1]), value=-1e9))


@misleading("X13")
def last_rows_of_causal_scores_narrowed(q, k, qt, kt):
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(8)
    s, t = (x.masked_fill(~keep, -1e9) for x in (student(q, k), student(qt, kt)))
    return kd(s.narrow(2, -16, 16), t.narrow(2, -16, 16))


@misleading("X13")
def last_rows_of_causal_scores_sliced(q, k, qt, kt):
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(8)
    s, t = (x.masked_fill(~keep, -1e9) for x in (student(q, k), student(qt, kt)))
    return kd(s[:, :, -16:], t[:, :, -16:])


@misleading("X13")
def last_keys_of_causal_scores_narrowed(q, k, qt, kt):
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(8)
    s, t = (x.masked_fill(~keep, -1e9) for x in (student(q, k), student(qt, kt)))
    return kd(s.narrow(-1, -20, 20), t.narrow(-1, -20, 20))


@misleading("X13")
def last_row_selected(q, k, qt, kt):
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    s, t = (x.masked_fill(~keep, -1e9) for x in (student(q, k), student(qt, kt)))
    return kd(s.select(2, -3), t.select(2, -3))


@misleading("X13")
def mask_narrowed_from_the_end(q, k, qt, kt):
    n, m = _sizes(q, k)
    keep = torch.ones(64, m, dtype=torch.bool).tril().narrow(0, -n, n)
    return masked(q, k, qt, kt, keep)


# ------------------------------------------------------------------------------- right ones
for _name, _mask, _fuses in (
    ("tril", lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(m - n), True),
    ("indices", lambda n, m: torch.arange(n)[:, None] >= torch.arange(m), True),
    ("shifted_indices", lambda n, m: torch.arange(n)[:, None] + 8 >= torch.arange(m), True),
    ("window", lambda n, m: _window(n, m, 5), True),
    ("int32_indices", lambda n, m: _difference(torch.int32, n, m), True),
    ("int16_indices", lambda n, m: _difference(torch.int16, n, m), True),
    ("float32_indices", lambda n, m: _difference(torch.float32, n, m), True),
    ("last_rows", lambda n, m: torch.ones(m, m, dtype=torch.bool).tril()[-n:], True),
    ("first_rows", lambda n, m: torch.ones(m, m, dtype=torch.bool).tril()[:n], True),
    ("buffer", lambda n, m: torch.ones(64, 64, dtype=torch.bool).tril()[:n, :m], True),
    ("all_keys", lambda n, m: torch.ones(n, m, dtype=torch.bool), True),
    ("halves", lambda n, m: torch.arange(n)[:, None] // 2 >= torch.arange(m) // 2, True),
    ("checkerboard", lambda n, m: (torch.arange(n)[:, None] + torch.arange(m)) % 2 == 0, True),
    ("flipped", lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(8).flip(1), True),
    ("every_second_key", lambda n, m: (torch.arange(m) % 2 == 0)[None], True),
    ("strided_indices", lambda n, m: torch.arange(0, 2 * n, 2)[:, None] >= torch.arange(m), False),
    ("descending", lambda n, m: torch.arange(n - 1, -1, -1)[:, None] <= torch.arange(m), False),
    ("diagonal", lambda n, m: torch.eye(n, m, dtype=torch.bool), True),
    ("transposed", lambda n, m: torch.ones(m, n, dtype=torch.bool).triu(-3).T, True),
    ("of_floats", lambda n, m: torch.ones(n, m).tril(8) > 0, True),
    ("of_differences", lambda n, m: (torch.arange(n)[:, None] - torch.arange(m)).abs() < 9, True),
):

    def _right(q, k, qt, kt, mask=_mask):
        return masked(q, k, qt, kt, mask(*_sizes(q, k)))

    for _kind in ("", "_dynamic"):
        register(
            f"mask_{_name}{_kind}", _right, "q k qt kt", fuses=1 if _fuses and not _kind else None,
            dynamic=bool(_kind), place=("masks", _name, _kind),
        )  # fmt: skip


def _window(n: int, m: int, width: int) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(m)
    return (j <= i) & (i - j < width)


@plain()
def student_padded_to_more_words(h, w_short, ht, wt):
    z, t = h @ w_short.T, ht @ wt.T
    z = F.pad(z, (0, t.shape[-1] - z.shape[-1]), value=-1e9)
    return rows_of_finite(z, t)


def rows_of_finite(z: Tensor, t: Tensor) -> Tensor:
    return -(t.softmax(-1)[:, :48] * z.log_softmax(-1)[:, :48]).sum(-1).mean()


@plain(fuses=1)
def teacher_sliced_to_the_student_s_words(h, w_short, ht, wt):
    z = h @ w_short.T
    return kd(z, (ht @ wt.T)[:, : z.shape[-1]])


@plain()
def padded_by_nothing(z, t):
    return kd(F.pad(z, (0, 0), value=-1e9), t)
