"""What is in the rank files of one save: the entries of every name, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lazymerge.errors import AmbiguousCheckpoint, UnsupportedCheckpoint
from lazymerge.files.inert_pickle import Record
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.torch_file import StoredTensor, ZippedObject, read_torch_file
from lazymerge.files.zip_directory import is_zip, open_archive
from lazymerge.formats.alike import Template, make_template
from lazymerge.formats.assemble import Ranked
from lazymerge.formats.entries import Distributed, Entry, EntryReader
from lazymerge.formats.rank_sets import RankSet

_WRAPPERS = ("model", "state_dict", "module", "model_state_dict")
_MAX_WRAPPERS = 3

ALIKE_FROM = 16
"""Rank files from which on it pays to look for what they have in common."""

MAX_TEMPLATES = 8
"""Kinds of alike files that are remembered: ranks below and above 256, with and without a remainder, ..."""


@dataclass(slots=True)
class Found:
    """The entries of all ranks by name, in the order of the first rank that has the name."""

    entries: dict[str, list[Ranked]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    files: list[LocalFile] = field(default_factory=list)
    mesh: tuple[tuple[str, int], ...] = ()


def read_ranks(chosen: RankSet) -> Found:
    """The entries of all files of the set; nothing but their metadata is read.

    Raises `UnsupportedCheckpoint` where there are no tensors, or such as cannot be merged.
    """
    pool = Descriptors()
    found = Found()
    reader = _FileReader(found, templates=len(chosen.files) >= ALIKE_FROM)
    for rank in sorted(chosen.files):
        file = LocalFile(chosen.files[rank], pool)
        found.files.append(file)
        for name, entry in reader.read(file, rank):
            found.entries.setdefault(name, []).append((rank, entry))
            if isinstance(entry, Distributed) and len(entry.names) > len(found.mesh):
                found.mesh = tuple(zip(entry.names, entry.layout.mesh, strict=False))
    if not found.entries:
        raise UnsupportedCheckpoint(
            f"{next(iter(chosen.files.values()))}: holds no tensors",
            "give a file or folder with a state dict",
        )
    return found


class _FileReader:
    """Reads the entries of rank files, those that are alike by a template."""

    def __init__(self, found: Found, *, templates: bool) -> None:
        self._found = found
        self._entries = EntryReader()
        self._templates: list[Template] = []
        self._room = MAX_TEMPLATES if templates else 0

    def read(self, file: LocalFile, rank: int) -> list[tuple[str, Entry]]:
        """The entries of one rank's file, by name."""
        if not self._room:
            return self._in_full(file, rank, read_torch_file(file))[1]
        with open_archive(file) as archive:
            if not is_zip(archive):
                return self._in_full(file, rank, read_torch_file(file))[1]
            zipped = ZippedObject(archive)
            for template in self._templates:
                entries = template.read(file, rank, zipped)
                if entries is not None:
                    return entries
            state, entries = self._in_full(file, rank, zipped.load())
            if len(self._templates) < self._room:
                made = make_template(zipped, state, entries)
                if made is None:
                    self._room = len(self._templates)
                else:
                    self._templates.append(made)
            return entries

    def _in_full(
        self, file: LocalFile, rank: int, value: object
    ) -> tuple[dict[Any, Any], list[tuple[str, Entry]]]:
        """The state dict and its entries; what is no tensor is noted as left out."""
        state = _state_dict(file, value, self._found)
        _refuse_flat(file, state)
        entries = []
        for name, item in state.items():
            entry = self._entries.read(file.name, rank, name, item) if isinstance(name, str) else None
            if entry is None:
                _refuse_hidden(file, name, item)
                self._found.left_out[str(name)[:200]] = f"no tensor but {_kind(item)}"
            else:
                _refuse_no_text(file, name)
                entries.append((name, entry))
        self._entries.forget_meshes()
        return state, entries


def _refuse_no_text(file: LocalFile, name: str) -> None:
    """Python's strings may hold half of a surrogate pair; the JSON of safetensors is UTF-8 and may not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedCheckpoint(
            f"{file.path}: a tensor named {ascii(name)[:200]}, which holds half of a surrogate pair",
            "no format can hold such a name: save the state dict again with another one",
        ) from None


def _state_dict(file: LocalFile, value: object, found: Found, depth: int = 0) -> dict[Any, Any]:
    """The state dict, taken out of what it is wrapped in; what stands beside it is noted as left out."""
    if not isinstance(value, dict):
        raise UnsupportedCheckpoint(
            f"{file.path}: holds {_kind(value)}, expected a state dict",
            "save model.state_dict(), not the model",
        )
    wrapped = [key for key in _WRAPPERS if _holds_tensors(value.get(key), depth + 1)]
    if len(wrapped) > 1:
        raise AmbiguousCheckpoint(
            f"{file.path}: holds state dicts under {' and '.join(wrapped)}", "save only one of them"
        )
    if not wrapped:
        return value
    for key in value:
        if key != wrapped[0]:
            found.left_out[str(key)[:200]] = "beside the state dict"
    return _state_dict(file, value[wrapped[0]], found, depth + 1)


def _holds_tensors(value: object, depth: int) -> bool:
    """Whether a value is a dict with tensors in it, or one that such a dict is wrapped in."""
    if not isinstance(value, dict) or depth > _MAX_WRAPPERS:
        return False
    if any(isinstance(item, StoredTensor) or _is_tensor(item) for item in value.values()):
        return True
    return any(_holds_tensors(value.get(key), depth + 1) for key in _WRAPPERS)


def _refuse_hidden(file: LocalFile, name: object, value: object) -> None:
    """Refuse to leave out what holds tensors, but for the extra state of modules, which is none of theirs."""
    if isinstance(name, str) and name.rpartition(".")[2] == "_extra_state":
        return
    if _any_tensor(value, _MAX_WRAPPERS, set()):
        raise UnsupportedCheckpoint(
            f"{str(name)[:200]!r} in {file.path}: {_kind(value)} with tensors where a tensor is expected",
            "save a flat state dict: names to tensors",
        )


def _any_tensor(value: object, depth: int, seen: set[tuple[int, int]]) -> bool:
    """Whether there is a tensor in a value, as deep as that; what is shared is looked at once a level."""
    if isinstance(value, StoredTensor) or _is_tensor(value):
        return True
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if depth == 0 or not inside or (id(value), depth) in seen:
        return False
    seen.add((id(value), depth))
    return any(_any_tensor(item, depth - 1, seen) for item in inside)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Record) and "_rebuild_" in str(value.cls)


def _refuse_flat(file: LocalFile, state: dict[Any, Any]) -> None:
    for name in state:
        if isinstance(name, str) and name.rpartition(".")[2] in {"_flat_param", "flat_param"}:
            raise UnsupportedCheckpoint(
                f"{name} in {file.path}: a flat parameter (LOCAL_STATE_DICT): what is in it is not said",
                "load it into the model that wrote it and save a SHARDED_STATE_DICT or FULL_STATE_DICT",
            )


def _kind(value: object) -> str:
    if isinstance(value, StoredTensor):
        return "a tensor"
    return str(value.cls)[:100] if isinstance(value, Record) else type(value).__name__
