"""Pickles that ask for something to be done, or to take all memory or all time.

What a reader of one pickle makes of malformed instructions is tests/files/test_inert_pickle.py's; here it is
a whole merge, with every container that a pickle can come in.
"""

from __future__ import annotations

import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.forge import Raw, call, deep, instance, laughs, name, ops, pickled, tensor, torch_file
from tests.attacks.harness import Attacker

W = tensor("0", (2, 2))
STORED = {"0": bytes(16)}


def zipped(path: Path, pickle: bytes) -> None:
    torch_file(path / "pytorch_model.bin", pickle, STORED)


def legacy(path: Path, pickle_: bytes) -> None:
    """The format before torch 1.6: five pickles, then each storage."""
    head = [pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    storage = struct.pack("<q", 4) + bytes(16)
    (path / "pytorch_model.bin").write_bytes(b"".join(head) + pickle_ + pickle.dumps(["0"], 2) + storage)


def dcp_metadata(path: Path, pickle: bytes) -> None:
    (path / ".metadata").write_bytes(pickle)
    torch_file(path / "__0_0.distcp", pickled(W), STORED)
    torch_file(path / "common.pt", pickled({"iteration": 1}))
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')


class Asks:
    """Reduces to a call; it can stand for what a call returns, which is called in its turn."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None, items: Any = None) -> None:
        self.call = (function, arguments, state, items)

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        raise AssertionError


def harmful(canary: str) -> dict[str, Callable[[int], bytes]]:
    """Kinds of attack: protocol -> pickle, which would make `canary` if any of it were called."""
    import builtins
    import os
    import subprocess

    def of(make: Callable[[], Any]) -> Callable[[int], bytes]:
        return lambda protocol: pickle.dumps({"w": make(), "v": 1}, protocol)

    return {
        "os.system": of(lambda: Asks(os.system, f"touch {canary}")),
        "popen": of(lambda: Asks(subprocess.Popen, ["touch", canary])),
        "eval": of(lambda: Asks(eval, f"open({canary!r}, 'w')")),
        "exec": of(lambda: Asks(exec, f"open({canary!r}, 'w')")),
        "open": of(lambda: Asks(builtins.open, canary, "w")),
        "import": of(lambda: Asks(__import__, "this")),
        "nested": of(lambda: Asks(Asks(getattr, Asks(__import__, "os"), "system"), f"touch {canary}")),
        "setstate": of(lambda: Asks(Asks(getattr, Asks(__import__, "os"), "mkdir"), canary, state=canary)),
        "state": of(lambda: Asks(dict, state={"__class__": Asks(os.system, f"touch {canary}")})),
        "items": of(lambda: Asks(list, items=iter([Asks(os.system, f"touch {canary}")]))),
        "key": lambda protocol: pickled({call(name("os", "system"), f"touch {canary}"): W}),
        "inst": lambda protocol: b"}S'w'\n(S'touch " + canary.encode() + b"'\nios\nsystem\ns.",
        "obj": lambda protocol: b"}S'w'\n(cos\nsystem\nS'touch " + canary.encode() + b"'\nos.",
        "ext": lambda protocol: b"}S'w'\n\x82\x01s.",
        "buffer": lambda protocol: b"\x80\x05}S'w'\n\x97s.",
        "getattr": lambda protocol: pickled(
            {"w": call(name("builtins", "getattr"), name("os", "x"), "system")}
        ),
        "dotted": lambda protocol: b"\x80\x04}\x8c\x01w\x8c\x02os\x8c\x0bpath.system\x93\x8c\x04true\x85Rs.",
        "numpy": lambda protocol: pickled(
            {"w": call(name("numpy.core.multiarray", "_reconstruct"), 1, 2, 3)}
        ),
        "torch.load": lambda protocol: pickled({"w": call(name("torch", "load"), canary)}),
        "rebuild": lambda protocol: pickled(
            {"w": call(name("torch._tensor", "_rebuild_from_type_v2"), name("os", "system"), canary, (), {})}
        ),
        "hooks": lambda protocol: pickled({"w": Raw(W[:-1] + ops(canary) + W[-1:])}),
    }


@pytest.mark.parametrize("container", [zipped, legacy, dcp_metadata])
@pytest.mark.parametrize("kind", list(harmful("x")))
def test_nothing_is_called(attacker: Attacker, kind: str, container: Any) -> None:
    attack = harmful(str(attacker.outside / "canary"))[kind]
    protocols = range(6) if container is zipped else (2, 4)
    for protocol in (2,) if attack(0) == attack(2) else protocols:
        shutil.rmtree(attacker.src)
        attacker.src.mkdir()
        container(attacker.src, attack(protocol))
        outcome = attacker.refused("metadata" if container is dcp_metadata else "pytorch_model.bin")
        assert "no checkpoint that any format knows" not in outcome.stderr


PLACES = ["../../x", "/etc/passwd", "a/../../../outside/x", "C:\\x", "\0", "x\ny", "..", "con", "~root"]


@pytest.mark.parametrize("place", PLACES)
def test_names_and_keys_that_are_paths(attacker: Attacker, place: str) -> None:
    """A storage's key names a record of the archive and nothing else; a tensor's name is never a path."""
    torch_file(attacker.src / "pytorch_model.bin", pickled({"w": tensor(place, (2, 2))}), STORED)
    attacker.refused("storage")
    torch_file(attacker.src / "pytorch_model.bin", pickled({place: W}), STORED)
    attacker.refused_or_merged()


def claimed(op: bytes, size: int, form: str) -> bytes:
    """A literal that says it has so many bytes, and has three."""
    return b"\x80\x04}\x8c\x01w" + op + struct.pack(form, size) + b"abcs."


@pytest.mark.parametrize(
    "pickle",
    [
        claimed(b"\x8a", 255, "<B"),
        claimed(b"\x8b", (1 << 31) - 1, "<i"),
        claimed(b"\x8b", -1, "<i"),
        claimed(b"B", (1 << 32) - 1, "<I"),
        claimed(b"X", (1 << 32) - 1, "<I"),
        claimed(b"\x8e", (1 << 63) - 1, "<Q"),
        claimed(b"\x8e", (1 << 64) - 1, "<Q"),
        claimed(b"\x8d", (1 << 64) - 1, "<Q"),
        claimed(b"\x96", 1 << 40, "<Q"),
        claimed(b"\x95", 1 << 62, "<Q"),
        b"\x80\x02N" + b"r\xff\xff\xff\xff" + b"j\xff\xff\xff\xff.",
        b"N" + b"p" + b"9" * 4000 + b"\n.",
        b"\x80\x02" + b"(" * 200_000,
        b"\x80\x02" + b"N2" * 200_000,
    ],
    ids=range(14),
)
@pytest.mark.parametrize("container", [zipped, legacy])
def test_lengths_that_lie(attacker: Attacker, pickle: bytes, container: Any) -> None:
    container(attacker.src, pickle)
    attacker.refused()


HUGE = Raw(b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20))
"""A number of eight million bits: to print it takes minutes, and Python refuses to."""
TEN_THOUSAND = Raw(b"\x8b" + struct.pack("<i", 4000) + b"\x7f" * 4000)


@pytest.mark.parametrize("number", [HUGE, TEN_THOUSAND, -1, 1 << 63, 1 << 200], ids=range(5))
@pytest.mark.parametrize("at", ["shape", "stride", "offset", "count", "key", "value"])
def test_numbers_beyond_all_counting(attacker: Attacker, number: Any, at: str) -> None:
    storage = ("storage", name("torch", "FloatStorage"), "0", "cpu", number if at == "count" else 4)
    hooks = call(name("collections", "OrderedDict"))
    parts = [number if at == each else 1 for each in ("offset", "shape", "stride")]
    rebuilt = call(
        name("torch._utils", "_rebuild_tensor_v2"),
        Raw(ops(storage) + b"Q"),
        parts[0],
        (parts[1],),
        (parts[2],),
        False,
        hooks,
    )
    state: dict[Any, Any] = {"w": rebuilt}
    if at == "key":
        state[number if isinstance(number, Raw) else Raw(ops(number))] = 1
    if at == "value":
        state["x"] = number
    torch_file(attacker.src / "pytorch_model.bin", pickled(state), STORED)
    outcome = attacker.refused_or_merged()
    assert at in {"key", "value"} or outcome.code == 2 or number == 1


BOMBS = {
    "laughs": laughs(100, 5),
    "wide laughs": laughs(2000, 3),
    "tuples": laughs(100, 5, tuple),
    "deep": deep(200_000),
    "deep tuples": deep(200_000, tuple),
    "sets": Raw(b"\x80\x04\x8fq\x00" + b"0(h\x00\x91q\x00" * 1000),
    "records": Raw(b"ca\nb\nq\x000" + b"N" + b"q\x010h\x00h\x01h\x01\x86R" * 200),
}
"""Values that take a few bytes, and all time or all memory to visit one by one."""


@pytest.mark.parametrize("place", ["value", "name", "whole", "in a list", "shape", "extra", "storage"])
@pytest.mark.parametrize("bomb", list(BOMBS))
def test_memo_bombs(attacker: Attacker, bomb: str, place: str) -> None:
    value = BOMBS[bomb]
    state: Any = {"v": W, "w": value}
    if place == "name":
        state = {"v": W, value: 1}
    elif place == "whole":
        state = value
    elif place == "in a list":
        state = {"v": W, "w": [W, value]}
    elif place == "shape":
        state = {"v": W, "w": Raw(tensor("0", (1,)).replace(ops((1,)), value, 1))}
    elif place == "extra":
        state = {"v": W, "m._extra_state": value, "w": {"x": value, "y": [value]}}
    elif place == "storage":
        state = {"v": W, "w": Raw(ops(("storage", name("torch", "FloatStorage"), "0", value, 4)) + b"Q")}
    torch_file(attacker.src / "pytorch_model.bin", pickled(state), STORED)
    attacker.refused_or_merged()


def test_objects_that_look_like_others(attacker: Attacker) -> None:
    """Records where plain values are expected, in each part of a tensor."""
    record = instance(name("evil", "Thing"), {"shape": (1,), "__len__": 3})
    for number in range(5):
        parts: list[Any] = [Raw(ops(("storage", name("torch", "FloatStorage"), "0", "cpu", 4)) + b"Q"), 0]
        parts += [(2, 2), (2, 1), False]
        parts[number] = record
        rebuilt = call(
            name("torch._utils", "_rebuild_tensor_v2"), *parts, call(name("collections", "OrderedDict"))
        )
        torch_file(attacker.src / "pytorch_model.bin", pickled({"w": rebuilt}), STORED)
        attacker.refused_or_merged()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1 << 29])
def test_a_sparse_pickle(attacker: Attacker, size: int) -> None:
    """Half a gigabyte of zeros, which take no room on the disk."""
    path = attacker.src / "pytorch_model.bin"
    torch_file(path, pickled({"w": W}), STORED)
    honest = path.read_bytes()
    with open(path, "wb") as file:
        file.write(honest[:100])
        file.seek(size)
        file.write(honest[100:])
    attacker.refused()
