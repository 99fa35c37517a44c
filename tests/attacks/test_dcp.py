"""DCP folders whose metadata lies: chunks, records, places and objects.

Single faults of metadata are tests/test_dcp.py's; these are whole merges of what is meant to do harm.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.attacks.forge import Raw, call, deep, instance, laughs, name, pickled, tensor, torch_file
from tests.attacks.harness import PLAIN, Attacker, Outcome

W = tensor("0", (2, 2))
BOMB = laughs(100, 5)
METADATA = "torch.distributed.checkpoint.metadata"
FILE = "__0_0.distcp"
NAME = "decoder.layers.0.w"


def size(*sizes: Any) -> Raw:
    return call(name("torch", "Size"), tuple(sizes))


def chunk(offsets: Any, sizes: Any) -> Raw:
    return instance(name(METADATA, "ChunkStorageMetadata"), {"offsets": offsets, "sizes": sizes})


def stored(shape: Any, chunks: Any, properties: Any = None) -> Raw:
    if properties is None:
        cls = name(METADATA, "TensorProperties")
        properties = Raw(cls + b")\x81" + pickled((name("torch", "float32"),))[2:-1] + b"b")
    state = {"properties": properties, "size": shape, "chunks": chunks}
    return instance(name(METADATA, "TensorStorageMetadata"), state)


def index(of: Any, offset: Any) -> Raw:
    return instance(name(METADATA, "MetadataIndex"), {"fqn": of, "offset": offset, "index": 0})


def place(path: Any, offset: Any, length: Any, **more: Any) -> Raw:
    state = {"relative_path": path, "offset": offset, "length": length, **more}
    return instance(name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)


def folder(attacker: Attacker, entries: dict[Any, Any], places: dict[Any, Any]) -> None:
    record = torch_file(attacker.src / FILE, pickled(W), {"0": bytes(16)})
    assert record.stat().st_size < 4096
    state = {"state_dict_metadata": entries, "planner_data": None, "storage_data": places}
    metadata = Raw(pickled(instance(name(METADATA, "Metadata"), state)))
    (attacker.src / ".metadata").write_bytes(metadata)
    torch_file(attacker.src / "common.pt", pickled({"iteration": 1}))
    (attacker.src / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "common_backend": "torch"}'
    )
    (attacker.src / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    )


def one(attacker: Attacker, entry: Any, at: Any = None, of: Any = NAME, offset: Any = None) -> None:
    """A folder of one tensor in one record."""
    torch_file(attacker.src / FILE, pickled(W), {"0": bytes(16)})
    length = (attacker.src / FILE).stat().st_size
    where = place(FILE, 0, length) if at is None else at
    folder(attacker, {of: entry}, {index(of, size(0, 0) if offset is None else offset): where})


ONE = stored(size(2, 2), [chunk(size(0, 0), size(2, 2))])

STAGED = (*PLAIN, "--stage", "merge")
"""No conversion, which would ask for all tensors of a model."""


def refused(attacker: Attacker, *words: str) -> Outcome:
    return attacker.refused(*words, options=STAGED)


def test_the_honest_one_is_merged(attacker: Attacker) -> None:
    one(attacker, ONE)
    outcome = attacker.merge(*STAGED)
    assert outcome.code == 0, outcome.stderr
    assert not outcome.violations


ENTRIES = {
    "out of bounds": stored(size(2, 2), [chunk(size(1, 0), size(2, 2))]),
    "far out": stored(size(2, 2), [chunk(size(1 << 62, 0), size(2, 2))]),
    "negative": stored(size(2, 2), [chunk(size(-2, 0), size(2, 2))]),
    "overlapping": stored(size(4, 2), [chunk(size(0, 0), size(3, 2)), chunk(size(1, 0), size(2, 2))]),
    "twice": stored(size(4, 2), [chunk(size(0, 0), size(2, 2))] * 2),
    "missing": stored(size(4, 2), [chunk(size(0, 0), size(2, 2))]),
    "none": stored(size(2, 2), []),
    "products": stored(size(1 << 40, 1 << 40), [chunk(size(0, 0), size(1 << 40, 1 << 40))]),
    "more products": stored(size(*[1 << 62] * 64), [chunk(size(*[0] * 64), size(*[1 << 62] * 64))]),
    "too many dimensions": stored(size(*[1] * 5000), [chunk(size(*[0] * 5000), size(*[1] * 5000))]),
    "other dimensions": stored(size(2, 2), [chunk(size(0), size(4))]),
    "beyond counting": stored(size(1 << 4000), [chunk(size(0), size(1 << 4000))]),
    "no numbers": stored(size("2", 2), [chunk(size(0, 0), size(2, 2))]),
    "floats": stored(BOMB, [chunk(size(0, 0), size(2, 2))]),
    "bombs": stored(size(2, 2), BOMB),
    "bombs in chunks": stored(size(2, 2), [chunk(BOMB, BOMB)]),
    "shared chunks": stored(
        size(2, 2), Raw(b"](" + chunk(size(0, 0), size(2, 2)) + b"q\xfa" + b"h\xfa" * 100_000 + b"e")
    ),
    "no dtype": stored(size(2, 2), [chunk(size(0, 0), size(2, 2))], BOMB),
    "a class for a dtype": stored(size(2, 2), [chunk(size(0, 0), size(2, 2))], name("os", "system")),
    "another class": instance(name("os", "system"), {"size": size(2, 2)}),
    "a call": call(name("os", "system"), "true"),
}


@pytest.mark.parametrize("entry", list(ENTRIES))
def test_tensors(attacker: Attacker, entry: str) -> None:
    one(attacker, ENTRIES[entry])
    refused(attacker, NAME)


PLACES = {
    "above": place("../outside/secret", 0, 900),
    "far above": place("../" * 50 + "etc/passwd", 0, 900),
    "absolute": place("/etc/passwd", 0, 900),
    "a device": place("/dev/zero", 0, 900),
    "itself": place(".metadata", 0, 900),
    "the folder": place(".", 0, 900),
    "empty": place("", 0, 900),
    "NUL": place("a\0b", 0, 900),
    "long": place("x" * 1_000_000, 0, 900),
    "deep": place("a/" * 100_000, 0, 900),
    "no text": place("\udc80", 0, 900),
    "not there": place("__9_9.distcp", 0, 900),
    "the end": place(FILE, 1 << 62, 900),
    "overflowing": place(FILE, (1 << 63) - 1, (1 << 63) - 1),
    "negative": place(FILE, -1, 900),
    "large": place(FILE, 0, 1 << 62),
    "beyond counting": place(FILE, 1 << 4000, 900),
    "nothing": place(FILE, 0, 0),
    "a part": place(FILE, 4, 300),
    "compressed": place(FILE, 0, 900, transform_descriptors=[BOMB]),
    "compressed, deep": place(FILE, 0, 900, transform_descriptors=deep(50_000)),
    "a bomb": place(BOMB, BOMB, BOMB),
    "a call": call(name("os", "system"), "true"),
}


@pytest.mark.parametrize("where", list(PLACES))
def test_places(attacker: Attacker, where: str) -> None:
    one(attacker, ONE, PLACES[where])
    refused(attacker)


@pytest.mark.parametrize("target", ["secret", "/etc/passwd", "/dev/zero", "loop"])
def test_links(attacker: Attacker, target: str) -> None:
    """A file that is a link out of the folder, or to itself."""
    one(attacker, ONE)
    (attacker.src / FILE).unlink()
    places = {"secret": attacker.outside / "secret", "loop": attacker.src / FILE}
    os.symlink(places.get(target, target), attacker.src / FILE)
    refused(attacker)


@pytest.mark.parametrize(
    "of", ["", "\0", "../../x", "a\nb", "\x1b[2J", "\udc80", "x" * 1_000_000, 7, None, (1, 2)], ids=range(10)
)
def test_names(attacker: Attacker, of: Any) -> None:
    """A name that could be one in a model is kept as it is: no place, and no command to the terminal."""
    one(attacker, ONE, of=of)
    outcome = attacker.refused_or_merged(*STAGED)
    assert outcome.code == (0 if of == "../../x" else 2)
    assert "\x1b" not in outcome.stderr


def test_more_chunks_than_bytes(attacker: Attacker) -> None:
    """One list of chunks that a thousand tensors share."""
    shared = Raw(b"](" + chunk(size(0, 0), size(2, 2)) * 1000 + b"eq\xfa")
    entries: dict[Any, Any] = {"w": stored(size(2, 2), shared)}
    entries |= {f"w{n}": stored(size(2, 2), Raw(b"h\xfa")) for n in range(5000)}
    folder(attacker, entries, {index("w", size(0, 0)): place(FILE, 0, 900)})
    refused(attacker)


@pytest.mark.parametrize(
    "metadata",
    [b"", b"\x80\x02N.", b"\x80\x02}.", b"cos\nsystem\n(S'true'\ntR.", bytes(1 << 20)],
    ids=range(5),
)
def test_metadata_that_is_none(attacker: Attacker, metadata: bytes) -> None:
    one(attacker, ONE)
    (attacker.src / ".metadata").write_bytes(metadata)
    refused(attacker)


@pytest.mark.parametrize("nbytes", [200 << 20, 2 << 30])
def test_metadata_that_is_sparse(attacker: Attacker, nbytes: int) -> None:
    one(attacker, ONE)
    with open(attacker.src / ".metadata", "r+b") as file:
        file.write(b"\x80\x02")
        file.truncate(nbytes)
    refused(attacker, ".metadata")
