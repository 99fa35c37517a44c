"""What torch's names in a pickle stand for: storages and tensors whose bytes have not been read.

A storage is a persistent id, ``("storage", type, key, location, elements)``; a tensor is the call of a
function of ``torch._utils`` with a storage, an offset, a shape and strides, in elements. They become
`Storage` and `StoredTensor`, each checked to lie inside what holds it. What is not a plain array of
bytes stays a `Record` of its call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lazymerge.errors import DamagedFile, UnsupportedCheckpoint
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.local import LocalFile
from lazymerge.files.pickle_records import Global, Record
from lazymerge.files.region import Region

MAX_DIMS = 64  # torch itself stops there
_MAX_NUMBER = 1 << 63
_COPY_AGAIN = "the file is truncated or overwritten; copy it again"

_STORAGE_DTYPES = {
    "DoubleStorage": DTYPES["float64"],
    "FloatStorage": DTYPES["float32"],
    "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"],
    "LongStorage": DTYPES["int64"],
    "IntStorage": DTYPES["int32"],
    "ShortStorage": DTYPES["int16"],
    "CharStorage": DTYPES["int8"],
    "ByteStorage": DTYPES["uint8"],
    "BoolStorage": DTYPES["bool"],
    "ComplexDoubleStorage": DTYPES["complex128"],
    "ComplexFloatStorage": DTYPES["complex64"],
    "QInt8Storage": DTYPES["qint8"],
    "QUInt8Storage": DTYPES["quint8"],
    "QInt32Storage": DTYPES["qint32"],
    "QUInt4x2Storage": DTYPES["quint4x2"],
    "QUInt2x4Storage": DTYPES["quint2x4"],
    "UntypedStorage": DTYPES["uint8"],  # its number of elements is one of bytes
    "_UntypedStorage": DTYPES["uint8"],
}
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_PLAIN_TYPES = {
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
}
_DTYPE_NAMES = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one storage: `nbytes` from byte `offset` of `file` on."""

    file: LocalFile
    key: str
    dtype: DType  # uint8 where the storage has no type of its own
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a storage: `offset` and `strides` in elements of its `dtype`."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def region(self) -> Region:
        """Where its bytes are."""
        start = self.storage.offset + self.offset * self.dtype.itemsize
        return Region(self.storage.file, start, self.dtype, self.shape, self.strides)


def storage_id(name: str, pid: Any) -> tuple[DType, str, int, Any, Any] | None:
    """Element type, key, elements, location and view of a storage's persistent id.

    None for the type of a module, which torch before 0.4 saved together with its source code.
    """
    if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
        return None
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise DamagedFile(f"{name}: a persistent id that is none of a storage", _COPY_AGAIN)
    _, kind, key, location, count = pid[:5]
    if type(key) is not str or type(count) is not int or not 0 <= count < _MAX_NUMBER:
        raise DamagedFile(f"{name}: a storage without a proper key and number of elements", _COPY_AGAIN)
    dtype = _STORAGE_DTYPES.get(kind.name) if type(kind) is Global else None
    if dtype is None:
        named = str(kind)[:100] if type(kind) is Global else type(kind).__name__
        raise UnsupportedCheckpoint(
            f"{name}: storage {key[:100]!r} is of the type {named!r}, whose elements are not known",
            "convert the tensor to a usual dtype and save the checkpoint again",
        )
    return dtype, key, count, location, pid[5] if len(pid) == 6 else None


def refuse_unresolved(what: str, value: object) -> None:
    """Raise `UnsupportedCheckpoint` for a view that torch keeps conjugated or negated; `what` says which.

    Its bytes are not its values, and only complex tensors and parts of them can be such.
    """
    if isinstance(value, Record) and str(value.cls).endswith("_with_metadata"):
        raise UnsupportedCheckpoint(
            f"{what}: was saved conjugated or negated, so that its bytes are not its values",
            "save tensor.resolve_conj().resolve_neg()",
        )


