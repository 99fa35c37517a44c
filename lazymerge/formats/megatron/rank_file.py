"""One file of the `torch` layout: the tensors of its pipeline chunks, and the arguments beside them.

    args                 argparse.Namespace
    checkpoint_version   3.0; below 2.0 the rows of query_key_value are in another order
    model                names -> tensors, with ``_extra_state`` of any kind among them
    model0, model1, ...  the same for each virtual stage of the rank
    optimizer, rng_state, ...  training state: not looked at

Models from before mcore are nested dicts under ``model["language_model"]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lazymerge.errors import AmbiguousCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint
from lazymerge.files.inert_pickle import Record
from lazymerge.files.local import LocalFile
from lazymerge.files.torch_file import StoredTensor, read_torch_file
from lazymerge.formats.megatron.names import chunk_name, is_adapter
from lazymerge.formats.megatron.settings import plain_number, settings_of

Chunk = dict[str, StoredTensor]
"""The tensors of one pipeline chunk of a rank, by mcore's names with local numbers."""

_MAX_NAME = 500  # characters
_VIRTUAL = re.compile(r"model(0|[1-9][0-9]{0,5})")
_FACTS = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")


@dataclass(slots=True)
class RankFile:
    """What is in one file; `left_out` has what is beside the model or can be computed, and why."""

    file: LocalFile
    settings: dict[str, Any]
    iteration: int | None
    chunks: list[Chunk]
    left_out: dict[str, str]


def read_rank_file(file: LocalFile) -> RankFile:
    """The model in one file, unread.

    Raises `UnsupportedCheckpoint` for what holds none, or holds what is no plain tensor,
    `AmbiguousCheckpoint` for two models and `IncompleteCheckpoint` for a gap in the numbers of its chunks.
    """
    state = read_torch_file(file)
    if not isinstance(state, dict):
        raise UnsupportedCheckpoint(
            f"{file.path}: holds {_kind(state)}, expected the dict that Megatron saves", "check what wrote it"
        )
    keys = _chunk_keys(file, state)
    left_out = {_shown(key)[:200]: "beside the model" for key in state if key not in (*keys, *_FACTS)}
    chunks = [_chunk(file, state, key, left_out) for key in keys]
    return RankFile(
        file, settings_of(state.get("args")), plain_number(state.get("iteration")), chunks, left_out
    )


def _chunk_keys(file: LocalFile, state: dict[Any, Any]) -> list[str]:
    numbers = []
    for key, value in state.items():
        if not isinstance(value, dict) or not isinstance(key, str) or not re.fullmatch(r"model\d+", key):
            continue
        match = _VIRTUAL.fullmatch(key)
        if match is None:
            raise UnsupportedCheckpoint(
                f"{file.path}: holds {key[:40]!r}, expected model0, model1 and on for virtual stages",
                "the file was changed after it was saved; copy it again",
            )
        numbers.append(int(match[1]))
    numbers.sort()
    if isinstance(state.get("model"), dict):
        if numbers:
            raise AmbiguousCheckpoint(
                f"{file.path}: holds two models, model and model{numbers[0]}",
                "save again with one of them: model, or model0 and on for virtual stages",
            )
        return ["model"]
    if not numbers:
        raise UnsupportedCheckpoint(
            f"{file.path}: holds no model (found {', '.join(_shown(key)[:40] for key in list(state)[:8])})",
            "give the folder of a save with weights",
        )
    if numbers != list(range(len(numbers))):
        missing = next(number for number in range(len(numbers)) if number not in numbers)
        raise IncompleteCheckpoint(
            f"{file.path}: holds model{numbers[-1]} and no model{missing}",
            "a virtual stage is missing; save the checkpoint again",
        )
    return [f"model{number}" for number in numbers]


def _chunk(file: LocalFile, state: dict[Any, Any], key: str, left_out: dict[str, str]) -> Chunk:
    model = state[key]
    legacy = isinstance(model.get("language_model"), dict)
    if legacy:
        _refuse_old_order(file, state.get("checkpoint_version", 0))
    chunk: Chunk = {}
    for full, value in _flat(file, model, "", set()):
        name = chunk_name(full, legacy=legacy)
        if name.rpartition(".")[2] == "_extra_state":
            continue
        if value is None or name.endswith("rotary_pos_emb.inv_freq"):
            left_out[name] = "empty" if value is None else "follows from the configuration"
            continue
        if not isinstance(value, StoredTensor):
            raise UnsupportedCheckpoint(
                f"{full!r} in {file.path}: {_kind(value)}, expected a tensor",
                "save the model in a plain dtype, without quantised weights or objects beside them",
            )
        if is_adapter(name):
            raise UnsupportedCheckpoint(
                f"{full!r} in {file.path}: a part of an adapter", "merge the adapter into the model first"
            )
        if name in chunk:
            raise UnsupportedCheckpoint(
                f"{file.path}: two tensors that are {name}, one of them {full!r}",
                "save one model in a file",
            )
        chunk[name] = value
    return chunk


def _flat(
    file: LocalFile, value: dict[Any, Any], prefix: str, seen: set[int]
) -> Iterator[tuple[str, object]]:
    """The leaves of nested dicts, under their keys joined by dots; `seen` are the dicts so far."""
    if id(value) in seen:
        raise UnsupportedCheckpoint(
            f"{file.path}: the dict under {prefix!r} is there twice", "save the model's own state dict"
        )
    seen.add(id(value))
    for key, item in value.items():
        if not isinstance(key, str) or len(prefix) + len(key) > _MAX_NAME or not key.isprintable():
            raise UnsupportedCheckpoint(
                f"{file.path}: {_shown(key)[:50]!r} under {prefix[:50]!r} is no name of a tensor",
                "save the model's own state dict",
            )
        if isinstance(item, dict) and key != "_extra_state":
            yield from _flat(file, item, f"{prefix}{key}.", seen)
        else:
            yield prefix + key, item


def _refuse_old_order(file: LocalFile, version: object) -> None:
    if isinstance(version, int | float) and version >= 2:
        return
    raise UnsupportedCheckpoint(
        f"{file.path}: checkpoint_version {_shown(version)[:20]}, whose query_key_value has its rows in"
        " another order than from 2.0 on",
        "load it into a Megatron-LM that still can (core 0.16 or earlier) and save it again",
    )


def _shown(value: object) -> str:
    """What to call a key or a number in a message; a type where it may be anything."""
    if isinstance(value, str | float) or plain_number(value) is not None:
        return str(value)
    return _kind(value)


def _kind(value: object) -> str:
    return str(value.cls)[:100] if isinstance(value, Record) else type(value).__name__
