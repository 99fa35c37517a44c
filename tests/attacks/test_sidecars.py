"""Sidecars that are links, pipes, devices or programs: only plain files of known names get into a result.

And settings, which are read and not copied: they may be links, as weights may, and nothing of them is shown.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.forge import entry, pickled, safetensors, tensor, torch_file
from tests.attacks.harness import PLAIN, Attacker, assert_harmless

NAMES = ("config.json", "tokenizer.model", "chat_template.jinja", "generation_config.json", "x.tiktoken")


def model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors(folder / "model.safetensors", {"w": entry((4,), 0, 16)}, bytes(16))
    return folder


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "outside", "/", "loop", "/proc/self/environ"])
@pytest.mark.parametrize("name", NAMES)
def test_links(attacker: Attacker, name: str, target: str) -> None:
    model(attacker.src)
    place = {"outside": attacker.outside / "secret", "loop": attacker.src / name}.get(target, target)
    os.symlink(place, attacker.src / name)
    attacker.refused(name)


@pytest.mark.parametrize("name", ["huggingface", "additional_chat_templates"])
def test_folders_that_are_links(attacker: Attacker, name: str) -> None:
    """A folder of sidecars may be elsewhere only where the user says so."""
    model(attacker.src)
    for each in ("config.json", "tokenizer.model", "x.jinja"):
        (attacker.outside / each).write_text("{}")
    os.symlink(attacker.outside, attacker.src / name)
    outcome = attacker.merge()
    assert_harmless(outcome)
    assert outcome.code == (2 if name == "huggingface" else 0)
    got = {path.name for path in attacker.out.rglob("*")} if attacker.out.exists() else set()
    assert got <= {"model.safetensors"}


@pytest.mark.parametrize("name", NAMES)
def test_pipes_and_sockets(attacker: Attacker, name: str) -> None:
    model(attacker.src)
    os.mkfifo(attacker.src / name)
    attacker.refused(name)


def test_a_cache_whose_store_is_a_link(attacker: Attacker) -> None:
    """The hub's cache is known by its folders; here they are made so that its links lead out of it."""
    src = model(attacker.src / "models--a--b" / "snapshots" / "0123")
    os.symlink(attacker.outside, attacker.src / "models--a--b" / "blobs")
    os.symlink("../../blobs/secret", src / "tokenizer.model")
    attacker.refused("tokenizer.model", src=src)


def test_a_cache_whose_links_lead_out(attacker: Attacker) -> None:
    src = model(attacker.src / "models--a--b" / "snapshots" / "0123")
    blobs = attacker.src / "models--a--b" / "blobs"
    blobs.mkdir()
    os.symlink(attacker.outside / "secret", blobs / "abcd")
    os.symlink("../../blobs/abcd", src / "tokenizer.model")
    attacker.refused("tokenizer.model", src=src)


@pytest.mark.parametrize("named", [True, False])
def test_a_cache_whose_file_is_gone(attacker: Attacker, named: bool) -> None:
    """A link whose file was not copied is not as good as none, in the folder that the user names too."""
    src = model(attacker.src / "models--a--b" / "snapshots" / "0123")
    (attacker.src / "models--a--b" / "blobs").mkdir()
    os.symlink("../../blobs/abcd", src / "tokenizer.model")
    options = (*PLAIN, "--hf-config", src) if named else PLAIN
    attacker.refused("tokenizer.model", options=options, src=src)


def test_a_cache_as_the_hub_has_it(attacker: Attacker) -> None:
    src = model(attacker.src / "models--a--b" / "snapshots" / "0123")
    blobs = attacker.src / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "abcd").write_text("tokens")
    os.symlink("../../blobs/abcd", src / "tokenizer.model")
    outcome = attacker.merge(*("--no-check", "--names", "runtime"), src=src)
    assert_harmless(outcome)
    assert (attacker.out / "tokenizer.model").read_text() == "tokens"


def test_modes_and_names(attacker: Attacker) -> None:
    """Nothing to execute, no setuid, no writing by others, nor any file that a model does not need."""
    src = model(attacker.src)
    taken = ("config.json", "tokenizer.model", "modeling.py")
    left = ("run.sh", ".bashrc", "sitecustomize.so", "x.exe", "__init__.pyc", "..jinja.sh", "authorized_keys")
    for name in (*taken, *left):
        (src / name).write_text('{"auto_map": {"AutoModel": "modeling.X"}}')
        (src / name).chmod(0o6777)
    outcome = attacker.merge()
    assert_harmless(outcome)
    assert {path.name for path in attacker.out.iterdir()} == {"model.safetensors", *taken}
    for path in attacker.out.iterdir():
        mode = path.lstat().st_mode
        assert stat.S_ISREG(mode)
        assert not mode & 0o7133, oct(mode)


