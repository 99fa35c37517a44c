"""JSON from a stranger: a few bytes of it are a value, which takes a hundred in memory."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from lazymerge.files.local import LocalFile

MOST_VALUES = 1 << 21
"""Values that a text may hold: the header of 260,000 tensors in one file, some 150 MB when it is parsed."""

Text = TypeVar("Text", str, bytes)


def strict(text: Text) -> object:
    """What the JSON says; `ValueError` for a key that is there twice, NaN, infinities, and as `bounded`."""
    return json.loads(bounded(text), object_pairs_hook=_without_doubles, parse_constant=_refuse)


def read_object(file: LocalFile, limit: int) -> dict[str, Any]:
    """The JSON object that a small file holds; `ValueError` for what is none, or is over `limit` bytes."""
    if file.size > limit:
        raise ValueError(f"{file.size} bytes, where {limit} are read at most")
    try:
        content = json.loads(bounded(file.read(0, file.size)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {why(error)}") from None
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    return content


def why(error: Exception) -> str:
    """What is wrong with a text that could not be decoded and parsed, in a few words."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, RecursionError):
        return "nested too deep"
    return str(error).partition(";")[0]  # what follows is how Python can be set


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key that is there twice")
    return found


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} where a number should be")


def bounded(text: Text) -> Text:
    """The text itself; `ValueError` if there may be more than `MOST_VALUES` values in it."""
    if isinstance(text, str):
        count = text.count(",") + text.count("[") + text.count("{")
    else:
        count = text.count(b",") + text.count(b"[") + text.count(b"{")
    if count > MOST_VALUES:
        raise ValueError(f"{count} values, where {MOST_VALUES} are read at most")
    return text
