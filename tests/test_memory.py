"""Memory under hard limits: a process that may not allocate more than a little merges what is much larger."""

from __future__ import annotations

import filecmp
import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import Partial, Shard

import lazymerge
from lazymerge.errors import OutputError
from tests.makers.dtensors import Local, dtensors

ROOM = 48 << 20
"""Bytes of data that a merge may allocate beyond what its process has when it begins."""

LIMITED = """
import json, resource, sys
import lazymerge
from lazymerge.budget import resident
arguments = json.loads(sys.argv[1])
if arguments.pop("torch"):
    import lazymerge.compute
import lazymerge.api, lazymerge.errors
import numpy, huggingface_hub
from huggingface_hub import split_state_dict_into_shards_factory
data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
room = arguments.pop("room")
if arguments.pop("addresses"):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
resource.setrlimit(resource.RLIMIT_DATA, (data + room, data + room))
read = lambda: int(open("/proc/self/io").readline().split()[1])
before, read_before = resident(), read()
try:
    report = lazymerge.merge(**{"max_workers": 2, **arguments})
except lazymerge.errors.BudgetError as error:
    print(json.dumps({"least": int(error.hint.partition("--max-ram ")[2].partition("MB")[0]) * 10**6}))
    sys.exit()
rchar = read() - read_before
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
print(json.dumps({"grown": peak - before, "peak": peak, "told": report.peak, "torch": "torch" in sys.modules,
                  "predicted": report.predicted_peak, "read": rchar, "disk": report.disk,
                  "resumed": report.resumed}))
"""


