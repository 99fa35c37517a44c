"""Files of torch.save: what torch wrote is found where the reader says that it is."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazymerge.errors import DamagedFile, LazymergeError, NotACheckpoint, UnsupportedCheckpoint
from lazymerge.files.dtype import DTYPES
from lazymerge.files.inert_pickle import Global, Record
from lazymerge.files.local import LocalFile
from lazymerge.files.torch_file import Storage, StoredTensor, is_torch_file, read_torch_file
from lazymerge.files.zip_directory import fingerprint

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
TYPES = [
    getattr(torch, name)
    for name in DTYPES
    if hasattr(torch, name) and not name.startswith(("q", "float4", "complex32"))
]


def save(path: Path, value: Any, zipped: bool = True, **options: Any) -> LocalFile:
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path, _use_new_zipfile_serialization=zipped, **options)
    return LocalFile(path)


def contents(stored: StoredTensor) -> bytes:
    """The bytes of the elements in row-major order, read at the places that the region gives."""
    region = stored.region()
    size = region.dtype.itemsize
    raw = np.frombuffer(region.source.read(region.offset, region.extent), np.uint8)
    if 0 in region.shape:
        return b""
    steps = [stride * size for stride in region.strides]
    return np.lib.stride_tricks.as_strided(raw, [*region.shape, size], [*steps, 1]).tobytes()


def true_bytes(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


def check(stored: Any, tensor: torch.Tensor) -> None:
    assert type(stored) is StoredTensor
    assert stored.dtype is DTYPES[str(tensor.dtype).removeprefix("torch.")]
    assert stored.shape == tuple(tensor.shape)
    assert stored.strides == tensor.stride()
    assert contents(stored) == true_bytes(tensor)


# ------------------------------------------------------------------------------ what torch writes


@FORMATS
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, zipped: bool) -> None:
    raw = torch.arange(1, 97, dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    tensors = {
        "plain": tensor.reshape(2, -1),
        "scalar": tensor[3].clone(),
        "empty": tensor[:0].clone(),
        "view": tensor.reshape(2, -1).t()[1:3],
    }
    result = read_torch_file(save(tmp_path / "a.pt", tensors, zipped))
    for name, true in tensors.items():
        check(result[name], true)


@FORMATS
def test_views_of_one_storage(tmp_path: Path, zipped: bool) -> None:
    whole = torch.arange(60.0).reshape(5, 12)
    tensors = [whole, whole[2:4], whole.t(), whole[:, 3], whole[1:2].expand(4, 12), whole[5:], torch.zeros(3)]
    result = read_torch_file(save(tmp_path / "a.pt", tensors, zipped))
    for stored, true in zip(result, tensors, strict=True):
        check(stored, true)
    assert len({id(stored.storage) for stored in result}) == 2
    assert result[1].offset == 24
    assert result[4].strides == (0, 1)
    assert result[0].storage.nbytes == 240


@FORMATS
def test_what_stands_around_tensors(tmp_path: Path, zipped: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    marked = torch.ones(4)
    marked.ds_id = 7  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.sharded = True  # type: ignore[attr-defined]
    value = {
        "module": model.state_dict(),
        "parameters": list(model.parameters()),
        "marked": marked,
        "parameter": parameter,
        "args": argparse.Namespace(num_layers=4, params_dtype=torch.bfloat16, shape=torch.Size([3, 4])),
        "numpy": np.arange(5.0),
        "scalar": np.float32(3.0),
        "nested": [({"a": (torch.zeros(1),)},), None, True, 1 << 70, "text", b"bytes"],
        "device": torch.device("cuda", 3),
        "untyped": torch.ones(3).untyped_storage(),
    }
    result = read_torch_file(save(tmp_path / "a.pt", value, zipped))
    assert type(result["module"]) is dict
    assert list(result["module"]) == list(model.state_dict())
    for name, true in model.state_dict().items():
        check(result["module"][name], true)
    check(result["parameters"][0], model[0].weight)
    check(result["marked"], marked)
    check(result["parameter"], parameter)
    arguments = result["args"]
    assert arguments.cls == Global("argparse", "Namespace")
    assert arguments.attrs() == {"num_layers": 4, "params_dtype": DTYPES["bfloat16"], "shape": (3, 4)}
    assert type(result["numpy"]) is Record
    assert np.arange(5.0).tobytes() in result["numpy"].state
    assert type(result["scalar"]) is Record
    check(result["nested"][0][0]["a"][0], torch.zeros(1))
    assert result["nested"][1:] == [None, True, 1 << 70, "text", b"bytes"]
    assert result["device"].args == ("cuda", 3)
    untyped = result["untyped"]
    assert type(untyped) is Storage
    assert untyped.file.read(untyped.offset, untyped.nbytes) == np.ones(3, np.float32).tobytes()


class Special(torch.Tensor):
    pass


@FORMATS
def test_tensors_that_are_no_plain_arrays_stay_records(tmp_path: Path, zipped: bool) -> None:
    value = {
        "special": torch.ones(3).as_subclass(Special),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(3, device="meta"),
        "plain": torch.ones(3),
    }
    result = read_torch_file(save(tmp_path / "a.pt", value, zipped))
    special = result["special"]
    assert str(special.cls) == "torch._tensor._rebuild_from_type_v2"
    assert special.args[1].name == "Special"
    check(special.args[2], torch.ones(3))
    assert str(result["sparse"].cls) == "torch._utils._rebuild_sparse_tensor"
    check(result["sparse"].args[1][1], torch.ones(3))
    assert "meta" in str(result["meta"].cls)
    check(result["plain"], torch.ones(3))


def test_a_quantised_tensor_stays_a_record(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="quantize"):
        quantised = torch._empty_affine_quantized([4], scale=0.5, zero_point=1, dtype=torch.qint8)
    result = read_torch_file(save(tmp_path / "a.pt", quantised))
    assert str(result.cls) == "torch._utils._rebuild_qtensor"
    assert result.args[0].dtype is DTYPES["qint8"]


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_other_pickle_protocols(tmp_path: Path, protocol: int, zipped: bool) -> None:
    file = save(tmp_path / "a.pt", {"a": torch.arange(5)}, zipped, pickle_protocol=protocol)
    assert is_torch_file(file)
    check(read_torch_file(file)["a"], torch.arange(5))


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_alignments_and_missing_checksums(tmp_path: Path, alignment: int) -> None:
    from torch.utils.serialization import config

    old, old_crc = config.save.storage_alignment, torch.serialization.get_crc32_options()
    config.save.storage_alignment = alignment
    torch.serialization.set_crc32_options(False)
    try:
        tensors = [torch.arange(7), torch.arange(3.0), torch.ones(5, dtype=torch.bfloat16)]
        file = save(tmp_path / "a.pt", tensors)
    finally:
        config.save.storage_alignment = old
        torch.serialization.set_crc32_options(old_crc)
    for stored, true in zip(read_torch_file(file), tensors, strict=True):
        check(stored, true)


@FORMATS
def test_a_file_inside_a_file(tmp_path: Path, zipped: bool) -> None:
    buffer = io.BytesIO()
    torch.save([torch.arange(9)], buffer, _use_new_zipfile_serialization=zipped)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"x" * 31 + buffer.getvalue() + b"behind")
    file = LocalFile(path)
    assert not is_torch_file(file)
    size = len(buffer.getvalue())
    (stored,) = read_torch_file(file, start=31, size=size)
    check(stored, torch.arange(9))
    for start, length in ((31, size - 1), (32, size - 1), (31, size + 7), (-1, 3), (10**9, 1)):
        with pytest.raises(LazymergeError) as caught:
            read_torch_file(file, start=start, size=length)
        assert "__0_0.distcp" in caught.value.problem


def zip_of(records: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return out.getvalue()


def tensor_pickle(**changes: Any) -> bytes:
    """A pickle of one float tensor of two rows of three, changed in what is named."""
    fields: dict[str, Any] = {
        "kind": b"ctorch\nFloatStorage\n",
        "key": "0",
        "location": "cpu",
        "count": 6,
        "offset": 0,
        "shape": (2, 3),
        "strides": (3, 1),
    }
    fields |= changes

    def put(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    pid = b"(" + put("storage") + fields["kind"] + put(fields["key"]) + put(fields["location"])
    pid += put(fields["count"]) + b"tQ"
    rest = put(fields["offset"]) + put(fields["shape"]) + put(fields["strides"]) + b"\x89N"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + pid + rest + b"tR."


def write(path: Path, data: bytes) -> LocalFile:
    path.write_bytes(data)
    return LocalFile(path)


def archive(path: Path, pickled: bytes, **records: bytes) -> LocalFile:
    return write(path, zip_of({"a/data.pkl": pickled, "a/data/0": bytes(range(24)), **records}))


@pytest.mark.parametrize(
    "kind", ["torch.cuda\nFloatStorage", "torch_npu.npu\nFloatStorage", "torch.xpu\nFloatStorage"]
)
def test_storages_of_accelerators(tmp_path: Path, kind: str) -> None:
    pickled = tensor_pickle(kind=f"c{kind}\n".encode(), location="npu:3")
    stored = read_torch_file(archive(tmp_path / "a.pt", pickled))
    assert contents(stored) == bytes(range(24))
    npu = pickled.replace(
        b"ctorch._utils\n_rebuild_tensor_v2", b"ctorch_npu.utils.storage\n_rebuild_npu_tensor"
    )
    assert contents(read_torch_file(archive(tmp_path / "b.pt", npu))) == bytes(range(24))


def test_a_storage_on_the_meta_device_stays_a_record(tmp_path: Path) -> None:
    result = read_torch_file(archive(tmp_path / "a.pt", tensor_pickle(location="meta")))
    assert str(result.cls) == "torch._utils._rebuild_tensor_v2"


# ------------------------------------------------------------------------------ DTensor and ShardedTensor

WRITER = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
whole = torch.arange(15.0).reshape(5, 3)
spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
sharded = sharded_tensor.empty(spec, 5, 3)
for shard in sharded.local_shards():
    shard.tensor.copy_(whole[3 * rank : 3 * rank + 3])
plain = torch.ones(2, dtype=torch.float8_e4m3fn)
torch.save(
    {"dtensor": distribute_tensor(whole, mesh, [Shard(0)]), "sharded": sharded, "plain": plain},
    f"{folder}/rank_{rank}.pt",
)
dist.barrier()
dist.destroy_process_group()
"""


