"""Where the records of a stored zip archive are: the part of the format that ``torch.save`` uses.

    [local header, name, extra, data, (descriptor)] ...   central directory   (zip64 end)   end record

Sizes and the places of the local headers are read from the central directory, because local
headers may leave their sizes at zero and give them in a descriptor behind the data. Only where the
data starts has to be asked of the local header: its extra field is the padding that aligns the
data. Records are stored, not compressed, so each is a range of the file. Checksums are not checked
here: torch can be told to write zeros instead (``torch.serialization.set_crc32_options``). ``zipfile``
would do, at twenty times the time: there are thousands of records to a file and hundreds of files to a
checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from lazymerge.errors import DamagedFile, SourceError, UnsupportedCheckpoint
from lazymerge.files.local import LocalFile

LOCAL_MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s4H2IH")
_END_MAGIC = b"PK\x05\x06"
_LOCATOR = struct.Struct("<4sIQI")
_LOCATOR_MAGIC = b"PK\x06\x07"
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_MAGIC = b"PK\x06\x06"
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_CENTRAL_MAGIC = b"PK\x01\x02"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_PADDING = b"FB"  # the kind of torch's last part of an extra field
_DESCRIBED = 8  # the flag of a record with a descriptor behind its data
_MAX_COMMENT = 0xFFFF
_MAX_DIRECTORY = 1 << 26  # bytes: a file of a million records
_COPY_AGAIN = "the file is truncated or overwritten; copy it again"


@dataclass(frozen=True, slots=True)
class Entry:
    """One record as the central directory has it: name, local header, bytes, and where it must end.

    `checksum` is the CRC-32 of its data; 0 where none was recorded.
    """

    name: bytes
    header: int  # from the start of the archive
    size: int
    limit: int  # the next record, or the directory
    checksum: int


class _Row(NamedTuple):
    """A record in the central directory."""

    header: int
    size: int
    name: bytes
    checksum: int


class OpenArchive:
    """A part of a file with its descriptor: positional reads without opening the file for each of them.

    Positions are from the start of the part, which is at byte `start` of the file.
    """

    __slots__ = ("fd", "file", "size", "start")

    def __init__(self, file: LocalFile, fd: int, start: int, size: int) -> None:
        self.file = file
        self.fd = fd
        self.start = start
        self.size = size

    @property
    def name(self) -> str:
        """What to call it in a message."""
        whole = self.start == 0 and self.size == self.file.size
        return (
            self.file.name if whole else f"{self.file.name} (bytes {self.start} to {self.start + self.size})"
        )

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; `DamagedFile` if they are not all there."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise DamagedFile(
                f"{self.name}: bytes {offset} to {offset + size} lie outside its {self.size} bytes",
                _COPY_AGAIN,
            )
        try:
            data = os.pread(self.fd, size, self.start + offset)
        except OSError as error:
            raise SourceError(
                f"{self.name}: reading {size} bytes at {offset}: {os.strerror(error.errno or errno.EIO)}",
                "the disk or network file system failed; run the same command again",
            ) from error
        if len(data) < size:  # a signal, a read of more than 2 GiB, or a file that shrank
            rest = bytearray(size - len(data))
            self.file.read_into(self.start + offset + len(data), memoryview(rest))
            data += rest
        return data


@contextmanager
def open_archive(file: LocalFile, start: int = 0, size: int | None = None) -> Iterator[OpenArchive]:
    """`size` bytes of `file` from `start` on, or all of them; `DamagedFile` if it ends before."""
    size = file.size - start if size is None else size
    if start < 0 or size < 0 or start + size > file.size:
        raise DamagedFile(
            f"{file.name}: {file.size} bytes, where bytes {start} to {start + size} should be", _COPY_AGAIN
        )
    with file.opened() as fd:
        yield OpenArchive(file, fd, start, size)


def is_zip(archive: OpenArchive) -> bool:
    """Whether it starts with a record."""
    return archive.size >= len(LOCAL_MAGIC) and archive.read(0, len(LOCAL_MAGIC)) == LOCAL_MAGIC


def read_directory(archive: OpenArchive) -> dict[str, Entry]:
    """The records by name, in the order of the directory.

    Raises `DamagedFile` where the directory contradicts itself or the file: no end record, names
    twice, records that overlap or lie outside; `UnsupportedCheckpoint` for compressed or encrypted records.
    """
    offset, size, count = _find_directory(archive)
    if size > _MAX_DIRECTORY:
        raise DamagedFile(f"{archive.name}: a zip directory of {size} bytes", _COPY_AGAIN)
    rows = _central_rows(archive, archive.read(offset, size), count)
    return _placed(archive, rows, offset)


def fingerprint(file: LocalFile) -> bytes | None:
    """A digest of the names, sizes and checksums of an archive's records; None where it has no checksums."""
    with open_archive(file) as archive:
        entries = list(read_directory(archive).values()) if is_zip(archive) else []
    if not any(entry.checksum for entry in entries):
        return None
    return hashlib.sha256(repr(entries).encode()).digest()


