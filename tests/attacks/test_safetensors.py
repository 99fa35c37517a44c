"""Safetensors files with headers that lie, or that take more to read than they are long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.attacks.forge import entry, safetensors
from tests.attacks.harness import Attacker

FILE = "model.safetensors"
GOOD = entry((4,), 0, 16)
DATA = bytes(16)
DEEP = 100_000


def test_the_honest_one_is_merged(attacker: Attacker) -> None:
    safetensors(attacker.src / FILE, text(), DATA)
    outcome = attacker.merge()
    assert outcome.code == 0, outcome.stderr


@pytest.mark.parametrize("length", [0, 1, 1 << 20, (1 << 31) - 1, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1])
def test_the_length_of_the_header(attacker: Attacker, length: int) -> None:
    safetensors(attacker.src / FILE, {"w": GOOD}, DATA, length=length)
    attacker.refused(FILE)


def text(shape: str = "[4]", offsets: str = "[0,16]", dtype: str = '"F32"') -> bytes:
    return f'{{"w":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'.encode()


@pytest.mark.parametrize(
    "header",
    [
        text(offsets="[-16,0]"),
        text(offsets="[0,-16]"),
        text(offsets="[16,0]"),
        text(offsets="[0,16,32]"),
        text(offsets="[0]"),
        text(offsets="[0,1e1]"),
        text(offsets='["0","16"]'),
        text(offsets="[false,true]"),
        text(offsets=f"[0,{1 << 63}]"),
        text(offsets=f"[{1 << 64},{(1 << 64) + 16}]"),
        text(shape="[NaN]"),
        text(shape="[Infinity]"),
        text(shape="[-4]"),
        text(shape="[4.0]"),
        text(shape="4"),
        text(shape="null"),
        text(shape="[[4]]"),
        text(shape="[true]"),
        text(shape=f"[{1 << 62},{1 << 62},4]"),
        text(shape="[0,9223372036854775807]"),
        text(shape=f"[{'1,' * 1_000_000}4]"),
        text(shape=f"[{','.join(['4611686018427387904'] * 300)}]"),
        text(shape=f"[{','.join(['4611686018427387904'] * 200_000)}]"),
        text(shape=f"[{'9' * 5000}]"),
        text(dtype='"F64"'),
        text(dtype='"F8_E4M3"'),
        text(dtype='"F128"'),
        text(dtype='"../../x"'),
        text(dtype="7"),
        text(dtype=f'"{"x" * 100_000}"'),
        b'{"w":' + json.dumps(GOOD).encode() + b',"w":' + json.dumps(GOOD).encode() + b"}",
        b'{"w":' + json.dumps(GOOD).encode() + b',"v":' + json.dumps(GOOD).encode() + b"}",
        json.dumps({"w": GOOD, "v": entry((2,), 8, 16)}).encode(),
        json.dumps({"w": entry((2,), 0, 8), "v": entry((1,), 12, 16)}).encode(),
        b'{"w":{"w":{"w":{}}}}',
        b'{"w":' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"w":' * DEEP + b"1" + b"}" * DEEP,
        b"[" * DEEP,
        b"\xff\xfe" * 100,
        b"\x00" * 100,
        b'"w"',
        b"NaN",
        b"{}",
    ],
    ids=range(43),
)
def test_headers(attacker: Attacker, header: bytes) -> None:
    safetensors(attacker.src / FILE, header, DATA)
    attacker.refused()


@pytest.mark.parametrize("filler", [b"[],", b"{},", b"0,", b'"",', b'{"":[]},', b"1e5,"])
def test_a_header_of_nothing_but_values(attacker: Attacker, filler: bytes) -> None:
    """Each takes two or three bytes of the file, and twenty times that in memory."""
    body = b'{"w":[' + filler * (40_000_000 // len(filler)) + b"0]}"
    safetensors(attacker.src / FILE, body, DATA)
    attacker.refused(FILE)


@pytest.mark.parametrize("value", [None, [], 1, "x", {"format": []}, {"format": {"a": "b"}}])
def test_metadata(attacker: Attacker, value: Any) -> None:
    safetensors(attacker.src / FILE, {"__metadata__": value, "w": GOOD}, DATA)
    attacker.refused_or_merged()


NAMES = [
    "",
    " ",
    ".",
    "..",
    "../../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "\0",
    "w\0.bin",
    "w\nerror: all is well",
    "\x1b[2J\x1b]0;title\x07",
    "\u202emoc.exe",
    "\ud800",
    "\U0010ffff",
    "__metadata__ ",
    "__class__",
    "%s%n{0}{w.__class__}",
    "*",
    "w" * 1_000_000,
    "é" * 10_000,
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names(attacker: Attacker, name: str) -> None:
    """A name is a name: it may be merged as it is, and is never a place or a command to the terminal."""
    safetensors(attacker.src / FILE, {name: GOOD}, DATA)
    outcome = attacker.refused_or_merged()
    assert "\x1b" not in outcome.stderr + outcome.stdout
    safetensors(attacker.src / FILE, {name: entry((4,), 8, 24)}, DATA)
    outcome = attacker.refused()
    assert "\x1b" not in outcome.stderr


@pytest.mark.parametrize("escape", [b"\\ud800", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80"], ids=range(4))
def test_names_that_are_no_text(attacker: Attacker, escape: bytes) -> None:
    safetensors(attacker.src / FILE, b'{"' + escape + b'":' + json.dumps(GOOD).encode() + b"}", DATA)
    attacker.refused()


@pytest.mark.parametrize("size", [99_000_000, 1 << 30])
def test_sparse_headers(attacker: Attacker, size: int) -> None:
    path = safetensors(attacker.src / FILE, b"{", length=size)
    with open(path, "r+b") as file:
        file.truncate(size + 8)
    attacker.refused(FILE)


def test_many_tensors_without_elements(attacker: Attacker) -> None:
    safetensors(attacker.src / FILE, {f"{n}": entry((0,), 0, 0) for n in range(20_000)})
    attacker.refused_or_merged()