def test_sharded_tensors_of_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    whole = torch.arange(15.0).reshape(5, 3)
    for rank in range(2):
        result = read_torch_file(LocalFile(tmp_path / f"rank_{rank}.pt"))
        rows = whole[3 * rank : 3 * rank + 3]
        check(result["plain"], torch.ones(2, dtype=torch.float8_e4m3fn))

        function, kind, arguments, state = result["dtensor"].args
        assert str(function) == "torch._utils._rebuild_wrapper_subclass"
        assert kind.name == "DTensor"
        assert arguments[1:4] == (DTYPES["float32"], (5, 3), (3, 1))
        check(state[1]["_local_tensor"], rows)
        spec = state[1]["_spec"].attrs()
        assert spec["placements"][0].cls.name == "Shard"
        assert spec["placements"][0].attrs() == {"dim": 0}
        assert spec["tensor_meta"].args[0] == (5, 3)
        assert spec["mesh"].cls == Global("torch.distributed.device_mesh", "DeviceMesh")

        function, kind, arguments, state = result["sharded"].args
        assert kind.name == "ShardedTensor"
        shards, metadata, group, _, _ = state
        check(shards[0].attrs()["tensor"], rows)
        assert shards[0].attrs()["metadata"].attrs()["shard_offsets"] == [3 * rank, 0]
        assert len(metadata.attrs()["shards_metadata"]) == 2
        assert group.cls.name == "ShardedTensor.ProcessGroupState"
        assert group.attrs()["global_rank"] == rank


