"""What tests of whole merges have in common: a result against the truth, and a refusal that leaves no trace.

Nothing here asks lazymerge: results are read with safetensors, or with struct and json.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lazymerge import LazymergeError
from tests.makers.layout import Made

logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # unpickled without groups

INDEX = "model.safetensors.index.json"


def raw(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_tensors(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bytes."""
    assert set(found) == set(truth)
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert raw(found[name]) == raw(tensor), name


def assert_same_model(folder: Path, truth: Mapping[str, torch.Tensor], tied: Collection[str] = ()) -> None:
    """The folder's safetensors files hold `truth`, without the names of `tied`, and are well formed."""
    placed = assert_well_formed(folder)
    found = {}
    for filename in set(placed.values()):
        with safe_open(folder / filename, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert_same_tensors(found, {name: tensor for name, tensor in truth.items() if name not in tied})


def assert_well_formed(folder: Path) -> dict[str, str]:
    """Name -> file of every tensor, after a look at the index and all headers."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    placed: dict[str, str] = {}
    total = 0
    for filename in files:
        header, nbytes = _checked_header(folder / filename)
        assert not set(header) & set(placed), "a name in two files"
        placed |= dict.fromkeys(header, filename)
        total += nbytes
    if files == ["model.safetensors"]:
        assert not (folder / INDEX).exists()
    else:
        count = len(files)
        assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        index = json.loads((folder / INDEX).read_text())
        assert index["weight_map"] == placed
        assert index["metadata"]["total_size"] == total
    left = {path.name for path in (folder / ".lazymerge").glob("*")}
    assert left in (set(), {"lock", "partial.json"}), left  # the latter after a merge with --include
    assert bool(left) == (folder / ".lazymerge").exists()
    return placed


def _checked_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header without its metadata, and the bytes of its tensors."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    at = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        start, end = entry["data_offsets"]
        assert start == at, "a gap or an overlap"
        at = end
    assert 8 + size + at == len(content)
    return header, at


def tied_away(made: Made) -> list[str]:
    """The names of parameters that have another name too, which is written."""
    return [name for names in made.tied for name in names[1:]]


def tree(folder: Path) -> dict[str, Any] | None:
    """Everything in a folder: what a refused merge must leave as it was. None: there is no such thing."""
    if not folder.exists():
        return None
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@contextmanager
def refused(kind: type[LazymergeError], *words: str, dst: Path) -> Iterator[None]:
    """The block raises just `kind`, its message holds all `words`, and `dst` is as it was before."""
    before = tree(dst)
    with pytest.raises(LazymergeError) as caught:
        yield
    error = caught.value
    public = next(cls for cls in type(error).__mro__ if cls.__module__ == "lazymerge.errors")
    assert public is kind, repr(error)
    assert error.exit_code == 2
    for word in words:
        assert word in str(error), f"{word!r} not in {error}"
    assert "\n" not in error.problem
    assert error.hint
    assert "\n" not in error.hint
    assert tree(dst) == before