def data_offset(archive: OpenArchive, entry: Entry) -> int:
    """Where the data of a record starts, from the start of the archive, read from its local header."""
    length = _LOCAL.size + len(entry.name)
    header = archive.read(entry.header, length)
    magic, _, flags, _, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack_from(header)
    if magic != LOCAL_MAGIC or name_length != len(entry.name) or header[_LOCAL.size :] != entry.name:
        raise DamagedFile(
            f"{archive.name}: no header of record {_shown(entry.name)} at byte {entry.header}, where its"
            " directory has it",
            _COPY_AGAIN,
        )
    offset = entry.header + length + int(extra_length)
    if offset + entry.size > entry.limit:
        raise DamagedFile(
            f"{archive.name}: record {_shown(entry.name)} ends at byte {offset + entry.size}, where byte"
            f" {entry.limit} belongs to what follows",
            _COPY_AGAIN,
        )
    extra_at = entry.header + length
    if not _starts_at(archive, entry, offset, extra_at, described=bool(flags & _DESCRIBED)):
        raise DamagedFile(
            f"{archive.name}: record {_shown(entry.name)} does not start at byte {offset}, where its header"
            f" puts it (an extra field of {extra_length} bytes)",
            _COPY_AGAIN,
        )
    return offset


def _starts_at(archive: OpenArchive, entry: Entry, offset: int, extra_at: int, described: bool) -> bool:
    """Whether what is around the data bears out where it starts: else a flipped bit would shift it.

    The bytes of the data can look like parts of the extra field, zeros above all, but not like padding.
    """
    end = offset + entry.size
    if described and archive.read(end, len(_DESCRIPTOR_MAGIC)) == _DESCRIPTOR_MAGIC:
        return True
    kinds = _kinds(archive.read(extra_at, offset - extra_at))
    if described:
        return kinds is not None and kinds[-1:] == [_PADDING]
    return end == entry.limit or kinds is not None


def _kinds(extra: bytes) -> list[bytes] | None:
    """The kinds of the parts (kind, length, content) of an extra field; None if it is not made of any."""
    kinds, pos = [], 0
    while pos + 4 <= len(extra):
        kinds.append(extra[pos : pos + 2])
        pos += 4 + int.from_bytes(extra[pos + 2 : pos + 4], "little")
    return kinds if pos == len(extra) else None


def first_record(archive: OpenArchive) -> tuple[str, int]:
    """Name of the record at the start of an archive and where its data is, without the directory."""
    header = archive.read(0, min(_LOCAL.size + 4096, archive.size))
    if len(header) < _LOCAL.size or not header.startswith(LOCAL_MAGIC):
        return "", 0
    *_, name_length, extra_length = _LOCAL.unpack_from(header)
    name = header[_LOCAL.size : _LOCAL.size + name_length]
    return name.decode("utf-8", "replace"), _LOCAL.size + name_length + extra_length


def _find_directory(archive: OpenArchive) -> tuple[int, int, int]:
    """Offset and bytes of the central directory, and the number of its entries."""
    end_offset, end = _end_record(archive)
    _, disk, start_disk, _, count, size, offset, _ = end
    before = end_offset
    locator = archive.read(max(end_offset - _LOCATOR.size, 0), min(_LOCATOR.size, end_offset))
    if locator.startswith(_LOCATOR_MAGIC) and len(locator) == _LOCATOR.size:
        before = int(_LOCATOR.unpack(locator)[2])
        record = archive.read(before, _END64.size)
        magic, _, _, _, disk, start_disk, _, count, size, offset = _END64.unpack(record)
        if magic != _END64_MAGIC:
            raise DamagedFile(f"{archive.name}: no zip64 end record at byte {before}", _COPY_AGAIN)
    if disk or start_disk:
        raise DamagedFile(f"{archive.name}: an archive in several parts", "give the parts joined")
    if offset + size != before:
        raise DamagedFile(
            f"{archive.name}: its zip directory ends at byte {offset + size}, expected {before}",
            _COPY_AGAIN,
        )
    return offset, size, count


