"""What stands beside the weights: config, tokenizer and their kin, copied byte for byte or refused."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch

import lazymerge
from lazymerge.errors import DamagedFile, SourceError
from tests.checks import assert_same_model, refused

STATE = {"x": torch.ones(4)}
NOT_CHECKED = "names are kept as they are, and not checked: config.json names no class (architectures)"
CONFIG = b'{\n  "model_type": "toy",\n  "dtype": "float32",\n  "rms_norm_eps": 1e-6\n}\n'


@pytest.fixture
def src(tmp_path) -> Path:
    """A checkpoint of one file, with a config beside it."""
    folder = tmp_path / "src"
    folder.mkdir()
    torch.save(STATE, folder / "model.pt")
    (folder / "config.json").write_bytes(CONFIG)
    return folder


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---- copied ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2-llama", "fsdp2-remote-code", "fsdp2-value"])
def test_every_sidecar_is_copied_byte_for_byte(checkpoint, out, name):
    made = checkpoint(name)
    report = lazymerge.merge(made.root, out, component=made.leaf.name)
    beside = names(made.sidecars)
    assert {
        "config.json",
        "generation_config.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    } <= beside
    assert names(out) == {*beside, "model.safetensors"}
    assert set(report.sidecars) == beside
    for path in beside:
        assert (out / path).read_bytes() == (made.sidecars / path).read_bytes(), path


def test_tokenizer_and_generation_config_load(checkpoint, out):
    import transformers

    lazymerge.merge(checkpoint("fsdp2-llama").root, out)
    assert transformers.AutoTokenizer.from_pretrained(out)("the cat")["input_ids"]
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [5, 6]


def test_only_what_a_model_needs_is_copied(src, out):
    for name in (".cache/huggingface/x.json", "huggingface/model.safetensors", "huggingface/.hidden.json"):
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_text("{}")
    for name in (
        "trainer_state.json",
        "training_args.bin",
        "run.py",
        "a.log",
    ):
        (src / name).write_text("{}")
    lazymerge.merge(src, out)
    assert names(out) == {"config.json", "model.safetensors"}


def test_the_cache_of_the_hub(src, out, tmp_path):
    """There every file is a link into the folder of blobs; any other link is refused as everywhere."""
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs = tmp_path / "models--a--b/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(src.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    lazymerge.merge(snapshot, out)
    assert names(out) == {"config.json", "model.safetensors"}
    assert (out / "config.json").read_bytes() == (snapshot / "config.json").read_bytes()
    (snapshot / "vocab.txt").symlink_to("../../../secret")
    (tmp_path / "secret").write_text("x")
    with pytest.raises(SourceError, match="is a link"):
        lazymerge.merge(snapshot, tmp_path / "other")


def test_additional_chat_templates(src, out):
    (src / "additional_chat_templates").mkdir()
    (src / "additional_chat_templates/tool_use.jinja").write_text("{{ x }}\n")
    (src / "additional_chat_templates/notes.txt").write_text("x")
    lazymerge.merge(src, out)
    assert names(out) == {"config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"}


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.txt", "qwen.tiktoken", "processor_config.json"])
def test_other_kinds_of_tokenizers_and_processors(src, out, name):
    (src / name).write_bytes(b"{}\r\n")
    lazymerge.merge(src, out)
    assert (out / name).read_bytes() == b"{}\r\n"


def test_no_sidecar_is_executable(src, out):
    (src / "config.json").chmod(0o755)
    lazymerge.merge(src, out)
    assert all(not path.stat().st_mode & 0o111 for path in out.iterdir())
    assert stat.S_IMODE((out / "config.json").stat().st_mode) & 0o600 == 0o600


# ---- where they are looked for -----------------------------------------------------------------------------


def test_a_given_folder_comes_first_and_the_others_fill_in(src, tmp_path, out):
    given, inner = tmp_path / "given", src / "huggingface"
    for folder, files in ((given, ["config.json"]), (inner, ["config.json", "vocab.txt"])):
        folder.mkdir()
        for name in files:
            (folder / name).write_text(json.dumps({"from": folder.name}))
    (src / "vocab.txt").write_text("beside the weights")
    (src / "merges.txt").write_text("beside the weights")
    lazymerge.merge(src, out, hf_config=given)
    assert "given" in (out / "config.json").read_text()
    assert "huggingface" in (out / "vocab.txt").read_text()
    assert "beside" in (out / "merges.txt").read_text()


@pytest.mark.parametrize("what", ["nothing", "a file"])
def test_a_given_folder_has_to_be_one(src, tmp_path, out, what):
    given = tmp_path / "nothing" if what == "nothing" else src / "config.json"
    with refused(SourceError, str(given), "--hf-config", dst=out):
        lazymerge.merge(src, out, hf_config=given)


def test_no_config_anywhere(src, out):
    (src / "config.json").unlink()
    report = lazymerge.merge(src, out)
    assert_same_model(out, STATE)
    (note,) = report.warnings
    assert "config.json" in note.text
    assert "--hf-config" in note.text


# ---- config.json and the dtype -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "float32", "fp32"])
def test_config_is_untouched_without_a_change_of_dtype(src, out, dtype):
    lazymerge.merge(src, out, dtype=dtype)
    assert (out / "config.json").read_bytes() == CONFIG


@pytest.mark.parametrize(
    "text",
    [
        '{"dtype": "float32", "x": 1e-6}',
        '{\n    "x": "\\u00e9 é",\n    "torch_dtype":"float32"\n}',
        '{"dtype": "float32", "torch_dtype": "float32"}',
        '{"dtype": "float32",\r\n\t"text_config": {"dtype": "float32"}, "vision_config": {"x": [1.50]}}',
        '{"dtype": "float32", "x": "a \\"dtype\\": in a text"}',
    ],
)
def test_config_changes_in_its_dtype_alone(src, out, text):
    (src / "config.json").write_text(text, newline="")
    lazymerge.merge(src, out, dtype="bfloat16")
    expected = text.replace('"float32"', '"bfloat16"').encode()
    assert (out / "config.json").read_bytes() == expected


def test_other_fields_of_that_name_stay(src, out):
    config = {"dtype": "float32", "rope": {"dtype": "float32"}, "quantization": {"torch_dtype": "float32"}}
    (src / "config.json").write_text(json.dumps(config))
    lazymerge.merge(src, out, dtype="bfloat16")
    assert json.loads((out / "config.json").read_text()) == {**config, "dtype": "bfloat16"}


@pytest.mark.parametrize("text", ["{}", '{"architectures": ["X"], "y": 2}', '{"dtype": null}'])
def test_a_dtype_is_added_where_there_is_none(src, out, text):
    (src / "config.json").write_text(text)
    lazymerge.merge(src, out, dtype="bfloat16")
    config = json.loads((out / "config.json").read_text())
    assert config == {**json.loads(text), "dtype": "bfloat16"}
    assert list(config)[: len(json.loads(text))] == list(json.loads(text))


# ---- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"x": \xff}', b'\xef\xbb\xbf{"x": 1}', b"{}{}", b"nan"]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_malformed_json(src, out, name, content):
    (src / name).write_bytes(content)
    with refused(DamagedFile, str(src / name), "JSON", dst=out):
        lazymerge.merge(src, out, dtype="bfloat16")
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"x": ' + b"1" * 5000 + b"}", "5000 digits"),
        (b'{"x": "\xff"}', "not UTF-8"),
        (b'{"x": ' + b"[" * 100_000, "nested too deep"),
        (b'{"x": [' + b"0," * (1 << 22) + b"0]}", "values"),
    ],
    ids=["digits", "encoding", "depth", "size"],
)
def test_why_json_is_malformed(src, out, content, reason):
    (src / "config.json").write_bytes(content)
    with refused(DamagedFile, "config.json", reason, dst=out):
        lazymerge.merge(src, out)


def test_json_in_another_encoding(src, out):
    (src / "config.json").write_bytes(CONFIG.decode().encode("utf-16"))
    with refused(DamagedFile, str(src / "config.json"), "UTF-8", dst=out):
        lazymerge.merge(src, out, dtype="bfloat16")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_a_tokenizer_that_is_cut(src, out, name):
    (src / name).write_text('{"model": {"vocab": {"a": 1, "b')
    with refused(DamagedFile, str(src / name), "JSON", dst=out):
        lazymerge.merge(src, out)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "additional_chat_templates/x.jinja"])
def test_a_sidecar_that_is_a_link(src, out, name):
    (src / name).parent.mkdir(exist_ok=True)
    (src / name).unlink(missing_ok=True)
    (src / name).symlink_to("/etc/passwd")
    with refused(SourceError, str(src / name), "link", dst=out):
        lazymerge.merge(src, out)


def test_links_are_followed_where_the_user_points(src, out, tmp_path):
    """In the cache of the Hugging Face hub every file of a snapshot is a link to a blob."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    content = json.loads((src / "config.json").read_text()) | {"said_by": "the snapshot"}
    (blobs / "abc").write_text(json.dumps(content))
    (snapshot / "config.json").symlink_to("../blobs/abc")
    lazymerge.merge(src, out, hf_config=snapshot)
    assert (out / "config.json").read_bytes() == (blobs / "abc").read_bytes()
    assert not (out / "config.json").is_symlink()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_sidecar_that_is_no_file(src, out, kind):
    (src / "config.json").unlink()
    os.mkfifo(src / "config.json") if kind == "pipe" else (src / "config.json").mkdir()
    with refused(SourceError, str(src / "config.json"), "no plain file", dst=out):
        lazymerge.merge(src, out)