def test_a_link_in_the_destination(attacker: Attacker) -> None:
    """What a stranger left in DST does not lead writing elsewhere."""
    model(attacker.src)
    (attacker.src / "config.json").write_text("{}")
    attacker.out.mkdir(parents=True)
    secret = attacker.outside / "secret"
    for name in ("config.json", "model.safetensors"):
        os.symlink(secret, attacker.out / name)
    outcome = attacker.merge("--overwrite", "--no-check", "--names", "runtime")
    assert_harmless(outcome)
    assert secret.read_text() == "nobody may read this"
    assert outcome.code == 2 or not (attacker.out / "config.json").is_symlink()


@pytest.mark.parametrize("name", [".lazymerge", ".lazymerge-ended"])
def test_a_folder_in_the_destination_that_is_a_link(attacker: Attacker, name: str) -> None:
    model(attacker.src)
    (attacker.src / "additional_chat_templates").mkdir()
    (attacker.src / "additional_chat_templates" / "x.jinja").write_text("x")
    attacker.out.mkdir(parents=True)
    os.symlink(attacker.outside, attacker.out / name)
    outcome = attacker.merge("--overwrite", "--no-check", "--names", "runtime")
    assert not outcome.violations, outcome.violations
    assert [path.name for path in attacker.outside.iterdir()] == ["secret"]


def run(folder: Path) -> None:
    model(folder / "global_step_1")


def ranks(folder: Path) -> None:
    name = "base_model.model.model.norm.base_layer.weight"
    lora = {name: (2, 2), name.replace("base_layer", "lora_A.default"): (1, 2)}
    lora[name.replace("base_layer", "lora_B.default")] = (2, 1)
    state = {name: tensor(str(at), shape) for at, (name, shape) in enumerate(lora.items())}
    torch_file(
        folder / "model_world_size_1_rank_0.pt", pickled(state), {str(at): bytes(16) for at in range(3)}
    )


def zarr(folder: Path) -> None:
    """Megatron's: what makes it one are the names of its tensors."""
    header = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "order": "C"}
    for name in ("decoder.final_layernorm.weight", "embedding.word_embeddings.weight"):
        (folder / name).mkdir()
        (folder / name / ".zarray").write_text(
            json.dumps({**header, "compressor": None, "filters": None, "fill_value": 0})
        )
        (folder / name / "0").write_bytes(bytes(16))


def verl(folder: Path) -> None:
    """A step of verl: the model's settings are two folders above the tensors."""
    (folder / "model" / "dist_ckpt").mkdir(parents=True)
    zarr(folder / "model" / "dist_ckpt")
    (folder / "model" / "dist_ckpt" / "metadata.json").write_text('{"sharded_backend": "zarr"}')


SETTINGS: dict[str, Callable[[Path], None]] = {
    "latest_checkpointed_iteration.txt": run,
    "fsdp_config.json": ranks,
    "lora_train_meta.json": ranks,
    "run_config.yaml": zarr,
    "transformer_config.json": verl,
    "common.pt": zarr,
    "metadata.json": zarr,
    "decoder.final_layernorm.weight/.zarray": zarr,
}


KINDS = [
    "dangling",
    "pipe",
    "terabyte",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("device", "folder")),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_no_file(attacker: Attacker, name: str, kind: str) -> None:
    """They are refused: without them another model would be made, or none be chosen."""
    SETTINGS[name](attacker.src)
    place = attacker.src / name
    place.unlink(missing_ok=True)
    if kind in {"dangling", "device"}:
        place.symlink_to("/dev/zero" if kind == "device" else attacker.folder / "nowhere")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        with place.open("wb") as file:
            file.truncate(1 << 40)
    attacker.refused(name)


TEXT = "the password is hunter2"
YAML = ["password: !hunter2 x", "password: *hunter2", "password: !!int hunter2", "- password: hunter2"]


@pytest.mark.parametrize(
    ("name", "text"), [*((name, TEXT) for name in SETTINGS), *(("run_config.yaml", text) for text in YAML)]
)
def test_settings_that_are_links_show_nothing(attacker: Attacker, name: str, text: str) -> None:
    """A message may be sent on to somebody who may not read what the user may.

    Of a file of weights it has the first 8 bytes, which say of what kind it is.
    """
    SETTINGS[name](attacker.src)
    elsewhere = attacker.folder / "elsewhere"
    elsewhere.write_text(text)
    (attacker.src / name).unlink(missing_ok=True)
    (attacker.src / name).symlink_to(elsewhere)
    assert "hunter2" not in attacker.refused(name).stderr
