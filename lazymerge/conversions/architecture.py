"""The names and shapes of the model that config.json names, and how a checkpoint differs from them.

transformers builds the model on the meta device (no weights, no network) and gives its names as
`save_pretrained` writes them (lazymerge.conversions.meta_model), in a process of its own. What it answers
is kept in the user's cache folder, so that the next merge of such a model does not ask again.

What is not in order:

    missing      the model has it, and no file does: a loader would draw it at random
    misshapen    another shape than the model's
    surplus      inside a part that the model has, such as a layer too many or the bias of a linear
                 layer that has none: a loader drops it, and the model is another one

and what is, but is said:

    absent       a whole part beside the text model, such as a vision tower
    unknown      in no part of the model, such as a value head; a loader leaves it
    ignored      what the class says that it leaves (and MTP layers, which transformers does not run)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.answers import remember, remembered
from lazymerge.conversions.contradiction import are_fields, contradiction, listed
from lazymerge.conversions.model_process import as_json
from lazymerge.conversions.model_process import ask as _ask
from lazymerge.conversions.quantised import without_quantised
from lazymerge.errors import DamagedFile, LazymergeError, PlanError

Shape = tuple[int, ...]

MOST_LAYERS = 1_000
"""Of any count of layers, blocks or experts in a config; one beyond it is refused at once."""

MOST_LABELS = 100_000
"""Of a head that classifies, for each of which transformers makes a name; ImageNet-21k has 21,843."""

_COUNT = re.compile(r"(^|_)(layers?|depth|(num|n)_(\w+_)?(blocks|experts))$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_REGEXES = ("optional", "ignored", "swappable")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What `save_pretrained` writes of a model, by hub names.

    shapes     name -> shape in elements, of tied ones too
    tied       name -> the one that it is tied to; either may be absent
    wide       a half type -> what the loader of that type keeps in float32: names, numbers in them as 0
    optional   regular expressions of names that may be absent without loss
    ignored    regular expressions of names that a loader leaves: the class's own, and buffers not saved
    swappable  regular expressions of names whose last two dimensions the loader swaps where that fits
    parts      parts beside the text model -> their names; each part may be absent as a whole
    config     config.json as it was given; `code` where the classes of its auto_map are, if they were used
    defaults   the whole config but for the labels' names, plain JSON as transformers writes it: what
               config.json says and, for fields that it omits, the defaults of its class; parts such as
               text_config and vision_config too
    """

    class_name: str
    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)
    wide: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    swappable: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    code: Path | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Differences:
    """How a checkpoint differs from an architecture (the module says what the words mean)."""

    missing: tuple[str, ...]
    misshapen: Mapping[str, tuple[Shape, Shape]]  # name -> found, expected
    surplus: tuple[str, ...]
    absent: Mapping[str, tuple[str, ...]]  # part -> names
    unknown: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Every tensor that the model does not have and does not say to ignore."""
        return self.surplus + self.unknown

    @property
    def wrong(self) -> frozenset[str]:
        """The names for which checkpoint and config contradict each other."""
        return frozenset((*self.missing, *self.misshapen, *self.surplus))


def expected(config: Mapping[str, Any], *, code: Path | None = None) -> Architecture | None:
    """What the model that this config.json names is made of; None if there is no such class (`why_unknown`).

    `code` is the folder with the files of config.json's auto_map, which are run: given only where the
    user trusts them. Raises `InconsistentCheckpoint` for a config that its class refuses, or whose
    `model_type` is another model's, and `DamagedFile` for one that asks for more than `MOST_LAYERS` or
    `MOST_LABELS`, or for more time or memory than `model_process` gives.
    """
    found = described(config, code, {"architecture": lambda data: from_plain(data, config, code)})
    return None if found is None else found["architecture"]


def described(
    config: Mapping[str, Any], code: Path | None, parts: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any] | None:
    """What transformers says of the model of this config.json, as `expected`, in one question for all parts.

    `parts` has "architecture", "conversion" or both, each with what makes it of plain data and raises
    `ValueError` for what is none. None, and what is raised, is as `expected` has it.
    """
    if not _names_a_class(config):
        return None
    _refuse_counts(config)
    request = {"config": dict(config), "code": None if code is None else str(code)}
    requests = {part: request if part == "architecture" else {**request, part: True} for part in parts}
    known: dict[str, Any] = {}
    if code is None:  # the user's code may change
        for part, make in parts.items():
            try:
                known[part] = make(remembered(as_json(requests[part])))
            except ValueError:
                break  # not asked yet; or written by somebody else, or damaged
    if len(known) == len(parts):
        return known
    data = _ask({key: value for each in requests.values() for key, value in each.items()})
    if data is None:
        return None
    for part in parts:
        if code is None:
            remember(as_json(requests[part]), data[part])
    return {part: make(data[part]) for part, make in parts.items()}


def classes(config: Mapping[str, Any]) -> list[str]:
    """Classes that may be the model's where `expected` knows none: what `architectures` has behind a class
    that transformers lacks, or what transformers lists for `model_type`. None where transformers cannot be
    asked, as under a tight limit of memory: they would only have been tried. Raises as `expected` else.
    """
    names = config.get("architectures")
    if not isinstance(config.get("model_type"), str) and not (isinstance(names, list) and len(names) > 1):
        return []
    request = {"config": dict(config), "code": None, "classes": True}
    key = as_json(request)
    found = remembered(key)
    if not _are_texts(found):
        try:
            found = (_ask(request) or {}).get("classes", [])
        except PlanError:
            return []
        remember(key, found)
    return list(found)


def why_unknown(config: Mapping[str, Any]) -> str:
    """Why `expected` gives None for this config: a clause for a note."""
    if isinstance(config.get("architectures"), str):
        return "config.json has a text as architectures, which is a list of names: [...]"
    if not _names_a_class(config):
        return "config.json names no class (architectures)"
    return f"transformers has no class {config['architectures'][0]}"


def compare(checkpoint: Checkpoint, architecture: Architecture) -> Differences:
    """How the checkpoint's names and shapes differ from the architecture's."""
    return differences({name: g.shape for name, g in checkpoint.gathers.items()}, architecture)


def check(checkpoint: Checkpoint, architecture: Architecture) -> Checkpoint:
    """The checkpoint, with notes on what the model does not have or lacks as a whole part.

    Raises `IncompleteCheckpoint` where tensors are missing, and `InconsistentCheckpoint` where there are
    misshapen or surplus ones; the message says which value of config.json would fit.
    """
    found, notes = without_quantised(compare(checkpoint, architecture), checkpoint, architecture)
    if found.wrong:
        shapes = {name: gather.shape for name, gather in checkpoint.gathers.items()}
        forced = checkpoint.format == "megatron"
        raise contradiction(shapes, architecture, found, _probable_fields, may_be_forced=forced)
    return checkpoint.with_notes(*notes, *_notes(architecture, found))


def differences(found: Mapping[str, Shape], architecture: Architecture) -> Differences:
    """How these names and shapes differ from the architecture's."""
    shapes = architecture.shapes
    absent = {
        part: names
        for part, names in architecture.parts.items()
        if names and not any(n in found for n in names)
    }
    explained = {name for names in absent.values() for name in names}
    for names in tied_together(architecture.tied):
        if any(name in found for name in names):
            explained.update(names)
    optional = _pattern(architecture.optional)
    missing = [n for n in shapes if n not in found and n not in explained and not optional.search(n)]
    swappable = _pattern(architecture.swappable)
    misshapen = {
        name: (found[name], shape)
        for name, shape in shapes.items()
        if name in found
        and found[name] != shape
        and not (found[name] == (*shape[:-2], *shape[:-3:-1]) and swappable.search(name))
    }
    surplus: list[str] = []
    unknown: list[str] = []
    ignored: list[str] = []
    ignores, inside = ignored_by(architecture), _Inside(shapes)
    for name in found:
        if name in shapes:
            continue
        if ignores(name):
            ignored.append(name)
        else:
            (surplus if name in inside else unknown).append(name)
    return Differences(tuple(missing), misshapen, tuple(surplus), absent, tuple(unknown), tuple(ignored))


