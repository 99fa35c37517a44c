"""A plan as plain data for JSON, and back: so that another process or machine can execute a part of it.

    {"version": 1, "format": "safetensors", "index": ...,
     "sources": [{"path": ..., "size": bytes, "mtime_ns": ...},          a file
                 {"op": ATen name, "operands": [gather, ...], ...},      a computation
                 {"cast": dtype, "operand": gather, "tensor": ...},      a cast that needs no torch
                 {"lowrank": gather, "terms": [{"left", "right", "scale"}, ...], ...},    an adapter folded in
                 {"memory": base64}],                                    a small tensor
     "files": [{"name": ..., "tensors": [{"name", "shape", "gather"}]}]}

A gather is ``{"dtype", "shape", "pieces": [[start, shape, strides, source, offset], ...]}``: `source` is
an index into the sources, `offset` in bytes, strides in elements. Offsets in output files are worked
out again, and every gather is proved complete again and inside of its sources, so a damaged plan is refused
like a damaged file. Which bytes of a file are a tensor's is what a plan says, and nothing else knows.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazymerge.boxes import Piece
from lazymerge.casting import Cast, casts
from lazymerge.errors import InconsistentCheckpoint, PlanError
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.local import Descriptors, LocalFile, Source
from lazymerge.files.region import Region
from lazymerge.gather import Constant, Gather, Shards
from lazymerge.lowrank import LowRank, Term
from lazymerge.plan import BIN, INDEX, SAFETENSORS, OutputFile, Plan, bin_file, safetensors_file

if TYPE_CHECKING:
    from lazymerge.compute import Computed

VERSION = 1
LARGEST_CONSTANT = 1 << 20
"""Bytes of a tensor in memory that a plan carries at most."""


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as dicts, lists, strings and numbers.

    Raises `PlanError` if it holds a large tensor that is only in this process's memory.
    """
    writer = _Writer()
    files = [
        {
            "name": file.name,
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "gather": writer.gather(tensor.gather),
                }
                for tensor in file.tensors
            ],
        }
        for file in plan.files
    ]
    return {
        "version": VERSION,
        "format": BIN if plan.files[0].archive else SAFETENSORS,
        "index": plan.index.decode() if plan.index is not None else None,
        "sources": writer.sources,
        "files": files,
    }


def plan_from_json(data: dict[str, Any]) -> Plan:
    """The plan that `plan_to_json` gave; opens the files that it reads.

    Raises `PlanError` for what is no such plan, and `InconsistentCheckpoint` if a file is not what it
    was when the plan was made.
    """
    try:
        if data["version"] != VERSION:
            raise PlanError(f"a plan of version {data['version']}", f"this lazymerge reads version {VERSION}")
        reader = _Reader(data["sources"])
        files = tuple(_file(reader, data["format"], file) for file in data["files"])
        index = data["index"]
        return Plan(files, None if index is None else index.encode(), None if index is None else INDEX)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanError(f"not a plan: {type(error).__name__} {error}", "make the plan again") from error


def _file(reader: _Reader, kind: str, data: dict[str, Any]) -> OutputFile:
    tensors = {
        each["name"]: reader.gather(each["gather"]).view(tuple(each["shape"])) for each in data["tensors"]
    }
    if kind == BIN:
        return bin_file(tensors)
    if Path(data["name"]).name != data["name"]:
        raise PlanError(f"a plan of the file {data['name'][:200]!r}", "make the plan again")
    return safetensors_file(data["name"], tensors)