def merge_limited(
    room: int = ROOM, torch: bool = False, addresses: bool = False, **arguments
) -> dict[str, Any]:
    """Merge in a process whose data segment may grow by `room` bytes only; what it measured of itself.

    With `addresses` its address space may not grow by more either, mapped files and stacks included.
    """
    text = json.dumps({**arguments, "room": room, "torch": torch, "addresses": addresses}, default=str)
    done = subprocess.run([sys.executable, "-c", LIMITED, text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def read(folder, name):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return file.get_tensor(name)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """One tensor of 256 MB in rows, and one in columns."""
    torch.manual_seed(0)
    rows, columns = torch.randn(1 << 14, 1 << 12), torch.randn(1 << 13, 1 << 12)
    entries = {"rows": (rows, (Shard(0),)), "columns": (columns, (Shard(1),))}
    return dtensors(tmp_path_factory.mktemp("rows"), (("fsdp", 2),), entries)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_addresses_are_not_spent_on_whole_files(rows, tmp_path, dtype):
    """Tensors of 256 MB with 192 MB of addresses, of which the heap of each thread takes 64 MB."""
    merge_limited(room=192 << 20, addresses=True, src=rows.root, dst=tmp_path / "out", dtype=dtype)
    for name, truth in rows.truth.items():
        assert torch.equal(read(tmp_path / "out", name), truth.to(torch.bfloat16) if dtype else truth)


@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
def test_a_plain_merge_needs_neither_the_model_nor_torch(rows, tmp_path, output_format):
    measured = merge_limited(src=rows.root, dst=tmp_path / "out", output_format=output_format)
    assert not measured["torch"]
    assert measured["grown"] < ROOM
    assert measured["peak"] < 150 << 20
    if output_format == "safetensors":
        assert all(torch.equal(read(tmp_path / "out", name), truth) for name, truth in rows.truth.items())


def test_a_cast_needs_no_more_than_its_blocks(rows, tmp_path):
    measured = merge_limited(src=rows.root, dst=tmp_path / "out", dtype="bf16")
    assert not measured["torch"]
    assert measured["grown"] < ROOM
    for name, truth in rows.truth.items():
        assert torch.equal(read(tmp_path / "out", name), truth.to(torch.bfloat16))


def test_a_cast_by_torch_needs_no_more_than_its_blocks(rows, tmp_path):
    merge_limited(torch=True, room=96 << 20, src=rows.root, dst=tmp_path / "out", dtype="fp16")
    for name, truth in rows.truth.items():
        assert torch.equal(read(tmp_path / "out", name), truth.to(torch.float16))


def test_a_sum_of_partial_values_needs_no_more_than_its_blocks(tmp_path):
    torch.manual_seed(0)
    parts = [torch.randn(1 << 13, 1 << 12).to(torch.bfloat16) for _ in range(2)]
    whole = (parts[0].float() + parts[1].float()).to(torch.bfloat16)
    entry = Local(tuple(parts), (Partial(),), tuple(whole.shape), whole)
    made = dtensors(tmp_path / "run", (("tp", 2),), {"w": entry})
    merge_limited(torch=True, room=128 << 20, src=made.root, dst=tmp_path / "out")
    assert torch.equal(read(tmp_path / "out", "w"), whole)


def test_the_budget_is_kept(rows, tmp_path):
    """`max_ram` counts everything, the interpreter included; what is told is what the system says."""
    generous = merge_limited(room=1 << 30, src=rows.root, dst=tmp_path / "a", max_ram="300MB")
    tight = merge_limited(room=1 << 30, src=rows.root, dst=tmp_path / "b", max_ram="90MB")
    assert generous["peak"] < 300 * 10**6
    assert tight["peak"] < 90 * 10**6
    assert abs(tight["told"] - tight["peak"]) < 8 << 20
    assert filecmp.cmp(*(tmp_path / run / "model.safetensors" for run in "ab"), shallow=False)


def test_a_large_tokenizer_is_not_held(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"w": torch.ones(4)}, folder / "model.pt")
    (folder / "tokenizer.json").write_text('{"v": "' + "x" * (100 << 20) + '"}')
    merge_limited(src=folder, dst=tmp_path / "out")
    assert filecmp.cmp(folder / "tokenizer.json", tmp_path / "out" / "tokenizer.json", shallow=False)


@pytest.fixture(scope="module")
def transposed(tmp_path_factory):
    """A tensor of 128 MB that was saved transposed."""
    folder = tmp_path_factory.mktemp("transposed")
    torch.save({"w": torch.randn(1 << 13, 1 << 12).t()}, folder / "model.pt")
    return folder


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("rows", {}),
        ("rows", {"dtype": "bf16"}),
        ("rows", {"dtype": "fp16"}),
        ("rows", {"output_format": "bin"}),
        ("transposed", {}),
        ("transposed", {"dtype": "bf16"}),
        ("transposed", {"max_ram": "90MB"}),
    ],
    ids=str,
)
def test_the_peak_is_what_was_predicted(rows, transposed, tmp_path, source, options):
    src = rows.root if source == "rows" else transposed
    measured = merge_limited(
        room=1 << 30, torch=options.get("dtype") == "fp16", src=src, dst=tmp_path / "out", **options
    )
    assert measured["peak"] <= measured["predicted"] * 1.05
    assert measured["predicted"] <= measured["peak"] * 1.2


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    """Tensors that were saved transposed, each larger than the one before it in the file."""
    folder = tmp_path_factory.mktemp("growing")
    state = {f"w{rows}": torch.randn(rows, 5003).t() for rows in (1000, 1200, 1400, 1600)}  # 20 to 32 MB
    torch.save(state, folder / "model.pt")
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_a_tight_budget_is_kept_where_blocks_grow(growing, tmp_path, workers):
    """A worker's smaller buffer is gone before it gets a larger one."""
    options = {"src": growing, "dst": tmp_path / "out", "max_workers": workers}
    largest = merge_limited(room=1 << 30, **options, max_ram="300MB", dry_run=True)["predicted"]
    budget = largest + (1 << 20)
    measured = merge_limited(room=1 << 30, **options, max_ram=budget)
    assert measured["predicted"] > budget - (2 << 20)
    assert measured["peak"] <= budget


# ---- 3 GB in 64 ranks, and an embedding of 1 GB ------------------------------------------------------------

