"""Arrays of zarr, written by hand after version 2 of its specification."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests.checks import raw

TYPES = {torch.bfloat16: "bfloat16", torch.float32: "<f4", torch.int64: "<i8", torch.bool: "|b1"}


def write_array(path: Path, tensor: torch.Tensor, chunks: tuple[int, ...], **header: Any) -> None:
    """An array as zarr stores it: chunks of one size, those at the ends filled up with ones."""
    path.mkdir(parents=True)
    fields = {
        "chunks": list(chunks),
        "compressor": None,
        "dtype": TYPES[tensor.dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(tensor.shape),
        "zarr_format": 2,
    }
    (path / ".zarray").write_text(json.dumps({**fields, **header}))
    grid = [-(-size // step) for size, step in zip(tensor.shape, chunks, strict=True)]
    for at in product(*map(range, grid)):
        whole = torch.ones(chunks, dtype=tensor.dtype)
        part = tensor[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, chunks, strict=True))]
        whole[tuple(slice(0, n) for n in part.shape)] = part
        (path / (".".join(map(str, at)) or "0")).write_bytes(raw(whole))