def tied_together(tied: Mapping[str, str]) -> list[list[str]]:
    """The names that stand for one tensor each, the one that is saved first; `ValueError` for a circle."""
    groups: dict[str, list[str]] = {}
    for name, root in tied.items():
        for _ in tied:
            root = tied.get(root, root)
        if root in tied:
            raise ValueError(f"{name} is tied in a circle")
        groups.setdefault(root, [root]).append(name)
    return list(groups.values())


def ignored_by(architecture: Architecture) -> Callable[[str], bool]:
    """Whether a loader leaves a tensor of this name, by what the class says; MTP layers too."""
    pattern = _pattern(architecture.ignored)
    return lambda name: bool(pattern.search(name)) or is_mtp(name, architecture.config)


class _Inside:
    """Whether a name lies in a part of the model: its module, its layer, or another of its layers."""

    def __init__(self, names: Mapping[str, Shape]) -> None:
        self._modules = {name.rpartition(".")[0] for name in names} - {""}
        self._layers = {layer for name in names for layer in layers_of(name)}
        self._numbered = {_NUMBER.sub("0", name) for name in names if _NUMBER.search(name)}

    def __contains__(self, name: str) -> bool:
        return (
            name.rpartition(".")[0] in self._modules
            or any(layer in self._layers for layer in layers_of(name))
            or _NUMBER.sub("0", name) in self._numbered
        )


