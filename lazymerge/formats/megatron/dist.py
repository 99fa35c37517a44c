"""Megatron's distributed checkpoints: one folder whose tensors are whole, whatever the parallelism was.

    torch_dist     .metadata, *.distcp, metadata.json     keys: lazymerge.formats.megatron.keys
    zarr           <key>/.zarray, metadata.json           the same keys
    torch_dcp      .metadata, *.distcp                    FSDP2: names of modules, one a layer
    fsdp_dtensor   .metadata, *.distcp                    Megatron-FSDP: the same, gate and up apart

Tensor, pipeline and expert parallelism leave no trace in them but in how tensors are cut. The trainer's
arguments are in common.pt; in an object of the checkpoint, ``common_state/shard_0_1`` (a list that holds
what common.pt held; mcore 0.19 on) or ``args`` (torch_dcp); in run_config.yaml, where Megatron-Bridge
wrote it; or nowhere (verl). The optimizer in the same folder is never read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Topology
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.files.inert_pickle import Record
from lazymerge.files.local import LocalFile
from lazymerge.files.torch_file import read_torch_file
from lazymerge.formats.dcp import DcpFolder, read_dcp
from lazymerge.formats.megatron.found import Found
from lazymerge.formats.megatron.joining import without_interleave
from lazymerge.formats.megatron.keys import HALVES, kind_left_out, parse
from lazymerge.formats.megatron.names import is_adapter
from lazymerge.formats.megatron.settings import is_gated, read_run_config, settings_of
from lazymerge.formats.zarr import ZarrFolder, holds_zarr, read_zarr
from lazymerge.gather import Gather, cat

COMMON = "common.pt"
RUN_CONFIG = "run_config.yaml"
_COMMON_OBJECT = "common_state/shard_0_1"
_ARGS_OBJECT = "args"

_GATED_HALF = re.compile(r"\.linear_fc1\.(?:weight|bias)_[wv]$")
_EXPERT_FC1 = re.compile(r"\.local_experts\.\d+\.linear_fc1\.(?:weight|bias)$")
_WEIGHT = re.compile(r"\.(weight|bias)(_[wv])?$")
_RANK = re.compile(r"__(\d{1,7})_\d+\.distcp")
_MESH = (
    ("tp", "tensor_model_parallel_size"),
    ("cp", "context_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
)


def read_dist(folder: Path) -> Found:
    """The model in a distributed checkpoint, under canonical names, unread.

    Raises `UnsupportedCheckpoint` where it holds no model, or an adapter, and what
    `lazymerge.formats.dcp.read_dcp` and `lazymerge.formats.zarr.read_zarr` raise.
    """
    store = read_zarr(folder, _is_weight) if holds_zarr(folder) else read_dcp(folder, _is_weight)
    _refuse_without_model(folder, store)
    found = Found(left_out=_left_out((*store.others, *store.objects)))
    found.settings = _settings(folder, store, found)
    found.topology = _topology(store, found.settings)
    origins: dict[str, str] = {}
    for key in store.tensors:
        parsed = parse(key)
        for index, gather in store.unstacked(key, parsed.axes).items():
            name = parsed.name(index)
            if name in origins:
                raise InconsistentCheckpoint(
                    f"{folder}: {origins[name]} and {key} both hold {name}",
                    "the save is damaged, or written by something unknown; please report it",
                )
            origins[name] = key
            found.gathers[name] = gather
    found.gathers = _deinterleaved(_joined(found.gathers), found.settings)
    found.files += store.files
    return found


def _is_weight(key: str) -> bool:
    return kind_left_out(key) is None


def _refuse_without_model(folder: Path, store: DcpFolder | ZarrFolder) -> None:
    """Refuse a folder without weights, or with what is an adapter's."""
    adapter = next((key for key in store.tensors if is_adapter(key)), None)
    if adapter is not None:
        raise UnsupportedCheckpoint(
            f"{adapter} in {folder}: an adapter's, which cannot be merged yet",
            "merge the adapter with the Megatron-Bridge that wrote it, and save the merged model",
        )
    if store.tensors:
        return
    kinds = sorted({kind_left_out(name) or name for name in (*store.others, *store.objects)})
    raise UnsupportedCheckpoint(
        f"{folder}: holds no model, only {', '.join(kinds[:8]) or 'nothing'}", _where_the_model_is(folder)
    )


def _where_the_model_is(folder: Path) -> str:
    """What to do where verl saved the model in another folder than its optimizer."""
    step = folder.parent.parent  # of model/, optimizer/ and extra/
    if (step / "model" / folder.name).is_dir():
        return f"give {step / 'model' / folder.name}"
    saved = [folder.parent / "huggingface", step / "model" / "huggingface"]
    done = next((each for each in saved if any(each.glob("*.safetensors"))), None)
    if done is not None:
        return f"the weights were saved in Hugging Face's form already: {done}"
    return "give the folder that holds the model: verl saves it in huggingface/ where mbridge was on"


