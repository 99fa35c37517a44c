r"""Patterns for names of modules, matched in bounded time: the part of regular expressions that they use.

    pattern    sequence ("|" sequence)*
    sequence   (one repeat?)*
    one        a letter, ".", "[a-z]", "\d", "\." and the like, "^", "$", "(" pattern ")", "(?:" pattern ")"
    repeat     "*", "+", "?", "{m}", "{m,}", "{m,n}", with "?" behind it or not; of a group only "?"

A config comes with a stranger's adapter, and Python's own matcher takes exponential time for some patterns.
Here all places that a part of the pattern may end at are followed at once, so that the time is at most the
pattern's length times the name's, squared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LONGEST = 1000
_DEEPEST = 20
_MOST_REPEATS = 1000
_ONE = re.compile(r"\\[dDwWsS]|\\[^0-9A-Za-z]|\[\^?\]?(?:[^\]\\[]|\\.)*\]|[^\\()\[\]{}*+?|^$]|\.")
_REPEAT = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<least>\d{1,4})(?P<comma>,(?P<most>\d{0,4}))?\})\??")


class Pattern:
    """A pattern as `re.fullmatch` would take it; `ValueError` for what is none, or too much."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ValueError("it is too long")
        self._text = text
        self._at = 0
        self._parts = self._either(0)
        if self._at != len(text):
            raise ValueError(f"{text[self._at]!r} at {self._at}")

    def matches(self, name: str) -> bool:
        """Whether all of the name fits, or all of it from behind a dot on."""
        starts = {0, *(at + 1 for at, letter in enumerate(name) if letter == ".")}
        return len(name) in _ends(self._parts, name, starts)

    def matches_whole(self, name: str) -> bool:
        """Whether all of the name fits."""
        return len(name) in _ends(self._parts, name, {0})

    def __str__(self) -> str:
        return self._text

    def _either(self, depth: int) -> _Either:
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")
        sequences: list[list[_Part]] = [[]]
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                sequences.append([])
            else:
                sequences[-1].append(self._part(depth))
        return _Either(sequences)

    def _part(self, depth: int) -> _Part:
        letter = self._text[self._at]
        if letter in "^$":
            self._at += 1
            return _Part(letter, 1, 1)
        what: _Either | re.Pattern[str]
        if letter == "(":
            self._at += 3 if self._text.startswith("(?:", self._at) else 1
            what = self._either(depth + 1)
            if self._text[self._at : self._at + 1] != ")":
                raise ValueError(f"no end of the group before {self._at}")
            self._at += 1
        else:
            match = _ONE.match(self._text, self._at)
            if match is None:
                raise ValueError(f"{letter!r} at {self._at}")
            self._at = match.end()
            what = re.compile(match[0])
        repeat = _REPEAT.match(self._text, self._at)
        if repeat is None:
            return _Part(what, 1, 1)
        self._at = repeat.end()
        least, most = _counts(repeat)
        if isinstance(what, _Either) and (least, most) != (0, 1):
            raise ValueError("a group that is repeated")
        return _Part(what, least, most)


@dataclass(frozen=True, slots=True)
class _Either:
    """Sequences of which one has to fit."""

    sequences: list[list[_Part]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A group, one letter, or "^" or "$", so many times; None is without end."""

    what: _Either | re.Pattern[str] | str
    least: int
    most: int | None


def _counts(repeat: re.Match[str]) -> tuple[int, int | None]:
    if repeat["sign"]:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[repeat["sign"]]
    least = int(repeat["least"])
    most = least if repeat["comma"] is None else int(repeat["most"]) if repeat["most"] else None
    if least > _MOST_REPEATS or (most is not None and not least <= most <= _MOST_REPEATS):
        raise ValueError(f"{repeat[0]} times")
    return least, most


def _ends(either: _Either, name: str, starts: set[int]) -> set[int]:
    """Where in the name a match may end that begins at one of these places."""
    found: set[int] = set()
    for sequence in either.sequences:
        places = starts
        for part in sequence:
            places = _after(part, name, places)
        found |= places
    return found


def _after(part: _Part, name: str, places: set[int]) -> set[int]:
    what = part.what
    if isinstance(what, str):
        return places & {0 if what == "^" else len(name)}
    if isinstance(what, _Either):
        after = _ends(what, name, places)
        return after | places if part.least == 0 else after
    found = set(places) if part.least == 0 else set()
    count = 0
    while places and (part.most is None or count < part.most):
        places = {at + 1 for at in places if at < len(name) and what.match(name, at)}
        count += 1
        if count >= part.least:
            if part.most is None and places <= found:
                break
            found |= places
    return found
