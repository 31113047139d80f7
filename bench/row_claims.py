"""Row programs at the sizes that docs/guide/row-programs.md names: `python -m bench.row_claims`.

Each case has its providers in one process, in rounds: the program, and what it replaces or is
compared with. A step is the mean of the rows' values and the gradients of what the student owns:
queries and keys (and an indexer's head weights), hidden states and LM head. Before it is timed a
provider's loss and gradients are held against float64 on a smaller problem of the same form
(accuracy.py); what is red has no times.

The cases "compiled: ..." are naive code next to itself with backend="streamkl", of 8 heads of 64
or an LM head: they say from which size on a program is worth its operator, `LEAST_PROGRAM_MIB` of
`fx_passes/planning/profitability.py`. On a CPU: ``--device cpu --threads 1 --cases compiled``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench import measure
from bench.accuracy import Truth
from bench.providers import with_streamkl
from bench.records import Program, Rows
from torch_streamkl import attention_kl, linear_kl, row_program

Loss = Callable[..., Tensor]
Pair = tuple[Loss, Loss]  # naive code, and what is timed
CHUNK = 512  # tokens of a chunk of verl's formulation
TOP = 64


@dataclass(frozen=True)
class Case:
    """Inputs of a size, the student's two first; and what providers compute."""

    make: Callable[[int, torch.device, torch.dtype], list[Tensor]]
    providers: dict[str, Pair]
    sizes: tuple[int, ...]
    small: int  # of the comparison with float64
    # the largest size of a provider that needs more memory
    most: dict[str, int] = field(default_factory=dict)


def _mean(of: Callable[[Any], Any], **given: Any) -> Tensor:
    """Of a program's rows."""
    rows: Tensor = row_program(of, **given)
    return rows.mean()


# ------------------------------------------------------------------------------ attention maps


def _maps(
    size: int, device: torch.device, dtype: torch.dtype, heads: int = 32, head_dim: int = 128
) -> list[Tensor]:
    """Queries and keys of both sides, and a weight for each key."""
    shape = (1, heads, size, head_dim)
    operands = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
    weight = torch.rand(1, 1, size, device=device) + 0.5
    return [*(x.requires_grad_(i < 2) for i, x in enumerate(operands)), weight]


def _naive_maps(
    sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, weight: Tensor, *, of: Loss, is_causal: bool
) -> Tensor:
    maps = []
    for q, k in ((tq, tk), (sq, sk)):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if is_causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -1e30)
        maps.append(scores.log_softmax(-1))
    return of(*maps, weight[:, :, None]).sum(-1).mean()


def _kl(p: Tensor, s: Tensor, _: Tensor) -> Tensor:
    return p.exp() * (p - s)


def _js(p: Tensor, s: Tensor, w: Tensor) -> Tensor:
    m = torch.logaddexp(p, s) - math.log(2)
    return 0.5 * (_kl(p, m, w) + _kl(s, m, w))


def _squares(p: Tensor, s: Tensor, _: Tensor) -> Tensor:
    return (p.exp() - s.exp()) ** 2


def _weighted(p: Tensor, s: Tensor, w: Tensor) -> Tensor:
    p, s = p.exp() * w, s.exp() * w
    p, s = (x / (x.sum(-1, keepdim=True) + 1e-9) for x in (p, s))
    return torch.where(p == 0, 0.0, p * (p.log() - s.clamp_min(1e-38).log()))


def _divergence(*inputs: Tensor, **options: Any) -> Tensor:
    return attention_kl(*inputs[:4], reduction="mean", **options)


def _maps_program(
    sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, w: Tensor, *, of: Loss, **options: Any
) -> Tensor:
    scaled, dots = partial(of, scale=sq.shape[-1] ** -0.5), {"t": (tq, tk), "s": (sq, sk)}
    return _mean(scaled, dots=dots, keys={"w": w}, **options)


