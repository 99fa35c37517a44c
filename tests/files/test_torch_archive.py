"""The archive beyond what 16 and 32 bits count: read by torch, and by Python's own zipfile."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from lazymerge.files.dtype import DTYPES
from lazymerge.files.torch_archive import torch_archive

BYTES = DTYPES["uint8"]
GIB = 1 << 30


def write(path: Path, sizes: dict[str, int], marks: dict[str, bytes]) -> None:
    """An archive of tensors of so many bytes, zeros but for the marks in front; what is zero is a hole."""
    archive = torch_archive({name: (BYTES, (size,), size) for name, size in sizes.items()})
    tensors = [record for record in archive.records if record.content is None]
    checksums = []
    with open(path, "wb") as file:
        file.truncate(archive.size)
        for (name, size), record in zip(sizes.items(), tensors, strict=True):
            assert record.size == size
            mark = marks.get(name, b"")
            os.pwrite(file.fileno(), mark, record.data_at)
            checksums.append(crc_of(mark, size))
        for at, content in archive.seal(checksums):
            os.pwrite(file.fileno(), content, at)
        assert os.fstat(file.fileno()).st_size == archive.size  # nothing was written behind the end


def crc_of(mark: bytes, size: int) -> int:
    """The CRC-32 of a mark and the zeros behind it."""
    crc, zeros = zlib.crc32(mark), bytes(min(size, 16 << 20))
    for at in range(len(mark), size, len(zeros)):
        crc = zlib.crc32(zeros[: size - at], crc)
    return crc


def load(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, mmap=True, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("count", [65_529, 65_530, 65_531])
def test_more_records_than_16_bits_count(tmp_path, count):
    """Five records are no tensors: 65,530 of them make 65,535, which is what 16 bits hold."""
    sizes = {f"t{i}": 2 for i in range(count)}
    marks = {f"t{i}": i.to_bytes(4, "little")[:2] for i in range(count)}
    write(tmp_path / "many.bin", sizes, marks)
    with zipfile.ZipFile(tmp_path / "many.bin") as archive:
        assert len(archive.infolist()) == count + 5
        assert archive.read(f"pytorch_model/data/{count - 1}") == marks[f"t{count - 1}"]
    found = load(tmp_path / "many.bin")
    assert len(found) == count
    assert all(bytes(found[name].tolist()) == mark for name, mark in marks.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"large": 4 * GIB + 100, "last": 8},  # a size, an offset and the directory
        {"half": 2 * GIB, "other": 2 * GIB, "last": 8},  # an offset, of a record that is small itself
        {"exact": 4 * GIB - 1, "last": 8},  # the number that stands for "look in the zip64 field"
        {"below": 4 * GIB - 2, "last": 8},
    ],
    ids=lambda sizes: "-".join(sizes),
)
def test_more_bytes_than_32_bits_count(tmp_path, sizes):
    marks = {name: f"<{name}>".encode()[:8] for name in sizes}
    path = tmp_path / "large.bin"
    write(path, sizes, marks)
    assert path.stat().st_blocks * 512 < GIB  # it is a hole
    found = load(path)
    assert {name: len(tensor) for name, tensor in found.items()} == sizes
    for name, mark in marks.items():
        assert bytes(found[name][: len(mark)].tolist()) == mark
        assert not found[name][-1:].any() or len(mark) == sizes[name]
    with zipfile.ZipFile(path) as archive:
        names = list(sizes)
        for key, name in enumerate(names):
            info = archive.getinfo(f"pytorch_model/data/{key}")
            assert (info.file_size, info.compress_size) == (sizes[name], sizes[name])
        last = archive.read(f"pytorch_model/data/{len(names) - 1}")  # its checksum is looked at
        assert last == marks["last"].ljust(8, b"\0")
