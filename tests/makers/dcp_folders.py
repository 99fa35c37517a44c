"""Folders of torch.distributed.checkpoint, written by torch in this process, and their metadata changed."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""A chunk: offsets and sizes."""


def save_dcp(
    folder: Path,
    state: Mapping[str, Any],
    cuts: Mapping[str, Sequence[Cut]] | None = None,
    threads: int = 1,
) -> Path:
    """The folder, with a state dict in it (flat: names to values); the tensors in `cuts` in those chunks."""
    cuts = cuts or {}
    flat = {name: value for name, value in state.items() if name not in cuts}
    for name, chunks in cuts.items():
        for at, (offsets, sizes) in enumerate(chunks):
            ends = zip(offsets, sizes, strict=True)
            flat[f"{name}#{at}"] = state[name][tuple(slice(a, a + n) for a, n in ends)].contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there are no other processes
        dcp.save(flat, storage_writer=FileSystemWriter(folder, thread_count=threads), no_dist=True)
    if cuts:
        edited(folder, lambda metadata: [_join(metadata, name, state[name], cuts[name]) for name in cuts])
    return folder


def _join(metadata: Any, name: str, whole: torch.Tensor, chunks: Sequence[Cut]) -> None:
    """Makes one tensor of those that were saved under a number each."""
    entries = metadata.state_dict_metadata
    places = {key.fqn: key for key in metadata.storage_data}
    for at, (offsets, _) in enumerate(chunks):
        info = metadata.storage_data.pop(places[f"{name}#{at}"])
        metadata.storage_data[MetadataIndex(name, offsets)] = info
        entry = entries.pop(f"{name}#{at}")
    entry.size = whole.shape
    entry.chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in chunks]
    entries[name] = entry


def edited(folder: Path, change: Callable[[Any], object]) -> None:
    """Rewrites `.metadata` as torch pickles it, after `change` of the object."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