def _kl_of(e: Any, scale: float) -> Any:
    p, s = (e.t * scale).log_softmax("key"), (e.s * scale).log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _squares_of(e: Any, scale: float) -> Any:
    p, s = (e.t * scale).softmax("key"), (e.s * scale).softmax("key")
    return ((p - s) ** 2).sum("key")


def _weighted_of(e: Any, scale: float) -> Any:
    p, s = (e.t * scale).softmax("key") * e.w, (e.s * scale).softmax("key") * e.w
    p, s = p / (p.sum("key") + 1e-9), s / (s.sum("key") + 1e-9)
    return (p * (p.log() - s.log())).sum("key")


def _attention(is_causal: bool) -> Case:
    found: dict[str, Pair] = {}
    operators = {"attention_kl, KL": (_kl, "forward_kl"), "attention_kl, JS": (_js, "js")}
    for name, (naive, divergence) in operators.items():
        found[name] = (naive, partial(_divergence, divergence=divergence))
    for name, naive, of in (
        ("KL", _kl, _kl_of),
        ("MSE of maps", _squares, _squares_of),
        ("weighted, renormalised", _weighted, _weighted_of),
    ):
        found[name] = (naive, partial(_maps_program, of=of))
        if naive is not _weighted:  # which has no kernels but its own
            own = f"{name.removesuffix(' of maps')} by its own kernels"
            found[own] = (naive, partial(_maps_program, of=of, impl="triton"))
    causal = {"is_causal": is_causal}
    providers = {
        name: (partial(_naive_maps, of=of, **causal), partial(loss, **causal))
        for name, (of, loss) in found.items()
    }
    return Case(_maps, providers, (8192,), 512)


# ------------------------------------------------------------------------------ indexer