@pytest.mark.parametrize(("name", "size"), [("config.json", 20 << 20), ("vocab.txt", 2 << 30)])
def test_a_sidecar_that_is_too_large_to_be_one(src, out, name, size):
    with open(src / name, "wb") as file:
        file.truncate(size)
    with refused(SourceError, str(src / name), str(size), dst=out):
        lazymerge.merge(src, out)
    assert not out.parent.exists()


# ---- code of the model's own -------------------------------------------------------------------------------


@pytest.fixture
def remote(src) -> Path:
    """A source with an auto_map and code that must not run."""
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"}
    (src / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    for name in ("configuration_x.py", "modeling_x.py", "helper.py"):
        (src / name).write_text("raise SystemExit('code of the checkpoint ran')\n")
    return src


def test_code_is_copied_and_not_run(remote, out):
    report = lazymerge.merge(remote, out)
    code = {"configuration_x.py", "modeling_x.py", "helper.py"}
    assert names(out) == {"config.json", "model.safetensors", *code}
    assert all((out / name).read_bytes() == (remote / name).read_bytes() for name in code)
    assert not {"configuration_x", "modeling_x", "helper"} & set(sys.modules)
    assert [note.text for note in report.notes] == [NOT_CHECKED]
    assert "trust_remote_code=True" in report.how_to_load


def test_code_that_is_missing_is_noted(remote, out):
    (remote / "modeling_x.py").unlink()
    (note,) = lazymerge.merge(remote, out).warnings
    assert "modeling_x.py" in note.text
    assert "auto_map" in note.text


@pytest.mark.parametrize(
    "auto_map", [{"AutoModel": "owner/repo--modeling_x.XModel"}, {}, None, "x", {"a": [None]}]
)
def test_an_auto_map_that_names_no_code_here(remote, out, auto_map):
    (remote / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    report = lazymerge.merge(remote, out)
    assert names(out) == {"config.json", "model.safetensors"}
    assert [note.text for note in report.notes] == [NOT_CHECKED]


def test_code_stays_out_of_other_folders(remote, tmp_path, out):
    """A module's name does not lead outside."""
    (remote / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "../secret.X"}}))
    (tmp_path / "secret.py").write_text("")
    lazymerge.merge(remote, out)
    assert names(out.parent) == {f"model/{name}" for name in names(out)}
    assert "secret.py" not in names(out)


def test_code_that_is_a_link(remote, out):
    (remote / "helper.py").unlink()
    (remote / "helper.py").symlink_to("/etc/passwd")
    with refused(SourceError, str(remote / "helper.py"), "link", dst=out):
        lazymerge.merge(remote, out)


def test_a_tokenizer_with_code_beside_a_plain_model(src, out):
    (src / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tok_x.XTok", None]}})
    )
    (src / "tok_x.py").write_text("raise SystemExit\n")
    lazymerge.merge(src, out)
    assert "tok_x.py" in names(out)


def test_a_folder_of_another_model_lends_no_code(remote, tmp_path, out):
    """The code comes from beside the file that names it."""
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(remote / "config.json", given)
    report = lazymerge.merge(remote, out, hf_config=given)
    assert "modeling_x.py" not in names(out)
    assert len(report.warnings) == 2


def test_a_class_that_is_no_list_of_classes(source, tmp_path, out):
    src = source(tmp_path / "x", {"w": torch.ones(2)}, {"architectures": "LlamaForCausalLM"})
    notes = [note.text for note in lazymerge.merge(src, out).notes]
    assert any("has a text as architectures, which is a list" in text for text in notes), notes
