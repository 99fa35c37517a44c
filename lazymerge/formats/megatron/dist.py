"""Megatron's distributed checkpoints: one folder whose tensors are whole, whatever the parallelism was.

    torch_dist     .metadata, *.distcp, metadata.json     keys: lazymerge.formats.megatron.keys
    zarr           <key>/.zarray, metadata.json           the same keys
    torch_dcp      .metadata, *.distcp                    FSDP2: names of modules, one a layer
    fsdp_dtensor   .metadata, *.distcp                    Megatron-FSDP: the same, gate and up apart

Tensor, pipeline and expert parallelism leave no trace in them but in how tensors are cut. Where the
trainer's arguments are, lazymerge.formats.megatron.arguments knows. The optimizer in the same folder is
never read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Topology
from lazymerge.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.formats.dcp import DcpFolder, read_dcp
from lazymerge.formats.megatron.arguments import read_arguments
from lazymerge.formats.megatron.found import Found
from lazymerge.formats.megatron.grid import size
from lazymerge.formats.megatron.joining import without_interleave
from lazymerge.formats.megatron.keys import HALVES, kind_left_out, parse
from lazymerge.formats.megatron.names import is_adapter
from lazymerge.formats.megatron.settings import is_gated
from lazymerge.formats.megatron.told import check_told
from lazymerge.formats.zarr import ZarrFolder, holds_zarr, read_zarr
from lazymerge.gather import Gather, cat

_GATED_HALF = re.compile(r"\.linear_fc1\.(?:weight|bias)_[wv]$")
_EXPERT_FC1 = re.compile(r"\.local_experts\.[0-9]+\.linear_fc1\.(?:weight|bias)$")
_OF_A_MODULE = re.compile(r"(?<!\.experts)\.experts\.(local_experts\.|linear_fc1\.)")  # names of modules
_RANK = re.compile(r"__([0-9]{1,7})_[0-9]+\.distcp")
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
    found.settings = read_arguments(folder, store, found)
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
    found.gathers = _deinterleaved(_joined(found.gathers), found.settings, origins)
    check_told(folder, found.gathers, found.settings)
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
    kinds = ", ".join(sorted({_kind(name) or name for name in (*store.others, *store.objects)})[:8])
    raise UnsupportedCheckpoint(
        f"{folder}: holds no model, {f'only {kinds}' if kinds else 'nor anything else'}",
        _where_the_model_is(folder),
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

    Raises `IncompleteCheckpoint` for what may be a weight and has none of its data.
    """
    kinds = {name: _kind(name) for name in names}
    lost = next((name for name, kind in kinds.items() if kind is None), None)
    if lost is not None:
        raise IncompleteCheckpoint(
            f"{lost}: is no tensor in this checkpoint (an object, or a folder without its .zarray), and it is"
            " not known to be anything but a weight",
            "copy the checkpoint again, or take the folder away if it is none of it",
        )
    return {
        kind: f"no weight of the model ({count} {'entry' if count == 1 else 'entries'})"
        for kind, count in Counter(kinds.values()).items()
        if kind is not None
    }


def _kind(name: str) -> str | None:
    """What is left out under a name: what has no dot in it is no parameter of a module."""
    stem = name.partition("/")[0]
    return kind_left_out(name) or (None if "." in stem else stem[:200])


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


def _deinterleaved(
    gathers: dict[str, Gather], settings: dict[str, Any], origins: Mapping[str, str]
) -> dict[str, Gather]:
    """The gathers, with [gate; up] in the experts' first layer where blocks of both were alternating.

    Kernels of mcore 0.17 on want blocks of `moe_mlp_glu_interleave_size` rows in turn. Each tensor
    parallel rank has its own, and saves the halves of it as if they were gate and up. Experts that are
    modules of their own (SequentialMLP) have nothing of it, whatever the setting. `origins` are the names
    in the files.
    """
    if is_gated(settings) is False:
        return gathers
    shared = "moe_shared_expert_glu_interleave_size", "use_grouped_gemm_for_shared_expert"
    if all(settings.get(name) for name in shared):
        raise UnsupportedCheckpoint(
            "moe_shared_expert_glu_interleave_size is set: how shared experts are laid out is not known",
            "export the checkpoint with the Megatron-Bridge that it was trained with",
        )
    block = size(settings, "moe_mlp_glu_interleave_size", None)
    if block is None:
        return gathers
    tensor_ranks = size(settings, "tensor_model_parallel_size", 1)
    ranks = size(settings, "expert_tensor_parallel_size", tensor_ranks) or 1
    return {
        name: without_interleave(name, gather, block, ranks)
        if _EXPERT_FC1.search(name) and _is_grouped(origins.get(name) or origins[name + HALVES[0]], settings)
        else gather
        for name, gather in gathers.items()
    }


def _is_grouped(key: str, settings: Mapping[str, Any]) -> bool:
    """Whether the experts under a stored name were one grouped layer.

    Names of modules say so. The keys of torch_dist and zarr are alike for both, so that it takes the
    arguments: Megatron groups experts by `moe_grouped_gemm`, but never in its own (`local`) layers.
    """
    module = _OF_A_MODULE.search(key)
    if module is not None:
        return module[1] == "linear_fc1."
    grouped = settings.get("moe_grouped_gemm")
    if grouped is False or settings.get("transformer_impl") == "local":
        return False
    if grouped is not True:
        raise UnsupportedCheckpoint(
            f"{key}: moe_mlp_glu_interleave_size is set, which grouped experts follow and others do not, and"
            f" which they are is not recorded (moe_grouped_gemm is {str(grouped)[:50]!r})",
            "export the checkpoint with the Megatron-Bridge that it was trained with",
        )
    return True