def _left_out(names: Iterable[str]) -> dict[str, str]:
    """What is no weight, by kind: thousands of names are a few entries.

    Raises `IncompleteCheckpoint` for what has a weight's name and none of its data.
    """
    names = list(names)
    lost = next((name for name in names if kind_left_out(name) is None and _WEIGHT.search(name)), None)
    if lost is not None:
        raise IncompleteCheckpoint(
            f"{lost}: is no tensor in this checkpoint (an object, or a folder without its .zarray)",
            "copy the checkpoint again; a weight that is left out would not be missed later",
        )
    kinds = Counter(
        kind_left_out(name) or re.sub(r"\d+", "N", name.partition("/")[0])[:200] for name in names
    )
    return {
        kind: f"no weight of the model ({count} {'entry' if count == 1 else 'entries'})"
        for kind, count in kinds.items()
    }


# ------------------------------------------------------------------------- the trainer's arguments


def _settings(folder: Path, store: DcpFolder | ZarrFolder, found: Found) -> dict[str, Any]:
    """The trainer's arguments, from where they were recorded first; {} if nowhere.

    Adds the files that it opens, and the iteration that is recorded beside the arguments, to `found`.
    """
    if (folder / COMMON).is_file():
        found.files.append(LocalFile(folder / COMMON))
        args = _args_in(found.files[-1].name, read_torch_file(found.files[-1]), found)
        if args is not None:
            return settings_of(args)
    if isinstance(store, DcpFolder):
        if _COMMON_OBJECT in store.objects:
            value = store.load_object(_COMMON_OBJECT)
            where = f"{_COMMON_OBJECT} in {folder}"
            args = _args_in(where, value[0] if isinstance(value, list) and value else value, found)
            if args is not None:
                return settings_of(args)
        if _ARGS_OBJECT in store.objects:
            return settings_of(store.load_object(_ARGS_OBJECT))
    return read_run_config(folder / RUN_CONFIG) if (folder / RUN_CONFIG).is_file() else {}


def _args_in(where: str, common: object, found: Found) -> object:
    """The arguments in the dict of what all ranks have in common; None if it has none."""
    if not isinstance(common, dict):
        raise DamagedFile(f"{where}: no dict of what all ranks have in common", "copy the checkpoint again")
    found.iteration = common.get("iteration")
    args = common.get("args")
    return args if isinstance(args, Record | dict) else None


def _topology(store: DcpFolder | ZarrFolder, settings: dict[str, Any]) -> Topology:
    """Who wrote it: at least the ranks that wrote a file, on the mesh that the settings name."""
    sizes = [(axis, settings.get(name)) for axis, name in _MESH]
    mesh = tuple((axis, size) for axis, size in sizes if isinstance(size, int) and size > 1)
    paths = store.paths if isinstance(store, DcpFolder) else set()
    ranks = sorted({int(match[1]) for path in paths if (match := _RANK.fullmatch(path))})
    world = max(math.prod(size for _, size in mesh), ranks[-1] + 1 if ranks else 1)
    return Topology(world, tuple(ranks) or (0,), mesh)


# ------------------------------------------------------------------------------------- gate and up


def _joined(gathers: dict[str, Gather]) -> dict[str, Gather]:
    """The gathers, gate and up that are stored under names of their own as one: [gate; up]."""
    joined: dict[str, Gather] = {}
    for name, gather in gathers.items():
        if not _GATED_HALF.search(name):
            joined[name] = gather
            continue
        whole = name[:-2]
        halves = [gathers.get(whole + end) for end in HALVES]
        gate, up = halves
        if gate is None or up is None:
            missing = whole + HALVES[halves.index(None)]
            raise IncompleteCheckpoint(
                f"{missing}: not in the checkpoint, which holds {name}",
                "the save did not finish, or files were lost; take another step of the run",
            )
        if whole in gathers or (gate.shape, gate.dtype) != (up.shape, up.dtype):
            raise InconsistentCheckpoint(
                f"{whole}: gate of shape {gate.shape} in {gate.dtype}, up of shape {up.shape} in {up.dtype}"
                + (", and the whole beside them" if whole in gathers else ""),
                "the save is damaged, or written by something unknown; please report it",
            )
        joined[whole] = cat([gate, up], 0)
    return joined


def _deinterleaved(gathers: dict[str, Gather], settings: dict[str, Any]) -> dict[str, Gather]:
    """The gathers, with [gate; up] in the experts' first layer where blocks of both were alternating.

    Kernels of mcore 0.17 on want blocks of `moe_mlp_glu_interleave_size` rows in turn. Each tensor
    parallel rank has its own, and saves the halves of it as if they were gate and up.
    """
    if is_gated(settings) is False:
        return gathers
    shared = "moe_shared_expert_glu_interleave_size", "use_grouped_gemm_for_shared_expert"
    if all(settings.get(name) for name in shared):
        raise UnsupportedCheckpoint(
            "moe_shared_expert_glu_interleave_size is set: how shared experts are laid out is not known",
            "export the checkpoint with the Megatron-Bridge that it was trained with",
        )
    block = settings.get("moe_mlp_glu_interleave_size")
    if not block:
        return gathers
    ranks = settings.get("expert_tensor_parallel_size") or settings.get("tensor_model_parallel_size") or 1
    if type(block) is not int or type(ranks) is not int or block < 1 or ranks < 1:
        raise UnsupportedCheckpoint(
            f"moe_mlp_glu_interleave_size is {block!r:.40} and the tensor parallel size {ranks!r:.40},"
            " expected numbers",
            "export the checkpoint with the Megatron-Bridge that it was trained with",
        )
    return {
        name: without_interleave(name, gather, block, ranks) if _EXPERT_FC1.search(name) else gather
        for name, gather in gathers.items()
    }
