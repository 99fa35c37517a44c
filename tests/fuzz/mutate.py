"""Mutations of bytes: what a damaged disk or an attacker would make of an honest file."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 62, 1 << 63, (1 << 64) - 1)
_TEXTS = (
    b"-1",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b"[" * 50,
    b"null",
    b"../",
    b"\\ud800",
    b'"',
    b"{}",
    b"[]",
    b"\0",
)
_OPS = b"NQRbct(]})a.sueh\x85\x86\x87\x81\x88\x93\x94q2"


def mutated(seeds: Sequence[bytes], generator: random.Random) -> bytes:
    """One of the seeds, with a few things changed."""
    data = bytearray(generator.choice(seeds))
    for _ in range(generator.choice((1, 1, 1, 2, 3, 8))):
        at = generator.randrange(len(data) + 1)
        match generator.randrange(8):
            case 0 if data:
                data[at % len(data)] = generator.randrange(256)
            case 1 if data:
                data[at % len(data)] ^= 1 << generator.randrange(8)
            case 2:
                del data[at : at + generator.choice((1, 2, 4, 8, 64))]
            case 3:
                piece = data[at : at + generator.randrange(1, 64)]
                data[generator.randrange(len(data) + 1) : 0] = piece
            case 4:
                raw = struct.pack("<Q", generator.choice(_NUMBERS))[: generator.choice((1, 2, 4, 8))]
                data[at : at + len(raw)] = raw
            case 5:
                data[at : at + generator.randrange(4)] = generator.choice(_TEXTS)
            case 6:
                data[at:at] = bytes(generator.choice(_OPS) for _ in range(generator.randrange(1, 8)))
            case _:
                other = generator.choice(seeds)
                start = generator.randrange(len(other) + 1)
                data[at : at + 32] = other[start : start + generator.randrange(64)]
    return bytes(data)
