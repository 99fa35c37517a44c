"""How the bytes of a file are moved: which way, in which steps, and that it never matters."""

from __future__ import annotations

import errno
import os
import threading
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file

import lazymerge
from lazymerge.conversions.dtypes import cast_to
from lazymerge.errors import DamagedFile, OutputError, SourceError
from lazymerge.execute import CopyRun, FillBlock, _joined, steps, write_tensors
from lazymerge.files.copying import Copier
from lazymerge.files.dtype import DTYPES
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.region import Region
from lazymerge.gather import of_region
from lazymerge.plan import make_plan
from lazymerge.tensor import LazyTensor
from lazymerge.threads import share


@pytest.fixture
def opened(tmp_path):
    """Two tensors of a quarter and half a megabyte in a file, and the checkpoint."""
    torch.manual_seed(0)
    state = {"a": torch.randn(256, 256), "b": torch.randn(512, 256)}
    torch.save(state, tmp_path / "model.pt")
    return state, lazymerge.open(tmp_path / "model.pt")


def steps_of(gather, block=1 << 16):
    (tensor,) = make_plan({"w": gather}).files[0].tensors
    return list(_joined(steps(tensor, block)))


def test_a_whole_tensor_is_one_run(opened):
    (step,) = steps_of(opened[1].gathers["a"])
    assert isinstance(step, CopyRun)
    assert step.size == 256 * 256 * 4


def test_rows_are_a_run_and_columns_are_not(opened):
    x = opened[1]["b"]
    assert all(isinstance(step, CopyRun) for step in steps_of(x[100:400].lazy_gather))
    assert all(isinstance(step, FillBlock) for step in steps_of(x[:, 100:].lazy_gather))


def test_neighbouring_runs_are_joined(opened):
    x = opened[1]["b"]
    parts = torch.cat([x[:200], x[200:300], x[300:]])
    assert len(steps_of(parts.lazy_gather)) == 1
    assert len(steps_of(torch.cat([x[300:], x[:300]]).lazy_gather)) == 2


def test_neighbours_that_the_output_has_apart(tmp_path):
    """Back to back in a safetensors file, with headers between them in a torch archive."""
    state = {name: torch.randn(300, 200) for name in "abc"}
    save_file(state, tmp_path / "model.safetensors")
    lazymerge.merge(tmp_path / "model.safetensors", tmp_path / "out", output_format="bin")
    result = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert all(torch.equal(result[name], tensor) for name, tensor in state.items())


def test_a_mixture_is_cut_by_rows(opened):
    x = opened[1]["b"]
    mixed = torch.cat([x[:256], x[256:].t().reshape(256, 256)])
    kinds = [type(step) for step in steps_of(mixed.lazy_gather)]
    assert kinds[0] is CopyRun
    assert set(kinds[1:]) == {FillBlock}


def test_steps_are_the_file_once(opened):
    x, y = opened[1]["b"], opened[1]["a"]
    for tensor in (x.t(), torch.cat([x, y]), x[:, ::2], x.view(2, 256, 256).transpose(0, 1), x[:0], y + 1):
        at = None
        for step in steps_of(tensor.lazy_gather, 10_000):
            assert at is None or step.at == at
            at = step.at + step.size


def test_a_long_run_is_cut_for_progress(monkeypatch, opened):
    monkeypatch.setattr("lazymerge.execute.LARGEST_COPY", 100_000)
    sizes = [step.size for step in steps_of(opened[1].gathers["b"])]
    assert max(sizes) <= 100_000
    assert sum(sizes) == 512 * 256 * 4