# ------------------------------------------------------------------------------ refused


def refused(file: LocalFile, kind: type[LazymergeError], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        read_torch_file(file)
    assert file.path.name in caught.value.problem
    assert "\n" not in caught.value.problem
    assert caught.value.hint
    assert "\n" not in caught.value.hint
    for part in parts:
        assert part in caught.value.problem


def test_a_file_cut_to_three_quarters(tmp_path: Path) -> None:
    whole = save(tmp_path / "a.pt", {"a": torch.zeros(1000), "b": torch.zeros(3000)})
    for part in (0.75, 0.5):
        cut = write(tmp_path / "cut.pt", whole.path.read_bytes()[: int(whole.size * part)])
        refused(cut, DamagedFile, f"{cut.size} bytes", "truncated", "expected at least 16")
    legacy = save(tmp_path / "b.pt", {"a": torch.zeros(1000), "b": torch.zeros(3000)}, False)
    cut = write(tmp_path / "cut.pt", legacy.path.read_bytes()[: legacy.size * 3 // 4])
    refused(cut, DamagedFile, f"{cut.size} bytes", f"expected at least {legacy.size}")


@FORMATS
def test_truncated_at_every_byte(tmp_path: Path, zipped: bool) -> None:
    data = save(tmp_path / "a.pt", collections.OrderedDict(a=torch.ones(2)), zipped).path.read_bytes()
    path = tmp_path / "cut.pt"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(LazymergeError, match=r"cut\.pt"):
            read_torch_file(LocalFile(path))
        is_torch_file(LocalFile(path))


@FORMATS
def test_flipped_bytes(tmp_path: Path, zipped: bool) -> None:
    data = save(tmp_path / "a.pt", {"a": torch.ones(2), "b": torch.ones(3)}, zipped).path.read_bytes()
    generator = random.Random(1)
    path = tmp_path / "flipped.pt"
    ends = [*range(min(600, len(data))), *range(max(0, len(data) - 900), len(data))]
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(generator.choice((1, 1, 3))):
            damaged[generator.choice(ends)] = generator.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(LazymergeError):
            read_torch_file(LocalFile(path))
            is_torch_file(LocalFile(path))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"offset": 1}, "reaches to byte 28 of storage '0', which has 24 bytes"),
        ({"offset": -1}, "-1"),
        ({"offset": 1.5}, "float"),
        ({"shape": (2, 4)}, "28"),
        ({"shape": (2, -3)}, "-3"),
        ({"shape": [2, 3]}, "proper shape"),
        ({"shape": (2, 3, 1)}, "proper shape"),
        ({"shape": (1,) * 65, "strides": (1,) * 65}, "proper shape"),
        ({"shape": (2, 1 << 63)}, "int"),
        ({"strides": (3, 1 << 62)}, "reaches"),
        ({"strides": (-3, 1)}, "-3"),
        ({"strides": (3, True)}, "bool"),
        ({"shape": (1 << 61, 1 << 61), "strides": (0, 0)}, "elements"),
        ({"count": 7}, "24 bytes, expected 28"),
        ({"count": -1}, "number of elements"),
        ({"count": 1 << 70}, "number of elements"),
        ({"key": "1"}, "no record for storage '1'"),
        ({"key": "../../etc/passwd"}, "no record"),
        ({"key": 0}, "proper key"),
        ({"kind": b"N"}, "NoneType"),
        ({"kind": b"ctorch\nFancyStorage\n"}, "torch.FancyStorage"),
    ],
)
def test_tensors_outside_their_storage(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    unsupported = "kind" in changes
    refused(
        archive(tmp_path / "a.pt", tensor_pickle(**changes)),
        UnsupportedCheckpoint if unsupported else DamagedFile,
        part,
    )


def test_zips_that_contradict_themselves(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    good = zip_of({"a/data.pkl": tensor_pickle(), "a/data/0": bytes(24)})
    assert type(read_torch_file(write(path, good))) is StoredTensor
    end, central = good.rindex(b"PK\x05\x06"), good.index(b"PK\x01\x02")
    second = good.index(b"PK\x01\x02", central + 4)

    def patched(offset: int, form: str, *values: int) -> LocalFile:
        data = bytearray(good)
        struct.pack_into(form, data, offset, *values)
        return write(path, bytes(data))

    refused(write(path, good + b"x"), DamagedFile, "no end-of-archive record")
    refused(patched(end + 10, "<H", 3), DamagedFile, "2 records")
    refused(patched(end + 12, "<I", 5), DamagedFile)
    refused(patched(end + 16, "<I", 0x7FFFFFFF), DamagedFile)
    refused(patched(end + 4, "<H", 1), DamagedFile, "several parts")
    refused(patched(second + 42, "<I", 0), DamagedFile, "runs into")
    refused(patched(second + 42, "<I", 0x7FFFFFF0), DamagedFile, "runs into")
    refused(patched(second + 20, "<II", 1000, 1000), DamagedFile, "runs into")
    refused(patched(second + 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF), DamagedFile, "zip64")
    refused(patched(second + 20, "<I", 23), UnsupportedCheckpoint, "compressed")
    refused(patched(second + 8, "<H", 1), UnsupportedCheckpoint, "encrypted")
    refused(patched(second + 10, "<H", 8), UnsupportedCheckpoint, "compressed")
    refused(write(path, good.replace(b"a/data/0", b"a/data/9", 1)), DamagedFile, "no header of record")
    refused(write(path, good.replace(b"a/data/0", b"a/data\xff0")), DamagedFile, "UTF-8")
    header = good.index(b"PK\x03\x04", 4)
    refused(patched(header + 28, "<H", 9000), DamagedFile, "ends at byte")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as twice:
        twice.writestr("a/data.pkl", tensor_pickle())
        with pytest.warns(UserWarning, match="Duplicate"):
            twice.writestr("a/data.pkl", tensor_pickle())
    refused(write(path, out.getvalue()), DamagedFile, "two records")


def test_zip64_fields_are_read(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive64:
        for name, data in {"a/data.pkl": tensor_pickle(), "a/data/0": bytes(range(24))}.items():
            with archive64.open(name, "w", force_zip64=True) as record:
                record.write(data)
    good = out.getvalue()
    assert contents(read_torch_file(write(tmp_path / "a.pt", good))) == bytes(range(24))
    # sizes and offset of the second record, and the end record, moved to their 64-bit places
    end, second = good.rindex(b"PK\x05\x06"), good.rindex(b"PK\x01\x02")
    count, size, offset = struct.unpack_from("<HII", good, end + 10)
    header = struct.unpack_from("<I", good, second + 42)[0]
    entry = bytearray(good[second:end])
    struct.pack_into("<III", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF, 28)
    struct.pack_into("<HH", entry, 28, 8, 28)
    struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
    struct.pack_into("<II", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    entry[46:] = b"a/data/0" + struct.pack("<HHQQQ", 1, 24, 24, 24, header)
    size += 28
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + size, 1)
    last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    wide = good[:second] + bytes(entry) + end64 + locator + last
    assert contents(read_torch_file(write(tmp_path / "b.pt", wide))) == bytes(range(24))


def test_other_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    refused(write(path, b""), DamagedFile, "0 bytes")
    refused(write(path, bytes(5000)), DamagedFile, "zeros")
    refused(write(path, b"plain text"), NotACheckpoint)
    refused(write(path, pickle.dumps({"a": 1})), NotACheckpoint)
    refused(write(path, zip_of({"word/document.xml": b"x"})), NotACheckpoint, "data.pkl")
    refused(write(path, zip_of({"a/data.pkl": b"N.", "b/data.pkl": b"N."})), DamagedFile, "2 records")
    torchscript = {"a/data.pkl": b"N.", "a/constants.pkl": b")."}
    refused(write(path, zip_of(torchscript)), UnsupportedCheckpoint, "TorchScript")
    refused(
        write(path, zip_of({"a/data.pkl": b"N.", "a/byteorder": b"big"})), UnsupportedCheckpoint, "big-endian"
    )
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("pickle")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"N."))
    refused(LocalFile(path), UnsupportedCheckpoint, "0.1.10")
    assert not is_torch_file(LocalFile(path))


def test_hostile_torch_files_run_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    call = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    assert type(read_torch_file(archive(tmp_path / "a.pt", call))) is Record
    nested = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + call[:-1] + b"cos\nsystem\n)NtR."
    read_torch_file(archive(tmp_path / "b.pt", nested))
    deep = b"ctorch._tensor\n_rebuild_from_type_v2\nq\x000)" + b"q\x010(h\x00h\x00h\x01Nt" * 50_000
    result = read_torch_file(archive(tmp_path / "d.pt", deep + b"q\x020h\x00h\x02R."))
    assert type(result) is Record
    assert not canary.exists()


def test_wrong_arguments_of_known_functions(tmp_path: Path) -> None:
    names = [
        "torch\nSize",
        "torch._utils\n_rebuild_tensor",
        "torch._utils\n_rebuild_tensor_v2",
        "torch._utils\n_rebuild_tensor_v3",
        "torch._utils\n_rebuild_parameter",
        "torch._utils\n_rebuild_parameter_with_state",
        "torch._utils\n_rebuild_device_tensor_from_cpu_tensor",
        "torch._tensor\n_rebuild_from_type",
        "torch._tensor\n_rebuild_from_type_v2",
        "torch\nfloat32",
    ]
    arguments = [b")", b"N\x85", b"((NNNNNNNtt", b"(NNNNt", b"]\x85", b"K\x01K\x02\x86", b"(NN)Nt", b"(])}Nt"]
    for name in names:
        for argument in arguments:
            with contextlib.suppress(LazymergeError):
                read_torch_file(archive(tmp_path / "a.pt", f"c{name}\n".encode() + argument + b"R."))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    file = save(tmp_path / "a.pt", [torch.ones(3)])
    read_torch_file(file)
    file.pool.close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read_torch_file(LocalFile(tmp_path / "a.pt", file.pool))
    file.pool.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("bit", range(12))
@pytest.mark.parametrize("alignment", [64, 4])
def test_a_bit_of_the_length_of_an_extra_field(tmp_path: Path, bit: int, alignment: int) -> None:
    """It shifts the data, which may be all zeros: an extra field of as many empty parts."""
    path = tmp_path / "a.pt"
    from torch.utils.serialization import config

    old, config.save.storage_alignment = config.save.storage_alignment, alignment
    try:
        torch.save([torch.zeros(9000, dtype=torch.uint8)], path)
    finally:
        config.save.storage_alignment = old
    data = bytearray(path.read_bytes())
    name = data.index(b"a/data/0")
    data[name - 2 + bit // 8] ^= 1 << bit % 8
    refused(write(path, bytes(data)), DamagedFile, "record 'a/data/0'")


def test_a_zip_without_descriptors_and_with_gaps(tmp_path: Path) -> None:
    """What other tools write: an extra field has to be one, where the data does not reach to what follows."""
    pickled, values = tensor_pickle(), bytes(range(24))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as zipped:
        zipped.writestr("a/data.pkl", pickled)
        info = zipfile.ZipInfo("a/data/0")
        info.extra = struct.pack("<HH6s", 0x4246, 6, b"filler")
        zipped.writestr(info, values)
        zipped.fp.write(b"gap of another tool")  # type: ignore[union-attr]
        zipped.start_dir = zipped.fp.tell()  # type: ignore[union-attr, attr-defined]
    good = out.getvalue()
    assert contents(read_torch_file(write(tmp_path / "a.pt", good))) == values
    data = bytearray(good)
    data[good.index(b"a/data/0") - 2] ^= 1
    refused(write(tmp_path / "a.pt", bytes(data)), DamagedFile, "does not start at byte")


def test_the_fingerprint_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    one = fingerprint(save(tmp_path / "1" / "a.pt", [torch.ones(5)]))
    assert one is not None
    assert one == fingerprint(save(tmp_path / "2" / "a.pt", [torch.ones(5)]))
    assert one != fingerprint(save(tmp_path / "3" / "a.pt", [torch.zeros(5)]))
    assert fingerprint(save(tmp_path / "4" / "a.pt", [torch.ones(5)], zipped=False)) is None
    torch.serialization.set_crc32_options(False)
    try:
        assert fingerprint(save(tmp_path / "5" / "a.pt", [torch.ones(5)])) is None
    finally:
        torch.serialization.set_crc32_options(True)
