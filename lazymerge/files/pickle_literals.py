"""The instructions of a pickle that spell out one plain value: numbers, texts and bytes.

Each is read by a function of the data and the position after the opcode, which gives the value and
the position after it. What is wrong is a `Malformed`, an end before the value's own an `OutOfData`.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable

U8 = struct.Struct("<Q").unpack_from
_F8 = struct.Struct(">d").unpack_from
_I4 = struct.Struct("<i").unpack_from
_MAX_DIGITS = 4300  # of a number in decimal: what `int` reads by default, since its time is quadratic
_MAX_BYTES = 1785  # of a number in binary: what `str` writes by default, so that a message can show it


class Malformed(Exception):
    """What the pickle has that it should not have."""


class OutOfData(Exception):
    """The data ends inside an instruction."""


def literal(op: int, data: bytes, start: int) -> tuple[object, int]:
    """The plain value that the instruction `op` spells out, and the position after it."""
    read = _LITERALS.get(op)
    if read is not None:
        return read(data, start)
    if op in _REFUSED:
        raise Malformed(f"the instruction {_REFUSED[op]}, which needs more than the file")
    raise Malformed(f"the byte {op:#04x} where an instruction should be")


def line(data: bytes, start: int) -> tuple[bytes, int]:
    """The bytes up to the next newline, and the position after it."""
    end = data.find(b"\n", start)
    if end < 0:
        raise OutOfData
    return data[start:end], end + 1


def text(data: bytes, start: int, end: int) -> str:
    """The UTF-8 text of a range; lone surrogates, which Python writes too, stay what they are."""
    raw = _taken(data, start, end - start)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        pass
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Malformed("a text that is not UTF-8") from None


def whole_text(raw: bytes) -> str:
    """The UTF-8 text of all of `raw`."""
    return text(raw, 0, len(raw))


def number(digits: bytes) -> int:
    """An integer in decimal."""
    try:
        if len(digits) <= _MAX_DIGITS:
            return int(digits)
    except ValueError:
        pass
    raise Malformed(f"{_shown(digits)} where a number should be")


def _shown(raw: bytes) -> str:
    return repr(raw[:20])[1:]


def _taken(data: bytes, start: int, size: int) -> bytes:
    if start + size > len(data):
        raise OutOfData
    return data[start : start + size]


def _counted(data: bytes, start: int, width: int, signed: bool = False) -> tuple[bytes, int]:
    """Bytes with their count in `width` bytes in front of them."""
    count = int.from_bytes(_taken(data, start, width), "little", signed=signed)
    if count < 0:
        raise Malformed(f"a count of {count} bytes")
    return _taken(data, start + width, count), start + width + count


def _bytes1(data: bytes, start: int) -> tuple[bytes, int]:
    return _counted(data, start, 1)


def _bytes4(data: bytes, start: int) -> tuple[bytes, int]:
    return _counted(data, start, 4)


def _bytes8(data: bytes, start: int) -> tuple[bytes, int]:
    return _counted(data, start, 8)


def _bytearray8(data: bytes, start: int) -> tuple[bytearray, int]:
    raw, end = _counted(data, start, 8)
    return bytearray(raw), end


def _text8(data: bytes, start: int) -> tuple[str, int]:
    raw, end = _counted(data, start, 8)
    return whole_text(raw), end


def _long1(data: bytes, start: int) -> tuple[int, int]:
    raw, end = _counted(data, start, 1)
    return int.from_bytes(raw, "little", signed=True), end


def _long4(data: bytes, start: int) -> tuple[int, int]:
    raw, end = _counted(data, start, 4, signed=True)
    if len(raw) > _MAX_BYTES:
        raise Malformed(f"a number of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True), end


def _int4(data: bytes, start: int) -> tuple[int, int]:
    return _I4(_taken(data, start, 4), 0)[0], start + 4


def _float8(data: bytes, start: int) -> tuple[float, int]:
    return _F8(_taken(data, start, 8), 0)[0], start + 8


def _integer_line(data: bytes, start: int) -> tuple[int, int]:
    digits, end = line(data, start)
    if digits in (b"00", b"01"):  # booleans, in protocol 0
        return digits == b"01", end
    return number(digits.removesuffix(b"L")), end


def _float_line(data: bytes, start: int) -> tuple[float, int]:
    digits, end = line(data, start)
    try:
        if len(digits) <= _MAX_DIGITS:
            return float(digits), end
    except ValueError:
        pass
    raise Malformed(f"{_shown(digits)} where a number should be")


def _unicode_line(data: bytes, start: int) -> tuple[str, int]:
    raw, end = line(data, start)
    try:
        return raw.decode("raw-unicode-escape"), end
    except UnicodeDecodeError:
        raise Malformed("a text with a wrong escape") from None


def _string_line(data: bytes, start: int) -> tuple[str | bytes, int]:
    """A string of Python 2 in quotes."""
    raw, end = line(data, start)
    if len(raw) < 2 or raw[:1] not in (b"'", b'"') or raw[:1] != raw[-1:]:
        raise Malformed("a string without quotes")
    return _native(_unescaped(raw[1:-1])), end


def _unescaped(raw: bytes) -> bytes:
    try:
        return codecs.escape_decode(raw)[0]
    except ValueError:
        raise Malformed("a string with a wrong escape") from None


def _string1(data: bytes, start: int) -> tuple[str | bytes, int]:
    raw, end = _counted(data, start, 1)
    return _native(raw), end


def _string4(data: bytes, start: int) -> tuple[str | bytes, int]:
    raw, end = _counted(data, start, 4, signed=True)
    return _native(raw), end


def _native(raw: bytes) -> str | bytes:
    """A string of Python 2: text where it can be, else bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


_LITERALS: dict[int, Callable[[bytes, int], tuple[object, int]]] = {
    0x47: _float8,  # BINFLOAT
    0x4A: _int4,  # BININT
    0x8A: _long1,  # LONG1
    0x8B: _long4,  # LONG4
    0x43: _bytes1,  # SHORT_BINBYTES
    0x42: _bytes4,  # BINBYTES
    0x8E: _bytes8,  # BINBYTES8
    0x96: _bytearray8,  # BYTEARRAY8
    0x8D: _text8,  # BINUNICODE8
    0x55: _string1,  # SHORT_BINSTRING
    0x54: _string4,  # BINSTRING
    0x49: _integer_line,  # INT
    0x4C: _integer_line,  # LONG
    0x46: _float_line,  # FLOAT
    0x53: _string_line,  # STRING
    0x56: _unicode_line,  # UNICODE
}
_REFUSED = {0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER"}