def _index(size: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    def normal(heads: int) -> Tensor:
        return torch.randn(1, heads, size, 128, device=device, dtype=dtype)

    sq, sk, tq, tk = normal(64), normal(1), normal(128), normal(128)
    w = torch.randn(1, 64, size, device=device) / 64
    return [sq.requires_grad_(), sk.requires_grad_(), w.requires_grad_(), tq, tk]


def _naive_index(sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
    scale = tq.shape[-1] ** -0.5
    hidden = torch.ones(sq.shape[2], sk.shape[2], dtype=torch.bool, device=sq.device).triu(1)
    teacher = (tq @ tk.mT * scale).masked_fill(hidden, -math.inf).softmax(-1).sum(1)
    teacher = teacher / teacher.sum(-1, keepdim=True)
    student = ((sq @ sk.mT).relu() * w[..., None]).sum(1).masked_fill(hidden, -math.inf)
    student = student.softmax(-1)
    return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).sum(-1).mean()


def _index_program(sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
    scale = tq.shape[-1] ** -0.5

    def kl(e: Any) -> Any:
        teacher = (e.t * scale).softmax("key").sum("head")
        teacher = teacher / teacher.sum("key")
        student = (e.w * e.s.relu()).sum("head").softmax("key")
        return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).sum("key")

    return _mean(kl, dots={"t": (tq, tk), "s": (sq, sk)}, rows={"w": w}, is_causal=True)


# ------------------------------------------------------------------------------ LM heads


def _heads(size: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Hidden states and LM heads of student and teacher, its top-k ids, and labels."""
    vocab, hidden = (152064, (3584, 5120)) if size >= 1024 else (4096, (256, 320))
    made = []
    for dim in hidden:
        made.append(torch.randn(size, dim, device=device, dtype=dtype))
        made.append(torch.randn(vocab, dim, device=device, dtype=dtype) * dim**-0.5)
    top = torch.rand(size, 512, device=device).topk(TOP).indices * (vocab // 512)
    log_p = (torch.randn(size, TOP, device=device).log_softmax(-1) - 0.1).to(dtype).float()
    labels = torch.randint(vocab, (size,), device=device)
    return [*(x.requires_grad_(i < 2) for i, x in enumerate(made)), top, log_p, labels]


def _cached_loss(logits: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
    s = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    return (log_p.exp() * (log_p - s)).sum(-1)


def _naive_cached(h: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
    """Log-probabilities at the ids; statistics in float32 as trainers take them."""
    logits = h @ w.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return _cached_loss(logits, *rest[2:4]).mean()


def _chunked_cached(h: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
    """The same by chunks of tokens, whose logits the backward computes again."""
    parts = [
        checkpoint(
            lambda h, w, ids, log_p: _cached_loss((h @ w.T).float(), ids, log_p),
            *(h[i : i + CHUNK], w, rest[2][i : i + CHUNK], rest[3][i : i + CHUNK]),
            use_reentrant=False,
        )
        for i in range(0, h.shape[0], CHUNK)
    ]
    return torch.cat(parts).mean()


def _cached_program(h: Tensor, w: Tensor, *rest: Tensor, **options: Any) -> Tensor:
    def kl(e: Any) -> Any:
        s = e.s.log_softmax("key")
        return torch.where(e.top, e.log_p.exp() * (e.log_p - s), 0.0).sum("key")

    columns = {"top": rest[2], "log_p": (rest[2], rest[3])}
    return _mean(kl, dots={"s": (h, w)}, columns=columns, **options)


def _naive_ghost(h: Tensor, w: Tensor, th: Tensor, tw: Tensor, ids: Tensor, *_: Tensor) -> Tensor:
    p, s = ((x @ y.T).log_softmax(-1).gather(-1, ids) for x, y in ((th, tw), (h, w)))
    rest_p, rest_s = (1 - x.exp().sum(-1) for x in (p, s))
    kl = (p.exp() * (p - s)).sum(-1) + rest_p * (rest_p.log() - rest_s.log())
    return kl.mean()


def _ghost_program(h: Tensor, w: Tensor, *rest: Tensor, **options: Any) -> Tensor:
    def divergence(e: Any) -> Any:
        p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
        kl = torch.where(e.top, p.exp() * (p - s), 0.0).sum("key")
        rest_p = torch.where(e.top, 0.0, p.exp()).sum("key")
        rest_s = torch.where(e.top, 0.0, s.exp()).sum("key")
        return kl + rest_p * (rest_p.log() - rest_s.log())

    dots = {"t": rest[:2], "s": (h, w)}
    return _mean(divergence, dots=dots, columns={"top": rest[2]}, **options)


def _naive_policy(h: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
    logs = (h @ w.T).log_softmax(-1)
    chosen = logs.gather(-1, rest[4][:, None]).squeeze(-1)
    return (-chosen + 0.1 * (logs.exp() * logs).sum(-1)).mean()


def _policy_program(h: Tensor, w: Tensor, *rest: Tensor, **options: Any) -> Tensor:
    def loss(e: Any) -> Any:
        s = e.s.log_softmax("key")
        log_p = torch.where(e.key_index == e.label, s, 0.0).sum("key")
        return -log_p + 0.1 * (s.exp() * s).sum("key")

    return _mean(loss, dots={"s": (h, w)}, rows={"label": rest[4]}, **options)


def _naive_linear(h: Tensor, w: Tensor, th: Tensor, tw: Tensor, *_: Tensor) -> Tensor:
    p, s = (th @ tw.T).log_softmax(-1), (h @ w.T).log_softmax(-1)
    return (p.exp() * (p - s)).sum(-1).mean()


def _linear_operator(*inputs: Tensor, reduction: str = "none") -> Tensor:
    return linear_kl(*inputs[:4], reduction=reduction).mean()


def _linear_program(h: Tensor, w: Tensor, th: Tensor, tw: Tensor, *_: Tensor) -> Tensor:
    return _mean(lambda e: _kl_of(e, 1.0), dots={"t": (th, tw), "s": (h, w)})


# ------------------------------------------------------------------------------ compiled

HIDDEN = 512
VOCAB_PER_TOKEN = 16  # a head of 16 N vocabulary entries for N tokens


def _small_maps(size: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    *operands, weight = _maps(size, device, dtype, heads=8, head_dim=64)
    return [*operands, weight.flatten().to(dtype)]


def _small_head(size: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    vocab = VOCAB_PER_TOKEN * size
    h = torch.randn(size, HIDDEN, device=device, dtype=dtype)
    w = torch.randn(vocab, HIDDEN, device=device, dtype=dtype) * HIDDEN**-0.5
    return [h.requires_grad_(), w.requires_grad_(), torch.randint(vocab, (size,), device=device)]


def _softmaxes(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> tuple[Tensor, Tensor]:
    scale = sq.shape[-1] ** -0.5
    return (sq @ sk.mT * scale).softmax(-1), (tq @ tk.mT * scale).softmax(-1)


def key_weights(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, weight: Tensor) -> Tensor:
    """Weights of keys after the softmax, renormalised."""
    p, r = (x * weight for x in _softmaxes(sq, sk, tq, tk))
    p, r = (x / (x.sum(-1, keepdim=True) + 1e-6) for x in (p, r))
    return (r * ((r + 1e-6).log() - (p + 1e-6).log())).sum(-1).mean()


def mse_of_maps(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, _: Tensor) -> Tensor:
    s, t = _softmaxes(sq, sk, tq, tk)
    return F.mse_loss(s, t) * s.shape[-1]


def entropy(h: Tensor, w: Tensor, _: Tensor) -> Tensor:
    """An entropy bonus and the squared log-sum-exp of an LM head."""
    s = h @ w.T
    logs = s.log_softmax(-1)
    return (logs.exp() * logs).sum(-1).mean() + 1e-4 * s.logsumexp(-1).square().mean()


def selected_entries(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of given vocabulary entries and the entropy, as of a policy."""
    logs = (h @ w.T).log_softmax(-1)
    chosen = logs.gather(-1, labels[:, None]).squeeze(-1)
    return -chosen.mean() + 0.01 * (logs.exp() * logs).sum(-1).mean()


def _inductor(loss: Loss) -> Pair:
    return loss, torch.compile(loss, dynamic=False)


def _in_graphs(loss: Loss) -> dict[str, Pair]:
    """Naive code compiled, without us and with us."""
    ours = with_streamkl(loss, **{"streamkl.min_mib": 0.0})
    return {"torch.compile": _inductor(loss), "streamkl": (loss, ours)}


def _compiled(make: Callable[..., list[Tensor]], loss: Loss) -> Case:
    return Case(make, _in_graphs(loss), (256, 1024, 2048), 256)


def _with_means(programs: dict[str, Pair]) -> dict[str, Pair]:
    """And each as a mean, whose gradients come with it."""
    means = {
        f"{name}, mean": (naive, partial(loss, reduction="mean"))
        for name, (naive, loss) in programs.items()
    }
    return programs | means


LARGE = 8192
CASES: dict[str, Case] = {
    "maps": _attention(False),
    "maps, causal": _attention(True),
    "indexer": Case(
        _index,
        {"torch.compile": _inductor(_naive_index), "program": (_naive_index, _index_program)},
        (4096, 16384),
        256,
        {"torch.compile": 4096},
    ),
    "cached top 64": Case(
        _heads,
        {
            "torch.compile": _inductor(_naive_cached),
            "chunks of tokens": (_naive_cached, _chunked_cached),
            **_with_means({"program": (_naive_cached, _cached_program)}),
        },
        (LARGE,),
        512,
    ),
    "two LM heads": Case(
        _heads,
        {
            "linear_kl, rows": (_naive_linear, _linear_operator),
            "linear_kl, mean": (_naive_linear, partial(_linear_operator, reduction="mean")),
            "KL": (_naive_linear, _linear_program),
            **_with_means(
                {
                    "top 64 and ghost": (_naive_ghost, _ghost_program),
                    "log-probabilities and entropy": (_naive_policy, _policy_program),
                }
            ),
        },
        (LARGE,),
        512,
    ),
    "policy in the graph": Case(_heads, _in_graphs(_naive_policy), (LARGE,), 512),
    "compiled: key weights, renormalised": _compiled(_small_maps, key_weights),
    "compiled: MSE of maps": _compiled(_small_maps, mse_of_maps),
    "compiled: entropy and z-loss": _compiled(_small_head, entropy),
    "compiled: selected vocabulary entries and entropy": _compiled(_small_head, selected_entries),
}


# ------------------------------------------------------------------------------ measurement

COLUMNS = {
    "case": "{case}", "N or tokens": "{size}", "what": "{provider}", "": "{status}",
    "forward ms": "{forward_ms:.2f}", "step ms": "{step_ms:.2f}", "peak MiB": "{peak_mib:.0f}",
    "gradient error": "{gradient_error:.1e}", "may be": "{gradient_budget:.1e}", "why": "{detail}",
}  # fmt: skip


def _result(loss: Loss, inputs: list[Tensor]) -> tuple[float, list[Tensor]]:
    value = loss(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    return value.item(), list(torch.autograd.grad(value, leaves))


def gate(case: Case, provider: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Errors on the small problem, and what they may be."""
    torch.manual_seed(0)
    inputs = case.make(case.small, device, dtype)
    wide = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in inputs
    ]
    naive, timed = case.providers[provider]
    exact, (loss, gradients) = _result(naive, wide), _result(naive, inputs)
    truth = Truth.of(exact, (abs(loss - exact[0]), gradients), dtype)
    return truth.judge(None, _result(timed, inputs)[1]).row()  # a loss may be right by luck


def rows_of(
    name: str, size: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> list[dict[str, Any]]:
    """One case at one size: a row for each provider."""
    case = CASES[name]
    torch._dynamo.reset()
    rows: dict[str, dict[str, Any]] = {}
    for provider in case.providers:
        if size <= case.most.get(provider, size):
            errors, why = measure.attempt(partial(gate, case, provider, device, dtype), device)
            row = {"case": name, "size": size, "provider": provider, "status": "ok"}
            rows[provider] = row | (errors or why)
    torch.manual_seed(0)
    inputs: Any = case.make(size, device, dtype)
    timed = {}
    for provider, row in rows.items():
        if row["status"] == "ok":
            one_step = partial(measure.step, case.providers[provider][1], inputs)
            _, why = measure.attempt(one_step, device)
            row |= why or {"peak_mib": measure.peak_mib(one_step, device)}
            if not why:
                timed[provider] = measure.Timed(case.providers[provider][1], [inputs])
    for provider, samples in measure.interleaved(timed, seconds).items():
        if isinstance(samples, measure.OutOfMemory):
            rows[provider]["status"] = "oom"
            continue
        modes = ("forward", "step")
        forward, both = (measure.Timing.of([s.ms(mode) for s in samples]) for mode in modes)
        rows[provider] |= vars(both) | {
            "forward_ms": forward.median_ms, "step_ms": both.median_ms, "rounds": len(samples)
        }  # fmt: skip
    return list(rows.values())


def main(argv: list[str] | None = None) -> int:
    parser = Program("bench.row_claims", __doc__)
    usual = [name for name in CASES if not name.startswith("compiled")]
    parser.add_argument("--cases", nargs="*", default=usual, help="or how names begin")
    parser.add_argument("--sizes", type=int, nargs="*", help="instead of a case's own")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each provider")
    options, head = parser.begin(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
        head["machine"]["threads"] = str(options.threads)
    chosen = {
        name: case
        for name, case in CASES.items()
        if name in options.cases
        or any(name.startswith(x) for x in options.cases if x not in CASES)
    }
    if not chosen:
        parser.error(f"--cases are {', '.join(CASES)}, got {', '.join(options.cases)}")
    device = torch.device(options.device)
    dtype = measure.usual_dtype(device)
    title = "Row programs next to what they replace or are compared with"
    head["dtype"] = str(dtype).removeprefix("torch.")
    record = Rows(title, COLUMNS, head, options.json)
    for name, case in chosen.items():
        for size in options.sizes or case.sizes:
            for row in rows_of(name, size, device, dtype, options.seconds):
                record.add(row)
            measure.release(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
