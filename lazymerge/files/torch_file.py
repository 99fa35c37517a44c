"""Files of ``torch.save``, read without torch: the saved object with its tensors not yet read.

Two formats. The zip format (torch 1.6 and later) is an archive of stored records:

    <stem>/data.pkl     the object; a tensor is a call of torch._utils._rebuild_tensor_v2
    <stem>/data/<key>   the bytes of one storage each
    <stem>/byteorder    "little" or "big" (torch 2.1 and later)

The legacy format is five pickles one after another (a magic number, the protocol 1001, facts about
the machine, the object, the list of storage keys), and then for every key its number of elements
(int64) and its bytes.

In both, the pickle names storages by persistent ids ``("storage", type, key, location, elements)``,
and a tensor is a storage with an offset, a shape and strides, in elements. Tensors come back as
`StoredTensor` and storages as `Storage`; both say where the bytes are, and every one of them has
been checked to lie in the file. ``torch.Size`` is a tuple, ``torch.bfloat16`` a `DType`, a parameter
the tensor in it. Whatever else the file names stays a `Record`, among them tensors that are not plain
arrays of bytes (sparse, quantised, nested, meta) and tensor subclasses:

    _rebuild_from_type_v2(function, type, arguments, state)
        -> Record(Global(...), (function, type, arguments, state))

where `arguments` is the inner `StoredTensor` if the function rebuilds a plain one, and as it was
otherwise (DTensor, ShardedTensor). Around ``torch.Tensor`` and ``Parameter`` the record is left out.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from lazymerge.errors import DamagedFile, LazymergeError, NotACheckpoint, UnsupportedCheckpoint
from lazymerge.files.inert_pickle import LARGE, START, TruncatedPickle, load, refuse_other
from lazymerge.files.local import LocalFile
from lazymerge.files.stored_tensor import Storage, StoredTensor, TensorReader, storage_id
from lazymerge.files.zip_directory import (
    LOCAL_MAGIC,
    Entry,
    OpenArchive,
    data_offset,
    first_record,
    open_archive,
    read_directory,
)

__all__ = ["Storage", "StoredTensor", "ZippedObject", "is_torch_file", "read_torch_file"]

MAX_PICKLE = 1 << 30  # bytes; that of a model of a million tensors has 400 million
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_COPY_AGAIN = "the file is truncated or overwritten; copy it again"


def is_torch_file(file: LocalFile) -> bool:
    """Whether the file starts like one of ``torch.save``; one small read."""
    with open_archive(file) as archive:
        head = archive.read(0, min(32, archive.size))
        if not head.startswith(LOCAL_MAGIC):
            return _is_legacy(head)
        return first_record(archive)[0].endswith(("/data.pkl", "/version", "/.format_version"))


def read_torch_file(file: LocalFile, *, start: int = 0, size: int | None = None) -> Any:
    """The object that ``torch.save`` wrote into the file, or into `size` bytes of it from `start` on.

    Raises `DamagedFile` for a file that is truncated or contradicts itself, `UnsupportedCheckpoint`
    for what is understood and cannot be read (TorchScript, big-endian, tar, compressed records), and
    `NotACheckpoint` for a file of another kind.
    """
    with open_archive(file, start, size) as archive:
        head = archive.read(0, min(512, archive.size))
        if head.startswith(LOCAL_MAGIC):
            return ZippedObject(archive).load()
        if _is_legacy(head[:32]):
            return _read_legacy(archive)
        raise _another_kind(archive, head)


def _is_legacy(head: bytes) -> bool:
    if head.startswith(f"L{_LEGACY_MAGIC}L".encode()):  # protocols 0 and 1
        return True
    return head.startswith(b"\x80") and _LEGACY_MAGIC.to_bytes(10, "little") in head


def _another_kind(archive: OpenArchive, head: bytes) -> LazymergeError:
    if not head.strip(b"\0"):
        return DamagedFile(
            f"{archive.name}: {archive.size} bytes that start with nothing but zeros, no file of torch.save",
            "it was not written to its end; copy it again or save the checkpoint anew",
        )
    if head[257:262] == b"ustar":
        return UnsupportedCheckpoint(
            f"{archive.name}: a tar file of torch.save before version 0.1.10",
            "load it with an old torch and save it again",
        )
    return NotACheckpoint(
        f"{archive.name}: not a file of torch.save (starts with {head[:8]!r})",
        "give a file written by torch.save; safetensors files and plain pickles are read elsewhere",
    )


# ------------------------------------------------------------------------------ the two formats


class ZippedObject:
    """An archive of the zip format: its pickle, and where its storages are.

    Raises what `read_torch_file` raises for a zip archive. To be used while the archive is open.
    """

    __slots__ = ("_archive", "_entries", "_stem", "pickled")

    def __init__(self, archive: OpenArchive) -> None:
        self._archive = archive
        self._entries = _directory(archive)
        self._stem = _stem(archive, self._entries)
        _check_byte_order(archive, self._entries, self._stem)
        entry = self._entries[f"{self._stem}data.pkl"]
        if entry.size > MAX_PICKLE:
            raise _too_large(archive, entry.size)
        at = data_offset(archive, entry)
        if entry.size > LARGE:
            refuse_other(archive.read(at, START), name=archive.name)
        self.pickled = archive.read(at, entry.size)
        if entry.checksum and zlib.crc32(self.pickled) != entry.checksum:
            raise DamagedFile(
                f"{archive.name}: data.pkl has the checksum {zlib.crc32(self.pickled):08x}, expected"
                f" {entry.checksum:08x}",
                "bytes in the file have changed since it was written; copy it again",
            )

    def locate(self, key: str) -> tuple[int, int]:
        """Where the bytes of a storage start in the file, and how many there are."""
        entry = self._entries.get(f"{self._stem}data/{key}")
        if entry is None:
            raise DamagedFile(f"{self._archive.name}: no record for storage {key[:100]!r}", _COPY_AGAIN)
        return self._archive.start + data_offset(self._archive, entry), entry.size

    def load(self) -> Any:
        """The saved object, with its tensors not yet read."""
        name = self._archive.name
        reader = TensorReader(self._archive.file, name, self.locate)
        return load(self.pickled, name=name, persistent_load=reader.storage, known=reader.known())[0]


def _directory(archive: OpenArchive) -> dict[str, Entry]:
    try:
        return read_directory(archive)
    except DamagedFile as error:
        least = _least_size(archive)
        if least is None or least <= archive.size:
            raise
        raise DamagedFile(f"{error.problem}; expected at least {least} bytes", error.hint) from None


def _stem(archive: OpenArchive, entries: dict[str, Entry]) -> str:
    """The folder of the records, with its slash."""
    stems = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")]
    if len(stems) > 1:
        raise DamagedFile(
            f"{archive.name}: {len(stems)} records named data.pkl, where there should be one", _COPY_AGAIN
        )
    if not stems:
        raise NotACheckpoint(
            f"{archive.name}: a zip archive without a record data.pkl, no file of torch.save",
            "give a file written by torch.save",
        )
    if f"{stems[0]}constants.pkl" in entries or any(name.startswith(f"{stems[0]}code/") for name in entries):
        raise UnsupportedCheckpoint(
            f"{archive.name}: a TorchScript archive, which holds a program",
            "load it with torch.jit.load and save its state_dict with torch.save",
        )
    return stems[0]


def _check_byte_order(archive: OpenArchive, entries: dict[str, Entry], stem: str) -> None:
    entry = entries.get(f"{stem}byteorder")
    if entry is None or entry.size > 16:
        return
    if archive.read(data_offset(archive, entry), entry.size) == b"big":
        raise _big_endian(archive)


def _read_legacy(archive: OpenArchive) -> Any:
    data, positions = _legacy_pickles(archive)
    places = _legacy_places(archive, data, positions)

    def locate(key: str) -> tuple[int, int]:
        if key not in places:
            raise DamagedFile(f"{archive.name}: no bytes for storage {key[:100]!r}", _COPY_AGAIN)
        return places[key]

    reader = TensorReader(archive.file, archive.name, locate)
    return load(
        data, name=archive.name, start=positions[0], persistent_load=reader.storage, known=reader.known()
    )[0]


def _legacy_places(
    archive: OpenArchive, data: bytes, positions: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    """Where the bytes of each storage start in the file, and how many there are.

    They follow the list of keys, but only the persistent ids in the object say how large an element is.
    """
    named: dict[str, tuple[int, int]] = {}  # bytes of an element, elements

    def note(pid: Any) -> None:
        fields = storage_id(archive.name, pid)
        if fields is not None:
            named[fields[1]] = (fields[0].itemsize, fields[2])

    load(data, name=archive.name, start=positions[0], persistent_load=note)
    keys, offset = load(data, name=archive.name, start=positions[1])
    keys = _checked_keys(archive, keys)
    sizes = {key: named.get(key, (1, 0)) for key in keys}
    least = offset + sum(8 + itemsize * count for itemsize, count in sizes.values())
    if least > archive.size:
        raise DamagedFile(
            f"{archive.name}: {archive.size} bytes, expected at least {least}: it is truncated", _COPY_AGAIN
        )
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        (count,) = struct.unpack("<q", archive.read(offset, 8))
        nbytes = count * sizes[key][0]
        if count < 0 or offset + 8 + nbytes > archive.size:
            raise DamagedFile(
                f"{archive.name}: {archive.size} bytes, where storage {key[:100]!r} has {count} elements from"
                f" byte {offset + 8} on",
                _COPY_AGAIN,
            )
        places[key] = (archive.start + offset + 8, nbytes)
        offset += 8 + nbytes
    return places


def _checked_keys(archive: OpenArchive, keys: Any) -> list[str]:
    if type(keys) is not list or not all(type(key) is str for key in keys) or len(set(keys)) != len(keys):
        raise DamagedFile(f"{archive.name}: no list of storage keys after the object", _COPY_AGAIN)
    return keys


def _legacy_pickles(archive: OpenArchive) -> tuple[bytes, tuple[int, int]]:
    """The start of the file as far as its pickles go, and where the object and the list of keys start.

    Nothing says how long the pickles are, so more and more of the file is read until they end.
    """
    size = 1 << 18
    while True:
        data = archive.read(0, min(size, archive.size))
        try:
            return data, _legacy_positions(archive, data)
        except TruncatedPickle:
            if size >= archive.size:
                raise
        if size >= MAX_PICKLE:
            raise _too_large(archive, size)
        size *= 8


def _legacy_positions(archive: OpenArchive, data: bytes) -> tuple[int, int]:
    magic, pos = load(data, name=archive.name)
    protocol, pos = load(data, name=archive.name, start=pos)
    system, obj = load(data, name=archive.name, start=pos)
    if magic != _LEGACY_MAGIC or protocol != _LEGACY_PROTOCOL or type(system) is not dict:
        raise DamagedFile(f"{archive.name}: not the start of a legacy file of torch.save", _COPY_AGAIN)
    if system.get("little_endian") is False:
        raise _big_endian(archive)
    _, keys = load(data, name=archive.name, start=obj, persistent_load=lambda pid: None)
    load(data, name=archive.name, start=keys)
    return obj, keys


def _least_size(archive: OpenArchive) -> int | None:
    """The bytes that a truncated archive had at least: its first record still names its storages."""
    name, offset = first_record(archive)
    sizes: dict[str, int] = {}

    def note(pid: Any) -> None:
        fields = storage_id(archive.name, pid)
        if fields is not None:
            sizes[fields[1]] = fields[0].itemsize * fields[2]

    if not name.endswith("/data.pkl"):
        return None
    for limit in (1 << 20, 1 << 24, 1 << 28):
        data = archive.read(0, min(limit, archive.size))
        try:
            _, end = load(data, name=archive.name, start=offset, persistent_load=note)
        except TruncatedPickle:
            continue
        except LazymergeError:
            return None
        return end + sum(sizes.values())
    return None


def _big_endian(archive: OpenArchive) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{archive.name}: saved on a big-endian machine",
        "load it with torch and save it again on a little-endian machine",
    )


def _too_large(archive: OpenArchive, size: int) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{archive.name}: a pickle of {size} bytes or more, where {MAX_PICKLE} are read at most",
        "save the weights without the objects beside them",
    )
