"""The zip archive that ``torch.save`` writes, laid out ahead so that it can be filled in any order.

    [local header | name | padding] data     for each record; data starts at a multiple of 64
    central directory, zip64 end records where sizes or offsets need them, end record

The records are stored, never compressed: ``data.pkl`` (the pickle of names, dtypes and shapes),
``byteorder``, ``data/N`` (the elements of tensor N), ``version``. Checksums are known only when the
data is there, so `Archive.seal` is called last and gives the headers.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lazymerge.files.dtype import DType
from lazymerge.files.region import contiguous_strides

_ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF
_TYPED = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
"""Element types that have a storage class; the others are written as untyped bytes."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record of the archive: its name and size, and where its header and its data start (bytes)."""

    name: bytes
    size: int
    header_at: int
    data_at: int
    content: bytes | None  # None: a tensor's elements


@dataclass(frozen=True, slots=True)
class Archive:
    """A laid-out archive: `records` in file order, `size` in bytes, all headers included."""

    records: tuple[Record, ...]
    size: int

    def seal(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """(offset, bytes) of everything but tensor data, given the CRC-32 of each tensor record in order."""
        remaining = iter(checksums)
        crcs = [next(remaining) if r.content is None else zlib.crc32(r.content) for r in self.records]
        written = []
        for record, crc in zip(self.records, crcs, strict=True):
            written.append((record.header_at, _local_header(record, crc)))
            if record.content is not None:
                written.append((record.data_at, record.content))
        directory = b"".join(_central_header(r, crc) for r, crc in zip(self.records, crcs, strict=True))
        last = self.records[-1]
        at = last.data_at + last.size
        return [*written, (at, directory + _end(len(self.records), len(directory), at))]


def torch_archive(tensors: Mapping[str, tuple[DType, tuple[int, ...], int]]) -> Archive:
    """The archive of a state dict of these tensors, name -> (dtype, shape, bytes), one storage each."""
    contents: list[tuple[str, int, bytes | None]] = []
    pickled = _pickle(tensors)
    contents.append(("data.pkl", len(pickled), pickled))
    contents.append((".format_version", 1, b"1"))
    contents.append((".storage_alignment", 2, b"64"))
    contents.append(("byteorder", 6, b"little"))
    contents += [(f"data/{key}", nbytes, None) for key, (_, _, nbytes) in enumerate(tensors.values())]
    contents.append(("version", 2, b"3\n"))
    records = []
    at = 0
    for stem, size, content in contents:
        name = b"pytorch_model/" + stem.encode()
        head = 30 + len(name) + _zip64_size(size, 0)
        data_at = at + head + 4  # the padding is an extra field of its own, with a header of four bytes
        data_at += -data_at % _ALIGNMENT
        records.append(Record(name, size, at, data_at, content))
        at = data_at + size
    directory = sum(46 + len(r.name) + _zip64_size(r.size, r.header_at) for r in records)
    return Archive(tuple(records), at + directory + len(_end(len(records), directory, at)))


def _zip64_size(size: int, offset: int) -> int:
    return len(_zip64(size, offset))


def _zip64(size: int, offset: int) -> bytes:
    """The extra field that holds what does not fit 32 bits."""
    values = [size, size] if size >= _LIMIT else []
    values += [offset] if offset >= _LIMIT else []
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _local_header(record: Record, crc: int) -> bytes:
    extra = _zip64(record.size, 0)
    padding = record.data_at - record.header_at - 30 - len(record.name) - len(extra) - 4
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    size = min(record.size, _LIMIT)
    fixed = (b"PK\x03\x04", 45 if record.size >= _LIMIT else 20, 0, 0, 0, 0x21, crc, size, size)
    return struct.pack("<4sHHHHHIIIHH", *fixed, len(record.name), len(extra)) + record.name + extra


def _central_header(record: Record, crc: int) -> bytes:
    extra = _zip64(record.size, record.header_at)
    size, at = min(record.size, _LIMIT), min(record.header_at, _LIMIT)
    version = 45 if extra else 20
    fixed = (b"PK\x01\x02", version, version, 0, 0, 0, 0x21, crc, size, size)
    tail = (len(record.name), len(extra), 0, 0, 0, 0, at)
    return struct.pack("<4sHHHHHHIIIHHHHHII", *fixed, *tail) + record.name + extra


def _end(count: int, size: int, at: int) -> bytes:
    """The end record, with the zip64 ones before it where 32 (or 16) bits do not do."""
    big = b""
    if count >= 0xFFFF or size >= _LIMIT or at >= _LIMIT:
        big = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
        big += struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    few = min(count, 0xFFFF)
    return big + struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, min(size, _LIMIT), min(at, _LIMIT), 0
    )


def _pickle(tensors: Mapping[str, tuple[DType, tuple[int, ...], int]]) -> bytes:
    """A protocol 2 pickle of an OrderedDict of tensors, as ``torch.load(weights_only=True)`` reads it."""
    out = [b"\x80\x02", _global("collections", "OrderedDict"), b")R("]
    for key, (name, (dtype, shape, nbytes)) in enumerate(tensors.items()):
        storage = _TYPED.get(dtype.name)
        count = nbytes // dtype.itemsize if storage else nbytes
        kind = (
            _global("torch", storage + "Storage") if storage else _global("torch.storage", "UntypedStorage")
        )
        persistent = b"(" + _text("storage") + kind + _text(str(key)) + _text("cpu") + _int(count) + b"tQ"
        rest = _int(0) + _ints(shape) + _ints(contiguous_strides(shape)) + b"\x89"
        hooks = _global("collections", "OrderedDict") + b")R"
        if storage:
            rebuild, last = _global("torch._utils", "_rebuild_tensor_v2"), b""
        else:
            rebuild, last = _global("torch._utils", "_rebuild_tensor_v3"), _global("torch", dtype.name)
        order = hooks + last if not storage else hooks
        out.append(_text(name) + rebuild + b"(" + persistent + rest + order + b"tR")
    return b"".join([*out, b"u."])


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _ints(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"
