"""The files of a result: those that safetensors, huggingface_hub and torch themselves would have written."""

from __future__ import annotations

import json
import os
import zipfile

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

import lazymerge
from lazymerge.errors import InconsistentCheckpoint, OutputError, PlanError, UnsupportedCheckpoint
from tests.checks import assert_same_model, assert_same_tensors, refused

DRAW = torch.Generator().manual_seed(5)
SAFE_DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
UNSAFE_DTYPES = ["complex128", "complex32"]
ODD_NAMES = [
    "",
    " ",
    ".",
    "a.b",
    "a/b",
    "../x",
    "é",
    "ключ",
    "名前",
    "🦥",
    'quote"',
    "back\\slash",
    "tab\t",
    "\n",
    "\x01",
    "\x7f",
]


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    """Bytes at random, so that also values appear that no arithmetic gives; truth values for bool."""
    dtype = getattr(torch, name)
    if dtype == torch.bool:
        return torch.rand(shape, generator=DRAW) > 0.5
    size = torch.empty(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=DRAW).view(dtype).reshape(shape)


COLLECTIONS: dict[str, dict[str, torch.Tensor]] = {
    "dtypes": {f"x.{name}": of_dtype(name, 3, 5) for name in SAFE_DTYPES},
    "shapes": {
        str(shape): of_dtype("float32", *shape) for shape in [(), (1,), (0,), (3, 0, 2), (2, 3, 4, 5)]
    },
    "odd bytes": {name: of_dtype(name, 7) for name in ("int8", "float16", "int64", "bool", "float32")},
    "names": {name: of_dtype("int16", 2) for name in ODD_NAMES},
    "order": {f"layers.{i}.x": of_dtype("float32", 2) for i in (10, 9, 1, 0, 2)},
    "nothing but empty": {"x": torch.empty(0, 3)},
}


# ---- safetensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collection", list(COLLECTIONS))
def test_the_file_is_that_of_save_file(source, tmp_path, out, collection):
    state = COLLECTIONS[collection]
    lazymerge.merge(source(tmp_path / "src", state), out)
    save_file(state, tmp_path / "expected", metadata={"format": "pt"})
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert_same_model(out, state)


@pytest.mark.parametrize("name", ["fsdp2-moe", "fsdp2-zoo", "fsdp2-hsdp-tp", "fsdp2-bf16"])
@pytest.mark.parametrize("size", [1000, "4KB", "10KB", "0.01MB", "30KiB", "1GB"])
def test_shards_are_split_as_the_hub_splits_them(checkpoint, tmp_path, out, name, size):
    made = checkpoint(name)
    report = lazymerge.merge(made.root, out, max_shard_size=size, names="runtime")  # in the order of `truth`
    nbytes = 30 * 1024 if size == "30KiB" else size
    split = split_torch_state_dict_into_shards(
        made.truth, filename_pattern="model{suffix}.safetensors", max_shard_size=nbytes
    )
    written = {path.name for path in out.glob("*.safetensors")}
    assert written == set(split.filename_to_tensors)
    for filename, names in split.filename_to_tensors.items():
        save_file({n: made.truth[n] for n in names}, tmp_path / "expected", metadata={"format": "pt"})
        assert (out / filename).read_bytes() == (tmp_path / "expected").read_bytes()
    assert_same_model(out, made.truth)
    index = out / "model.safetensors.index.json"
    assert index.exists() == (len(written) > 1)
    assert {path: (out / path).stat().st_size for path in report.files} == dict(report.files)


