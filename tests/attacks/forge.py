"""Files of any content, honest or not: pickles an instruction at a time, zips and safetensors field by field.

    pickled({"w": tensor("0", (2, 2))})            a state dict as torch pickles it, protocol 2
    torch_file(folder / "model.pt", pickled(...), {"0": bytes(16)})
    safetensors(folder / "model.safetensors", {"w": {"dtype": "F32", ...}}, bytes(16))

`Raw` is a value whose instructions are given.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------ pickles


class Raw(bytes):
    """Instructions that leave one value on the stack."""


def ops(value: Any) -> bytes:
    """The instructions that push a value."""
    match value:
        case Raw():
            return value
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8b" + struct.pack("<i", len(raw)) + raw
        case str():
            raw = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(raw)) + raw
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case tuple():
            return b"(" + b"".join(map(ops, value)) + b"t"
        case list():
            return b"](" + b"".join(map(ops, value)) + b"e"
        case dict():
            return b"}(" + b"".join(ops(key) + ops(each) for key, each in value.items()) + b"u"
    raise TypeError(type(value))


def pickled(value: Any) -> bytes:
    """A whole pickle of a value."""
    return b"\x80\x02" + ops(value) + b"."


def name(module: str, attribute: str) -> Raw:
    """A global."""
    return Raw(f"c{module}\n{attribute}\n".encode())


def call(function: Raw, *arguments: Any) -> Raw:
    """A call of a global."""
    return Raw(function + ops(arguments) + b"R")


def instance(cls: Raw, state: Mapping[str, Any]) -> Raw:
    """An object with attributes."""
    return Raw(cls + b")\x81" + ops(dict(state)) + b"b")


def tensor(
    key: str, shape: tuple[int, ...], *, count: int | None = None, strides: tuple[int, ...] | None = None
) -> Raw:
    """A float32 tensor in a storage of `count` elements; what is not given is as it should be."""
    product, steps = 1, []
    for size in reversed(shape):
        steps.append(product)
        product *= size
    count = product if count is None else count
    strides = tuple(reversed(steps)) if strides is None else strides
    storage = Raw(ops(("storage", name("torch", "FloatStorage"), key, "cpu", count)) + b"Q")
    hooks = call(name("collections", "OrderedDict"))
    return call(name("torch._utils", "_rebuild_tensor_v2"), storage, 0, shape, strides, False, hooks)


def shard(dim: Any) -> Raw:
    """The placement Shard(dim)."""
    return instance(name("torch.distributed.tensor.placement_types", "Shard"), {"dim": dim})


def mesh(shape: Any, coordinate: Any, **more: Any) -> Raw:
    """A device mesh, as torch 2.10 to 2.12 have it."""
    layout = instance(name("torch.distributed._mesh_layout", "_MeshLayout"), {"shape": shape, "stride": 1})
    state = {"_layout": layout, "_coordinate_on_dim": coordinate, **more}
    return instance(name("torch.distributed.device_mesh", "DeviceMesh"), state)


def dtensor(local: Raw, shape: Any, of_mesh: Raw, placements: Any, *, old: bool = False, **spec: Any) -> Raw:
    """A DTensor; `spec` are more attributes of its spec."""
    cls = name("torch.distributed._tensor.api" if old else "torch.distributed.tensor", "DTensor")
    spec_record = instance(
        name("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
        {"mesh": of_mesh, "placements": placements, **spec},
    )
    return call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_wrapper_subclass"),
        cls,
        (cls, name("torch", "float32"), shape),
        {"_local_tensor": local, "_spec": spec_record},
    )


def laughs(fan: int, depth: int, kind: type = list) -> Raw:
    """A value of fan^depth parts in fan x depth instructions, each level a container of one below it."""
    start, end = (b"](", b"e") if kind is list else (b"(", b"t")
    raw = b"N"
    levels = [b"q\x00"]
    for level in range(depth):
        get = b"h" + bytes([level])
        levels.append(b"0" + start + get * fan + end + b"q" + bytes([level + 1]))
    return Raw(raw + b"".join(levels))


def deep(levels: int, kind: type = list) -> Raw:
    """A value nested so deep."""
    if kind is list:
        return Raw(b"]" * levels + b"a" * (levels - 1))
    return Raw(b"N" + b"\x85" * levels)


# ------------------------------------------------------------------------------ zip archives


@dataclass(frozen=True)
class Member:
    """One record of an archive; what is not None replaces what would be true."""

    name: bytes
    data: bytes
    method: int = 0
    flags: int = 0
    size: int | None = None  # in the directory
    packed: int | None = None  # in the directory
    at: int | None = None  # in the directory
    crc: int | None = None
    local_name: bytes | None = None
    local_size: int | None = None
    local_extra: bytes = b""
    extra: bytes = b""  # in the directory


def archive(members: Sequence[Member], **end: int) -> bytes:
    """The bytes of an archive; `end` replaces fields of its end record: count, size, offset, disk."""
    body, directory = bytearray(), bytearray()
    for each in members:
        at = len(body)
        crc = zlib.crc32(each.data) if each.crc is None else each.crc
        size = len(each.data) if each.local_size is None else each.local_size
        local = each.name if each.local_name is None else each.local_name
        head = (b"PK\x03\x04", 20, each.flags, each.method, 0, 0x21, crc, size, size)
        body += struct.pack("<4sHHHHHIIIHH", *head, len(local), len(each.local_extra))
        body += local + each.local_extra + each.data
        size = len(each.data) if each.size is None else each.size
        packed = size if each.packed is None else each.packed
        place = at if each.at is None else each.at
        head = (b"PK\x01\x02", 20, 20, each.flags, each.method, 0, 0x21, crc, packed, size)
        tail = (len(each.name), len(each.extra), 0, 0, 0, 0, place)
        directory += struct.pack("<4sHHHHHHIIIHHHHHII", *head, *tail) + each.name + each.extra
    count, size, offset, disk = len(members), len(directory), len(body), 0
    count, size = end.get("count", count), end.get("size", size)
    offset, disk = end.get("offset", offset), end.get("disk", disk)
    last = struct.pack("<4sHHHHIIH", b"PK\x05\x06", disk, disk, count, count, size, offset, 0)
    return bytes(body + directory + last)


def members(pickle: bytes, storages: Mapping[str, bytes] | None = None) -> list[Member]:
    """The records that torch.save writes."""
    held = {"data.pkl": pickle, "byteorder": b"little"}
    held |= {f"data/{key}": data for key, data in (storages or {}).items()} | {"version": b"3\n"}
    return [Member(f"archive/{name}".encode(), data) for name, data in held.items()]


def lying(honest: Sequence[Member], member: str, **lies: Any) -> list[Member]:
    """The records, with lies about one of them."""
    full = f"archive/{member}".encode()
    assert any(each.name == full for each in honest)
    return [replace(each, **lies) if each.name == full else each for each in honest]


def torch_file(path: Path, pickle: bytes, storages: Mapping[str, bytes] | None = None) -> Path:
    """A file of torch.save."""
    path.write_bytes(archive(members(pickle, storages)))
    return path


# ------------------------------------------------------------------------------ safetensors


def safetensors(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with this header (JSON, or its text), and another `length` than it has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: Sequence[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
