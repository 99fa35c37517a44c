"""The names and shapes of the model that config.json names, and how a checkpoint differs from them.

transformers builds the model on the meta device (no weights, no network) and gives its names as
`save_pretrained` writes them: lazymerge.conversions.meta_model. That is done in a process of its own:
it costs 350 MB and some seconds of imports, which are then not in the merge's memory, and a config
that nobody can trust (layers without end, sizes beyond any memory) ends with that process. The answer
is kept in the user's cache folder, so that the next merge of such a model costs neither.

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

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.answers import remember, remembered
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    LazymergeError,
    PlanError,
)

Shape = tuple[int, ...]

MOST_LAYERS = 10_000
"""Of any count of layers, blocks or experts in a config; one beyond it is refused at once."""

SECONDS = 30
"""Of processor time that building a model takes at most; DeepSeek-V3 takes half a second."""

MEMORY = 2 << 30
"""Bytes that building a model takes at most beyond the imports; DeepSeek-V3 takes 50 MB."""

_WAIT = 600
"""Seconds until a process that neither works nor ends is given up."""

_COUNT = re.compile(r"(^|_)(layers?|depth|(num|n)_(\w+_)?(blocks|experts))$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 5
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What `save_pretrained` writes of a model, by hub names.

    shapes     name -> shape in elements, of tied ones too
    tied       name -> the one that it is tied to; either may be absent
    optional   regular expressions of names that may be absent without loss
    ignored    regular expressions of names that a loader leaves: the class's own, and buffers not saved
    swappable  regular expressions of names whose last two dimensions the loader swaps where that fits
    parts      parts beside the text model -> their names; each part may be absent as a whole
    config     config.json as it was given; `code` where the classes of its auto_map are, if they were used
    """

    class_name: str
    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    swappable: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    code: Path | None = None


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
    """What the model that this config.json names is made of; None if transformers has no such class.

    `code` is the folder with the files of config.json's auto_map, which are run: given only where the
    user trusts them. Raises `InconsistentCheckpoint` for a config that its class refuses, and
    `DamagedFile` for one that asks for more than `MOST_LAYERS`, `SECONDS` or `MEMORY`.
    """
    if not _names_a_class(config):
        return None
    _refuse_counts(config)
    request = {"config": dict(config), "code": None if code is None else str(code)}
    key = None if code is not None else _as_json(request)  # the user's code may change
    if key is not None and (known := remembered(key)) is not None:
        try:
            return from_plain(known, config)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass  # written by somebody else, or damaged
    data = _ask(request)
    if data is None:
        return None
    if key is not None:
        remember(key, data["architecture"])
    return from_plain(data["architecture"], config, code)


def compare(checkpoint: Checkpoint, architecture: Architecture) -> Differences:
    """How the checkpoint's names and shapes differ from the architecture's."""
    return differences({name: g.shape for name, g in checkpoint.gathers.items()}, architecture)


def check(checkpoint: Checkpoint, architecture: Architecture) -> Checkpoint:
    """The checkpoint, with notes on what the model does not have or lacks as a whole part.

    Raises `IncompleteCheckpoint` where tensors are missing, and `InconsistentCheckpoint` where there are
    misshapen or surplus ones; the message says which value of config.json would fit.
    """
    found = compare(checkpoint, architecture)
    if found.wrong:
        raise _contradiction(checkpoint, architecture, found)
    return checkpoint.with_notes(*_notes(architecture, found))


def differences(found: Mapping[str, Shape], architecture: Architecture) -> Differences:
    """How these names and shapes differ from the architecture's."""
    shapes = architecture.shapes
    absent = {
        part: names
        for part, names in architecture.parts.items()
        if names and not any(n in found for n in names)
    }
    explained = {name for names in absent.values() for name in names}
    for one, other in architecture.tied.items():
        if one in found or other in found:
            explained |= {one, other}
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


def ignored_by(architecture: Architecture) -> Callable[[str], bool]:
    """Whether a loader leaves a tensor of this name, by what the class says; MTP layers too."""
    pattern = _pattern(architecture.ignored)
    return lambda name: bool(pattern.search(name)) or _is_mtp(name, architecture.config)


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


def _is_mtp(name: str, config: Mapping[str, Any]) -> bool:
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


def _contradiction(checkpoint: Checkpoint, architecture: Architecture, found: Differences) -> LazymergeError:
    """The error for tensors that the config and the checkpoint do not agree on."""
    said = []
    if found.misshapen:
        shapes = [f"{n} is {_size(is_)}, not {_size(want)}" for n, (is_, want) in found.misshapen.items()]
        said.append(_listed(shapes))
    if found.missing:
        said.append(f"missing: {_listed(found.missing)}")
    if found.surplus:
        said.append(f"not in the model: {_listed(found.surplus)}")
    count = len(found.wrong)
    problem = (
        f"{count} tensor{'s do' if count > 1 else ' does'} not fit the {architecture.class_name} of"
        f" config.json: {'; '.join(said)}"
    )
    fields = _probable_fields(checkpoint, architecture)
    hint = f"in config.json, {fields}" if fields else "see whether config.json is this checkpoint's own"
    if any(len(is_) == len(want) for is_, want in found.misshapen.values()):
        hint += "; --force-shape-match crops or pads to its shapes"
    hint += "; --no-check merges what is there"
    only_missing = not found.misshapen and not found.surplus
    return (IncompleteCheckpoint if only_missing else InconsistentCheckpoint)(problem, hint)