def test_a_tensor_that_is_larger_than_a_shard(source, tmp_path, out):
    state = {"a": torch.ones(2), "large": torch.ones(100), "z": torch.ones(2)}
    lazymerge.merge(source(tmp_path / "src", state), out, max_shard_size=16)
    assert_same_model(out, state)
    assert len(list(out.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("size", [0, -1, "0B", "much", "5XB", ""])
def test_a_shard_size_that_is_none(source, tmp_path, out, size):
    with refused(PlanError, repr(size), dst=out):
        lazymerge.merge(source(tmp_path / "src", {"x": torch.ones(2)}), out, max_shard_size=size)


@pytest.mark.parametrize("name", UNSAFE_DTYPES)
def test_a_dtype_that_safetensors_has_not(source, tmp_path, out, name):
    src = source(tmp_path / "src", {"fine": torch.ones(2), "odd": of_dtype(name, 3)})
    with refused(PlanError, "odd", name, "--exclude", "bin", dst=out):
        lazymerge.merge(src, out)
    lazymerge.merge(src, out, exclude=["odd"])
    assert_same_model(out, {"fine": torch.ones(2)})


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"output_format": "bin"}], ids=str)
@pytest.mark.parametrize("kind", ["small", "large"])
def test_the_same_bytes_whatever_the_workers(source, checkpoint, tmp_path, kind, options):
    """Small tensors go through buffers, large ones through the kernel, both when they are cast."""
    src = checkpoint("fsdp2-tp-uneven").root
    if kind == "large":
        tensors = {f"w{i}": torch.randn(700 + i, 1000) for i in range(6)}
        src = source(tmp_path / "src", {**tensors, "t": torch.randn(500, 900).t()})
    for folder, count in (("one", 1), ("other", 4)):
        lazymerge.merge(src, tmp_path / folder, max_workers=count, max_shard_size="5MB", **options)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "other").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


# ---- pytorch_model.bin -------------------------------------------------------------------------------------


@pytest.mark.parametrize("collection", [*COLLECTIONS, "unsafe"])
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_bin_is_read_by_torch(source, tmp_path, out, collection, mmap):
    unsafe = {name: of_dtype(name, 3, 2) for name in UNSAFE_DTYPES}
    state = COLLECTIONS.get(collection, unsafe)
    lazymerge.merge(source(tmp_path / "src", state), out, output_format="bin")
    assert [path.name for path in out.iterdir()] == ["pytorch_model.bin"]
    found = torch.load(out / "pytorch_model.bin", weights_only=True, mmap=mmap)
    assert_same_tensors(found, state)
    assert list(found) == list(state)


@pytest.mark.parametrize("name", ["fsdp2-zoo", "fsdp2-bf16", "sharded-tensor-uneven"])
def test_a_bin_of_shards(checkpoint, out, name):
    made = checkpoint(name)
    lazymerge.merge(made.root, out, output_format="bin")
    path = out / "pytorch_model.bin"
    assert_same_tensors(torch.load(path, weights_only=True), made.truth)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())


def test_a_bin_loads_in_transformers(checkpoint, out):
    import transformers

    made = checkpoint("fsdp2-llama")
    lazymerge.merge(made.root, out, output_format="bin")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {kind: names for kind, names in info.items() if names} == {}
    assert_same_tensors(dict(model.state_dict()), made.truth)


def test_a_bin_can_be_merged_again(source, tmp_path, out):
    state = COLLECTIONS["dtypes"]
    lazymerge.merge(source(tmp_path / "src", state), tmp_path / "bin", output_format="bin")
    lazymerge.merge(tmp_path / "bin", out)
    assert_same_model(out, state)


def test_a_format_that_is_none(source, tmp_path, out):
    with refused(PlanError, "gguf", "safetensors or bin", dst=out):
        lazymerge.merge(source(tmp_path / "src", {"x": torch.ones(2)}), out, output_format="gguf")


# ---- a part of the tensors ---------------------------------------------------------------------------------

NAMES = ["model.layers.0.q.weight", "model.layers.10.q.weight", "model.layers.1.q.bias", "lm_head.weight"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"include": ["*.weight"]}, [0, 1, 3]),
        ({"include": ["model.layers.1.*", "lm_head*"]}, [2, 3]),
        ({"exclude": ["lm_head.weight"]}, [0, 1, 2]),
        ({"include": ["model.*"], "exclude": ["*.layers.1?.*"]}, [0, 2]),
        ({"include": ["model.layers.[01].*"]}, [0, 2]),
    ],
    ids=str,
)
def test_include_and_exclude(source, tmp_path, out, options, kept):
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}
    report = lazymerge.merge(source(tmp_path / "src", state), out, **options)
    assert_same_model(out, {NAMES[i]: state[NAMES[i]] for i in kept})
    assert set(report.left_out) == {name for i, name in enumerate(NAMES) if i not in kept}


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing(source, tmp_path, out, option):
    src = source(tmp_path / "src", {name: torch.ones(2) for name in NAMES})
    with refused(PlanError, f"--{option}", "'lmhead*'", NAMES[0], dst=out):
        lazymerge.merge(src, out, **{option: ["*.weight", "lmhead*"]})