class TensorReader:
    """What torch's names stand for in one file. Its methods take the arguments of the recorded call."""

    def __init__(self, file: LocalFile, name: str, locate: Callable[[str], tuple[int, int]]) -> None:
        self.file = file
        self.name = name
        self.locate = locate  # key -> where its bytes start in the file, and how many there are
        self.storages: dict[tuple[str, str], Storage] = {}

    def known(self) -> dict[str, object]:
        """What the names of torch stand for, for `load`.

        Not kept here: methods that hold this object would keep each file's pickle until the garbage
        collector came by.
        """
        return {
            **_DTYPE_NAMES,
            **{name: partial(build, self) for name, build in _PLAIN.items()},
            "torch.Size": self.size,
            "torch._tensor._rebuild_from_type": self.from_type,
            "torch._tensor._rebuild_from_type_v2": self.from_type,
        }

    def storage(self, pid: Any) -> object:
        """The `Storage` of a persistent id; a record where it is on the meta device and has no bytes."""
        fields = storage_id(self.name, pid)
        if fields is None:
            return pid[1]
        dtype, key, count, location, view = fields
        if location == "meta":
            return Record(pid[1], pid)
        nbytes = count * dtype.itemsize
        known = self.storages.get((key, dtype.name))
        if known is None:
            offset, found = self.locate(key)
            known = self.storages[key, dtype.name] = Storage(self.file, key, dtype, offset, found)
        if nbytes > known.nbytes:
            raise DamagedFile(
                f"{self.name}: storage {key[:100]!r} has {known.nbytes} bytes, expected {nbytes}", _COPY_AGAIN
            )
        return known if view is None else self.view(known, view)

    def view(self, root: Storage, view: Any) -> Storage:
        """A part of a storage (torch before 0.4): key, offset and elements."""
        if type(view) is not tuple or len(view) != 3 or type(view[0]) is not str:
            raise DamagedFile(f"{self.name}: storage {root.key[:100]!r} with a damaged view", _COPY_AGAIN)
        key, offset, count = view
        self.check_numbers(root, (offset, count))
        start, nbytes = offset * root.dtype.itemsize, count * root.dtype.itemsize
        if start + nbytes > root.nbytes:
            raise self.outside(root, start + nbytes)
        return Storage(root.file, key, root.dtype, root.offset + start, nbytes)

    def size(self, args: tuple[Any, ...]) -> object:
        if len(args) == 1 and type(args[0]) is tuple and len(args[0]) <= MAX_DIMS:
            return args[0]
        raise DamagedFile(f"{self.name}: a torch.Size that is no shape", _COPY_AGAIN)

    def tensor(self, args: tuple[Any, ...]) -> object:
        if len(args) >= 7 and args[6]:  # {"conj": True} or {"neg": True}: the bytes are not its values
            return Record(Global("torch._utils", "_rebuild_tensor_v2_with_metadata"), args)
        if len(args) >= 4 and type(args[0]) is Storage:
            return self.checked(args[0], args[0].dtype, args[1], args[2], args[3])
        return self.recorded("_rebuild_tensor_v2", args)

    def tensor_v3(self, args: tuple[Any, ...]) -> object:
        if len(args) >= 8 and args[7]:
            return Record(Global("torch._utils", "_rebuild_tensor_v3_with_metadata"), args)
        if len(args) >= 7 and type(args[0]) is Storage and type(args[6]) is DType:
            return self.checked(args[0], args[6], args[1], args[2], args[3])
        return self.recorded("_rebuild_tensor_v3", args)

    def parameter(self, args: tuple[Any, ...]) -> object:
        if args and type(args[0]) in (StoredTensor, Record):
            return args[0]
        return self.recorded("_rebuild_parameter", args)

    def device_tensor(self, args: tuple[Any, ...]) -> object:
        """A tensor of an accelerator that was saved through the CPU, if that kept its dtype."""
        if len(args) == 4 and type(args[0]) is StoredTensor and args[1] is args[0].dtype:
            return args[0]
        return self.recorded("_rebuild_device_tensor_from_cpu_tensor", args)

    def from_type(self, args: tuple[Any, ...]) -> object:
        known = len(args) == 4 and type(args[0]) is Global and args[0].build is not None
        rebuild = _PLAIN.get(str(args[0])) if known else None
        if rebuild is not None and type(args[2]) is tuple:
            inner = rebuild(self, args[2])
            if type(args[1]) is Global and str(args[1]) in _PLAIN_TYPES:
                return inner
            args = (args[0], args[1], inner, args[3])
        return Record(_FROM_TYPE, args)

    def recorded(self, name: str, args: tuple[Any, ...]) -> Record:
        """A call that rebuilds no plain tensor, such as one on the meta device."""
        if args and type(args[0]) in (Storage, Record):
            return Record(Global("torch._utils", name), args)
        raise DamagedFile(f"{self.name}: a tensor without a storage ({name})", _COPY_AGAIN)

    def checked(self, storage: Storage, dtype: DType, offset: Any, shape: Any, strides: Any) -> StoredTensor:
        """The tensor, if all of it lies inside its storage."""
        proper = type(shape) is tuple and type(strides) is tuple and len(shape) == len(strides) <= MAX_DIMS
        if not proper:
            raise DamagedFile(
                f"{self.name}: a tensor in storage {storage.key[:100]!r} without a proper shape and strides",
                _COPY_AGAIN,
            )
        self.check_numbers(storage, (offset, *shape, *strides))
        last, elements = offset, 1
        for length, stride in zip(shape, strides, strict=True):
            last += (length - 1) * stride
            elements *= length
        if elements and (last + 1) * dtype.itemsize > storage.nbytes:
            raise self.outside(storage, (last + 1) * dtype.itemsize)
        if elements * dtype.itemsize >= _MAX_NUMBER:
            raise DamagedFile(
                f"{self.name}: a tensor of {elements} elements in storage {storage.key[:100]!r}", _COPY_AGAIN
            )
        return StoredTensor(storage, dtype, offset, shape, strides)

    def check_numbers(self, storage: Storage, numbers: tuple[Any, ...]) -> None:
        for number in numbers:
            if type(number) is not int or number < 0 or number >= _MAX_NUMBER:
                shown = number if type(number) is int and abs(number) < _MAX_NUMBER else type(number).__name__
                raise DamagedFile(
                    f"{self.name}: a tensor in storage {storage.key[:100]!r} with {shown} as size, stride"
                    " or offset",
                    _COPY_AGAIN,
                )

    def outside(self, storage: Storage, needed: int) -> DamagedFile:
        return DamagedFile(
            f"{self.name}: a tensor reaches to byte {needed} of storage {storage.key[:100]!r}, which has"
            f" {storage.nbytes} bytes",
            _COPY_AGAIN,
        )


_PLAIN: dict[str, Callable[[TensorReader, tuple[Any, ...]], object]] = {
    "torch._utils._rebuild_tensor": TensorReader.tensor,
    "torch._utils._rebuild_tensor_v2": TensorReader.tensor,
    "torch._utils._rebuild_tensor_v3": TensorReader.tensor_v3,
    "torch._utils._rebuild_parameter": TensorReader.parameter,
    "torch._utils._rebuild_parameter_with_state": TensorReader.parameter,
    "torch_npu.utils.storage._rebuild_npu_tensor": TensorReader.tensor,  # and a memory format, gone on disk
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": TensorReader.device_tensor,
}
"""What rebuilds a plain tensor."""
