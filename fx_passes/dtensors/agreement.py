"""Makes all ranks that share DTensors rewrite alike, or not at all.

A rewritten graph has other collectives than the user's. If one rank rewrites and another does not,
because its check failed or had no memory, both wait forever. So before a rewrite, all ranks tell
each other which losses they found and which they refuse, through the store of the process group.

NOTE [Compilations that a rank does alone]
A rank that compiles what the others do not compile waits for them until the store's timeout (that
of the process group) and raises. Earlier agreements are not reused: a rank cannot know whether the
others compile the same again or something else. Ranks that share DTensors have the same shapes and
options, so they compile together. The compiler makes another graph where a rank's own part has one
entry or none, so `with_guarded_parts` adds guards that the ranks have in common. The store is used
in place of the group, so that collectives of the program never meet those of a compilation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_streamkl.distributed.agreement import DisagreementError
from torch_streamkl.distributed.collectives import default_store
from torch_streamkl.fx_passes.fx_utils.dtensors import dtensors_in, ranks_of
from torch_streamkl.fx_passes.fx_utils.errors import Fatal, Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.sizes import hint_of


class RanksDisagreeError(Fatal, DisagreementError):
    """Raised if the ranks of a mesh do not compile the same."""


class Agreement:
    """Makes the ranks of a graph's meshes agree, one exchange after the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self.ranks = ranks_of(graph)
        self.store = default_store() if len(self.ranks) > 1 else None
        self.inputs = _signature(graph)
        self.is_settled = False  # the others wait for nothing more
        self.prefix = "streamkl/" + "-".join(map(str, self.ranks))

    def refusals(self, rewrite: Sequence[str], refused: Mapping[str, str]) -> dict[str, str]:
        """Returns every loss that a rank refuses, and why, the same on all ranks.

        ``rewrite`` describes what all of them have to do alike: options, losses, operators. Raises
        Unsupported on all ranks if one would do something else, or failed.
        """
        if self.store is None:
            return dict(refused)
        digest = hashlib.sha256(repr((self.inputs, list(rewrite))).encode()).hexdigest()
        everyone = self._exchanged({"digest": digest, "refused": dict(refused)})
        failed = [f"rank {rank}: {message['failed']}" for rank, message in everyone.items()
                  if "failed" in message]  # fmt: skip
        if failed:
            raise Unsupported(f"the analysis failed on {'; '.join(failed)}")
        first, *rest = everyone
        odd = [r for r in rest if everyone[r]["digest"] != everyone[first]["digest"]]
        if odd:
            listed = " and ".join(f"rank {rank}" for rank in odd)
            raise Unsupported(f"{listed} compiles another graph than rank {first}")
        agreed: dict[str, str] = {}
        for site in sorted({site for message in everyone.values() for site in message["refused"]}):
            reasons = {r: message["refused"].get(site) for r, message in everyone.items()}
            if len(set(reasons.values())) == 1:
                agreed[site] = reasons[first]
            else:
                agreed[site] = "; ".join(f"rank {r}: {x}" for r, x in reasons.items() if x)
        return agreed

    @contextlib.contextmanager
    def sharing_failures(self) -> Iterator[None]:
        """Tells other ranks if this rank's analysis raises, so that they do not wait."""
        try:
            yield
        except (Unsupported, Fatal):
            raise
        except Exception as error:
            if self.store is not None and not self.is_settled:
                self._post({"failed": f"{type(error).__name__}: {error}"[:300]})
            raise

    def _post(self, message: object) -> int:
        assert self.store is not None
        me = torch.distributed.get_rank()
        number = int(self.store.add(f"{self.prefix}/count/{me}", 1))
        self.store.set(f"{self.prefix}/{number}/{me}", json.dumps(message))
        return number

    def _exchanged(self, message: object) -> dict[int, dict[str, Any]]:
        """Returns what every rank sends, by rank; raises RanksDisagreeError if one sends
        nothing.
        """
        assert self.store is not None
        number = self._post(message)
        found = {}
        for rank in self.ranks:
            try:
                found[rank] = json.loads(self.store.get(f"{self.prefix}/{number}/{rank}"))
            except RuntimeError as error:
                raise RanksDisagreeError(
                    f"rank {rank} did not say within {self.store.timeout.total_seconds():.0f} s "
                    "which divergences of the graph it rewrites: all ranks that share a DTensor "
                    "must compile the same programs"
                ) from error
        return found


def with_guarded_parts(graph: fx.Graph) -> None:
    """Adds guards on sizes of DTensors that vary, by which all ranks compile at the same time.

    Either every rank's part of a DTensor has two entries at least, or parts are as large as now.
    """
    for node in graph.nodes:
        for x in dtensors_in(example(node)) if node.op == "placeholder" else ():
            for parts in _symbolic_parts(x):
                hints = [hint_of(part) for part in parts]
                sizes = [hint for hint in hints if hint is not None]
                if len(sizes) < len(hints):  # only the data decides
                    continue
                for part, size in zip(parts, sizes, strict=True):
                    if min(sizes) >= 2:
                        bool(part >= 2)
                    else:  # an equality would replace the symbol, and Dynamo then guards nothing
                        bool(part >= size) and bool(part <= size)


def _symbolic_parts(x: Any) -> Iterator[list[Any]]:
    """Yields the sizes of the largest and smallest parts of each size that ranks share."""
    for dim, size in enumerate(x.shape):
        counts = [x.device_mesh.size(i) for i, p in enumerate(x.placements) if p.is_shard(dim)]
        if math.prod(counts) == 1 or isinstance(size, int):
            continue
        parts = [size]
        for count in counts:
            largest = [-(-part // count) for part in parts]
            rests = zip(parts, largest, strict=True)
            parts = largest + [part - (count - 1) * most for part, most in rests]
        yield parts


def _signature(graph: fx.Graph) -> list[object]:
    """Describes the DTensors of a graph; plain tensors may differ between ranks."""
    return [
        (node.name, _sizes(x), str(x.placements))
        for node in graph.nodes
        for x in dtensors_in(example(node))
    ]


def _sizes(x: torch.Tensor) -> list[object]:
    return [size if isinstance(size, int) else "symbol" for size in x.shape]
