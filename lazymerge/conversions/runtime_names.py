"""Names as the hub has them, of a checkpoint of a model that ran under transformers 5.

There a model holds other tensors than its files: experts are fused, parts renamed, heads permuted. What
`save_pretrained` does to undo it has been recorded (lazymerge.conversions.recording), and is done here:

    model.layers.0.mlp.experts.gate_up_proj [128, 1536, 2048]
        -> model.layers.0.mlp.experts.{0..127}.{gate,up}_proj.weight [768, 2048]

Which of the two forms a checkpoint has is told by its names and shapes. A trainer on transformers 4, or one
that saved by `save_pretrained`, has the hub's already, and they stay; a mixture is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lazymerge.boxes import Box, Piece, cut
from lazymerge.checkpoint import Checkpoint, Copy, Note
from lazymerge.conversions.answers import remember, remembered
from lazymerge.conversions.architecture import (
    Architecture,
    Shape,
    described,
    from_plain,
    tied_together,
    why_unknown,
)
from lazymerge.conversions.expressions import Expression, names_in, shape_of
from lazymerge.conversions.expressions import from_plain as gather_of
from lazymerge.conversions.model_process import as_json
from lazymerge.conversions.model_process import ask as _ask
from lazymerge.conversions.quantised import quantised_name
from lazymerge.errors import InconsistentCheckpoint, LazymergeError, UnsupportedCheckpoint
from lazymerge.gather import Constant, Gather, Shards

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_KEEP = "--names runtime merges under the names that are there"


@dataclass(frozen=True, slots=True)
class Conversion:
    """transformers' way from run-time to hub names for one model.

    moves       hub name -> expression over run-time names, where name or layout change
    runtime     the run-time names in them -> shape in elements
    unsaved     run-time names that `save_pretrained` leaves out
    tied        run-time name -> the one that it is tied to
    impossible  why there are no moves, where the way does more than move elements; else ""
    """

    moves: Mapping[str, Expression]
    runtime: Mapping[str, Shape]
    unsaved: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    impossible: str = ""


def to_hub_names(
    checkpoint: Checkpoint, config: Mapping[str, Any], *, code: Path | None = None
) -> Checkpoint:
    """The checkpoint under the names and in the layouts that `save_pretrained` writes, by this config.json.

    Of a class that transformers does not know it keeps its names, with a note. `code` is as `expected` has
    it, whose errors are raised too. Raises `InconsistentCheckpoint` for a mixture of both forms, and
    `UnsupportedCheckpoint` for a model whose conversion is not mere moving.
    """
    known = architecture_and_conversion(config, code)
    if known is None:
        return checkpoint.with_notes(unchanged(why_unknown(config), "info"))
    return converted(checkpoint, *known)


def unchanged(why: str, level: str) -> Note:
    """The note on a checkpoint whose names are neither converted nor checked."""
    return Note(level, f"names are kept as they are, and not checked: {why}")


def architecture_and_conversion(
    config: Mapping[str, Any], code: Path | None
) -> tuple[Architecture, Conversion] | None:
    """What the model of this config.json is made of, and its way to hub names; raises as `expected`."""
    found = described(
        config,
        code,
        {
            "architecture": lambda data: from_plain(data, config, code),
            "conversion": conversion_from_plain,
        },
    )
    return None if found is None else (found["architecture"], found["conversion"])


def converted(checkpoint: Checkpoint, architecture: Architecture, conversion: Conversion) -> Checkpoint:
    """The checkpoint under hub names; as `to_hub_names`."""
    if conversion.impossible:
        raise UnsupportedCheckpoint(
            f"{architecture.class_name}: transformers' way back to the names of the hub cannot be followed"
            f" without the values: {conversion.impossible}",
            _KEEP,
        )
    if not has_runtime_names(checkpoint, architecture, conversion):
        return _moved(checkpoint, replace(conversion, moves={}, runtime={}))
    name = quantised_name(checkpoint, architecture.config)
    if name is not None:
        raise UnsupportedCheckpoint(
            f"{name} is quantised, and tensors have the names of the running {architecture.class_name}: which"
            " scales go with what they become is not known",
            f"save it by save_pretrained; {_KEEP}",
        )
    if _is_odd(checkpoint, conversion):
        return _moved(checkpoint, _conversion_of(checkpoint, architecture))
    try:
        return _moved(checkpoint, conversion)
    except _Unfitting as unfitting:  # perhaps by an answer that was kept, and is not what transformers says
        try:
            conversion = _conversion_of(checkpoint, architecture, kept=False)
        except LazymergeError:
            raise unfitting from None
        return _moved(checkpoint, conversion)


def has_runtime_names(checkpoint: Checkpoint, architecture: Architecture, conversion: Conversion) -> bool:
    """Whether the tensors that a conversion would change are still in the run-time form.

    Raises `InconsistentCheckpoint` where some are and others are not, or where nothing tells.
    """
    runtime, hub, either = [], [], []
    for name, gather in checkpoint.gathers.items():
        is_source = name in conversion.runtime
        is_target = name in conversion.moves
        if is_source and is_target:
            is_source = gather.shape == conversion.runtime[name]
            is_target = gather.shape == architecture.shapes.get(name)
            if is_source == is_target:
                either.append(name)
                continue
        if is_source:
            runtime.append(name)
        elif is_target:
            hub.append(name)
    if runtime and hub:
        raise InconsistentCheckpoint(
            f"{runtime[0]} is a name of {architecture.class_name} as it runs, {hub[0]} one of its files: the"
            f" checkpoint has {len(runtime)} of the former and {len(hub)} of the latter",
            f"save it again in one form; {_KEEP}",
        )
    if either and not runtime and not hub:
        return _ran_under_5(checkpoint, architecture, either[0])
    return bool(runtime)


def _ran_under_5(checkpoint: Checkpoint, architecture: Architecture, name: str) -> bool:
    """Whether tensors that have the same names and shapes in both forms are in that of transformers 5."""
    if checkpoint.format == "huggingface":
        return False
    version = architecture.config.get("transformers_version")
    match = re.match(r"(\d{1,4})\.", version) if isinstance(version, str) else None
    if match is None:
        raise InconsistentCheckpoint(
            f"{name}: the files of {architecture.class_name} have its values in another order than the"
            " running model, and neither its shape nor a transformers_version in the checkpoint's own"
            " config.json says which order this is",
            f"put the training's config.json, with its transformers_version, beside the ranks; {_KEEP}",
        )
    return int(match[1]) >= 5


def _is_odd(checkpoint: Checkpoint, conversion: Conversion) -> bool:
    """Whether tensors to convert are not those of the config: other sizes, more layers or experts."""
    alike = {_NUMBER.sub("0", name) for name in conversion.runtime}
    return any(
        gather.shape != conversion.runtime[name]
        if name in conversion.runtime
        else _NUMBER.sub("0", name) in alike and name not in conversion.moves
        for name, gather in checkpoint.gathers.items()
    )


def _conversion_of(checkpoint: Checkpoint, architecture: Architecture, *, kept: bool = True) -> Conversion:
    """The conversion of just these tensors, which may not all be in the config's sizes.

    `kept` says that an answer of before will do.
    """
    code = architecture.code
    request = {
        "config": dict(architecture.config),
        "code": None if code is None else str(code),
        "tensors": {name: [list(g.shape), g.dtype.name] for name, g in checkpoint.gathers.items()},
    }
    key = as_json(request)
    try:
        found = conversion_from_plain(remembered(key) if code is None and kept else None)
    except ValueError:
        data = (_ask(request) or {}).get("conversion")
        found = conversion_from_plain(data)
        if code is None:
            remember(key, data)
    if found.impossible:
        raise InconsistentCheckpoint(
            f"the tensors do not fit the {architecture.class_name} of config.json, and cannot be brought to"
            f" the names of the hub: {found.impossible}",
            f"see whether config.json is this checkpoint's own; {_KEEP}",
        )
    return found


def _moved(checkpoint: Checkpoint, conversion: Conversion) -> Checkpoint:
    """The checkpoint with what the conversion makes of its tensors in their places.

    What needs a tensor that is not there is not made; tensors that nothing was made of keep their names.
    """
    present = checkpoint.gathers
    if not conversion.moves and conversion.unsaved.isdisjoint(present):
        return checkpoint
    became: dict[str, list[str]] = {}  # the first tensor of an expression -> what it becomes
    first: dict[str, str] = {}  # each tensor -> the first that it is in
    used: set[str] = set()
    for name, expression in conversion.moves.items():
        names = list(names_in(expression))
        if all(each in present for each in names):
            became.setdefault(names[0], []).append(name)
            used.update(names)
            for each in names:
                first.setdefault(each, name)
    taken = [hub for hubs in became.values() for hub in hubs if hub in present and hub not in used]
    if taken:
        raise InconsistentCheckpoint(
            f"{taken[0]} is in the checkpoint already, and another tensor has that name on the hub",
            f"save it again in one form; {_KEEP}",
        )
    sources = {
        name: _Held(present[name]) if len(became.get(name, ())) > 1 else present[name] for name in used
    }
    gathers: dict[str, Gather] = {}
    for name, gather in present.items():
        if name not in used and name not in conversion.unsaved:
            gathers[name] = gather
        for hub in became.get(name, ()):
            gathers[hub] = _made(hub, conversion.moves[hub], sources)
    left_out = {name: "its class does not save it" for name in conversion.unsaved if name in present}
    notes = [_note(used, became)] if used else []
    copies = partial(_copies, checkpoint, first)
    return replace(checkpoint.with_gathers(gathers, *notes, left_out=left_out), copies=copies)


class _Held(Shards):
    """A tensor with its pieces worked out once, for the many that are cut from it.

    A window looks only at the pieces from its first row to its last: one expert of 128, not all ranks.
    """

    __slots__ = ("_ends", "_in_rows", "_pieces", "_starts")

    def __init__(self, gather: Gather) -> None:
        pieces = list(gather.pieces())
        if gather.shape:
            pieces.sort(key=lambda piece: piece.start[0])
        super().__init__(gather.shape, gather.dtype, Constant(pieces), gather.depth, gather.steps)
        self._pieces = pieces
        self._starts = [piece.start[0] for piece in pieces if piece.start]
        self._ends = [piece.start[0] + piece.region.shape[0] for piece in pieces if piece.start]
        self._in_rows = bool(gather.shape) and self._ends == sorted(self._ends)

    def pieces(self, window: Box | None = None) -> Iterator[Piece]:
        if window is None or not self._in_rows:
            yield from super().pieces(window)
            return
        first = bisect_right(self._ends, window.start[0])
        last = bisect_left(self._starts, window.start[0] + window.shape[0])
        for piece in self._pieces[first:last]:
            part = cut(piece, window)
            if part is not None:
                yield part


class _Unfitting(InconsistentCheckpoint):
    """An expression that the tensors do not fit."""


def _made(name: str, expression: Expression, sources: Mapping[str, Gather]) -> Gather:
    try:
        return gather_of(expression, sources)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise _Unfitting(
            f"{name} cannot be made of {', '.join(sorted(set(names_in(expression)))[:3])}: {error}",
            f"see whether config.json is this checkpoint's own; {_KEEP}",
        ) from error


def _note(used: set[str], became: Mapping[str, list[str]]) -> Note:
    first = next(iter(became))
    count = sum(map(len, became.values()))
    text = (
        f"{len(used)} tensors of the running model are written as the {count} that the hub has of them:"
        f" {first} as {became[first][0]}{' and others' if len(became[first]) > 1 else ''}"
    )
    return Note("info", text, became[first][0])


def _copies(checkpoint: Checkpoint, first: Mapping[str, str]) -> Iterator[Copy]:
    """What ranks share, under the first of the tensors that it became, and under its own name."""
    return (
        copy._replace(name=first[copy.name], source=copy.source or copy.name) if copy.name in first else copy
        for copy in checkpoint.copies()
    )


def conversion_from_plain(data: Any) -> Conversion:
    """The conversion that `recording.recorded` gave as plain data; `ValueError` for what is none."""
    match data:
        case {"impossible": str(why)}:
            return Conversion({}, {}, impossible=why)
        case {
            "moves": dict(moves),
            "runtime": dict(runtime),
            "unsaved": list(unsaved),
            "tied": dict(tied),
        }:
            tied_together(tied)
            shapes = {name: shape_of(shape) for name, shape in runtime.items()}
            if not all(name in shapes for each in moves.values() for name in names_in(each)):
                raise ValueError("a conversion of tensors without shapes")
            ties = {name: str(other) for name, other in tied.items()}
            return Conversion(moves, shapes, frozenset(map(str, unsaved)), ties)
    raise ValueError("no conversion")
