"""What comparing two checkpoints can find: the options, the differences, the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ATOL = 1e-6
"""The difference that is allowed by default where both sides have one element type."""

KINDS = MISSING, EXTRA, SHAPE, DTYPE, VALUES, SETTING = (
    *("missing", "extra", "shape", "dtype", "values"),
    "setting",
)
"""How a tensor can differ, and a setting of an adapter."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What counts as equal, and how many differences of each kind are listed.

    Values a (of the first) and b are close where ``|a - b| <= atol + rtol * |b|``. None for both is `ATOL`
    and 0 where the types are equal; different types are then a difference by themselves, unless
    `accept_rounding` allows what rounding to the coarser type explains. `exact` compares bytes.
    """

    atol: float | None = None
    rtol: float | None = None
    exact: bool = False
    accept_rounding: bool = False
    max_mismatches: int = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same on both sides, or a setting of an adapter.

    `kind` is "missing" (only the other side has it), "extra" (only the first), "shape", "dtype", "values" or
    "setting".
    `one` and `other` say what is there, such as "float32 [8, 4]"; None on a side that has no such tensor.
    Of values: how many of `elements` differ, the largest difference of any two, and the first place that
    differs with what stands there (numbers, and their bits in hexadecimal).
    """

    kind: str
    name: str
    one: str | None
    other: str | None
    elements: int = 0
    mismatches: int = 0
    largest: float = 0.0
    first: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    bits: tuple[str, str] | None = None

    def __str__(self) -> str:
        if self.kind == MISSING:
            return f"{self.name}: is missing, expected {self.other}"
        if self.kind == EXTRA:
            return f"{self.name}: {self.one}, expected no such tensor"
        if self.kind in {SHAPE, DTYPE, SETTING}:
            return f"{self.name}: {self.one}, expected {self.other}"
        found, expected = self.shown()
        return (
            f"{self.name}: {self.mismatches:,} of {self.elements:,} values differ, at most by"
            f" {self.largest:.3g}; first at {list(self.first or ())}: {found}, expected {expected}"
        )

    def shown(self) -> tuple[str, str]:
        """The two values in words; with their bits where nothing else tells them apart."""
        found, expected = (str(value) for value in self.values or ("", ""))
        if found == expected and self.bits is not None:
            return f"{found} (0x{self.bits[0]})", f"{expected} (0x{self.bits[1]})"
        return found, expected


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """A tensor with NaN or infinities: how many elements of the first side and of the other."""

    name: str
    nan: tuple[int, int]
    inf: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing two checkpoints has found; sizes are in bytes.

    `tensors` is how many were compared by value, `identical` how many of them have the same bytes.
    `counts` has the number of differences of each kind; `differences` and `nonfinite` list the worst of each
    kind, at most as many as were asked for. `largest` is the largest difference of any two values that were
    compared. `digests` are the xxh3_128 of the other side's tensors, where they were wanted.
    """

    tensors: int
    identical: int
    nbytes: int
    counts: Mapping[str, int]
    differences: tuple[Difference, ...]
    largest: float
    nan: tuple[int, int]
    inf: tuple[int, int]
    nonfinite: tuple[Nonfinite, ...]
    hint: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not any(self.counts.values())

    @property
    def differing(self) -> int:
        """How many tensors differ."""
        return sum(self.counts.values()) - self.counts[SETTING]

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data for JSON; what JSON has no number for is text."""
        content = asdict(self)
        del content["digests"]
        plain: dict[str, Any] = _plain(content)
        return {"same": self.same, **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