def refuse(code):
    def call(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return call


WAYS = {
    "copy_file_range": [],
    "sendfile": ["copy_file_range"],
    "buffer": ["copy_file_range", "sendfile"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_every_way_copies_the_same(way, code, opened, tmp_path, monkeypatch):
    for name in WAYS[way]:
        monkeypatch.setattr(os, name, refuse(code))
    lazymerge.merge(tmp_path / "model.pt", tmp_path / "out", check_copies=False)
    result = lazymerge.open(tmp_path / "model.pt")  # the source is untouched
    assert torch.equal(result["b"].materialize(), opened[0]["b"])
    from safetensors.torch import load_file

    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in opened[0].items())


@pytest.mark.parametrize("most", [999, 70_000])
def test_short_copies_are_gone_on_with(most, opened, tmp_path, monkeypatch):
    copy = os.copy_file_range

    def short(source, target, size, source_at, at):
        return copy(source, target, min(size, most), source_at, at)

    monkeypatch.setattr(os, "copy_file_range", short)
    lazymerge.merge(tmp_path / "model.pt", tmp_path / "out")
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["b"], opened[0]["b"])


def test_a_source_that_ends_early_is_an_error(tmp_path):
    (tmp_path / "short").write_bytes(bytes(1000))
    file = LocalFile(tmp_path / "short")
    with (
        open(tmp_path / "out", "wb+") as target,
        pytest.raises(DamagedFile, match="ends at byte 1000, expected 2000"),
    ):
        Copier(target.fileno(), "out").copy(file, 0, 0, 2000)
    with pytest.raises(DamagedFile, match="ends at byte 1000, expected 1500"):
        file.read_into(500, memoryview(bytearray(1000)))


@pytest.mark.parametrize(
    ("code", "hint"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota"), (errno.EIO, "same command")],
)
def test_a_failing_disk_is_named(code, hint, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", refuse(code))
    with pytest.raises(OutputError) as caught:
        lazymerge.merge(tmp_path / "model.pt", tmp_path / "out")
    assert "model.safetensors: writing at byte" in caught.value.problem
    assert os.strerror(code) in caught.value.problem
    assert hint in caught.value.hint
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_failing_source_is_named(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", refuse(errno.EIO))
    with pytest.raises(SourceError, match=r"model\.pt: reading"):
        opened[1]["a"].materialize()


def test_the_first_error_of_any_worker_ends_the_work(opened, tmp_path):
    plan = make_plan({"w": LazyTensor(opened[1].gathers["b"]).t().lazy_gather})
    calls = []

    def fail(count: int) -> None:
        calls.append(count)
        raise RuntimeError("no more")

    with open(tmp_path / "out", "wb+") as target:
        target.truncate(plan.files[0].size)
        with pytest.raises(RuntimeError, match="no more"):
            write_tensors(plan.files[0], target.fileno(), block=4096, workers=4, on_bytes=fail)
    assert len(calls) <= 4


def test_descriptors_are_never_too_many(tmp_path):
    pool = Descriptors(limit=3)
    files = []
    for number in range(10):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
        files.append(LocalFile(tmp_path / str(number), pool))
    before = len(os.listdir("/proc/self/fd"))
    assert [file.read(0, 1)[0] for file in files] == list(range(10))
    assert len(os.listdir("/proc/self/fd")) - before <= 3
    pool.close()
    assert [file.read(9, 1)[0] for file in files] == list(range(10))


def test_an_error_while_steps_are_worked_out_ends_the_work(opened, tmp_path, monkeypatch):
    """Whichever worker meets it: the file must not count as written."""
    from lazymerge import execute

    def failing(tensor, block, scattered):
        yield from list(steps(tensor, block))[:1]
        raise MemoryError("no more")

    plan = make_plan({"w": opened[1]["b"].t().lazy_gather})
    monkeypatch.setattr(execute, "steps", failing)
    for _ in range(5):
        with open(tmp_path / "out", "wb+") as target:
            target.truncate(plan.files[0].size)
            with pytest.raises(MemoryError):
                write_tensors(
                    plan.files[0], target.fileno(), block=4096, workers=4, on_bytes=lambda count: None
                )


def test_a_copy_of_nothing_is_tried_another_way(opened, tmp_path, monkeypatch):
    """Some file systems copy 0 bytes and call it success."""
    monkeypatch.setattr(os, "copy_file_range", lambda *args: 0)
    lazymerge.merge(tmp_path / "model.pt", tmp_path / "out")
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["b"], opened[0]["b"])


def test_a_product_is_computed_once(monkeypatch, tmp_path):
    """Blocks are as many rows as are computed together, so that none is computed for two blocks."""
    from lazymerge import compute

    torch.save({"w": torch.randn(4096, 512)}, tmp_path / "model.pt")
    product = lazymerge.open(tmp_path / "model.pt")["w"] @ torch.ones(512, 512)
    evaluated = []
    evaluate = compute.Computed._evaluate
    monkeypatch.setattr(
        compute.Computed, "_evaluate", lambda self, boxes: evaluated.append(boxes) or evaluate(self, boxes)
    )
    plan = make_plan({"w": product.lazy_gather})
    with open(tmp_path / "out", "wb+") as target:
        target.truncate(plan.files[0].size)
        write_tensors(plan.files[0], target.fileno(), block=1 << 18, workers=1, on_bytes=lambda count: None)
    assert len({boxes[0].start for boxes in evaluated}) == len(evaluated) > 1


@pytest.mark.parametrize("cast", [False, True])
def test_a_transposed_tensor_is_read_in_long_runs(monkeypatch, tmp_path, cast):
    """A small block holds a short part of every row; larger blocks need fewer reads for the same bytes."""
    torch.save({"w": torch.randn(2048, 1024).t()}, tmp_path / "model.pt")
    checkpoint = lazymerge.open(tmp_path / "model.pt")
    if cast:
        checkpoint = cast_to(checkpoint, DTYPES["bfloat16"])
    plan = make_plan(checkpoint.gathers)
    reads = []
    read = LocalFile.read_into
    monkeypatch.setattr(
        LocalFile, "read_into", lambda self, at, buffer: reads.append(at) or read(self, at, buffer)
    )

    def written(scattered):
        reads.clear()
        with open(tmp_path / "out", "wb+") as target:
            target.truncate(plan.files[0].size)
            options = {"block": 1 << 18, "scattered": scattered, "workers": 1}
            write_tensors(plan.files[0], target.fileno(), **options, on_bytes=lambda count: None)
        return (tmp_path / "out").read_bytes(), len(reads)

    (small, many), (large, few) = written(0), written(32 << 20)
    assert small == large
    assert many > 10_000
    assert few < 50  # 8 MB by a scratch of 256 KiB


def test_runs_are_made_one_by_one(tmp_path):
    """A tensor of 4 GB in 65,536 runs, of which a list would take 12 MB."""
    path, rows, row = tmp_path / "sparse", 1 << 16, 1 << 16
    with open(path, "wb") as file:
        file.truncate(2 * rows * row)
    half = Region(LocalFile(path), 0, DTYPES["uint8"], (rows, row), (2 * row, 1))
    (tensor,) = make_plan({"w": of_region(half)}).tensors
    tracemalloc.start()
    try:
        assert sum(1 for _ in _joined(steps(tensor, 1 << 20))) == rows
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_limit_on_threads_is_met_with_fewer(monkeypatch):
    def no_more(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    done = []
    share(range(5), done.extend, 4)
    assert done == [0, 1, 2, 3, 4]