def _probable_fields(checkpoint: Checkpoint, architecture: Architecture) -> str:
    """Which values of config.json would fit, as a clause; "" if no single one does."""
    request = {
        "config": dict(architecture.config),
        "code": None if architecture.code is None else str(architecture.code),
        "found": {name: list(gather.shape) for name, gather in checkpoint.gathers.items()},
    }
    try:
        data = _ask(request)
    except LazymergeError:  # the contradiction is reported, with or without an explanation
        return ""
    clauses = [
        " or ".join(f"{each['field']} = {json.dumps(each['fits'])}" for each in group)
        + f" would fit, it says {' and '.join(dict.fromkeys(json.dumps(each['is']) for each in group))}"
        for group in (data or {}).get("fields", [])
    ]
    return ", and ".join(clauses)


def _notes(architecture: Architecture, found: Differences) -> Iterator[Note]:
    model = architecture.class_name
    for part, names in found.absent.items():
        text = f"{part} of {model} ({len(names)} tensors) is not in the checkpoint, so not in the result"
        yield Note("warning", text)
    if found.unknown:
        text = f"{len(found.unknown)} tensors are not in {model}, whose loader leaves them: "
        yield Note("warning", text + _listed(found.unknown), found.unknown[0])
    if found.ignored:
        text = f"{len(found.ignored)} tensors are written that {model} does not load: "
        yield Note("info", text + _listed(found.ignored), found.ignored[0])


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _size(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _names_a_class(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and isinstance(names[0], str) and names[0].isidentifier()


def _refuse_counts(config: Mapping[str, Any]) -> None:
    """Refuse counts of layers that no model has: building would only end with the time."""
    todo: list[tuple[str, Any]] = list(config.items())
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += value.items()
        elif type(value) in {int, float} and _COUNT.search(key) and value > MOST_LAYERS:
            raise DamagedFile(
                f"config.json: {key} is {value:,}, expected at most {MOST_LAYERS:,}",
                "mend config.json, or merge with --no-check",
            )


def _ask(request: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of lazymerge.conversions.meta_model, in a process of its own."""
    question = _as_json(request)
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(_ROOT)]),
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": scratch,  # copies of trusted code, which would else stay in the user's cache
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        # -P: a torch.py in the current folder is not what is meant
        command = [sys.executable, "-P", "-W", "ignore", "-m", "lazymerge.conversions.meta_model"]
        try:
            done = subprocess.run(
                command,
                input=question.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=_WAIT,
            )
        except subprocess.TimeoutExpired as error:
            raise _beyond_bounds(request["config"]) from error
        except OSError as error:
            raise PlanError(
                f"{sys.executable}: {error.strerror}", "merge with --no-check, which starts no Python"
            ) from error
    if done.returncode == -signal.SIGXCPU:
        raise _beyond_bounds(request["config"])
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise PlanError(
            f"building the model of config.json ended with exit code {done.returncode}",
            "see that `python -c 'import transformers'` works, or merge with --no-check",
        ) from error
    if "too large" in answer:
        raise _beyond_bounds(request["config"])
    if "refused" in answer:
        name = request["config"]["architectures"][0]
        raise InconsistentCheckpoint(
            f"config.json: {name} does not take it: {answer['refused']}",
            "mend config.json, or merge with --no-check",
        )
    return None if "unknown" in answer else answer


def _as_json(request: dict[str, Any]) -> str:
    try:
        return json.dumps(request)
    except (RecursionError, TypeError, ValueError) as error:
        raise DamagedFile(
            f"config.json: {type(error).__name__} {error}", "mend config.json, or merge with --no-check"
        ) from error


def _beyond_bounds(config: Mapping[str, Any]) -> DamagedFile:
    return DamagedFile(
        f"config.json: building the {config['architectures'][0]} that it asks for takes more than"
        f" {SECONDS} s or {MEMORY >> 30} GiB",
        "mend config.json, or merge with --no-check",
    )


def from_plain(data: Mapping[str, Any], config: Mapping[str, Any], code: Path | None = None) -> Architecture:
    """The architecture that `meta_model.describe` gave as plain data."""
    return Architecture(
        class_name=data["class_name"],
        shapes={name: tuple(shape) for name, shape in data["shapes"].items()},
        tied=data["tied"],
        optional=tuple(data["optional"]),
        ignored=tuple(data["ignored"]),
        swappable=tuple(data["swappable"]),
        parts={part: tuple(names) for part, names in data["parts"].items()},
        config=config,
        code=code,
    )