class _Writer:
    """Collects sources; each file and each computation is written once."""

    def __init__(self) -> None:
        self.sources: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}

    def gather(self, gather: Gather) -> dict[str, Any]:
        pieces = [
            [list(start), list(r.shape), list(r.strides), self._source(r.source), r.offset]
            for start, r in gather.pieces()
        ]
        return {"dtype": gather.dtype.name, "shape": list(gather.shape), "pieces": pieces}

    def _source(self, source: Source) -> int:
        number = self._numbers.get(id(source))
        if number is None:
            described = self._describe(source)  # may add the sources of operands first
            number = self._numbers[id(source)] = len(self.sources)
            self.sources.append(described)
        return number

    def _describe(self, source: Source) -> dict[str, Any]:
        if isinstance(source, LocalFile):
            return {"path": str(source.path), "size": source.size, "mtime_ns": source.mtime_ns}
        if isinstance(source, Cast):
            operand = self.gather(source.operand)
            return {"cast": source.dtype.name, "operand": operand, "tensor": source.tensor}
        if isinstance(source, LowRank):
            return self._products(source)
        from lazymerge.compute import Computed

        if isinstance(source, Computed):
            return self._computation(source)
        if source.size > LARGEST_CONSTANT:
            raise PlanError(
                f"the plan holds a tensor of {source.size} bytes that is only in memory",
                "execute it in this process, or save that tensor to a file first",
            )
        content = bytearray(source.size)
        source.read_into(0, memoryview(content))
        return {"memory": base64.b64encode(content).decode()}

    def _products(self, source: LowRank) -> dict[str, Any]:
        terms = [
            {
                "left": self.gather(term.left),
                "right": None if term.right is None else self.gather(term.right),
                "scale": term.scale,
            }
            for term in source.terms
        ]
        return {
            "lowrank": self.gather(source.base),
            "dtype": source.dtype.name,
            "terms": terms,
            "magnitude": None if source.magnitude is None else self.gather(source.magnitude),
            "columns": source.columns,
            "tensor": source.tensor,
        }

    def _computation(self, source: Computed) -> dict[str, Any]:
        from lazymerge.compute_json import arguments_to_json

        return {
            "op": source.op,
            "operands": [self.gather(operand) for operand in source.operands],
            "arguments": arguments_to_json(source),
            "shape": list(source.shape),
            "dtype": source.dtype.name,
            "checked": source.checked,
        }


def _numbers(values: list[int]) -> tuple[int, ...]:
    """A shape, or the like; `ValueError` if not all are whole numbers from 0 on."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"of the numbers {str(values)[:100]}")
    return tuple(values)


class _Reader:
    """Opens sources when a gather first names them."""

    def __init__(self, sources: list[dict[str, Any]]) -> None:
        self._described = sources
        self._opened: dict[int, Source] = {}
        self._pool = Descriptors()

    def gather(self, data: dict[str, Any]) -> Gather:
        dtype = DTYPES[data["dtype"]]
        pieces = [
            Piece(_numbers(start), self._region(dtype, shape, strides, source, offset))
            for start, shape, strides, source, offset in data["pieces"]
        ]
        return Shards(_numbers(data["shape"]), dtype, Constant(pieces))

    def _region(self, dtype: DType, shape: list[int], strides: list[int], source: int, at: int) -> Region:
        """The region, which lies inside of its source."""
        (offset,) = _numbers([at])
        region = Region(self._source(source), offset, dtype, _numbers(shape), _numbers(strides))
        inside = offset + region.extent <= region.source.size
        if not inside or (not isinstance(region.source, LocalFile) and offset % dtype.itemsize):
            raise PlanError(
                f"a plan with bytes {offset} to {offset + region.extent} of {region.source.name},"
                f" which has {region.source.size}",
                "make the plan again",
            )
        return region

    def _source(self, number: int) -> Source:
        if number not in self._opened:
            self._opened[number] = self._open(self._described[number])
        return self._opened[number]

    def _open(self, data: dict[str, Any]) -> Source:
        if "path" in data:
            file = LocalFile(Path(data["path"]), self._pool)
            if (file.size, file.mtime_ns) != (data["size"], data["mtime_ns"]):
                raise InconsistentCheckpoint(
                    f"{file.path}: has changed since the plan was made", "make the plan again"
                )
            return file
        if "cast" in data:
            return self._cast(data)
        if "lowrank" in data:
            return self._products(data)
        from lazymerge.compute_json import computed_from_json
        from lazymerge.elements import Memory

        if "memory" in data:
            return Memory(base64.b64decode(data["memory"]))
        operands = tuple(self.gather(operand) for operand in data["operands"])
        return computed_from_json(
            data["op"],
            operands,
            data["arguments"],
            tuple(data["shape"]),
            DTYPES[data["dtype"]],
            data["checked"],
        )

    def _cast(self, data: dict[str, Any]) -> Cast:
        operand, dtype = self.gather(data["operand"]), DTYPES[data["cast"]]
        if not casts(operand, dtype):
            raise PlanError(f"a plan with a cast of {operand.dtype} to {dtype}", "make the plan again")
        return Cast(operand, dtype, data["tensor"])

    def _products(self, data: dict[str, Any]) -> LowRank:
        terms = tuple(
            Term(
                self.gather(term["left"]),
                None if term["right"] is None else self.gather(term["right"]),
                term["scale"],
            )
            for term in data["terms"]
        )
        magnitude = None if data["magnitude"] is None else self.gather(data["magnitude"])
        base, dtype = self.gather(data["lowrank"]), DTYPES[data["dtype"]]
        return LowRank(base, terms, data["tensor"], magnitude, data["columns"], dtype)
