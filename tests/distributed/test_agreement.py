"""What ranks tell each other before a rewrite, and how DTensors become whole: in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_streamkl.fx_passes.dtensors import agreement
from torch_streamkl.fx_passes.dtensors.unshard import whole_graph
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.opaque_nodes import opaque, same

# ------------------------------------------------------------------------ agreement


class OneRank(agreement.Agreement):
    """A thread in place of a process; what threads have in common is the store."""

    def __init__(self, rank: int, store: Any) -> None:
        super().__init__(fx.Graph())
        self.rank, self.store, self.ranks = rank, store, (0, 1)
        self.prefix = "a test"

    def _post(self, message: object) -> int:
        number = int(self.store.add(f"{self.prefix}/count/{self.rank}", 1))
        self.store.set(f"{self.prefix}/{number}/{self.rank}", agreement.json.dumps(message))
        return number


def on_both(what: Callable[[OneRank], Any]) -> list[Any]:
    """What a function returns or raises on each rank."""
    store = distributed.HashStore()

    def run(rank: int) -> Any:
        try:
            return what(OneRank(rank, store))
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


def test_a_loss_that_one_rank_refuses_is_refused_by_all() -> None:
    own: Sequence[dict[str, str]] = ({"kl_div": "of rank 0"}, {"sum_1": "both", "kl_div": "other"})
    found = on_both(lambda me: me.refusals(["options"], own[me.rank]))
    assert found[0] == found[1] == {
        "kl_div": "rank 0: of rank 0; rank 1: other", "sum_1": "rank 1: both",
    }  # fmt: skip


def test_ranks_that_rewrite_otherwise_rewrite_nothing() -> None:
    for error in on_both(lambda me: me.refusals([f"scale {me.rank}"], {})):
        assert isinstance(error, Unsupported)
        assert str(error) == "rank 1 compiles another graph than rank 0"


def test_a_failure_is_told_to_ranks_that_wait() -> None:
    def analysed(me: OneRank) -> Any:
        with me.sharing_failures():
            if me.rank == 1:
                raise IndexError("of a test")
            return me.refusals([], {})

    waited, failed = on_both(analysed)
    assert isinstance(failed, IndexError)
    assert str(waited) == "the analysis failed on rank 1: IndexError: of a test"


# ------------------------------------------------------------------------ whole tensors


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Of two ranks, of which the other does nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def whole_of(program: Callable[..., Any], *inputs: Tensor) -> dict[str, fx.Node]:
    """The nodes of a program's graph with whole tensors, by name."""
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(whole_graph(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=keep, fullgraph=True)(*inputs)
    (graph,) = graphs
    return {node.name: node for node in graph.nodes}


# placement, whether `to_local` is the whole tensor
PLACEMENTS = {"Replicate": (Replicate(), True), "Shard": (Shard(0), False)}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_part_of_one_rank_is_no_whole_tensor(name: str, mesh: Any) -> None:
    placement, is_whole = PLACEMENTS[name]
    x = DTensor.from_local(torch.randn(3, 4), mesh, [placement], run_check=False)
    nodes = whole_of(lambda x: x.exp().to_local() * 2, x)
    (exp,) = (n for n in nodes.values() if "exp" in n.name)
    local = next(iter(exp.users))
    assert example(exp).shape == ((3, 4) if is_whole else (6, 4))
    assert local.target is (same if is_whole else opaque)
    assert example(local).shape == (3, 4)


def test_ranks_compare_placements(mesh: Any) -> None:
    """Of tensors that have the same sizes and names."""
    found = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        found.append(agreement.Agreement(gm.graph).inputs)
        return gm.forward

    for placement, rows in ((Replicate(), 6), (Shard(0), 3), (Shard(0), 3)):
        torch._dynamo.reset()
        x = DTensor.from_local(torch.randn(rows, 4), mesh, [placement], run_check=False)
        torch.compile(lambda x: x.exp(), backend=keep, fullgraph=True)(x)
    copied, shared, again = found
    assert shared == again != copied


def test_moved_tensors_are_the_same(mesh: Any) -> None:
    def moved(x: Any) -> Any:
        return x.redistribute(placements=[Replicate()]).to_local() + 1

    x = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)], run_check=False)
    kinds = [n.target for n in whole_of(moved, x).values()]
    assert kinds.count(same) == 2 and opaque not in kinds
    # terms of a maximum are no sum of the ranks' tensors
    largest = DTensor.from_local(torch.randn(3, 4), mesh, [Partial("max")], run_check=False)
    _, redistributed, *_ = whole_of(moved, largest).values()
    assert redistributed.target is opaque
