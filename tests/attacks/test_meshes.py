"""DTensors, ShardedTensors, device meshes and fsdp_config.json that claim what cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.attacks.forge import (
    Raw,
    call,
    deep,
    dtensor,
    instance,
    laughs,
    mesh,
    name,
    pickled,
    shard,
    tensor,
    torch_file,
)
from tests.attacks.harness import Attacker

W = tensor("0", (2, 2))
STORED = {"0": bytes(16)}
BOMB = laughs(100, 5)
DEEP = deep(20_000, tuple)
LARGE = 1 << 20  # the largest mesh that is believed


def ranked(attacker: Attacker, value: Raw, *, world: int | str = 1, ranks: int = 1, copies: int = 1) -> None:
    """Rank files of one value, under many names."""
    state = pickled({f"w{n}": value for n in range(copies)})
    for rank in range(ranks):
        torch_file(attacker.src / f"model_world_size_{world}_rank_{rank}.pt", state, STORED)


def test_the_honest_one_is_merged(attacker: Attacker) -> None:
    ranked(attacker, dtensor(W, (2, 2), mesh((1,), [0]), (shard(0),)))
    assert attacker.refused_or_merged().code == 0


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (0,),
        (-1,),
        (1 << 62,),
        (1 << 40, 1 << 40),
        (1 << 11, 1 << 11),
        (1 << 200,),
        tuple([2] * 100),
        tuple([1] * 17),
        -1,
        1 << 62,
        True,
        "4",
        None,
        ((2, 2), (2, (2, ((2,),)))),
        tuple([(1 << 20, 1 << 20)] * 16),
        BOMB,
        DEEP,
    ],
    ids=range(18),
)
def test_shapes_of_a_mesh(attacker: Attacker, shape: Any) -> None:
    ranked(attacker, dtensor(W, (2, 2), mesh(shape, [0]), (shard(0),)))
    attacker.refused()


def test_a_mesh_that_is_a_tensor_without_elements(attacker: Attacker) -> None:
    """As torch up to 2.9 has it: a tensor of ranks, here of one that is repeated a thousand billion times."""
    ranks = tensor("0", (1 << 20, 1 << 20), count=1, strides=(0, 0))
    state = {"mesh": ranks, "_coordinate_on_dim": [0, 0]}
    of_mesh = instance(name("torch.distributed.device_mesh", "DeviceMesh"), state)
    ranked(attacker, dtensor(W, (2, 2), of_mesh, (shard(0), shard(1))))
    attacker.refused("mesh")


@pytest.mark.parametrize("whole", [(2, 2), (LARGE, 2), (1 << 40, 2)])
@pytest.mark.parametrize("dims", [(LARGE,), (1 << 10, 1 << 10)], ids=str)
def test_many_tensors_on_the_largest_mesh(attacker: Attacker, dims: Any, whole: Any) -> None:
    """A million coordinates for each of a thousand tensors, of which none but one is there."""
    places = tuple([shard(0)] * len(dims))
    local = tensor("0", (1, 2)) if whole[0] <= LARGE else tensor("0", (whole[0] // LARGE, 2), count=4)
    value = dtensor(local, whole, mesh(dims, [0] * len(dims)), places)
    ranked(attacker, value, world=LARGE, copies=1000)
    attacker.refused()


@pytest.mark.parametrize(
    "coordinate", [[1], [-1], [0, 0], [], [None], ["0"], [1 << 70], 0, BOMB, {0: 0}], ids=range(10)
)
def test_coordinates(attacker: Attacker, coordinate: Any) -> None:
    ranked(attacker, dtensor(W, (2, 2), mesh((1,), coordinate), (shard(0),)))
    attacker.refused()


PLACEMENTS = [
    (),
    (shard(0), shard(0)),
    (shard(2),),
    (shard(-3),),
    (shard(1 << 4000),),
    (shard(None),),
    (shard(BOMB),),
    [shard(0)],
    (name("os", "system"),),
    (call(name("os", "system"), "true"),),
    (BOMB,),
    (instance(name("x", "_StridedShard"), {"dim": 0, "split_factor": 0}),),
    (instance(name("x", "_StridedShard"), {"dim": 0, "split_factor": -1}),),
    (instance(name("x", "_StridedShard"), {"dim": 0, "split_factor": 1 << 4000}),),
    (instance(name("x", "_StridedShard"), {"dim": 0, "split_factor": BOMB}),),
    (instance(name("x", "Partial"), {"reduce_op": "os.system"}),),
    (instance(name("x", "Partial"), {"reduce_op": BOMB}),),
    (instance(name("x", "Partial"), {"reduce_op": "sum" * 100_000}),),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=range(len(PLACEMENTS)))
def test_placements(attacker: Attacker, placements: Any) -> None:
    ranked(attacker, dtensor(W, (2, 2), mesh((1,), [0]), placements))
    attacker.refused()


def order(dim: Any, mesh_dims: Any) -> Raw:
    return call(name("x", "ShardOrderEntry"), dim, mesh_dims)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "orders",
    [
        (order(0, (99, 98)),),
        (order(99, (0, 1)),),
        (order(0, (0,)),),
        (order(0, (0, 0, 1)),),
        (order(0, (0, 1)), order(0, (1, 0))),
        (order(1, (0, 1)),),
        (order(0, tuple([0] * 60)),),
        (order(1 << 4000, (0, 1)),),
    ],
    ids=range(8),
)
def test_orders_of_cuts(attacker: Attacker, orders: Any, old: bool) -> None:
    value = dtensor(W, (2, 2), mesh((2, 1), [0, 0]), (shard(0), shard(0)), old=old, shard_order=orders)
    twice = dtensor(W, (2, 2), mesh((2, 2), [0, 0]), (shard(0), shard(0)), old=old, shard_order=orders)
    for each in (value, twice):
        ranked(attacker, each)
        attacker.refused()


def test_ranks_whose_meshes_differ(attacker: Attacker) -> None:
    """Coordinates of another length than the first rank's layout."""
    shapes = [((2, 2), [0, 0]), ((2, 2, 2), [1, 1, 1]), ((2,), [1]), ((2, 2), [1, 0])]
    for rank, (shape, coordinate) in enumerate(shapes):
        value = dtensor(W, (4, 4), mesh(shape, coordinate), tuple([shard(0)] * len(shape)), old=True)
        torch_file(attacker.src / f"model_world_size_4_rank_{rank}.pt", pickled({"w": value}), STORED)
    attacker.refused("w")


