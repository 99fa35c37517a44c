"""Rank files that are alike: the pickles of one save differ in a few numbers, and need not be read again.

A pickle of 723 DTensors has some 100,000 instructions, and those of 512 ranks are the same but for
where the rank stands on the mesh and on which device it was. A `Template` is a pickle that has been
read, with the *sites* in it that may differ, operands of instructions all of them:

    coordinate   the numbers after ``_coordinate_on_dim``
    rank         the number after ``_rank``
    free         the index of a torch.device, the location of a storage ("cuda:3"), names of process groups

Nobody asks for free sites. A string is free only if the pickle does not fetch it again: Python has
one object "3", which may name a process group and, through the memo, a storage as well.

Another pickle of the same length that differs in nothing but sites has the same instructions, so it
means the same with other numbers at those sites. Anything else is read in full. Files with several
meshes (FSDP over tensor parallelism) always are, since it is not worked out which site is whose.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lazymerge.boxes import Shape
from lazymerge.errors import DamagedFile
from lazymerge.files.dtype import DType
from lazymerge.files.local import LocalFile
from lazymerge.files.region import Region
from lazymerge.files.torch_file import ZippedObject
from lazymerge.formats.entries import Distributed, Entry, Plain, local_tensor

_LOCATION = re.compile(r"[a-z]+:\d+")
_WIDTHS = {"BININT1": 1, "BININT2": 2, "BININT": 4}
_STRINGS = {"BINUNICODE": 5, "SHORT_BINUNICODE": 2}  # bytes before the text


class _Token(NamedTuple):
    """An instruction that pushes or builds something; memo instructions are resolved away.

    `value` is the string, number or global name that it pushes, if it is one; `at` and `width` are the
    bytes of its operand in the pickle; `memo` is the memo entry that it is put into or fetched from.
    """

    name: str
    value: Any
    at: int
    width: int
    memo: int | None = None


class _Site(NamedTuple):
    at: int
    width: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """An entry of the template's file, and where in its storage its bytes are."""

    name: str
    entry: Plain | Distributed
    key: str
    inside: int  # bytes from the start of the storage


@dataclass(frozen=True, slots=True)
class Template:
    """A pickle that was read, its entries, and where another one may differ from it."""

    pickled: NDArray[np.uint8]
    may_differ: NDArray[np.bool_]
    coordinate: tuple[_Site, ...]
    rank: tuple[_Site, ...]
    entries: tuple[_Stored, ...]

    def read(self, file: LocalFile, rank: int, zipped: ZippedObject) -> list[tuple[str, Entry]] | None:
        """The entries of another rank's file by its template; None if the file is not like it.

        Raises `DamagedFile` if a storage is smaller than its tensor.
        """
        other = np.frombuffer(zipped.pickled, np.uint8)
        if other.size != self.pickled.size or np.any((other != self.pickled) & ~self.may_differ):
            return None
        coordinate = tuple(_number(other, site) for site in self.coordinate)
        if any(_number(other, site) != rank for site in self.rank) or not self._on_mesh(coordinate):
            return None  # the full reader says what is wrong, if something is
        return [(stored.name, _moved(stored, file, coordinate, zipped)) for stored in self.entries]

    def _on_mesh(self, coordinate: Shape) -> bool:
        meshes = {each.entry.layout.mesh for each in self.entries if isinstance(each.entry, Distributed)}
        return all(
            len(coordinate) == len(mesh) and all(0 <= at < n for at, n in zip(coordinate, mesh, strict=True))
            for mesh in meshes
        )


def make_template(
    zipped: ZippedObject, state: dict[str, Any], entries: list[tuple[str, Entry]]
) -> Template | None:
    """The template of a file that was read in full; None if files like it cannot be told from others."""
    stored = [_stored(name, entry, state[name]) for name, entry in entries]
    known = tuple(each for each in stored if each is not None)
    sites = _sites(zipped.pickled)
    if sites is None or len(known) < len(stored):
        return None
    coordinate, rank, free = sites
    pickled = np.frombuffer(zipped.pickled, np.uint8)
    may_differ = np.zeros(pickled.size, np.bool_)
    for site in (*coordinate, *rank, *free):
        may_differ[site.at : site.at + site.width] = True
    return Template(pickled, may_differ, tuple(coordinate), tuple(rank), known)


def _stored(name: str, entry: Entry, value: object) -> _Stored | None:
    tensor = local_tensor(value)
    on_mesh = isinstance(entry, Plain) or (isinstance(entry, Distributed) and entry.coordinate is not None)
    if tensor is None or not on_mesh or not isinstance(entry, Plain | Distributed):
        return None
    inside = tensor.offset * tensor.dtype.itemsize
    return _Stored(name, entry, tensor.storage.key, inside)


