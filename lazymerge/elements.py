"""Tensors in memory as bytes and as gathers, and torch's names for element types."""

from __future__ import annotations

import torch

from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.gather import Gather, of_region


class Memory:
    """The row-major bytes of a tensor that is in memory already, as a source."""

    __slots__ = ("_bytes", "size")

    def __init__(self, content: bytes | memoryview) -> None:
        self._bytes = content
        self.size = len(content)

    @property
    def name(self) -> str:
        return "a tensor in memory"

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._bytes[offset : offset + len(buffer)]


def in_memory(tensor: torch.Tensor) -> Gather:
    """A gather over a copy of a tensor in memory: what is done to the tensor later does not change it."""
    shape, dtype = tuple(tensor.shape), dtype_of(tensor.dtype)
    source = Memory(bytes(raw_bytes(tensor.detach())))
    return of_region(Region(source, 0, dtype, shape, contiguous_strides(shape)))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order as bytes; shared where it is contiguous."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's own element type of that name."""
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def dtype_of(dtype: torch.dtype) -> DType:
    """The element type by torch's name for it."""
    return DTYPES[str(dtype).removeprefix("torch.")]