def test_nothing_is_left(source, tmp_path, out):
    with refused(PlanError, "no tensor is left", "--exclude", dst=out):
        lazymerge.merge(source(tmp_path / "src", {"x": torch.ones(2)}), out, exclude=["*"])


def test_patterns_are_of_the_names_without_wrappers(source, tmp_path, out):
    src = source(tmp_path / "src", {"module.a": torch.ones(2), "module.b": torch.ones(3)})
    lazymerge.merge(src, out, include=["a"])
    assert_same_model(out, {"a": torch.ones(2)})


def test_a_tensor_that_is_no_array_of_bytes(source, tmp_path, out):
    """It is refused before patterns are looked at, so the hint must not advise them."""
    src = source(tmp_path / "src", {"x": torch.ones(2), "odd": torch.eye(3).to_sparse()})
    with refused(UnsupportedCheckpoint, "odd in ", str(src), "sparse", "plain tensors", dst=out):
        lazymerge.merge(src, out)
    with pytest.raises(UnsupportedCheckpoint) as caught:
        lazymerge.merge(src, out, exclude=["odd"])
    assert "--exclude" not in caught.value.hint


# ---- the report --------------------------------------------------------------------------------------------


def test_the_report_counts_what_is_there(checkpoint, out):
    made = checkpoint("fsdp2-zoo")
    report = lazymerge.merge(made.root, out)
    sizes: dict[str, list[int]] = {}
    for tensor in made.truth.values():
        sizes.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor.nbytes)
    assert dict(report.per_dtype) == {name: (len(each), sum(each)) for name, each in sizes.items()}
    assert report.tensors == len(made.truth)
    assert report.bytes_read == sum(tensor.nbytes for tensor in made.truth.values())
    assert report.bytes_written == (out / "model.safetensors").stat().st_size
    json.dumps(report.to_json())


def test_a_name_that_safetensors_keeps_for_itself(source, tmp_path):
    src = source(tmp_path / "run", {"__metadata__": torch.ones(2)})
    with pytest.raises(PlanError, match="__metadata__"):
        lazymerge.merge(src, tmp_path / "out")
    lazymerge.merge(src, tmp_path / "bin", output_format="bin")


def test_overwriting_leaves_adapters_and_takes_stale_sidecars(source, tmp_path):
    src, out = source(tmp_path / "run", {"w": torch.ones(4)}), tmp_path / "out"
    out.mkdir()
    for name in ("model-00001-of-00002.safetensors", "consolidated.safetensors", "chat_template.jinja"):
        (out / name).write_text("old")
    (out / "adapter_model.safetensors").write_text("somebody's")
    lazymerge.merge(src, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["adapter_model.safetensors", "model.safetensors"]


def test_a_staging_folder_that_is_a_link(source, tmp_path):
    src, out, precious = (
        source(tmp_path / "run", {"w": torch.ones(4)}),
        tmp_path / "out",
        tmp_path / "precious",
    )
    out.mkdir()
    precious.mkdir()
    (precious / "important").write_text("keep")
    (out / ".lazymerge").symlink_to(precious)
    with pytest.raises(OutputError, match="is a link"):
        lazymerge.merge(src, out)
    assert (precious / "important").read_text() == "keep"


def test_a_source_that_is_written_meanwhile(source, tmp_path):
    src, out = source(tmp_path / "run", {"w": torch.ones(1 << 18)}), tmp_path / "out"

    def write(progress):
        if progress.stage == "write":
            content = (src / "pytorch_model.bin").read_bytes()
            (src / "pytorch_model.bin").write_bytes(content)
            os.utime(src / "pytorch_model.bin", ns=(1, 1))

    with pytest.raises(InconsistentCheckpoint, match=r"pytorch_model\.bin: has changed while it was read"):
        lazymerge.merge(src, out, on_progress=write)
    assert not (out / "model.safetensors").exists()


def test_a_merge_goes_on_by_another_spelling_of_its_source(source, tmp_path, monkeypatch):
    src, out = source(tmp_path / "run", {"a": torch.ones(1000), "b": torch.zeros(1000)}), tmp_path / "out"

    def stop(progress):
        if progress.file == "model-00002-of-00002.safetensors":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lazymerge.merge(src, out, max_shard_size=4500, on_progress=stop)
    monkeypatch.chdir(tmp_path)
    report = lazymerge.merge("run", out, max_shard_size=4500)
    assert report.resumed == ("model-00001-of-00002.safetensors",)
