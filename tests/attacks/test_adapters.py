"""Adapters, manifests and stage files that lie, or lead elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.forge import entry, pickled, safetensors, tensor, torch_file
from tests.attacks.harness import PLAIN, Attacker, Outcome, assert_harmless

FRONT = "base_model.model.w"
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["w"]}


def base(attacker: Attacker) -> None:
    safetensors(attacker.src / "model.safetensors", {"w.weight": entry((2, 2), 0, 16)}, bytes(16))
    (attacker.src / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


def adapter(attacker: Attacker, config: Any = None, front: str = FRONT) -> Path:
    folder = attacker.folder / "adapter"
    folder.mkdir(exist_ok=True)
    header = {f"{front}.lora_A.weight": entry((1, 2), 0, 8), f"{front}.lora_B.weight": entry((2, 1), 8, 16)}
    safetensors(folder / "adapter_model.safetensors", header, bytes([0, 0, 128, 63] * 4))
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def test_the_honest_one_is_folded(attacker: Attacker) -> None:
    base(attacker)
    assert attacker.refused_or_merged(*PLAIN, "--adapter", adapter(attacker)).code == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"r": -1},
        {"r": 0},
        {"r": 1 << 62},
        {"r": 10**4000},
        {"lora_alpha": 1e999},
        {"lora_alpha": 10**4000},
        {"peft_type": "os.system"},
        {"peft_type": {"a": 1}},
        {"rank_pattern": {"(a+)+$": 1}},
        {"rank_pattern": {"(.*)*(.*)*w": 1}},
        {"rank_pattern": {"(?:a|a)*b": 1, "a{1,9999}{1,9999}": 1}},
        {"alpha_pattern": {"(" * 5000: 1}},
        {"alpha_pattern": {"[" + "a" * 100_000: 1}},
        {"rank_pattern": {"x" * 1_000_000: 1}},
        {"rank_pattern": {f"w{n}": 1 for n in range(100_000)}},
        {"modules_to_save": ["../../x"]},
        {"modules_to_save": [[[]]]},
        {"trainable_token_indices": [1 << 62]},
        {"trainable_token_indices": {"w": [-1]}},
        {"target_parameters": ["../../outside/secret"]},
        {"layer_replication": [[0, 10**9]]},
        {"auto_mapping": {"parent_library": "this", "base_model_class": "x"}},
        {"base_model_name_or_path": "/etc/passwd"},
        {"megatron_core": "this"},
        {"unknown": "x" * 1_000_000},
        {"init_lora_weights": [["eva"]]},
        {"bias": {"none": 1}},
    ],
    ids=range(27),
)
def test_configs(attacker: Attacker, fields: dict[str, Any]) -> None:
    base(attacker)
    folder = adapter(attacker, {**CONFIG, **fields})
    attacker.refused_or_merged(*PLAIN, "--adapter", folder)


@pytest.mark.parametrize(
    "front", ["../../x", "/etc/passwd", "base_model.model.../../x", "\0", "\x1b[2J", "x" * 2000]
)
def test_names(attacker: Attacker, front: str) -> None:
    base(attacker)
    outcome = attacker.refused(options=(*PLAIN, "--adapter", adapter(attacker, front=front)))
    assert "\x1b" not in outcome.stderr


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "pipe", "sparse"])
def test_files_that_are_none(attacker: Attacker, name: str, target: str) -> None:
    base(attacker)
    folder = adapter(attacker)
    (folder / name).unlink()
    if target == "pipe":
        os.mkfifo(folder / name)
    elif target == "sparse":
        (folder / name).touch()
        os.truncate(folder / name, 1 << 31)
    else:
        os.symlink(target, folder / name)
    outcome = attacker.merge(*PLAIN, "--adapter", folder)
    told = tuple(
        each for each in outcome.violations if each != "read /etc/passwd"
    )  # the user named the folder
    assert_harmless(Outcome(**{**outcome.__dict__, "violations": told}))
    assert outcome.code == 2


NAMES = [
    "..",
    "../../x",
    "/etc/x",
    "",
    ".",
    "a/b",
    "\0",
    "x" * 300,
    "..\\x",
    "lora_adapter",
    "\x1b[2J",
    "con",
    "\n",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_of_adapters_in_a_checkpoint(attacker: Attacker, name: str) -> None:
    """Several adapters have a folder each, by a name that the checkpoint gives."""
    state = {"w.base_layer.weight": tensor("0", (2, 2))}
    for each in ("default", name):
        state[f"w.lora_A.{each}.weight"] = tensor("0", (1, 2), count=4)
        state[f"w.lora_B.{each}.weight"] = tensor("0", (2, 1), count=4)
    torch_file(attacker.src / "pytorch_model.bin", pickled(state), {"0": bytes([0, 0, 128, 63] * 4)})
    (attacker.src / "config.json").write_text("{}")
    before = sorted(attacker.folder.rglob("*"))
    for mode in ("extract", "only"):
        outcome = attacker.refused_or_merged(*PLAIN, "--lora", mode, "--lora-alpha", "1")
        assert "\x1b" not in outcome.stdout + outcome.stderr
        assert sorted(attacker.folder.rglob("*")) == before


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"format": "os.system", "settings": {}}',
        '{"format": "../../x", "settings": {}}',
        '{"format": "megatron", "settings": {"num_layers": ' + "9" * 4000 + "}}",
        '{"format": "megatron", "settings": {"num_layers": -1, "pipeline_model_parallel_size": 1000000000}}',
        '{"format": "megatron", "settings": {"x": ' + "[" * 900 + "]" * 900 + "}}",
        '{"format": "megatron", "settings": [' + "[]," * 5_000_000 + "1]}",
        '{"format": "fsdp", "settings": null}',
        "[" * 100_000,
        "\udc80",
    ],
    ids=range(11),
)
def test_stage_files(attacker: Attacker, text: str) -> None:
    base(attacker)
    path = attacker.src / "lazymerge-stage.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    attacker.refused_or_merged()


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "pipe"])
def test_a_stage_file_that_is_none(attacker: Attacker, target: str) -> None:
    base(attacker)
    path = attacker.src / "lazymerge-stage.json"
    os.mkfifo(path) if target == "pipe" else os.symlink(target, path)
    attacker.refused()


def manifest(attacker: Attacker, files: Any, *, seal: bool = True) -> None:
    from lazymerge.manifest import _sealed

    content = {"manifest": 1, "files": files}
    path = attacker.src / "lazymerge-manifest.json"
    path.write_bytes(_sealed(content) if seal else json.dumps(content).encode())


@pytest.mark.parametrize(
    "name",
    ["../outside/secret", "/etc/passwd", "/dev/zero", "a/../../outside/secret", "\0", "x" * 5000, "", "."],
)
def test_manifests_that_lead_elsewhere(attacker: Attacker, name: str) -> None:
    """`lazymerge verify` of a stranger's result reads what is in the folder and nothing else."""
    base(attacker)
    manifest(attacker, {name: {"size": 21, "xxh3_128": "0" * 32}})
    outcome = attacker.zygote.run(["verify", attacker.src], attacker.out)
    assert not outcome.violations
    assert not outcome.killed
    assert outcome.code == 3, outcome
    assert "internal error" not in outcome.stderr


@pytest.mark.parametrize(
    "text",
    ["", "[" * 100_000, '{"files": [' + "[]," * 5_000_000 + "1]}", '{"checksum": ' + "9" * 5000 + "}"],
    ids=range(4),
)
def test_manifests_that_are_none(attacker: Attacker, text: str) -> None:
    base(attacker)
    (attacker.src / "lazymerge-manifest.json").write_text(text)
    outcome = attacker.zygote.run(["verify", attacker.src], attacker.out)
    assert not outcome.violations
    assert not outcome.killed
    assert outcome.code == 3, outcome
