"""safetensors headers: what the library writes is read, everything else is refused by name and size."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lazymerge.errors import DamagedFile, LazymergeError, UnsupportedCheckpoint
from lazymerge.files.dtype import DTYPES
from lazymerge.files.local import LocalFile
from lazymerge.files.safetensors_file import read_safetensors


def content(region):
    raw = bytearray(region.extent)
    region.source.read_into(region.offset, memoryview(raw))
    return bytes(raw)


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.code is not None])
def test_what_the_library_writes(tmp_path, dtype):
    raw = torch.from_numpy(np.arange(48, dtype=np.uint8) % 2)
    whole = raw.view(getattr(torch, dtype))
    tensors = {"a": whole.clone().reshape(2, -1), "b": whole[:0].clone(), "c.d": whole[:1].clone()}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt", "more": "x"})
    found = read_safetensors(LocalFile(tmp_path / "x.safetensors"))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype.name == dtype
        assert found[name].shape == tuple(tensor.shape)
        nbytes = tensor.numel() * tensor.element_size()
        assert content(found[name]) == bytes(raw[:nbytes].numpy())


def written(path, header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = {"a": entry(), "b": entry(offsets=(8, 16))}

BAD = {
    "one byte short": (GOOD, b"x" * 15, "15 bytes"),
    "one byte long": (GOOD, b"x" * 17, None),
    "a gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, b"x" * 20, "'b' begins at byte 12"),
    "an overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, b"x" * 12, "'b' begins at byte 4"),
    "not from the start": ({"a": entry(offsets=(8, 16))}, b"x" * 16, "begins at byte 8"),
    "a wrong size": ({"a": entry(shape=(3,))}, b"x" * 8, "8 bytes, expected 12"),
    "a size beyond numbers": ({"a": entry(shape=(1 << 62, 1 << 62))}, b"x" * 8, "expected"),
    "negative offsets": ({"a": entry(offsets=(-8, 0))}, b"", "'a'"),
    "offsets the wrong way": ({"a": entry(offsets=(8, 0))}, b"x" * 8, "'a'"),
    "a negative shape": ({"a": entry(shape=(-2,))}, b"x" * 8, "'a'"),
    "a shape of booleans": ({"a": {**entry(), "shape": [True, 2]}}, b"x" * 8, "'a'"),
    "a shape of fractions": ({"a": {**entry(), "shape": [2.0]}}, b"x" * 8, "'a'"),
    "three offsets": ({"a": entry(offsets=(0, 8, 8))}, b"x" * 8, "'a'"),
    "an entry that is none": ({"a": []}, b"", "'a'"),
    "a key twice": (b'{"a": 1, "a": 2}', b"", "twice"),
    "not a number": (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', b"x" * 8, "NaN"),
    "no object": (b"[]", b"", "no JSON object"),
    "no JSON": (b"{]", b"", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not JSON"),
    "deep": (b'{"a":' + b"[" * 200_000, b"", "not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_damage(tmp_path, case):
    header, data, words = BAD[case]
    path = written(tmp_path / "x.safetensors", header, data)
    with pytest.raises(DamagedFile) as caught:
        read_safetensors(LocalFile(path))
    assert str(path) in caught.value.problem
    if words is None or "short" in case:
        words = (
            f"{path.stat().st_size} bytes, expected {path.stat().st_size + (1 if 'short' in case else -1)}"
        )
    assert words in caught.value.problem


@pytest.mark.parametrize("size", [0, 1, 7, 10, 2**63, 2**64 - 1, 99_999_999])
def test_a_header_length_that_lies(tmp_path, size):
    path = written(tmp_path / "x.safetensors", GOOD, b"x" * 16, size)
    with pytest.raises(DamagedFile):
        read_safetensors(LocalFile(path))


@pytest.mark.parametrize("length", range(8))
def test_a_file_that_is_hardly_there(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\1" * length)
    with pytest.raises(DamagedFile, match=f"{length} bytes"):
        read_safetensors(LocalFile(path))


def test_a_type_that_is_not_known(tmp_path):
    path = written(tmp_path / "x.safetensors", {"a": entry(dtype="F6_E2M3")}, b"x" * 8)
    with pytest.raises(UnsupportedCheckpoint, match="F6_E2M3"):
        read_safetensors(LocalFile(path))


def test_every_truncation_is_refused(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "x.safetensors").write_bytes(whole[:length])
        with pytest.raises(LazymergeError):
            read_safetensors(LocalFile(tmp_path / "x.safetensors"))
