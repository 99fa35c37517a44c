"""`--param-mapping`: where tensors go that no table knows, as the user says.

    OLD:NEW      OLD goes as it is under the name NEW; with an empty NEW it is left out
    FILE         one such pair a line (# begins a comment), or a JSON object

OLD is a canonical name (lazymerge.formats.megatron) or a pattern, in which ``{}`` stands for one part
of a name between dots; the ``{}`` of NEW are what those of OLD stood for, in their order.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lazymerge.errors import PlanError

_LARGEST = 16 << 20
_OPTION = "--param-mapping"


def parse_mapping(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The (OLD, NEW) pairs of all arguments, in their order. Raises `PlanError`."""
    pairs: list[tuple[str, str]] = []
    for argument in arguments:
        path = Path(argument)
        if _is_file(path):
            pairs += _from_file(path)
        else:
            pairs.append(_pair(argument, f"{_OPTION} {argument!r}"))
    return pairs


def apply_mapping(
    mapping: Sequence[tuple[str, str]], names: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Which names go where: (OLD -> NEW, OLD -> why it is left out). The first pair that fits is taken.

    Raises `PlanError` for a pair that fits no name (or none that is left), and for two tensors of one name.
    """
    names = list(names)
    new_names: dict[str, str] = {}
    left_out: dict[str, str] = {}
    owners: dict[str, str] = {}
    for old, new in mapping:
        fitting = [
            (name, renamed)
            for name, renamed in _renamed(old, new, names)
            if name not in new_names and name not in left_out
        ]
        if not fitting:
            raise _matches_nothing(old, new, names)
        for name, renamed in fitting:
            if not renamed:
                left_out[name] = f"left out by {_OPTION} {old}:"
            elif renamed in owners:
                raise PlanError(
                    f"{_OPTION} {old}:{new}: {owners[renamed]} and {name} both become {renamed}",
                    "give NEW as many {} as OLD has, or map them one by one",
                )
            else:
                owners[renamed] = name
                new_names[name] = renamed
    return new_names, left_out


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long for a file, or has a NUL in it
        return False


def _from_file(path: Path) -> list[tuple[str, str]]:
    """The pairs in a file of lines or of JSON."""
    try:
        if path.stat().st_size > _LARGEST:
            raise PlanError(f"{path}: larger than {_LARGEST} bytes", f"give {_OPTION} a file of names")
        text = path.read_bytes().decode("utf-8-sig")  # some editors put a mark in front
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}", "check the path and its permissions") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not UTF-8", f"give {_OPTION} a text file") from None
    start = text.lstrip()[:2]
    if path.suffix == ".json" or (start[:1] == "{" and start != "{}"):
        return _from_json(path, text)
    pairs = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            pairs.append(_pair(content, f"{path}, line {number}"))
    return pairs


def _from_json(path: Path, text: str) -> list[tuple[str, str]]:
    try:
        content = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError):
        raise PlanError(f"{path}: malformed JSON", "mend it, or write one OLD:NEW a line") from None
    if not isinstance(content, list) or not all(
        isinstance(pair, tuple) and isinstance(pair[1], str) for pair in content
    ):
        raise PlanError(f"{path}: expected a JSON object of names", 'write {"OLD": "NEW", ...}')
    return [_checked(old, new, f"{path}: {old!r}") for old, new in content]


def _pair(text: str, where: str) -> tuple[str, str]:
    old, colon, new = text.partition(":")
    if not colon:
        raise PlanError(f"{where}: neither OLD:NEW nor a file", "separate the two names by a colon")
    return _checked(old.strip(), new.strip(), where)


def _checked(old: str, new: str, where: str) -> tuple[str, str]:
    if not old:
        raise PlanError(f"{where}: no name before the colon", "give OLD:NEW")
    if any("\ud800" <= letter <= "\udfff" for letter in new):
        raise PlanError(f"{where}: NEW is no text that a file can hold", "give a name in UTF-8")
    if ":" in new:
        raise PlanError(f"{where}: more than one colon", "give OLD:NEW")
    if new.count("{}") > old.count("{}"):
        raise PlanError(
            f"{where}: {new.count('{}')} groups {{}} in NEW, {old.count('{}')} in OLD",
            "NEW can use what OLD has; write the same number",
        )
    return old, new


def _renamed(old: str, new: str, names: list[str]) -> Iterable[tuple[str, str]]:
    """(name, new name) of the names that OLD fits."""
    if "{}" not in old:
        return [(name, new) for name in names if name == old]
    pattern = re.compile("([^.]+)".join(re.escape(part) for part in old.split("{}")))
    fill = _filler(new)
    return [(name, fill(found.groups())) for name in names if (found := pattern.fullmatch(name))]


def _filler(new: str) -> Callable[[Sequence[str]], str]:
    first, *rest = new.split("{}")
    return lambda groups: first + "".join(group + part for group, part in zip(groups, rest, strict=False))


def _matches_nothing(old: str, new: str, names: list[str]) -> PlanError:
    close = difflib.get_close_matches(old, names[:20_000], 3, cutoff=0.4)
    shown = ", ".join(close or names[:1]) or "none"
    return PlanError(
        f"{_OPTION} {old}:{new} fits none of {len(names)} tensors, or none that an earlier one has left",
        f"the nearest names are: {shown}",
    )
