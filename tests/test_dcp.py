"""Folders of torch.distributed.checkpoint, written by torch itself and then damaged."""

from __future__ import annotations

import io
import pickle
import shutil
import struct
import sys
import types
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lazymerge.compute import read
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    LazymergeError,
    SourceError,
    UnsupportedCheckpoint,
)
from lazymerge.files.local import LocalFile
from lazymerge.files.torch_file import read_torch_file
from lazymerge.formats.dcp import DcpFolder, holds_dcp, read_dcp
from lazymerge.formats.stacks import Allowance
from lazymerge.tiling import check
from tests.checks import assert_same_tensors
from tests.makers.dcp_folders import edited, save_dcp
from tests.makers.ranks import run_ranks


def tensors() -> dict[str, torch.Tensor]:
    """Kinds of tensors that torch saves in one chunk each."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(8, 6, generator=generator)
    return {
        "bf16": base.bfloat16(),
        "transposed": base.t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "bool": base > 0,
        "int64": torch.arange(7),
        "view": base[2:5, 1:3],
        "fp8": base.to(torch.float8_e4m3fn),
    }


@pytest.fixture(scope="session")
def plain_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "plain"
    state = {"model": tensors(), "step": 7, "extra": {"text": "hello"}}
    return save_dcp(folder, state, threads=2)


@pytest.fixture
def plain(plain_once: Path, tmp_path: Path) -> Path:
    """A folder with one chunk a tensor, to damage."""
    return Path(shutil.copytree(plain_once, tmp_path / "plain"))


def moved(index: MetadataIndex, metadata: Any, **fields: Any) -> None:
    """Changes fields of the place of one record."""
    info = metadata.storage_data[index]
    metadata.storage_data[index] = _StorageInfo(**{**vars(info), **fields})


def values(folder: DcpFolder) -> dict[str, torch.Tensor]:
    """All tensors, each proved to be whole."""
    for name in folder.tensors:
        check(name, folder.gather(name))
    return {name: read(folder.gather(name)) for name in folder.tensors}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return values(read_dcp(folder))


# ---- what is read ------------------------------------------------------------------------------------------


def test_plain_tensors(plain):
    folder = read_dcp(plain)
    truth = {f"model.{name}": tensor for name, tensor in tensors().items()}
    assert_same_tensors(values(folder), truth)
    assert set(folder.objects) == {"step", "extra.text"}
    assert folder.load_object("step") == 7
    assert folder.load_object("extra.text") == "hello"
    assert {file.path.name for file in folder.files} == {
        ".metadata",
        *(p.name for p in plain.glob("*.distcp")),
    }


def test_opening_reads_no_record(plain):
    folder = read_dcp(plain)
    for path in plain.glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    gather = folder.gather("model.bf16")
    assert gather.shape == (8, 6)
    with pytest.raises(DamagedFile, match=r"model\.bf16"):
        list(gather.pieces())


def test_tensors_that_are_not_wanted_are_only_named(plain):
    edited(plain, lambda metadata: moved(MetadataIndex("model.view", [0, 0]), metadata, relative_path="../x"))
    folder = read_dcp(plain, lambda name: name != "model.view")
    assert folder.others == ("model.view",)
    assert "model.view" not in folder.tensors
    with pytest.raises(DamagedFile, match=r"model\.view.*outside"):
        read_dcp(plain)


def test_names(plain, tmp_path):
    assert holds_dcp(plain)
    (plain / ".metadata").unlink()
    assert holds_dcp(plain)
    assert not holds_dcp(tmp_path)
    assert not holds_dcp(tmp_path / "nothing")


def save_sharded(rank: int, folder: Path) -> None:
    """Rows and columns over two ranks; one row is less than there are ranks."""
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(15.0).view(5, 3)
    state = {
        "rows": dist.tensor.distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": dist.tensor.distribute_tensor(rows.bfloat16(), mesh, [Shard(1)]),
        "one": dist.tensor.distribute_tensor(rows[:1], mesh, [Shard(0)]),
        "plain": torch.full((2,), 3.0),
    }
    assert all(isinstance(state[name], DTensor) for name in ("rows", "columns", "one"))
    dcp.save(state, checkpoint_id=folder)


def test_distributed_tensors(tmp_path):
    run_ranks(save_sharded, 2, tmp_path / "two")
    rows = torch.arange(15.0).view(5, 3)
    truth = {"rows": rows, "columns": rows.bfloat16(), "one": rows[:1], "plain": torch.full((2,), 3.0)}
    folder = read_dcp(tmp_path / "two")
    assert len(folder.tensors["rows"].boxes) == 2
    assert_same_tensors(values(folder), truth)


# ---- what other versions wrote -----------------------------------------------------------------------------


def test_metadata_of_megatron_core(plain, monkeypatch):
    """mcore 0.12 to 0.15: a subclass, attributes of its own, and plans of a class that is not here."""
    module = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing.strategies", types.ModuleType("s"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("MCoreMetadata", "MCoreSavePlan"):
        setattr(module, name, type(name, (), {"__module__": module.__name__}))
    old = pickle.loads((plain / ".metadata").read_bytes())
    new = module.MCoreMetadata()
    new.__dict__.update(vars(old), mcore_data={"model.bf16": {"nd_reformulated_orig_global_shape": (8, 6)}})
    new.all_local_plans = [module.MCoreSavePlan()]
    for entry in new.state_dict_metadata.values():
        if hasattr(entry, "properties"):  # torch up to 2.2
            entry.properties = OldProperties(dtype=entry.properties.dtype)
    new.storage_data = {
        MetadataIndex(key.fqn, key.offset, 5): info for key, info in new.storage_data.items()
    }  # the index is a hint
    (plain / ".metadata").write_bytes(pickle.dumps(new))
    monkeypatch.undo()
    assert b"MCoreSavePlan" in (plain / ".metadata").read_bytes()
    assert_same_tensors(read_all(plain), {f"model.{name}": tensor for name, tensor in tensors().items()})


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_protocols(plain, protocol):
    metadata = pickle.loads((plain / ".metadata").read_bytes())
    (plain / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    assert_same_tensors(read_all(plain), {f"model.{name}": tensor for name, tensor in tensors().items()})


def test_where_the_bytes_are_is_read_from_the_record(plain, tmp_path):
    """Another archive name moves the elements: 704 bytes in is only where torch has them today."""
    name = tmp_path / ("long_" * 12)
    torch.save(tensors()["bf16"], name)
    record = name.read_bytes()
    (plain / "__9_0.distcp").write_bytes(b"x" * 31 + record)
    index = MetadataIndex("model.bf16", [0, 0])
    edited(
        plain,
        lambda metadata: moved(index, metadata, relative_path="__9_0.distcp", offset=31, length=len(record)),
    )
    gather = read_dcp(plain).gather("model.bf16")
    ((_, region),) = gather.pieces()
    assert region.offset - 31 != 704
    assert_same_tensors({"x": read(gather)}, {"x": tensors()["bf16"]})


def test_records_that_are_alike(tmp_path, monkeypatch):
    """Chunks of one shape are found by the headers of the first, but for one that is laid out otherwise."""
    whole = torch.arange(6.0 * 4).view(6, 4)
    cuts = [((at, 0), (1, 4)) for at in range(6)]
    folder = save_dcp(tmp_path / "x", {"a": whole, "b": whole.t()}, {"a": cuts})
    torch.save(whole[2:3].clone(), tmp_path / "other_name")  # as long a record, with a longer name
    other = (tmp_path / "other_name").read_bytes()
    index = MetadataIndex("a", [2, 0])
    (folder / "__9_0.distcp").write_bytes(other)
    place = {"relative_path": "__9_0.distcp", "offset": 0, "length": len(other)}
    edited(folder, lambda metadata: moved(index, metadata, **place))
    read_in_full = []

    def counted(file: LocalFile, *, start: int, size: int) -> Any:
        read_in_full.append(start)
        return read_torch_file(file, start=start, size=size)

    monkeypatch.setattr("lazymerge.formats.dcp_records.read_torch_file", counted)
    assert_same_tensors(read_all(folder), {"a": whole, "b": whole.t()})
    assert 3 <= len(read_in_full) <= 4


def test_headers_that_differ_are_read_in_full(tmp_path):
    """A record like the others but for the number of elements that its pickle names, or the sizes behind."""
    whole = torch.arange(6.0 * 4).view(6, 4)
    cuts = [((at, 0), (1, 4)) for at in range(6)]
    for change in ("pickle", "behind"):
        folder = save_dcp(tmp_path / change, {"a": whole}, {"a": cuts})
        ((_, region),) = read_dcp(folder).gather("a").narrow(0, 5, 1).pieces()
        path = Path(region.source.name)
        data = bytearray(path.read_bytes())
        at = region.offset
        if change == "pickle":  # (1, 4) becomes (1, 3)
            start = data.rindex(b"K\x01K\x04\x86", 0, at)
            record = data.rindex(b"PK\x03\x04", 0, start)
            old = zipfile.ZipFile(io.BytesIO(data[record:])).getinfo("archive/data.pkl")
            data[start + 3] = 3
            path.write_bytes(data)
            with pytest.raises(DamagedFile, match=f"data.pkl has the checksum .* expected {old.CRC:08x}"):
                read_all(folder)
            pickled = record + data[record:start].rindex(b"\x80\x02")
            assert zlib.crc32(data[pickled : pickled + old.file_size]) != old.CRC
            new = zlib.crc32(data[pickled : pickled + old.file_size])
            data[record:] = data[record:].replace(struct.pack("<I", old.CRC), struct.pack("<I", new))
        else:
            data[at + 24 : at + 28] = b"XXXX"
        path.write_bytes(data)
        if change == "pickle":
            with pytest.raises(InconsistentCheckpoint, match=r"a: the record .* shape \(1, 3\)"):
                read_all(folder)
        else:  # not what the directory says is wrong, so the record is read as torch reads it
            assert_same_tensors(read_all(folder), {"a": whole})


# ---- stacks ------------------------------------------------------------------------------------------------


def test_a_stack_is_taken_apart(tmp_path):
    """Chunks of one layer and one expert, of two experts, of rows, and of several layers."""
    whole = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    chunks = [
        ((0, 0, 0, 0), (1, 2, 4, 5)),
        ((0, 2, 0, 0), (1, 1, 3, 5)),
        ((0, 2, 3, 0), (1, 1, 1, 5)),
        ((1, 0, 0, 0), (1, 3, 4, 2)),
        ((1, 0, 0, 2), (1, 3, 4, 3)),
    ]
    folder = read_dcp(save_dcp(tmp_path / "stack", {"stack": whole}, {"stack": chunks}))
    layers = folder.unstacked("stack", 1)
    assert list(layers) == [(0,), (1,)]
    experts = folder.unstacked("stack", 2)
    assert len(experts) == 6
    for index, gather in {**layers, **experts, (): folder.gather("stack")}.items():
        check(str(index), gather)
        assert torch.equal(read(gather), whole[index])
    assert len(list(experts[0, 2].pieces())) == 2


@pytest.mark.parametrize("shape", [(1 << 40, 0), (1 << 40, 0, 3), (0, 1 << 40), (1 << 11, 1 << 11, 0)])
def test_stacks_that_no_model_has(tmp_path, shape):
    folder = save_dcp(tmp_path / "stack", {"stack": torch.arange(4)})
    with pytest.raises(UnsupportedCheckpoint, match="expected 2 leading axes"):
        read_dcp(folder).unstacked("stack", 2)

    def grow(metadata: Any) -> None:
        metadata.state_dict_metadata["stack"].size = torch.Size(shape)
        metadata.state_dict_metadata["stack"].chunks = []

    edited(folder, grow)
    with pytest.raises(UnsupportedCheckpoint, match="leading axes"):
        read_dcp(folder).unstacked("stack", 2)


# ---- damage ------------------------------------------------------------------------------------------------


def first_of(metadata: Any, name: str = "model.int64") -> Any:
    return metadata.state_dict_metadata[name]


INT64 = MetadataIndex("model.int64", [0])


def chunk(start: int, size: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start]), torch.Size([size]))


CHANGES: dict[str, tuple[Callable[[Any], object], type[SourceError], str]] = {
    "chunk outside": (
        lambda m: first_of(m).chunks.__setitem__(0, chunk(1, 7)),
        InconsistentCheckpoint,
        r"model\.int64.*outside",
    ),
    "overlapping": (
        lambda m: first_of(m).chunks.append(chunk(3, 2)),
        InconsistentCheckpoint,
        r"model\.int64.*overlap",
    ),
    "hole": (
        lambda m: first_of(m).chunks.__setitem__(0, chunk(0, 5)),
        IncompleteCheckpoint,
        r"model\.int64.*5 of 7",
    ),
    "other rank of chunk": (
        lambda m: first_of(m).chunks.__setitem__(
            0, ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([7, 1]))
        ),
        InconsistentCheckpoint,
        r"model\.int64.*outside",
    ),
    "no record": (lambda m: m.storage_data.pop(INT64), IncompleteCheckpoint, r"model\.int64.*no record"),
    "smaller record": (
        lambda m: moved(INT64, m, length=40),
        InconsistentCheckpoint,
        r"model\.int64.*record of 40 bytes.*takes 56",
    ),
    "compressed": (
        lambda m: moved(INT64, m, transform_descriptors=["zstd"]),
        UnsupportedCheckpoint,
        r"model\.int64.*compressed.*zstd",
    ),
    "beyond the file": (
        lambda m: moved(INT64, m, offset=1 << 40),
        DamagedFile,
        r"model\.int64.*distcp has \d+ bytes",
    ),
    "negative offset": (lambda m: moved(INT64, m, offset=-1), DamagedFile, r"model\.int64.*proper"),
    "parent": (lambda m: moved(INT64, m, relative_path="../x.distcp"), DamagedFile, "outside of its folder"),
    "absolute": (
        lambda m: moved(INT64, m, relative_path="/etc/passwd"),
        DamagedFile,
        "outside of its folder",
    ),
    "empty path": (lambda m: moved(INT64, m, relative_path=""), SourceError, "not a regular file"),
    "null in path": (lambda m: moved(INT64, m, relative_path="a\0b"), DamagedFile, "proper name and file"),
    "long path": (lambda m: moved(INT64, m, relative_path="a" * 5000), SourceError, r"model\.int64"),
    "missing file": (
        lambda m: moved(INT64, m, relative_path="__7_0.distcp"),
        IncompleteCheckpoint,
        r"model\.int64.*__7_0\.distcp",
    ),
    "the folder": (lambda m: moved(INT64, m, relative_path="."), SourceError, "not a regular file"),
    "no dtype": (
        lambda m: setattr(first_of(m), "properties", None),
        UnsupportedCheckpoint,
        r"model\.int64.*element type",
    ),
    "negative size": (lambda m: setattr(first_of(m), "size", (-7,)), DamagedFile, r"model\.int64.*shape"),
    "absurd size": (
        lambda m: setattr(first_of(m), "size", torch.Size([1 << 62, 1 << 62])),
        DamagedFile,
        r"model\.int64.*shape",
    ),
    "no chunks": (lambda m: setattr(first_of(m), "chunks", None), DamagedFile, r"model\.int64.*chunks"),
    "no tables": (lambda m: setattr(m, "storage_data", None), DamagedFile, "no metadata"),
    "another kind": (
        lambda m: m.state_dict_metadata.__setitem__("x", chunk(0, 1)),
        DamagedFile,
        "x as a ChunkStorageMetadata",
    ),
}


@pytest.mark.parametrize("case", list(CHANGES))
def test_metadata_that_is_wrong(plain, case):
    change, kind, words = CHANGES[case]
    edited(plain, change)
    with pytest.raises(kind, match=words) as caught:
        read_dcp(plain)
    assert "\n" not in caught.value.problem
    assert caught.value.hint


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (torch.arange(8), r"shape \(8,\).*expected \(7,\)"),
        (torch.arange(7).double(), r"float64.*expected \(7,\) in int64"),
        (torch.arange(70)[:7], r"560 bytes\), expected.*56 bytes"),
        ({"x": torch.arange(7)}, "no plain tensor"),
        (torch.arange(7).to_sparse(), "no plain tensor"),
    ],
    ids=["shape", "dtype", "part of a storage", "dict", "sparse"],
)
def test_a_record_that_is_not_the_chunk(plain, record, words):
    buffer = io.BytesIO()
    torch.save(record, buffer)
    (plain / "__9_0.distcp").write_bytes(buffer.getvalue())
    place = {"relative_path": "__9_0.distcp", "offset": 0, "length": len(buffer.getvalue())}
    edited(plain, lambda metadata: moved(INT64, metadata, **place))
    with pytest.raises(SourceError, match=f"model.int64.*{words}"):
        read_all(plain)


def test_a_truncated_file(plain):
    path = max(plain.glob("*.distcp"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DamagedFile, match=f"{path.name} has .* bytes"):
        read_dcp(plain)


def test_a_record_without_its_end(plain):
    edited(plain, lambda m: moved(INT64, m, length=m.storage_data[INT64].length - 10))
    with pytest.raises(DamagedFile, match=r"model\.int64.*distcp"):
        read_all(plain)


def test_links(plain, tmp_path):
    path = next(plain.glob("*.distcp"))
    path.rename(tmp_path / "elsewhere.distcp")
    path.symlink_to(tmp_path / "elsewhere.distcp")
    with pytest.raises(DamagedFile, match="outside of its folder"):
        read_dcp(plain)


def test_an_unfinished_save(plain):
    (plain / ".metadata").unlink()
    with pytest.raises(IncompleteCheckpoint, match="did not finish"):
        read_dcp(plain)


class Hostile:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("called",))


def test_nothing_that_is_named_is_called(plain):
    """Neither in `.metadata` nor in an object."""
    edited(plain, lambda metadata: setattr(metadata, "planner_data", Hostile()))
    assert_same_tensors(read_all(plain), {f"model.{name}": tensor for name, tensor in tensors().items()})
    (plain / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DamagedFile, match="no metadata"):
        read_dcp(plain)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9, 0.99])
def test_truncated_metadata(plain, at):
    data = (plain / ".metadata").read_bytes()
    (plain / ".metadata").write_bytes(data[: int(len(data) * at)])
    with pytest.raises(DamagedFile):
        read_dcp(plain)


def test_flipped_bytes_are_an_error_or_nothing(plain):
    """Any byte of `.metadata` may be wrong: there is never a traceback."""
    data = (plain / ".metadata").read_bytes()
    for at in range(0, len(data), 7):
        (plain / ".metadata").write_bytes(data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :])
        with suppress(LazymergeError):
            read_all(plain)


def test_an_object_without_a_record(plain):
    edited(plain, lambda metadata: metadata.storage_data.pop(MetadataIndex("step")))
    folder = read_dcp(plain)
    with pytest.raises(IncompleteCheckpoint, match="step"):
        folder.load_object("step")


# ---- chunks in the same bytes, and more than a file can hold -----------------------------------------------


def place_of(metadata: Any, name: str) -> MetadataIndex:
    return next(key for key in metadata.storage_data if key.fqn == name)


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_two_chunks_in_the_same_bytes(tmp_path, shift):
    folder = save_dcp(tmp_path / "two", {name: torch.arange(5) for name in ("a", "b")})

    def move(metadata: Any) -> None:
        """Moves the second of both records onto the first, or one byte into it from either side."""
        one, other = (metadata.storage_data[place_of(metadata, name)] for name in ("a", "b"))
        start = min(one.offset, other.offset)
        moved(place_of(metadata, "a"), metadata, offset=start + 1)
        moved(place_of(metadata, "b"), metadata, offset=start + 1 + shift)

    edited(folder, move)
    with pytest.raises(
        InconsistentCheckpoint, match=r"chunks of [ab] at \(0,\) and of [ab] at \(0,\) in the same"
    ):
        read_dcp(folder)
    assert read_dcp(folder, lambda name: name == "b").tensors


def test_two_chunks_of_one_tensor_in_the_same_bytes(tmp_path):
    """Also where the file has a second name."""
    folder = save_dcp(tmp_path / "one", {"a": torch.arange(8)}, {"a": [((0,), (4,)), ((4,), (4,))]})
    (folder / "again.distcp").hardlink_to(folder / "__0_0.distcp")

    def move(metadata: Any) -> None:
        first, second = (key for key in metadata.storage_data if key.fqn == "a")
        info = metadata.storage_data[first]
        moved(second, metadata, **{**vars(info), "relative_path": "again.distcp"})

    edited(folder, move)
    with pytest.raises(InconsistentCheckpoint, match=r"chunks of a at \([04],\) and of a at \([04],\)"):
        read_dcp(folder)


def test_one_list_of_chunks_for_many_tensors(tmp_path):
    folder = save_dcp(tmp_path / "many", {f"t{at}": torch.ones(0) for at in range(30)})
    several = [ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))] * 1000

    def grow(metadata: Any) -> None:
        for entry in metadata.state_dict_metadata.values():
            entry.chunks = several

    edited(folder, grow)
    with pytest.raises(DamagedFile, match=r"\d+ chunks up to t\d+, which \d+ bytes cannot hold"):
        read_dcp(folder)


def test_all_stacks_have_one_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(Allowance.__init__, "__defaults__", (10,))
    state = {name: torch.arange(16).view(8, 2) for name in ("a", "b")}
    folder = read_dcp(save_dcp(tmp_path / "stacks", state))
    assert len(folder.unstacked("a", 0)) == 1
    with pytest.raises(UnsupportedCheckpoint, match="a: stacks of more than"):
        folder.unstacked("a", 1)  # eight tensors, in a chunk that spans all of them
    cuts = {name: [((at, 0), (1, 2)) for at in range(8)] for name in state}
    folder = read_dcp(save_dcp(tmp_path / "cut", state, cuts))
    assert len(folder.unstacked("a", 1)) == 8
    with pytest.raises(UnsupportedCheckpoint, match="b: stacks of more than"):
        folder.unstacked("b", 1)


def test_metadata_that_is_no_file(plain):
    (plain / ".metadata").unlink()
    (plain / ".metadata").symlink_to("/dev/zero")
    with pytest.raises(SourceError, match=r"\.metadata: not a regular file"):
        read_dcp(plain)


# ---- files that are another's ------------------------------------------------------------------------------


def _apart(folder: Path, *tensors: torch.Tensor) -> Path:
    """A folder with each tensor in a file of its own."""
    state = {f"t{at}": tensor for at, tensor in enumerate(tensors)}
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert len(list(folder.glob("*.distcp"))) == len(tensors)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_file_copied_over_another_is_refused(tmp_path):
    tensors = [torch.arange(4096.0) + at for at in range(3)]
    folder = _apart(tmp_path, *tensors)
    assert_same_tensors(read_all(folder), {f"t{at}": tensor for at, tensor in enumerate(tensors)})
    first, second, _ = sorted(folder.glob("*.distcp"))
    assert first.stat().st_size == second.stat().st_size
    shutil.copy(first, second)
    with pytest.raises(
        InconsistentCheckpoint, match=rf"{second.name}: holds the same bytes as .*{first.name}"
    ):
        read_dcp(folder)


@pytest.mark.filterwarnings("ignore")
def test_files_of_tensors_that_are_honestly_alike(tmp_path):
    """Norms of ones, empty biases: all that is in the files is one value."""
    alike = [torch.ones(64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)]
    folder = _apart(tmp_path, *alike)
    first, second = sorted(folder.glob("*.distcp"))
    assert first.read_bytes() == second.read_bytes()
    assert_same_tensors(read_all(folder), {f"t{at}": tensor for at, tensor in enumerate(alike)})


def test_a_record_of_what_has_no_entry(tmp_path):
    """An entry that was lost would be missed by nobody."""
    folder = save_dcp(tmp_path / "x", {"a": torch.ones(2), "common_state/shard_0_1": [1]})
    edited(folder, lambda metadata: metadata.state_dict_metadata.pop("common_state/shard_0_1"))
    with pytest.raises(DamagedFile, match="a record of common_state/shard_0_1, and no entry"):
        read_dcp(folder)


def test_an_entry_without_a_name(tmp_path):
    folder = save_dcp(tmp_path / "x", {"a": torch.ones(2), "": torch.ones(2)})
    with pytest.raises(DamagedFile, match="without a proper name"):
        read_dcp(folder)
