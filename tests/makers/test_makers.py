"""The makers make what they say. That torch itself gathers the truth again is asserted in the ranks; here
the files are put together a second way: an index tensor, cut as the shards were cut, tells where each lies.
"""

from __future__ import annotations

import json
import logging
import pickletools
import time
import zipfile
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.makers.dtensors import Local, Placed, dtensors
from tests.makers.fixtures import RECIPES, REFUSED_RECIPES
from tests.makers.layout import JUNK, Made, copy_of, edit_rank, renamed
from tests.makers.old_torch import VERSIONS, mesh_shape, old_checkpoint, old_torch, release_of
from tests.makers.ranks import RankError, run_ranks

logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # "unpickling before the PGs"
DTENSOR_RECIPES = [name for name in RECIPES if not name.startswith("sharded-tensor")]
AB = (("a", 2), ("b", 2))


# ---- a second way to put files together -------------------------------------------------------------------


def read_ranks(made: Made) -> list[dict[str, torch.Tensor]]:
    return [torch.load(made.rank_file(rank), weights_only=False) for rank in range(made.world_size)]


def put_together(made: Made, backwards: bool = False) -> dict[str, torch.Tensor]:
    """Whole tensors of the rank files; `backwards`: shards of one dimension were cut by the last mesh
    dimension first (FSDP2 over TP before torch 2.5).
    """
    ranks = read_ranks(made)
    return {name: _whole([rank[name] for rank in ranks], backwards) for name in ranks[0]}


def _whole(parts: list[torch.Tensor], backwards: bool) -> torch.Tensor:
    if not isinstance(parts[0], DTensor):
        return parts[0]
    shape = parts[0]._spec.tensor_meta[0]
    index = torch.arange(shape.numel()).reshape(shape)
    whole = torch.zeros(shape.numel(), parts[0].element_size(), dtype=torch.uint8)
    seen = torch.zeros(shape.numel(), dtype=torch.bool)
    for part in parts:
        if (own := _own(index, part._spec, backwards)) is not None:
            whole[own.flatten()] = _bytes(part._local_tensor).view(-1, part.element_size())
            seen[own.flatten()] = True
    assert seen.all()
    return whole.flatten().view(parts[0].dtype).reshape(shape)


def _own(index: torch.Tensor, spec, backwards: bool) -> torch.Tensor | None:
    """The elements that this rank holds."""
    state = vars(spec.mesh)
    coordinate = state["_coordinate_on_dim"]
    shape = state["mesh"].shape if "mesh" in state else _shape(spec.mesh)
    if coordinate is None:
        return None
    for dim, cuts in _cuts(spec, shape, backwards).items():
        for mesh_dim in cuts:
            chunks = index.chunk(shape[mesh_dim], dim)
            at = coordinate[mesh_dim]
            index = chunks[at] if at < len(chunks) else index.narrow(dim, 0, 0)
    return index


def _shape(mesh) -> tuple[int, ...]:
    layout = vars(vars(mesh)["_layout"])
    if "axes" in layout:
        return mesh_shape(mesh)
    shape = (layout["shape"],) if isinstance(layout["shape"], int) else layout["shape"]
    return tuple(length if isinstance(length, int) else prod(length) for length in shape)


def _cuts(spec, shape: tuple[int, ...], backwards: bool) -> dict[int, list[int]]:
    strided = any(isinstance(p, _StridedShard) for p in spec.placements)
    if not strided and vars(spec).get("shard_order"):
        return {entry.tensor_dim: list(entry.mesh_dims) for entry in spec.shard_order}
    cuts: dict[int, list[int]] = {}
    dims = list(enumerate(spec.placements))
    for mesh_dim, placement in reversed(dims) if strided or backwards else dims:
        if isinstance(placement, Shard | _StridedShard):
            so_far = cuts.setdefault(placement.dim, [])
            if backwards or not strided:
                so_far.append(mesh_dim)
            else:
                so_far.insert(_place_of(so_far, shape, getattr(placement, "split_factor", 1)), mesh_dim)
    return cuts


def _place_of(cuts: list[int], shape: tuple[int, ...], split_factor: int) -> int:
    product = 1
    for place, mesh_dim in enumerate(cuts):
        if product == split_factor:
            return place
        product *= shape[mesh_dim]
    return len(cuts)