@pytest.mark.parametrize(
    "shape",
    [(1 << 62, 1 << 62), (-1, 2), tuple([1 << 62] * 64), tuple([2] * 5000), (1 << 4000,), 4, BOMB, "22"],
    ids=range(8),
)
def test_shapes_of_a_dtensor(attacker: Attacker, shape: Any) -> None:
    ranked(attacker, dtensor(W, shape, mesh((1,), [0]), (shard(0),)))
    attacker.refused()


def test_names_of_mesh_dimensions(attacker: Attacker) -> None:
    for names in [(BOMB,), BOMB, (1 << 4000,), ("x" * 1_000_000,), ("\x1b[2J",), (DEEP,)]:
        ranked(attacker, dtensor(W, (2, 2), mesh((1,), [0], mesh_dim_names=names), (shard(0),)))
        outcome = attacker.refused_or_merged()
        assert "\x1b" not in outcome.stdout


@pytest.mark.parametrize("rank", [1, -1, 1 << 4000, BOMB, "0"], ids=range(5))
def test_ranks_of_a_mesh(attacker: Attacker, rank: Any) -> None:
    ranked(attacker, dtensor(W, (2, 2), mesh((1,), [0], _rank=rank), (shard(0),)))
    attacker.refused_or_merged()


def sharded(size: Any, offsets: Any, sizes: Any, described: Any = None) -> Raw:
    """A ShardedTensor of FSDP1 with one shard."""
    box = instance(name("x", "ShardMetadata"), {"shard_offsets": offsets, "shard_sizes": sizes})
    held = instance(name("x", "Shard"), {"tensor": W, "metadata": box})
    about = {"size": size, "shards_metadata": [box] if described is None else described}
    metadata = instance(name("x", "ShardedTensorMetadata"), about)
    cls = name("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
    rebuild = name("torch._utils", "_rebuild_wrapper_subclass")
    function = name("torch._tensor", "_rebuild_from_type_v2")
    inner = (cls, name("torch", "float32"), size)
    return call(function, rebuild, cls, inner, ([held], metadata, None, None, {}))


@pytest.mark.parametrize(
    ("size", "offsets", "sizes", "described"),
    [
        ((2, 2), [1, 0], [2, 2], None),
        ((2, 2), [-1, 0], [2, 2], None),
        ((4, 2), [0, 0], [2, 2], None),
        ((1 << 62, 1 << 62), [0, 0], [2, 2], None),
        ((2, 2), [0], [2, 2], None),
        ((2, 2), [0, 0], [2, 1 << 4000], None),
        ((2, 2), BOMB, BOMB, None),
        (BOMB, [0, 0], [2, 2], None),
        ((2, 2), [0, 0], [2, 2], [BOMB]),
        ((2, 2), [0, 0], [2, 2], BOMB),
    ],
    ids=range(10),
)
def test_sharded_tensors(attacker: Attacker, size: Any, offsets: Any, sizes: Any, described: Any) -> None:
    ranked(attacker, sharded(size, offsets, sizes, described))
    attacker.refused()


@pytest.mark.parametrize(
    "world", [-1, 0, 10**9, 1 << 62, 10**4000, 1.0, True, "1", None, [1], {"a": 1}], ids=range(11)
)
def test_world_sizes(attacker: Attacker, world: Any) -> None:
    torch_file(attacker.src / "rank_0.pt", pickled({"w": W}), STORED)
    (attacker.src / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    attacker.refused_or_merged() if world is None else attacker.refused("fsdp_config.json")


@pytest.mark.parametrize("version", [-1, 10**9, "2", [2], {"2": 2}, True, 1.0, None], ids=range(8))
def test_versions(attacker: Attacker, version: Any) -> None:
    torch_file(attacker.src / "rank_0.pt", pickled({"w": W}), STORED)
    (attacker.src / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": 1}))
    attacker.refused_or_merged()


@pytest.mark.parametrize("world", ["999999999", "0", "00000001", "9" * 100])
def test_world_sizes_in_names(attacker: Attacker, world: str) -> None:
    ranked(attacker, dtensor(W, (2, 2), mesh((1,), [0]), (shard(0),)), world=world)
    attacker.refused_or_merged()


def test_json_that_is_almost_too_deep(attacker: Attacker) -> None:
    """As deep as it can be read, but perhaps not shown."""
    torch_file(attacker.src / "rank_0.pt", pickled({"w": W}), STORED)
    for depth in (*range(930, 1000, 6), 100_000):
        value = "[" * depth + "]" * depth
        (attacker.src / "fsdp_config.json").write_text(f'{{"world_size": {value}}}')
        attacker.refused("fsdp_config.json")