def _moved(stored: _Stored, file: LocalFile, coordinate: Shape, zipped: ZippedObject) -> Entry:
    """The template's entry as it is in another rank's file."""
    offset, size = zipped.locate(stored.key)
    needed = stored.inside + stored.entry.region.extent
    if needed > size:
        raise DamagedFile(
            f"{file.path}: storage {stored.key!r} has {size} bytes, expected {needed}",
            "the file is truncated or overwritten; copy it again",
        )
    old = stored.entry.region
    dtype: DType = old.dtype
    region = Region(file, offset + stored.inside, dtype, old.shape, old.strides)
    if isinstance(stored.entry, Plain):
        return Plain(region)
    return Distributed(stored.entry.layout, coordinate, region, stored.entry.names, stored.entry.old)


def _number(pickled: NDArray[np.uint8], site: _Site) -> int:
    return int.from_bytes(pickled[site.at : site.at + site.width].tobytes(), "little", signed=site.width == 4)


def _sites(pickled: bytes) -> tuple[list[_Site], list[_Site], list[_Site]] | None:
    """(coordinate, rank, free) sites of a pickle; None if it does not have exactly one mesh."""
    tokens = _tokens(pickled)
    coordinates: list[list[_Site]] = []
    rank: list[_Site] = []
    devices: list[_Site] = []
    unasked: set[int] = set()  # indices of strings that nobody asks for
    for index, token in enumerate(tokens):
        if not isinstance(token.value, str):
            continue
        following = tokens[index + 1 : index + 24]
        if token.value == "_coordinate_on_dim":
            coordinates.append(_numbers(following))
        elif token.value == "_rank" and following and following[0].name in _WIDTHS:
            rank.append(_Site(following[0].at, following[0].width))
        elif _is_device(tokens, index):
            devices.append(_Site(following[0].at, following[0].width))
        elif _LOCATION.fullmatch(token.value) and "BINPERSID" in [each.name for each in following[:4]]:
            unasked.add(index)
        elif token.value == "_dim_group_names":
            unasked.update(range(index + 1, index + 1 + _length(following)))
    if len(coordinates) != 1 or not coordinates[0]:
        return None
    return coordinates[0], rank, devices + _strings(tokens, unasked)


def _strings(tokens: list[_Token], unasked: set[int]) -> list[_Site]:
    """The sites of strings at these indices, but for those that are fetched from the memo elsewhere."""
    asked = {token.memo for i, token in enumerate(tokens) if token.name == "GET" and i not in unasked}
    strings = [tokens[index] for index in unasked if tokens[index].name in _STRINGS]
    return [_Site(token.at, token.width) for token in strings if token.memo not in asked]


def _length(following: list[_Token]) -> int:
    """How many instructions make a list of strings."""
    kinds = {"EMPTY_LIST", "MARK", "GET", *_STRINGS}
    return next((i for i, token in enumerate(following) if token.name not in kinds), 0)


def _numbers(following: list[_Token]) -> list[_Site]:
    """The sites of a list or tuple of numbers; empty if it is something else."""
    sites = []
    for token in following:
        if token.name in _WIDTHS:
            sites.append(_Site(token.at, token.width))
        elif token.name in {"APPEND", "APPENDS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}:
            return sites
        elif token.name not in {"EMPTY_LIST", "MARK"}:
            return []
    return []


def _is_device(tokens: list[_Token], index: int) -> bool:
    """Whether a string is the type of a torch.device that has an index."""
    names = [token.name for token in tokens[index + 1 : index + 4]]
    called = index > 0 and tokens[index - 1].value == "torch device"
    return called and len(names) == 3 and names[0] in _WIDTHS and names[1:] == ["TUPLE2", "REDUCE"]


def _tokens(pickled: bytes) -> list[_Token]:
    """The instructions of a pickle that has been read before, so that it is known to be a proper one."""
    tokens: list[_Token] = []
    memo: dict[int, Any] = {}
    for opcode, operand, at in pickletools.genops(pickled):
        name, argument = opcode.name, cast(Any, operand)
        assert at is not None
        if name.endswith("PUT") or name == "MEMOIZE":
            index = len(memo) if name == "MEMOIZE" else int(argument)
            memo[index] = tokens[-1].value
            tokens[-1] = tokens[-1]._replace(memo=index)
        elif name.endswith("GET"):
            tokens.append(_Token("GET", memo[int(argument)], 0, 0, int(argument)))
        elif name in _WIDTHS:
            tokens.append(_Token(name, int(argument), at + 1, _WIDTHS[name]))
        elif name in _STRINGS:
            width = len(argument.encode("utf-8", "surrogatepass"))
            tokens.append(_Token(name, argument, at + _STRINGS[name], width))
        else:
            tokens.append(_Token(name, argument if name == "GLOBAL" else None, 0, 0))
    return tokens
