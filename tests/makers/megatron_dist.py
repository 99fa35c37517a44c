"""Checkpoints of Megatron's `torch_dist` format: torch's own DCP writer, given Megatron's keys and chunks.

Followed: megatron/core/dist_checkpointing/strategies/torch.py, mcore_to_pyt_state_dict and MCoreSavePlanner
(an object is bytes that torch.save made, a tensor a list of chunks at offsets);
megatron/core/transformer/transformer_block.py, sharded_state_dict (layers stacked on an axis of their own, or
named); moe/experts.py, sharded_state_dict (an expert axis under `experts.experts`); mlp.py,
apply_swiglu_sharded_factory (gate and up are chunks of one tensor); ssm/gated_delta_net/common.py (a key for
each part). `.metadata` and `.distcp` are bytes of torch.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.checks import raw
from tests.makers.megatron_inverse import Megatron
from tests.makers.megatron_shards import EXPERT, Parallel, arguments, experts_of, pieces, with_blocks

logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)  # a line for each object

STACK = re.compile(r"((?:vision_model\.)?decoder\.layers\.)(\d+)\.(.*)")
METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass
class Chunks:
    """A tensor of the checkpoint: its whole shape, and its chunks by offset."""

    shape: tuple[int, ...]
    chunks: dict[tuple[int, ...], torch.Tensor]


def write_torch_dist(
    folder: Path,
    model: Megatron,
    parallel: Parallel = Parallel(),  # noqa: B008 - frozen
    *,
    stacked: bool | None = None,
    common: str = "common.pt",
    arguments_recorded: bool = True,
    optimizer: bool = False,
    prefix: str = "",
    block: int | None = None,
    singletons: bool = False,
    backend: str = "torch_dist",
) -> None:
    """Writes a torch_dist folder, which is there and empty.

    stacked    layers on an axis of their own; as Megatron does if not given: where all layers are alike
    common     "common.pt", or "inside" for the bytes entry common_state/shard_0_1 of mcore from 0.19 on
    arguments_recorded  Megatron-LM keeps `args` there; verl keeps nothing
    optimizer  also the states that a training run saves beside the weights
    prefix     before every name, as NeMo's "module."
    block      moe_mlp_glu_interleave_size: experts' gate and up in turn, so many rows each
    singletons the option singleton_local_shards: gate, up and each expert under keys of their own
    backend    or "zarr", as mcore up to 0.15
    """
    entries: dict[str, Chunks | io.BytesIO] = {}
    vision = any(name.startswith(("vision_model.", "visual.")) for name in model.tensors)
    if stacked is None:
        stacked = _alike(model) and not singletons
    for name in model.tensors:
        text = "language_model." if vision and not name.startswith(("vision_model.", "visual.")) else ""
        if singletons:
            _add_apart(entries, prefix + text, name, model, parallel)
        else:
            _add_tensor(entries, prefix + text, name, model, parallel, stacked, block)
    _add_objects(entries)
    if optimizer:
        _add_optimizer(entries)
    args = arguments(model, parallel, moe_mlp_glu_interleave_size=block)
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 100}
    about = METADATA | {"sharded_backend": backend}
    if common == "inside":
        entries["common_state/shard_0_1"] = _saved([content if arguments_recorded else {}])
        about = {key: value for key, value in about.items() if key.startswith("sharded")}
    else:
        torch.save(content if arguments_recorded else {}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(about))
    (save_zarr if backend == "zarr" else save)(folder, entries)


def save_zarr(folder: Path, entries: dict[str, Chunks | io.BytesIO]) -> None:
    """strategies/zarr.py of mcore 0.12: folders of raw chunks, objects beside."""
    for key, entry in entries.items():
        if not isinstance(entry, Chunks):
            (folder / key).parent.mkdir(exist_ok=True)
            (folder / f"{key}.pt").write_bytes(entry.getvalue())
            continue
        (folder / key).mkdir()
        first = next(iter(entry.chunks.values()))
        dtype = {torch.bfloat16: "bfloat16", torch.float32: "<f4"}[first.dtype]
        header: dict[str, Any] = {
            "zarr_format": 2,
            "shape": entry.shape,
            "chunks": first.shape,
            "dtype": dtype,
        }
        header |= {"order": "C", "compressor": None, "filters": None, "fill_value": None}
        (folder / key / ".zarray").write_text(json.dumps(header))
        for offset, chunk in entry.chunks.items():
            assert chunk.shape == first.shape, key
            place = ".".join(str(start // size) for start, size in zip(offset, chunk.shape, strict=True))
            (folder / key / place).write_bytes(raw(chunk))


def save(folder: Path, entries: dict[str, Chunks | io.BytesIO], writers: int = 3) -> None:
    """Writes the entries with torch's writer, spread over so many .distcp files."""
    writer = FileSystemWriter(folder, thread_count=writers, sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(entries, storage_writer=writer, planner=_Planner(), no_dist=True)


class _Planner(DefaultSavePlanner):
    """Chunks at offsets and bytes as they are; the checks of the whole plan are torch's."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [item for key, entry in self.state_dict.items() for item in _write_items(key, entry)]
        self.plan = SavePlan(items=items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self.state_dict[index.fqn]
        return entry.chunks[tuple(index.offset or ())] if isinstance(entry, Chunks) else entry

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        return object


def _write_items(key: str, entry: Chunks | io.BytesIO) -> list[WriteItem]:
    if not isinstance(entry, Chunks):
        return [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)]
    items = []
    for number, (offset, tensor) in enumerate(entry.chunks.items()):
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=tensor.size()),
            properties=TensorProperties.create_from_tensor(tensor),
            size=torch.Size(entry.shape),
        )
        index = MetadataIndex(key, torch.Size(offset), number)
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return items


def _alike(model: Megatron) -> bool:
    """Whether all decoder layers have the same names."""
    layers: dict[str, set[str]] = {}
    for name in model.tensors:
        found = STACK.fullmatch(name)
        if found and found[1] == "decoder.layers.":
            layers.setdefault(found[2], set()).add(found[3])
    return all(names == layers["0"] for names in layers.values())


def _add_tensor(
    entries: dict[str, Any],
    prefix: str,
    name: str,
    model: Megatron,
    parallel: Parallel,
    stacked: bool,
    block: int | None,
) -> None:
    """One whole tensor's chunks, with the axes that Megatron prepends."""
    key, lead, expert = name, [], EXPERT.fullmatch(name)
    layer = STACK.fullmatch(name) if stacked else None
    if layer:
        key = layer[1] + layer[3]
        lead.append((int(layer[2]), _depth(model, layer[1])))
    if expert:
        key = re.sub(r"experts\.local_experts\.\d+\.", "experts.experts.", key)
        lead.append((int(expert[2]), experts_of(model)))
    whole = model.tensors[name]
    shape = (*(length for _, length in lead), *whole.shape)
    entry = entries.setdefault(prefix + key, Chunks(shape, {}))
    assert entry.shape == shape, name
    ranks = pieces(model, name, parallel.expert_tp if expert else parallel.tp)
    if block and expert and name in model.gated:  # mixed by rank, then cut in the middle as if it were not
        ranks = [_mixed(parts, block) for parts in ranks]
    for parts in ranks:  # what all ranks have is written once
        for start, tensor in parts:
            at = [0] * whole.dim()
            at[_cut(tensor, whole)] = start
            offset = (*(number for number, _ in lead), *at)
            entry.chunks[offset] = tensor.reshape((1,) * len(lead) + tuple(tensor.shape)).contiguous()


def _cut(part: torch.Tensor, whole: torch.Tensor) -> int:
    """The axis along which it is a part; the first, if it is all."""
    return next((axis for axis in range(whole.dim()) if part.shape[axis] != whole.shape[axis]), 0)


def _mixed(parts: list[tuple[int, torch.Tensor]], block: int) -> list[tuple[int, torch.Tensor]]:
    halves = with_blocks(torch.cat([tensor for _, tensor in parts]), block).chunk(2)
    return [(start, half) for (start, _), half in zip(parts, halves, strict=True)]


def _add_apart(entries: dict[str, Any], prefix: str, name: str, model: Megatron, parallel: Parallel) -> None:
    """With `singleton_local_shards`: nothing stacked, `_w` behind the gate's key and `_v` behind the up's."""
    expert, whole = EXPERT.fullmatch(name), model.tensors[name]
    key = prefix + name.replace("experts.local_experts.", "experts.experts.")
    for parts in pieces(model, name, parallel.expert_tp if expert else parallel.tp):
        for half, (start, tensor) in enumerate(parts):
            length = whole.shape[0] // len(parts)
            shape = (length, *whole.shape[1:])
            own = key + ("_w", "_v")[half] if len(parts) == 2 else key
            at = [0] * whole.dim()
            at[_cut(tensor, whole.narrow(0, 0, length))] = start - half * length
            entries.setdefault(own, Chunks(shape, {})).chunks[tuple(at)] = tensor.contiguous()


def _depth(model: Megatron, at: str) -> int:
    return 1 + max(int(found[2]) for n in model.tensors if (found := STACK.fullmatch(n)) and found[1] == at)


def _add_objects(entries: dict[str, Any]) -> None:
    """TransformerEngine's states, one for each module of each layer and expert; the random generators'."""
    for key in list(entries):
        module = key.rpartition(".")[0]
        if not re.search(r"linear_\w+$|layernorm$", module):
            continue
        stacked = re.search(r"decoder\.layers\.[^\d]", key) is not None
        axes = entries[key].shape[: stacked + ("experts.experts" in key)] or (1,)
        sizes = ".".join(map(str, axes))
        for index in itertools.product(*map(range, axes)):
            state = torch.empty(0, dtype=torch.uint8) if index[-1] % 2 else None
            entries[f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{sizes}"] = _saved(state)
    entries["rng_state/shard_0.0.0_1.1.1"] = _saved([{"torch_rng_state": torch.get_rng_state()}])


def _add_optimizer(entries: dict[str, Any]) -> None:
    """Moments under the weights' names, and flat buffers of the distributed optimizer (`dp_reshardable`)."""
    for key in [key for key, entry in entries.items() if isinstance(entry, Chunks)]:
        for state in ("exp_avg", "exp_avg_sq", "fp32_param"):
            wrong = {offset: torch.zeros_like(t).float() for offset, t in entries[key].chunks.items()}
            entries[f"optimizer.state.{state}.{key}"] = Chunks(entries[key].shape, wrong)
    bucket = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    )
    for state in ("param", "exp_avg"):
        entries[f"chained_0.{bucket}.{state}"] = Chunks((64,), {(0,): torch.zeros(64)})


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
