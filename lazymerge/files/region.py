"""A region: the bytes of one strided array inside one source."""

from __future__ import annotations

from dataclasses import dataclass

from lazymerge.files.dtype import DType
from lazymerge.files.local import Source


@dataclass(frozen=True, slots=True)
class Region:
    """An array in a source: where its first element is, and how to step to the others.

    `offset` is in bytes from the start of the source, `strides` are in elements and
    never negative (0 repeats an element along that dimension).
    """

    source: Source
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last one (0 if there is none)."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The row-major strides of `shape`, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
