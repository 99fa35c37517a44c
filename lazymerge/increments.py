"""A result that grows: what a merge of some tensors has written is kept, and a later one adds the rest.

    DST/.lazymerge/partial.json    {"job": ..., "sources": {path: identity}, "files": {name: identity}}

`job` is what decides the bytes, but for the selection of tensors. The next merge of that job into DST plans
only tensors that no file there holds. Files that are kept are never written again, only renamed: there
are more of them then, and the index names them all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.adapters.adapter import WEIGHTS as ADAPTER
from lazymerge.errors import InconsistentCheckpoint, OutputError
from lazymerge.files.json_text import bounded
from lazymerge.files.local import LocalFile
from lazymerge.files.safetensors_file import read_safetensors
from lazymerge.gather import of_region
from lazymerge.journal import identity_of, is_file, is_inside
from lazymerge.output import PARTIAL, STAGING
from lazymerge.plan import INDEX, SAFETENSORS, OutputFile, Plan, index_file, make_plan
from lazymerge.prepare import Held, Prepared

_LARGEST = 16 << 20


def held(
    folder: Path, job: Mapping[str, Any], sources: Mapping[str, Any], *, overwrite: bool = False
) -> tuple[Held, ...]:
    """The weight files of earlier increments of this job in the folder; none where there is no such part.

    `overwrite` says that one which cannot be kept is replaced. Else raises `InconsistentCheckpoint` if a
    source has changed since, and `OutputError` if one of the files has, or is none that can grow.
    """
    record = _record(folder)
    job, sources = json.loads(json.dumps(job)), json.loads(json.dumps(sources))
    if record is None or record["sources"].keys() != sources.keys():
        return ()
    formats = {str(each.get("output_format")) for each in (record["job"], job)}
    if {**record["job"], "output_format": None} != {**job, "output_format": None}:
        return ()
    changed = [path for path in sorted(sources) if record["sources"][path] != sources[path]]
    if overwrite and (changed or formats != {SAFETENSORS}):
        return ()
    if formats != {SAFETENSORS}:
        raise OutputError(
            f"{folder}: holds a part of the result, and only safetensors can grow, not bin",
            "merge everything at once with --output-format bin into another folder, or with --overwrite",
        )
    if changed:
        raise InconsistentCheckpoint(
            f"{changed[0]}: has changed since a part of the result in {folder} was read from it",
            "merge into another folder, empty this one, or give --overwrite to start anew",
        )
    found = []
    weights = {name: identity for name, identity in record["files"].items() if name.endswith(".safetensors")}
    for name, identity in weights.items():
        path = _place(folder, identity)
        if path is None and overwrite:
            return ()
        if path is None:
            raise OutputError(
                f"{folder / name}: is not the file that an earlier merge of a part wrote",
                "merge into another folder, or empty this one",
            )
        regions = read_safetensors(LocalFile(path))
        found.append(
            Held(name, path, identity, {key: of_region(region).nbytes for key, region in regions.items()})
        )
    return tuple(found)


def _record(folder: Path) -> dict[str, Any] | None:
    path = folder / STAGING / PARTIAL
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        record = json.loads(bounded(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None
    parts = ("job", "sources", "files")
    if not isinstance(record, dict) or not all(isinstance(record.get(part), dict) for part in parts):
        return None
    if not all(map(is_inside, record["files"])):
        return None  # no merge has written that
    return record


def _place(folder: Path, identity: object) -> Path | None:
    """Where a file of this identity is: under its name, or under its next one if that run was killed."""
    candidates = [*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")]
    candidates += (folder / STAGING).glob("**/*.safetensors")
    return next((path for path in candidates if is_file(path, identity)), None)


def record_of(
    job: Mapping[str, Any], sources: Mapping[str, Any], folder: Path, names: Sequence[str]
) -> bytes:
    """What the next increment has to know of a published part."""
    files = {name: identity_of(folder / name) for name in names}
    return json.dumps({"job": job, "sources": sources, "files": files}).encode() + b"\n"


def grown(prepared: Prepared, kept: Sequence[Held], shard_size: int) -> Prepared:
    """The merge without what the kept files hold; its plan has those too, with nothing to write in them."""
    beside = {each.name: each for each in kept if each.name.endswith(ADAPTER)}
    kept = [each for each in kept if each.name not in beside]
    there = {name for each in kept for name in each.tensors}
    checkpoint = prepared.checkpoint
    unwanted = there - set(checkpoint.gathers)
    missing = {name: gather for name, gather in checkpoint.gathers.items() if name not in there}
    plan = make_plan(missing, max_shard_size=shard_size) if missing else Plan((), None, None)
    plan, links = joined(plan, kept)
    for file in prepared.plan.files:
        if file.name not in prepared.adapters:
            continue
        found = beside.get(file.name)
        if found is not None and not found.tensors.keys() <= prepared.adapters[file.name].keys():
            raise OutputError(
                f"{found.path}: holds tensors of the adapter that are not asked for this time",
                "ask for these too, or they would be lost; or merge into another folder",
            )
        if found is not None and found.tensors.keys() == prepared.adapters[file.name].keys():
            links[file.name] = found
            file = replace(file, tensors=())
            there |= found.tensors.keys()
        plan = replace(plan, files=(*plan.files, file))
    text = f"{len(there)} tensors are there from an earlier merge"
    if unwanted:
        text += f"; {len(unwanted)} of them are not asked for this time, and stay"
    return replace(
        prepared, checkpoint=checkpoint.with_gathers(missing, Note("info", text)), plan=plan, kept=links
    )


def joined(plan: Plan, kept: Sequence[Held]) -> tuple[Plan, dict[str, Held]]:
    """The plan of new files with those that are kept, numbered through and indexed; new name -> kept file."""
    total = len(kept) + len(plan.files)
    names = [f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)]
    if total == 1:
        names = ["model.safetensors"]
    links = dict(zip(names, kept, strict=False))
    new = [replace(file, name=name) for file, name in zip(plan.files, names[len(kept) :], strict=True)]
    places = {key: name for name, each in links.items() for key in each.tensors}
    places |= {tensor.name: file.name for file in new for tensor in file.tensors}
    size = sum(sum(each.tensors.values()) for each in kept)
    size += sum(tensor.nbytes for file in new for tensor in file.tensors)
    index = index_file({"total_size": size}, places) if total > 1 else None
    standing = [OutputFile(name, each.path.stat().st_size, ()) for name, each in links.items()]
    return Plan((*standing, *new), index, INDEX if index else None), links