def assert_equal(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(truth)
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(_bytes(found[name]), _bytes(tensor)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# ---- sharded models ---------------------------------------------------------------------------------------


def test_verl_layout(fsdp_checkpoint):
    made = fsdp_checkpoint
    names = {path.name for path in made.leaf.iterdir()}
    for kind in ("model", "optim", "extra_state"):
        assert {made.rank_file(rank, kind).name for rank in range(made.world_size)} <= names
    assert made.rank_file(0, "optim").read_bytes() == JUNK
    config = json.loads((made.leaf / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": made.fsdp_version, "world_size": made.world_size}
    assert (made.root / "latest_checkpointed_iteration.txt").read_text() == "7"


@pytest.mark.parametrize("name", DTENSOR_RECIPES)
def test_the_files_hold_the_truth(checkpoint, name):
    made = checkpoint(name)
    assert_equal(put_together(made), made.truth)


def test_the_makers_cover_each_placement(checkpoint):
    seen = {text for name in DTENSOR_RECIPES for text in checkpoint(name).placements.values()}
    assert "(Shard(dim=0),)" in seen
    assert "(Shard(dim=1),)" in seen
    assert "(Replicate(), Shard(dim=0))" in seen
    assert "(_StridedShard(dim=0, sf=2), Shard(dim=0))" in seen
    assert "(Replicate(), _StridedShard(dim=0, sf=2), Shard(dim=0))" in seen


def test_full_files_hold_the_truth(full_checkpoint):
    made = full_checkpoint
    (path,) = (path for path in made.leaf.iterdir() if path.is_file())
    state = torch.load(path, weights_only=True)
    for key in ("model", "state_dict"):
        state = state.get(key, state)
    assert_equal(dict(state), made.truth)


@pytest.mark.parametrize("name", list(REFUSED_RECIPES))
def test_flat_parameters(checkpoint, name):
    made = checkpoint(name)
    assert b"_flat_param" in made.rank_file(0).read_bytes()


def test_tied_names(checkpoint):
    assert checkpoint("fsdp2-qwen2").tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert checkpoint("fsdp2-llama").tied == ()


# ---- single tensors ---------------------------------------------------------------------------------------


def test_odd_tensors(odd_tensors_checkpoint):
    made = odd_tensors_checkpoint
    assert_equal(put_together(made), made.truth)


@pytest.mark.parametrize("operation", ["sum", "avg", "max", "min"])
def test_partial(tmp_path, operation):
    whole = torch.arange(30.0).reshape(5, 6)
    made = dtensors(tmp_path, AB, {"x": Placed(whole, (Partial(operation), Shard(1)))})
    ranks = torch.stack([rank["x"]._local_tensor for rank in read_ranks(made)[::2]])  # b = 0
    reduced = {"sum": ranks.sum(0), "avg": ranks.mean(0), "max": ranks.amax(0), "min": ranks.amin(0)}
    assert torch.equal(reduced[operation], whole[:, :3])
    assert not torch.equal(ranks[0], ranks[1])


def test_locals_are_taken_as_they_are(tmp_path):
    """Sizes that do not add up to the shape that the file claims."""
    parts = tuple(torch.full((1, 2), float(rank)) for rank in range(4))
    made = dtensors(tmp_path, AB, {"x": Local(parts, (Shard(0), Shard(0)), torch.Size([8, 2]))})
    assert made.truth == {}
    assert [tuple(rank["x"]._local_tensor.shape) for rank in read_ranks(made)] == [(1, 2)] * 4


# ---- other releases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "name", ["fsdp2-tp-rows", "fsdp2-tp-uneven", "fsdp2-hsdp", "fsdp1-uneven", "fsdp1-tp"]
)
def test_old_torch(checkpoint, tmp_path, version, name):
    made = checkpoint(name)
    old = old_checkpoint(made, tmp_path, version)
    over_tp = release_of(version) < (2, 5) and name.startswith("fsdp2-tp")
    assert_equal(put_together(old, backwards=over_tp), made.truth)
    assert any("_StridedShard" in text for text in old.placements.values()) == (
        name.startswith("fsdp2-tp") and release_of(version) >= (2, 5)
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_old_torch_meshes(odd_meshes_checkpoint, tmp_path, version):
    """Sub-meshes, flattened and permuted ones, and sizes of one."""
    made = odd_meshes_checkpoint
    assert_equal(put_together(made), made.truth)
    assert_equal(put_together(old_checkpoint(made, tmp_path / "old", version)), made.truth)


@pytest.mark.parametrize("version", ["2.10", "2.12"])
def test_old_torch_keeps_the_order(tmp_path, version):
    placed = {"x": Placed(torch.randn(7, 6), (Shard(0), Shard(0)), order={0: (1, 0)})}
    made = dtensors(tmp_path / "new", AB, placed)
    assert_equal(put_together(old_checkpoint(made, tmp_path / "old", version)), made.truth)


@pytest.mark.parametrize("version", ["2.9", "2.13"])
def test_a_gpus_file(checkpoint, tmp_path, version):
    made = checkpoint("fsdp2-qwen2")
    old_torch(made.rank_file(1), tmp_path / "rank.pt", version, cuda=1)
    with zipfile.ZipFile(tmp_path / "rank.pt") as archive:
        pickled = archive.read("rank/data.pkl")
    strings = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)]
    assert "cuda:1" in strings
    assert "cuda" in strings
    assert "cpu" not in strings


@pytest.mark.parametrize("name", ["fsdp2-tp-rows", "fsdp2-qwen2", "fsdp1-hsdp"])
def test_stand_ins_pickle_as_the_real_objects_do(checkpoint, tmp_path, name):
    """Rewritten for the torch that wrote it, a file holds the same operations on the same classes."""
    path = checkpoint(name).rank_file(1)
    old_torch(path, tmp_path / path.name, "2.13")
    assert _operations(tmp_path / path.name) == _operations(path)


def _operations(path: Path) -> Counter[tuple[str, object]]:
    """How often each class is built, and each key of a state is set."""
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(f"{path.stem}/data.pkl")
    operations = [(code.name, argument) for code, argument, _ in pickletools.genops(pickled)]
    return Counter(op for op in operations if op[0] in {"GLOBAL", "NEWOBJ", "BUILD", "REDUCE", "BINPERSID"})


def test_old_torch_legacy(checkpoint, tmp_path):
    made = checkpoint("fsdp2-hsdp")
    old = old_checkpoint(made, tmp_path, "2.4", zip_format=False, python=(3, 10))
    assert_equal(put_together(old), made.truth)


# ---- sidecars ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2-qwen2", "fsdp2-value", "fsdp2-gpt2", "fsdp2-moe"])
def test_sidecars_load(checkpoint, name):
    import transformers

    made = checkpoint(name)
    config = transformers.AutoConfig.from_pretrained(made.sidecars)
    (architecture,) = config.architectures
    model = getattr(transformers, architecture)(config)
    model.load_state_dict(made.truth)
    assert transformers.AutoTokenizer.from_pretrained(made.sidecars)("the cat")["input_ids"]
    assert transformers.GenerationConfig.from_pretrained(made.sidecars).eos_token_id == [5, 6]


def test_remote_code(checkpoint):
    folder = checkpoint("fsdp2-remote-code").sidecars
    assert "auto_map" in json.loads((folder / "config.json").read_text())
    assert (folder / "modeling_x.py").exists()


# ---- ranks ------------------------------------------------------------------------------------------------


def _add_ranks(rank: int, start: int) -> int:
    total = torch.tensor(rank)
    torch.distributed.all_reduce(total)
    return start + int(total)


def _fail_in_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("this rank is ill")
    torch.distributed.barrier()


def _sleep(rank: int) -> None:
    time.sleep(60 * rank)


def test_run_ranks():
    assert run_ranks(_add_ranks, 3, 10) == [13, 13, 13]


def test_a_rank_that_fails_is_named():
    with pytest.raises(RankError, match=r"(?s)ValueError: this rank is ill"):
        run_ranks(_fail_in_one, 2)


def test_a_rank_that_hangs_is_ended():
    with pytest.raises(RankError, match=r"ranks \[.*1\] did not finish"):
        run_ranks(_sleep, 2, timeout=1.0)
    assert run_ranks(_add_ranks, 1, 5) == [5]


# ---- copies -----------------------------------------------------------------------------------------------


def test_edit_rank(checkpoint, tmp_path):
    made = checkpoint("fsdp2-hsdp")
    copied = copy_of(made, tmp_path)
    edit_rank(copied, 2, lambda state: state["model.norm.weight"]._local_tensor.add_(1))
    before, after = (torch.load(m.rank_file(2), weights_only=False) for m in (made, copied))
    changed = after["model.norm.weight"]._local_tensor - before["model.norm.weight"]._local_tensor
    assert torch.allclose(changed, torch.tensor(1.0))
    assert after["model.norm.weight"].placements == before["model.norm.weight"].placements
    assert made.rank_file(2).read_bytes() != copied.rank_file(2).read_bytes()


def test_renamed(checkpoint, tmp_path):
    folder = renamed(checkpoint("fsdp1-dtensor"), tmp_path / "x", "pytorch_model_fsdp_0_rank{rank}.bin")
    assert (folder / "pytorch_model_fsdp_0_rank3.bin").exists()
    assert (folder / "config.json").exists()
