"""Zip archives that contradict themselves, hide something, or unpack to more than there is.

What the directory itself may be is tests/files/test_torch_file.py's; here nothing but a refusal may come out
of a whole merge, and it may not cost more than the file.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence

import pytest

from tests.attacks.forge import Member, archive, lying, members, pickled, tensor, torch_file
from tests.attacks.harness import Attacker

STATE = pickled({"w": tensor("0", (2, 2))})
HONEST = members(STATE, {"0": bytes(16)})
FILE = "pytorch_model.bin"


def put(attacker: Attacker, records: Sequence[Member], **end: int) -> None:
    (attacker.src / FILE).write_bytes(archive(records, **end))


def test_the_honest_one_is_merged(attacker: Attacker) -> None:
    put(attacker, HONEST)
    assert attacker.refused_or_merged().code == 0


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def wide(*numbers: int) -> bytes:
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


FULL = 0xFFFFFFFF
ZEROS = bytes(100 << 20)

LIES = {
    "a bomb": lambda: lying(HONEST, "data/0", data=deflated(ZEROS), method=8, size=len(ZEROS)),
    "a bomb for a pickle": lambda: lying(HONEST, "data.pkl", data=deflated(ZEROS), method=8, size=len(ZEROS)),
    "stored, of another size": lambda: lying(HONEST, "data/0", size=100 << 20, packed=16),
    "packed, of another size": lambda: lying(HONEST, "data/0", packed=15),
    "deflated in the local header alone": lambda: lying(HONEST, "data/0", size=15),
    "encrypted": lambda: lying(HONEST, "data/0", flags=1),
    "an unknown method": lambda: lying(HONEST, "data/0", method=93),
    "larger than the file": lambda: lying(HONEST, "data/0", size=1 << 31),
    "a size of all ones": lambda: lying(HONEST, "data/0", size=FULL),
    "zip64 without sizes": lambda: lying(HONEST, "data/0", size=FULL, extra=wide()),
    "zip64 beyond the file": lambda: lying(HONEST, "data/0", size=FULL, extra=wide(1 << 63, 1 << 63)),
    "zip64 with half a size": lambda: lying(HONEST, "data/0", size=FULL, extra=wide(16)),
    "zip64 at all ones": lambda: lying(HONEST, "data/0", size=FULL, extra=wide(FULL << 32 | FULL, 16)),
    "a header beyond the file": lambda: lying(HONEST, "data/0", at=1 << 30),
    "the header of another": lambda: lying(HONEST, "data/0", at=0),
    "the header in the directory": lambda: lying(HONEST, "data/0", at=len(archive(HONEST)) - 60),
    "another name in the local header": lambda: lying(HONEST, "data/0", local_name=b"archive/data/1"),
    "a longer name in the local header": lambda: lying(HONEST, "data/0", local_name=b"archive/data/0" * 99),
    "two of one name": lambda: [*HONEST, HONEST[2]],
    "two pickles": lambda: [*HONEST, Member(b"other/data.pkl", STATE)],
    "a program": lambda: [*HONEST, Member(b"archive/code/x.py", b"import os")],
    "no pickle": lambda: HONEST[1:],
    "no storage": lambda: [HONEST[0], HONEST[3]],
    "a name that is no text": lambda: [*HONEST, Member(b"archive/\xff\xfe", b"")],
    "a pickle of another checksum": lambda: lying(HONEST, "data.pkl", crc=1),
    "big-endian": lambda: lying(HONEST, "byteorder", data=b"big"),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_lies_about_records(attacker: Attacker, lie: str) -> None:
    put(attacker, LIES[lie]())
    attacker.refused(FILE)


@pytest.mark.parametrize(
    "end",
    [
        {"count": 0},
        {"count": 3},
        {"count": 0xFFFF},
        {"size": 0},
        {"size": FULL},
        {"size": 1 << 30},
        {"offset": 0},
        {"offset": FULL},
        {"disk": 1},
    ],
    ids=str,
)
def test_lies_about_the_directory(attacker: Attacker, end: dict[str, int]) -> None:
    put(attacker, HONEST, **end)
    attacker.refused(FILE)


def end64(count: int, size: int, offset: int) -> bytes:
    return struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)


@pytest.mark.parametrize("at", [0, 1 << 63, (1 << 64) - 1, 100])
@pytest.mark.parametrize("numbers", [(5, 1 << 63, 0), (1 << 63, 300, 200), (5, 300, (1 << 64) - 1)])
def test_lies_in_zip64_ends(attacker: Attacker, at: int, numbers: tuple[int, int, int]) -> None:
    honest = archive(HONEST)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    (attacker.src / FILE).write_bytes(honest[:-22] + end64(*numbers) + locator + honest[-22:])
    attacker.refused(FILE)


def test_records_that_overlap(attacker: Attacker) -> None:
    """Two tensors in one record's bytes, and a record inside of another one's data."""
    inside = archive([Member(b"archive/data/1", bytes(16))])[: 30 + 14 + 16]
    state = pickled({"w": tensor("0", (15,)), "v": tensor("1", (2, 2))})
    outer = members(state, {"0": inside})
    at = archive(outer).index(inside)
    put(attacker, [*outer, Member(b"archive/data/1", b"", size=16, at=at)])
    attacker.refused(FILE)


@pytest.mark.parametrize("count", [2000])
def test_many_records_in_the_same_bytes(attacker: Attacker, count: int) -> None:
    """The bomb without compression: each entry of the directory is the same megabyte."""
    state = pickled({f"w{key}": tensor(str(key), (1 << 18,)) for key in range(count)})
    records = [Member(b"archive/data.pkl", state), Member(b"archive/data/0", bytes(1 << 20))]
    at = archive(records[:1]).index(b"PK\x01\x02")
    records += [Member(f"archive/data/{key}".encode(), b"", size=1 << 20, at=at) for key in range(1, count)]
    put(attacker, records)
    attacker.refused(FILE)


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/passwd",
        "archive/../../x",
        "archive/data/../../../x",
        "C:/x",
        "archive/" + "x" * 60000,
    ],
    ids=lambda name: name[:30],
)
def test_names_that_lead_elsewhere(attacker: Attacker, name: str) -> None:
    """Records are ranges of bytes: their names are compared and never opened."""
    put(attacker, [*HONEST, Member(name.encode(), b"overwritten")])
    attacker.refused_or_merged()
    put(
        attacker, [Member(each.name.replace(b"archive", name.encode()[:60000]), each.data) for each in HONEST]
    )
    attacker.refused_or_merged()


def test_a_record_that_is_a_link(attacker: Attacker) -> None:
    """What unpackers make a symbolic link of: here it is a record of so many bytes."""
    path = attacker.src / FILE
    with zipfile.ZipFile(path, "w") as file:
        for each in HONEST:
            if each.name != b"archive/data/0":
                file.writestr(zipfile.ZipInfo(each.name.decode()), each.data)
        link = zipfile.ZipInfo("archive/data/0")
        link.external_attr = 0o120777 << 16
        file.writestr(link, str(attacker.outside / "secret")[:16])
    attacker.refused_or_merged()


@pytest.mark.parametrize("what", ["directory", "comment", "storage", "hole"])
def test_sparse_files(attacker: Attacker, what: str) -> None:
    """Gigabytes that take no room on the disk: nothing may be read for being claimed."""
    path = attacker.src / FILE
    honest = archive(HONEST)
    directory = honest.index(b"PK\x01\x02")
    with open(path, "wb") as file:
        if what == "directory":
            file.write(honest[:directory])
            size = 1 << 30
            file.seek(size - 22, 1)
            file.write(archive(HONEST, size=size - 22)[-22:])
        elif what == "comment":
            file.write(honest)
            file.truncate(1 << 30)
        elif what == "storage":
            torch_file(path, pickled({"w": tensor("0", (1 << 28,))}), {"0": bytes(16)})
        else:
            file.write(honest[:40])
            file.seek(2 << 30)
            file.write(honest[40:])
    attacker.refused(FILE)
