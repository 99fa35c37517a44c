"""Index files that point out of the folder, at devices, or at more than there is."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.attacks.forge import entry, safetensors
from tests.attacks.harness import Attacker

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
GOOD = {"w": SHARD}


def model(attacker: Attacker, places: Any, **more: Any) -> None:
    """A model of one tensor, and an index."""
    safetensors(attacker.src / SHARD, {"w": entry((4,), 0, 16)}, bytes(16))
    (attacker.src / INDEX).write_text(json.dumps({"weight_map": places, **more}))


def test_the_honest_one_is_merged(attacker: Attacker) -> None:
    model(attacker, GOOD)
    assert attacker.refused_or_merged().code == 0


@pytest.mark.parametrize(
    "place",
    [
        "../outside/secret",
        "../outside/x.safetensors",
        "/etc/passwd",
        "/dev/zero",
        "/dev/stdin",
        "/dev/zero/x.safetensors",
        "..",
        ".",
        "",
        "a/b.safetensors",
        "a\0.safetensors",
        "\udc80.safetensors",
        "x" * 300 + ".safetensors",
        "x" * 5000 + ".safetensors",
        "\x1b[2J.safetensors",
        "C:\\x.safetensors",
        INDEX,
        None,
        7,
        [SHARD],
        {"w": SHARD},
    ],
    ids=range(21),
)
def test_places(attacker: Attacker, place: Any) -> None:
    safetensors(attacker.outside / "x.safetensors", {"w": entry((4,), 0, 16)}, bytes(16))
    model(attacker, {"w": place})
    outcome = attacker.refused()
    assert "\x1b" not in outcome.stderr


@pytest.mark.parametrize(
    "target", ["/dev/zero", "/dev/random", "/dev/tty", "/proc/self/mem", "/proc/kmsg", "/", "loop"]
)
@pytest.mark.parametrize("name", [SHARD, INDEX, "model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_links(attacker: Attacker, target: str, name: str) -> None:
    """A link to what is no file is not opened: a device never ends, and a pipe never begins."""
    if name in (SHARD, INDEX):
        model(attacker, GOOD)
        (attacker.src / name).unlink()
    os.symlink(attacker.src / name if target == "loop" else target, attacker.src / name)
    attacker.refused()


@pytest.mark.parametrize("name", [SHARD, INDEX, "model.safetensors", "pytorch_model.bin", "config.json"])
def test_pipes(attacker: Attacker, name: str) -> None:
    model(attacker, GOOD)
    if name in (SHARD, INDEX):
        (attacker.src / name).unlink()
    elif name != "config.json":
        for each in (SHARD, INDEX):
            (attacker.src / each).unlink()
    os.mkfifo(attacker.src / name)
    attacker.refused()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": ' + b"[" * 100_000,
        b'{"weight_map": ' * 100_000,
        b'{"weight_map": {"w": ' + b"9" * 5000 + b"}}",
        b"\xff\xfe{",
        b'{"weight_map": {' + b'"":[],' * 4_000_000 + b'"w":"x.safetensors"}}',
    ],
    ids=range(10),
)
def test_texts(attacker: Attacker, text: bytes) -> None:
    model(attacker, GOOD)
    (attacker.src / INDEX).write_bytes(text)
    attacker.refused()


@pytest.mark.parametrize("nbytes", [60 << 20, 2 << 30])
def test_an_index_that_is_sparse(attacker: Attacker, nbytes: int) -> None:
    model(attacker, GOOD)
    os.truncate(attacker.src / INDEX, nbytes)
    attacker.refused(INDEX)


def test_many_names_in_one_place(attacker: Attacker) -> None:
    model(attacker, {f"w{n}": SHARD for n in range(200_000)})
    attacker.refused(SHARD)


@pytest.mark.parametrize("total", [-1, 1 << 62, "16", None, [1], {"a": 1}, 1e999], ids=range(7))
def test_sizes(attacker: Attacker, total: Any) -> None:
    model(attacker, GOOD, metadata={"total_size": total})
    attacker.refused_or_merged()
