"""The safetensors container: eight bytes of header length, a JSON header, the tensors back to back.

    <u64 little-endian: n> <n bytes of JSON, padded with spaces to a multiple of 8> <data>

The layout here is that of the library's own writer: tensors by element type (largest first, in
the order of `lazymerge.files.dtype`), then by name, without gaps; ``__metadata__`` holds the one key
``format``. A file laid out so is byte for byte what ``safetensors.torch.save_file`` writes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from lazymerge.files.dtype import DType

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything in a file goes: `offsets` are bytes from its start, `size` its length in bytes."""

    header: bytes
    offsets: dict[str, int]
    size: int


def safetensors_layout(tensors: Mapping[str, tuple[DType, tuple[int, ...], int]]) -> Layout:
    """The layout of a file of these tensors, name -> (dtype, shape, bytes); offsets in file order.

    Every dtype has a safetensors code (the caller has checked).
    """
    ordered = sorted(tensors, key=lambda name: (tensors[name][0].order, name.encode()))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    offsets = {}
    for name in ordered:
        dtype, shape, nbytes = tensors[name]
        if dtype.code == "F4":  # two elements in a byte; the header counts elements
            shape = (*shape[:-1], shape[-1] * 2) if shape else shape
        header[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [at, at + nbytes]}
        offsets[name] = at
        at += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return Layout(
        struct.pack("<Q", len(text)) + text,
        {name: start + offset for name, offset in offsets.items()},
        start + at,
    )
