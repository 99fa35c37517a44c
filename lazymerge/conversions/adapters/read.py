"""PEFT's folders: adapter_config.json, and adapter_model.safetensors or adapter_model.bin.

The config is a JSON object with the fields of PEFT's LoraConfig. The weights are a flat state dict with the
names that the adapted model has, without the adapter's own name:

    base_model.model.<module>.lora_A.weight     [rank, in]           of convolutions [rank, in, *kernel]
    base_model.model.<module>.lora_B.weight     [out, rank]          [out, rank, 1, ...]
    base_model.model.<module>.lora_embedding_A  [rank, vocabulary], lora_embedding_B [size, rank]
    base_model.model.<module>.lora_magnitude_vector   [out]
    base_model.model.<module>.weight            a module that was saved whole
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lazymerge.conversions.adapters.adapter import BIN as BIN
from lazymerge.conversions.adapters.adapter import CONFIG, WEIGHTS, Adapter
from lazymerge.errors import DamagedFile, IncompleteCheckpoint, NotACheckpoint, UnsupportedCheckpoint
from lazymerge.files.json_text import strict
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.safetensors_file import read_safetensors
from lazymerge.files.stored_tensor import StoredTensor
from lazymerge.files.torch_file import read_torch_file
from lazymerge.gather import Gather, of_region

_LARGEST_CONFIG = 1 << 24  # bytes
_COPY_AGAIN = "copy the adapter's folder again"


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder of PEFT's, its tensors not yet read.

    Raises `NotACheckpoint` for a folder that holds none, `IncompleteCheckpoint` where one of the two files
    is missing, and what reading a damaged file raises.
    """
    config, weights = folder / CONFIG, [folder / name for name in (WEIGHTS, BIN)]
    there = next((path for path in weights if os.path.lexists(path)), None)
    if there is None and not config.exists():
        raise NotACheckpoint(
            f"{folder}: holds neither {CONFIG} nor {WEIGHTS}", "give the folder that PEFT saved an adapter in"
        )
    if there is None or not config.exists():
        raise IncompleteCheckpoint(
            f"{folder}: holds no {CONFIG if there else f'{WEIGHTS} (nor {BIN})'}", _COPY_AGAIN
        )
    pool = Descriptors()
    files = LocalFile(config, pool), LocalFile(there, pool)
    gathers = _safetensors(files[1]) if there.name == WEIGHTS else _torch_file(files[1])
    if not gathers:
        raise DamagedFile(f"{there}: holds no tensors", _COPY_AGAIN)
    return Adapter(str(folder), _config(files[0]), gathers, files)


def _config(file: LocalFile) -> dict[str, Any]:
    try:
        if file.size > _LARGEST_CONFIG:
            raise ValueError(f"{file.size} bytes")
        config = strict(file.read(0, file.size))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{file.path}: not JSON ({str(error)[:100]})", _COPY_AGAIN) from None
    if not isinstance(config, dict):
        raise DamagedFile(f"{file.path}: no JSON object", _COPY_AGAIN)
    return config


def _safetensors(file: LocalFile) -> dict[str, Gather]:
    return {name: of_region(region) for name, region in read_safetensors(file).items()}


def _torch_file(file: LocalFile) -> dict[str, Gather]:
    found = read_torch_file(file)
    if not isinstance(found, dict):
        raise UnsupportedCheckpoint(f"{file.path}: holds no dict of tensors", "save the adapter with PEFT")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise UnsupportedCheckpoint(
                f"{file.path}: {str(name)[:100]} is no plain tensor", "save the adapter with PEFT"
            )
    return {name: of_region(value.region()) for name, value in found.items()}
