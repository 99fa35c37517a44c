"""Memory under hard limits: a process that may not allocate more than a little merges what is much larger."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import Partial, Shard

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
import lazymerge.api
import numpy, huggingface_hub
from huggingface_hub import split_state_dict_into_shards_factory
data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
room = arguments.pop("room")
resource.setrlimit(resource.RLIMIT_DATA, (data + room, data + room))
before = resident()
report = lazymerge.merge(**arguments, max_workers=2)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
print(json.dumps({"grown": peak - before, "peak": peak, "told": report.peak, "torch": "torch" in sys.modules,
                  "predicted": report.predicted_peak}))
"""


def merge_limited(room: int = ROOM, torch: bool = False, **arguments) -> dict[str, int]:
    """Merge in a process whose data segment may grow by `room` bytes only; what it measured of itself."""
    text = json.dumps({**arguments, "room": room, "torch": torch}, default=str)
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
