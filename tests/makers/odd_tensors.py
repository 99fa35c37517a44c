"""Collections of tensors for `dtensors`: every kind of layout, shape and type, and every kind of mesh."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.makers.dtensors import Entry, Grid, PerRank, Placed

TWO_BY_TWO = (("a", 2), ("b", 2))
EIGHT = (("a", 2), ("one", 1), ("b", 2), ("c", 2))


def odd_tensors() -> dict[str, Entry]:
    """Layouts, shapes and types of every kind, for `TWO_BY_TWO`."""
    draw = torch.Generator().manual_seed(1)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    both = (Shard(0), Shard(0))
    return {
        "plain": real(3, 2),
        "rows": (real(5, 6), (Shard(0), Replicate())),
        "both": (real(5, 6), both),
        "two dims": (real(5, 7), (Shard(1), Shard(0))),
        "third dim": (real(2, 3, 5), (Replicate(), Shard(2))),
        "empty": (real(1, 2), (Shard(0), Shard(1))),
        "no rows": (real(0, 2), both),
        "b first": Placed(real(7, 6), both, order={0: (1, 0)}),
        "sub-mesh": Placed(real(5, 6), (Shard(0),), mesh=("b",)),
        "flat": Placed(real(5, 6), (Shard(0),), mesh=("a", "b"), flatten=True),
        "own mesh": Placed(real(5, 6), (Shard(0), Shard(1)), mesh=Grid(((0, 2), (1, 3)), ("x", "y"))),
        "two ranks": Placed(real(5, 6), (Shard(0),), mesh=Grid((1, 2), ("x",))),
        "view": Placed(real(5, 6), (Shard(1), Shard(0)), view=True),
        "transposed": (real(8, 6).t(), both),
        "strided": (real(8, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "scalar": (torch.tensor(3.5), (Replicate(), Replicate())),
        "float8": (real(5, 6).to(torch.float8_e4m3fn), (Shard(0), Shard(1))),
        "bool": (real(5, 6) > 0, both),
        "int8": (torch.arange(10, dtype=torch.int8), both),
        "uint16": (torch.arange(10).to(torch.uint16), both),
        "complex": (torch.randn(4, 2, dtype=torch.complex64, generator=draw), (Shard(0), Replicate())),
        "trained": Placed(real(8, 2), both, requires_grad=True),
        "differs": PerRank(tuple(real(2) for _ in range(4))),
    }


def odd_meshes() -> dict[str, Entry]:
    """One tensor on sub-meshes of `EIGHT`, on flattened ones (of neighbours and not), on one of size 1, on
    the whole, and on a mesh of its own that leaves ranks out.
    """
    whole = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    sub_meshes = {"a": ("a",), "c": ("c",), "ab": ("a", "b"), "ac": ("a", "c"), "one": ("one",)}
    placed: dict[str, Entry] = {
        name: Placed(whole, (Shard(0),), mesh=mesh, flatten=len(mesh) > 1)
        for name, mesh in sub_meshes.items()
    }
    placed["all"] = Placed(whole, (Shard(0),) * 4)
    placed["own"] = Placed(whole, (Shard(1), Shard(0)), mesh=Grid(((0, 2), (5, 7)), ("x", "y")))
    return placed
