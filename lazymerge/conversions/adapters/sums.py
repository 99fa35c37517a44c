"""What becomes of one tensor of a base: products added to it, rows put in the place of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from lazymerge.files.dtype import DType
from lazymerge.fill import alike
from lazymerge.gather import Gather, cat
from lazymerge.lowrank import Term, add_products


@dataclass(slots=True)
class Sum:
    """What is added to one matrix, in the order of the adapters; `magnitude` and `columns` as `Delta` has."""

    terms: list[Term] = field(default_factory=list)
    magnitude: Gather | None = None
    columns: bool = False


def added(matrix: Gather, sums: Sum, name: str, dtype: DType) -> Gather:
    """The matrix, which is of the tensor `name`, with all of it added, in the type `dtype`."""
    return add_products(matrix, sums.terms, name, sums.magnitude, columns=sums.columns, dtype=dtype)


def same(one: Sum, other: Sum) -> bool:
    """Whether both add the same, by the values of what they multiply; not where rows are scaled."""
    return (
        len(one.terms) == len(other.terms)
        and one.magnitude is None
        and other.magnitude is None
        and all(
            first.scale == second.scale and all(map(alike, first.operands, second.operands))
            for first, second in zip(one.terms, other.terms, strict=True)
        )
    )


def with_rows(base: Gather, rows: Gather, tokens: tuple[int, ...]) -> Gather:
    """The base with other rows for these tokens."""
    parts, at = [], 0
    for token, index in sorted((token, index) for index, token in enumerate(tokens)):
        parts += [base.narrow(0, at, token - at), rows.narrow(0, index, 1)]
        at = token + 1
    return cat([*parts, base.narrow(0, at, base.shape[0] - at)], 0)
