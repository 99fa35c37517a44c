"""What is fuzzed: each target reads bytes as a file of one kind; its seeds are real files of that kind.

A target raises nothing but `LazymergeError`, which it swallows: whatever else comes out is a finding.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazymerge.conversions.adapters.adapter import Adapter
from lazymerge.conversions.adapters.read import read_adapter
from lazymerge.conversions.adapters.settings import understand
from lazymerge.errors import LazymergeError
from lazymerge.files.inert_pickle import load
from lazymerge.files.local import LocalFile
from lazymerge.files.safetensors_file import read_safetensors
from lazymerge.files.torch_file import read_torch_file
from lazymerge.files.zip_directory import data_offset, open_archive, read_directory
from lazymerge.formats import fsdp
from lazymerge.formats.dcp import read_dcp
from lazymerge.formats.huggingface import read_index
from lazymerge.formats.registry import OpenOptions
from lazymerge.formats.staged import read_staged
from lazymerge.formats.zarr import read_zarr
from lazymerge.manifest import check_manifest
from lazymerge.sidecars import find_sidecars


@dataclass(frozen=True)
class Target:
    """`read` gets a folder where `name` has the bytes; `seeds` makes honest ones, in a folder of its own."""

    name: str
    read: Callable[[Path], object]
    seeds: Callable[[Path], list[bytes]]
    beside: Callable[[Path], object] = lambda folder: None  # what stands beside the file


class Fuzzed:
    """A target in a scratch folder, which is used again for each input."""

    def __init__(self, target: Target) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self._scratch.name)
        self.target = target
        target.beside(self.folder)

    def __call__(self, data: bytes) -> None:
        """Read the bytes; whatever is raised is a finding."""
        (self.folder / self.target.name).write_bytes(data)
        with contextlib.suppress(LazymergeError):
            self.target.read(self.folder)

    def close(self) -> None:
        self._scratch.cleanup()


# ------------------------------------------------------------------------------ seeds


def _saved(value: Any, **options: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def _state() -> dict[str, Any]:
    import torch

    return {"w": torch.arange(6.0).reshape(2, 3), "v": torch.zeros(3, dtype=torch.bfloat16), "step": 1}


def _pickles(folder: Path) -> list[bytes]:
    value = [OrderedDict(a=(1, 2.5, None)), Namespace(x={1, 2}, y=b"raw" * 9), "text", -3, 1 << 70]
    return [pickle.dumps(value, protocol) for protocol in range(6)]


def _torch_files(folder: Path) -> list[bytes]:
    return [_saved(_state()), _saved(_state(), _use_new_zipfile_serialization=False)]


def _ranks(folder: Path) -> list[bytes]:
    from torch.distributed.tensor import Shard

    from tests.makers.dtensors import dtensors

    made = dtensors(folder / "ranks", (("fsdp", 1),), {"w": (_state()["w"], (Shard(0),))})
    return [made.rank_file(0).read_bytes()]


def _safetensors(folder: Path) -> list[bytes]:
    from safetensors.torch import save

    return [save({name: value for name, value in _state().items() if name != "step"}, {"format": "pt"})]


def _dcp(folder: Path) -> list[bytes]:
    from tests.makers.dcp_folders import save_dcp

    return [(save_dcp(folder / "dcp", _state()) / ".metadata").read_bytes()]


def _beside_dcp(folder: Path) -> None:
    from tests.makers.dcp_folders import save_dcp

    save_dcp(folder, _state())


def _zarr(folder: Path) -> list[bytes]:
    from tests.makers.zarr_arrays import write_array

    write_array(folder / "w", _state()["w"], (2, 3))
    return [(folder / "w" / ".zarray").read_bytes()]


def _beside_zarr(folder: Path) -> None:
    from tests.makers.zarr_arrays import write_array

    write_array(folder / "w", _state()["w"], (2, 3))


def _text(*values: Any) -> Callable[[Path], list[bytes]]:
    return lambda folder: [json.dumps(value).encode() for value in values]


ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "rank_pattern": {"w": 2},
    "alpha_pattern": {"w|v": 2.5},
    "modules_to_save": ["score"],
    "trainable_token_indices": {"embed": [1, 2]},
    "use_dora": False,
    "bias": "none",
}


def _beside_adapter(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(folder)[0])


def _manifest(folder: Path) -> list[bytes]:
    from lazymerge.manifest import make_manifest

    _beside_manifest(folder)
    return [make_manifest(folder)]


def _beside_manifest(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(_safetensors(folder)[0])


# ------------------------------------------------------------------------------ readers


def _read_zip(folder: Path) -> None:
    with open_archive(LocalFile(folder / "x.zip")) as archive:
        for entry in read_directory(archive).values():
            data_offset(archive, entry)


def _read_adapter(folder: Path) -> None:
    adapter: Adapter = read_adapter(folder)
    settings = understand(adapter)
    settings.scale("model.layers.0.w")
    settings.is_saved_whole("model.score")


def _read_ranks(folder: Path) -> None:
    checkpoint = fsdp.FORMAT.open([folder], OpenOptions())
    list(checkpoint.copies())


def _read_dcp(folder: Path) -> None:
    opened = read_dcp(folder)
    for name in opened.tensors:
        list(opened.gather(name).pieces())


TARGETS = {
    "pickle": Target(
        "x.pkl",
        lambda folder: load((folder / "x.pkl").read_bytes(), name="x.pkl", persistent_load=lambda pid: pid),
        _pickles,
    ),
    "zip": Target("x.zip", _read_zip, lambda folder: _torch_files(folder)[:1]),
    "torch_file": Target("x.pt", lambda folder: read_torch_file(LocalFile(folder / "x.pt")), _torch_files),
    "rank_file": Target("model_world_size_1_rank_0.pt", _read_ranks, _ranks),
    "safetensors": Target(
        "x.safetensors", lambda folder: read_safetensors(LocalFile(folder / "x.safetensors")), _safetensors
    ),
    "dcp_metadata": Target(".metadata", _read_dcp, _dcp, _beside_dcp),
    "zarr": Target("w/.zarray", lambda folder: read_zarr(folder), _zarr, _beside_zarr),
    "index": Target(
        "model.safetensors.index.json",
        read_index,
        _text({"metadata": {"total_size": 4}, "weight_map": {"w": "a.safetensors"}}),
    ),
    "adapter": Target("adapter_config.json", _read_adapter, _text(ADAPTER), _beside_adapter),
    "stage": Target("lazymerge-stage.json", read_staged, _text({"format": "megatron", "settings": {"a": 1}})),
    "config": Target(
        "config.json",
        lambda folder: find_sidecars([folder]),
        _text({"architectures": ["X"], "auto_map": {"AutoModel": "m.X"}, "torch_dtype": "float32"}),
    ),
    "manifest": Target("lazymerge-manifest.json", check_manifest, _manifest, _beside_manifest),
}