def _end_record(archive: OpenArchive) -> tuple[int, tuple[int, ...]]:
    """Where the end record is and what it says."""
    for reach in (_END.size, _END.size + _MAX_COMMENT):  # nearly every archive ends without a comment
        length = min(reach, archive.size)
        tail = archive.read(archive.size - length, length)
        at = tail.rfind(_END_MAGIC)
        while at >= 0:
            if at + _END.size <= length:
                fields = _END.unpack_from(tail, at)
                if at + _END.size + fields[-1] == length:
                    return archive.size - length + at, fields
            at = tail.rfind(_END_MAGIC, 0, at)
    raise DamagedFile(
        f"{archive.name}: no end-of-archive record at the end of its {archive.size} bytes: it is truncated",
        "copy the file again, or save the checkpoint anew; the disk may have been full",
    )


def _central_rows(archive: OpenArchive, directory: bytes, count: int) -> list[_Row]:
    """Every record, as the central directory has it."""
    rows: list[_Row] = []
    pos = 0
    while pos < len(directory):
        if pos + _CENTRAL.size > len(directory) or len(rows) == count:
            break
        magic, _, _, flags, method, _, _, crc, packed, size, name_length, extra, comment, _, _, _, header = (
            _CENTRAL.unpack_from(directory, pos)
        )
        pos += _CENTRAL.size
        name = directory[pos : pos + name_length]
        pos += name_length
        if size == 0xFFFFFFFF or packed == 0xFFFFFFFF or header == 0xFFFFFFFF:
            wide = _zip64_extra(directory[pos : pos + extra], (size, packed, header))
            if wide is None:
                raise DamagedFile(
                    f"{archive.name}: record {_shown(name)} without its zip64 sizes", _COPY_AGAIN
                )
            size, packed, header = wide
        pos += extra + comment
        if magic != _CENTRAL_MAGIC:
            break
        if method or flags & 1 or packed != size:
            raise UnsupportedCheckpoint(
                f"{archive.name}: record {_shown(name)} is compressed or encrypted",
                "torch.save stores records as they are; unpack the archive and save the checkpoint again",
            )
        rows.append(_Row(header, size, name, crc))
    if pos != len(directory) or len(rows) != count:
        raise DamagedFile(
            f"{archive.name}: {len(rows)} records in its zip directory, where its end record says {count}",
            _COPY_AGAIN,
        )
    return rows


def _zip64_extra(extra: bytes, fields: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """The fields, those that are all ones replaced by the next of their 64-bit values."""
    pos = 0
    while pos + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, pos)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{min(length, len(extra) - pos - 4) // 8}Q", extra, pos + 4))
            wide = [next(values, None) if value == 0xFFFFFFFF else value for value in fields]
            size, packed, header = wide
            return None if size is None or packed is None or header is None else (size, packed, header)
        pos += 4 + length
    return None


def _placed(archive: OpenArchive, rows: list[_Row], directory: int) -> dict[str, Entry]:
    """The entries by name, each with the byte before which it has to end."""
    limits: dict[int, int] = {}
    limit = directory
    for header, size, name, _ in sorted(rows, reverse=True):
        if header + _LOCAL.size + len(name) + size > limit:
            raise DamagedFile(
                f"{archive.name}: record {_shown(name)} of {size} bytes at byte {header} runs into what is at"
                f" byte {limit}",
                _COPY_AGAIN,
            )
        limits[header] = limit
        limit = header
    entries: dict[str, Entry] = {}
    for header, size, name, checksum in rows:
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise DamagedFile(
                f"{archive.name}: a record name that is not UTF-8: {_shown(name)}", _COPY_AGAIN
            ) from None
        if text in entries:
            raise DamagedFile(f"{archive.name}: two records named {_shown(name)}", _COPY_AGAIN)
        entries[text] = Entry(name, header, size, limits[header], checksum)
    return entries


def _shown(name: bytes) -> str:
    return repr(name[:100])[1:]