def layers_of(name: str) -> list[str]:
    """The name's beginnings that end with a number."""
    return [name[: match.end()] for match in _NUMBER.finditer(name)]


def is_mtp(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a name is of the layers behind the last one, which predict further tokens."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    layers, more = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    if type(layers) is not int or type(more) is not int:
        return False
    match = re.search(r"(^|\.)layers\.(\d{1,9})\.", name)
    return match is not None and layers <= int(match[2]) < layers + more


def _pattern(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")


def _probable_fields(architecture: Architecture, found: Mapping[str, Shape]) -> list[Any]:
    """Which values of config.json would fit (`config_fields.explain`); [] where that cannot be told."""
    request = {
        "config": dict(architecture.config),
        "code": None if architecture.code is None else str(architecture.code),
        "found": {name: list(shape) for name, shape in found.items()},
    }
    try:
        key = as_json(request) if architecture.code is None else None  # the user's code may change
        known: Any = None if key is None else remembered(key)
        if are_fields(known):
            return list(known)
        data = _ask(request)
    except LazymergeError:  # the contradiction is reported, with or without an explanation
        return []
    fields: Any = (data or {}).get("fields", [])
    if data is not None and key is not None:
        remember(key, fields)
    return list(fields)


def _notes(architecture: Architecture, found: Differences) -> Iterator[Note]:
    model = architecture.class_name
    for part, names in found.absent.items():
        text = f"{part} of {model} ({len(names)} tensors) is not in the checkpoint, so not in the result"
        yield Note("warning", text)
    if found.unknown:
        text = f"{len(found.unknown)} tensors are not in {model}, whose loader leaves them: "
        yield Note("warning", text + listed(found.unknown), found.unknown[0])
    if found.ignored:
        text = f"{len(found.ignored)} tensors are written that {model} does not load: "
        yield Note("info", text + listed(found.ignored), found.ignored[0])


def _names_a_class(config: Mapping[str, Any]) -> bool:
    """Whether `architectures` has the name of a class; AutoModel and the like choose one by other fields."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return False
    return names[0].isidentifier() and not names[0].startswith("AutoModel")


def _refuse_counts(config: Mapping[str, Any]) -> None:
    """Refuse counts of layers and labels that no model has: building would only end with the time."""
    todo: list[tuple[str, Any]] = list(config.items())
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += value.items()
            continue
        most = MOST_LABELS if key == "num_labels" else MOST_LAYERS if _COUNT.search(key) else math.inf
        if type(value) in {int, float} and value > most:
            shown = f"{value:,}" if value < 1 << 64 else "above 2^64"
            raise DamagedFile(
                f"config.json: {key} is {shown}, expected at most {most:,}",
                "mend config.json, or merge with --no-check",
            )


def from_plain(data: Any, config: Mapping[str, Any], code: Path | None = None) -> Architecture:
    """The architecture that `meta_model.describe` gave as plain data; `ValueError` for what is none."""
    if not isinstance(data, dict):
        raise ValueError("no architecture")
    shapes, tied, parts = data.get("shapes"), data.get("tied"), data.get("parts")
    wide, patterns = data.get("wide"), {key: data.get(key) for key in _REGEXES}
    if not (
        isinstance(data.get("class_name"), str)
        and isinstance(data.get("defaults"), dict)
        and isinstance(shapes, dict)
        and shapes
        and all(isinstance(shape, list) and all(map(_is_size, shape)) for shape in shapes.values())
        and isinstance(tied, dict)
        and _are_texts(list(tied.values()))
        and isinstance(parts, dict)
        and all(map(_are_texts, parts.values()))
        and isinstance(wide, dict)
        and all(map(_are_texts, wide.values()))
        and all(map(_are_texts, patterns.values()))
    ):
        raise ValueError("no architecture")
    tied_together(tied)
    try:
        for each in patterns.values():
            _pattern(each or ())
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression: {error}") from error
    return Architecture(
        class_name=data["class_name"],
        shapes={name: tuple(shape) for name, shape in shapes.items()},
        tied=tied,
        wide={dtype: tuple(names) for dtype, names in wide.items()},
        optional=tuple(data["optional"]),
        ignored=tuple(data["ignored"]),
        swappable=tuple(data["swappable"]),
        parts={part: tuple(names) for part, names in parts.items()},
        config=config,
        code=code,
        defaults=data["defaults"],
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