RANKS = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
folder, world, tensors = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
for rank in range(world):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    state = {}
    for name, (shape, dim) in tensors.items():
        shape[dim] //= world
        state[name] = DTensor.from_local(torch.empty(shape), mesh, (Shard(dim),), run_check=False)
        shape[dim] *= world
    with torch.serialization.skip_data():
        torch.save(state, f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    dist.destroy_process_group()
"""
"""Rank after rank in one process; where the elements belong are holes."""

MARK = 64 << 10
PAGE = 1 << 20
SHARD = {"max_shard_size": 300 * 10**6}
LARGE_TENSORS = {f"layers.{i:02}.weight": ((16384, 4096), 0) for i in range(11)}  # 256 MB each
LARGE_TENSORS |= {"columns": ((16384, 4096), 1)}
Large = namedtuple("Large", "folder nbytes tensors world")
Usage = namedtuple("Usage", "total used free")


def large(folder: Path, world: int, tensors: dict[str, tuple[tuple[int, int], int]]) -> Large:
    """Rank files of float32 tensors that are holes but for random bytes at both ends of each storage."""
    folder.mkdir()
    torch.manual_seed(0)
    command = [sys.executable, "-c", RANKS, str(folder), str(world), json.dumps(tensors)]
    subprocess.run(command, check=True, capture_output=True)
    for rank in range(world):
        with open(rank_path(folder, world, rank), "r+b") as file:
            for at, size in storages(folder, world, rank):
                for place in (at, at + size - MARK):
                    os.pwrite(file.fileno(), torch.randn(MARK // 4).numpy().tobytes(), place)
    return Large(folder, sum(4 * math.prod(shape) for shape, _ in tensors.values()), tensors, world)


def rank_path(folder: Path, world: int, rank: int) -> Path:
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


def storages(folder: Path, world: int, rank: int) -> list[tuple[int, int]]:
    """(offset, bytes) of each tensor's elements in a rank file, in the order of the tensors."""
    path = rank_path(folder, world, rank)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    found = []
    with open(path, "rb") as file:
        for key in range(sum(name.startswith("data/") for name in records)):
            info = records[f"data/{key}"]
            if info.file_size < 2 * MARK:
                continue  # the ranks of the mesh
            head = os.pread(file.fileno(), 30, info.header_offset)
            skip = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            found.append((info.header_offset + 30 + skip, info.file_size))
    return found


def assert_holds(out: Path, made: Large, dtype: torch.dtype = torch.float32) -> None:
    """Every element of the result is that of the rank file that it comes from, cast to `dtype`."""
    placed: dict[str, Path] = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            placed |= dict.fromkeys(file.keys(), path)
    assert set(placed) == set(made.tensors)
    places = [storages(made.folder, made.world, rank) for rank in range(made.world)]
    for number, (name, (shape, dim)) in enumerate(made.tensors.items()):
        with safe_open(placed[name], "pt") as file:
            whole = file.get_tensor(name)
        assert (whole.shape, whole.dtype) == (shape, dtype)
        for rank, part in enumerate(whole.chunk(made.world, dim)):
            at, size = places[rank][number]
            path = rank_path(made.folder, made.world, rank)
            local = torch.from_file(str(path), size=(at + size) // 4)[at // 4 :].view(part.shape)
            assert at % 4 == 0
            assert torch.equal(part, local.to(dtype)), (name, rank)


def on_disk(folder: Path) -> int:
    """Bytes that the files of a folder take, as the file system counts them."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def ranks64(tmp_path_factory) -> Iterator[Large]:
    """3 GB in twelve tensors, the last one in columns, over 64 ranks."""
    folder = tmp_path_factory.mktemp("ranks64")
    yield large(folder / "src", 64, LARGE_TENSORS)
    shutil.rmtree(folder)


@pytest.fixture
def results(tmp_path) -> Iterator[Path]:
    """A folder for results, which are large."""
    yield tmp_path
    for path in tmp_path.iterdir():
        shutil.rmtree(path)


def assert_foretold(measured: dict[str, Any], out: Path) -> None:
    """The peak and the disk within a fifth of what was predicted."""
    assert abs(measured["predicted"] - measured["peak"]) <= 0.2 * measured["peak"]
    assert abs(measured["disk"] - on_disk(out)) <= 0.2 * on_disk(out)


@pytest.mark.slow
def test_three_gigabytes_of_64_ranks(ranks64, results):
    """Within the budget, the same bytes with 1 and 4 workers, and as much memory and disk as foretold."""
    assert ranks64.nbytes > 3 * 10**9
    for workers in (1, 4):
        out = results / str(workers)
        measured = merge_limited(
            src=ranks64.folder, dst=out, max_ram="200MB", max_workers=workers, room=200 << 20, **SHARD
        )
        assert measured["peak"] <= 200 * 10**6
        assert ranks64.nbytes <= measured["read"] <= 1.1 * ranks64.nbytes
        assert_foretold(measured, out)
    assert_holds(results / "1", ranks64)
    names = sorted(path.name for path in (results / "1").iterdir())
    assert sorted(path.name for path in (results / "4").iterdir()) == names
    assert len(names) == 12 + 1
    for name in names:
        assert filecmp.cmp(results / "1" / name, results / "4" / name, shallow=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_an_embedding_of_a_gigabyte(results, dtype):
    made = large(results / "src", 4, {"model.embed_tokens.weight": ((65536, 4096), 0)})
    measured = merge_limited(
        room=128 << 20, torch=dtype is not None, src=made.folder, dst=results / "out", dtype=dtype
    )
    assert measured["grown"] < 128 << 20
    assert_foretold(measured, results / "out")
    assert_holds(results / "out", made, torch.float16 if dtype else torch.float32)


@pytest.mark.slow
def test_killed_half_way_and_run_again(ranks64, results):
    """What was finished is neither written again nor read again."""
    out = results / "out"
    command = [sys.executable, "-m", "lazymerge", "merge", str(ranks64.folder), str(out)]
    command += ["--max-shard-size", str(SHARD["max_shard_size"]), "--max-workers", "1"]
    running = subprocess.Popen([*command, "--log-level", "debug"], stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    assert any("finished model-00006-of-" in line for line in running.stderr)
    running.kill()
    assert running.wait() == -9
    running.stderr.close()
    before = {path.name: path.stat() for path in (out / ".lazymerge").glob("*.safetensors")}
    measured = merge_limited(src=ranks64.folder, dst=out, **SHARD)
    resumed = measured["resumed"]
    assert 6 <= len(resumed) < 12
    for name in resumed:
        now = (out / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (before[name].st_ino, before[name].st_mtime_ns)
    left = ranks64.nbytes * (12 - len(resumed)) // 12
    assert left <= measured["read"] <= left + 0.1 * ranks64.nbytes / 12 + (64 << 20)
    assert_holds(out, ranks64)


@pytest.fixture
def small_disk(tmp_path, monkeypatch) -> Iterator[tuple[Path, int]]:
    """A folder on a disk of 64 MB, and the bytes that are free there; a pretended one without root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
        yield folder, 64 << 20
    else:
        yield folder, shutil.disk_usage(folder).free
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_small_disk_is_refused_before_work(ranks64, small_disk):
    folder, free = small_disk
    events: list[object] = []
    with pytest.raises(OutputError) as caught:
        lazymerge.merge(ranks64.folder, folder / "out", on_progress=events.append, **SHARD)
    assert events == []
    needed, found = (int(word.replace(",", "")) for word in caught.value.problem.split() if word[0].isdigit())
    assert ranks64.nbytes <= needed <= ranks64.nbytes + PAGE
    assert free - PAGE <= found <= free  # the lock and the journal take a page each
    assert f"{needed - found:,}" in caught.value.hint
    assert list(folder.iterdir()) == []
