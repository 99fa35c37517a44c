"""Configs and other small JSON files that are large, deep or ask for what no model has; odd names."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.attacks.forge import entry, pickled, safetensors, tensor, torch_file
from tests.attacks.harness import PLAIN, Attacker

SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
W = tensor("0", (2, 2))


def model(attacker: Attacker) -> None:
    safetensors(attacker.src / "model.safetensors", {"w": entry((4,), 0, 16)}, bytes(16))
    (attacker.src / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    )


@pytest.mark.parametrize("name", [*SMALL, "tokenizer.json", "vocab.json"])
@pytest.mark.parametrize("nbytes", [15 << 20, 1 << 30, 1 << 40])
def test_sparse_files(attacker: Attacker, name: str, nbytes: int) -> None:
    """A config of a gigabyte of zeros."""
    model(attacker)
    with open(attacker.src / name, "wb") as file:
        file.write(b"{")
        file.truncate(nbytes)
    attacker.refused(name)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a":' * 985 + "1" + "}" * 985,
        '{"a":' * 960 + "1" + "}" * 960,
        '{"a": ' + "9" * 5000 + "}",
        '{"a": [' + "[]," * 4_000_000 + "1]}",
        '{"a": NaN',
        "nul",
        '"config"',
        "\ud800",
    ],
    ids=range(10),
)
def test_texts(attacker: Attacker, text: str) -> None:
    for name in SMALL:
        model(attacker)
        (attacker.src / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        outcome = attacker.refused_or_merged()
        assert outcome.code == 2 or text.startswith('{"a":' * 900)
        (attacker.src / name).unlink()


VALUES: list[Any] = [
    None,
    [],
    {},
    -1,
    0,
    1 << 62,
    10**4000,
    1e999,
    "x" * 1_000_000,
    ["x"] * 100_000,
    "../../outside/x",
    "os.system",
    [["x"]],
    {"a": {"b": ["c"]}},
    True,
    "\ud800",
]
FIELDS = (
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "tie_word_embeddings",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "text_config",
    "quantization_config",
    "auto_map",
    "num_experts",
)
QUICK = ("architectures", "dtype", "auto_map")


@pytest.mark.parametrize(
    "field", [field if field in QUICK else pytest.param(field, marks=pytest.mark.slow) for field in FIELDS]
)
def test_fields(attacker: Attacker, field: str) -> None:
    """Each field with each value, without the check: what lazymerge itself reads of a config."""
    model(attacker)
    for value in VALUES:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", field: value}
        (attacker.src / "config.json").write_text(json.dumps(config))
        attacker.refused_or_merged(*PLAIN, "--dtype", "bfloat16")


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoConfig": "../../outside/secret.X"},
        {"AutoConfig": "os.system"},
        {"AutoConfig": "/etc/passwd.X"},
        {"AutoConfig": "a--b.C"},
        {"AutoConfig": "\0.X"},
        {"AutoConfig": "modeling.X", "AutoModel": ["modeling.X", None, 7]},
    ],
    ids=range(6),
)
def test_code_is_copied_and_never_run(attacker: Attacker, auto_map: Any) -> None:
    model(attacker)
    (attacker.src / "modeling.py").write_text(
        f"open({str(attacker.outside / 'canary')!r}, 'w')\nimport this\n"
    )
    config = {"architectures": ["X"], "model_type": "x", "auto_map": auto_map}
    (attacker.src / "config.json").write_text(json.dumps(config))
    attacker.refused_or_merged()


NAMES = ["", " ", "\0", "\x1b[2J", "../../x", "/etc/passwd", "a\nb", "x" * 100_000, "\u202e", "é", "."]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_of_tensors(attacker: Attacker, name: str) -> None:
    """In a torch file, of rank 0 alone and of a rank: as a name, and in the message of a refusal."""
    torch_file(attacker.src / "model_world_size_1_rank_0.pt", pickled({name: W}), {"0": bytes(16)})
    outcome = attacker.refused_or_merged()
    assert "\x1b" not in outcome.stdout + outcome.stderr
    torch_file(attacker.src / "model_world_size_1_rank_0.pt", pickled({name: W}), {"0": bytes(8)})
    assert "\x1b" not in attacker.refused().stderr


@pytest.mark.parametrize(
    "name", [b"\xff\xfe", b"a\nb", b"\x1b[2J", b"x" * 250, b"-rf", b"$(true)", b"%s%n"], ids=range(7)
)
def test_names_of_folders(attacker: Attacker, name: bytes) -> None:
    """Of the source: a message shows them, and nothing takes them for an option or a command."""
    src = attacker.src / os.fsdecode(name)
    src.mkdir()
    safetensors(src / "model.safetensors", {"w": entry((4,), 0, 12)}, bytes(16))
    outcome = attacker.refused(src=src)
    assert "\x1b" not in outcome.stderr


@pytest.mark.parametrize(
    "text", ["-1", "9" * 90, "1e3", "²", "../../outside", "\0", "\x1b[2J", "global_step_1", ""]
)
def test_pointers_to_steps(attacker: Attacker, text: str) -> None:
    step = attacker.src / "global_step_1"
    step.mkdir()
    safetensors(step / "model.safetensors", {"w": entry((4,), 0, 16)}, bytes(16))
    (attacker.src / "latest_checkpointed_iteration.txt").write_text(text)
    outcome = attacker.refused()
    assert "\x1b" not in outcome.stderr


@pytest.mark.parametrize("name", ["global_step_" + "9" * 200, "iter_²", "global_step_-1", "global_step_1\n"])
def test_names_of_steps(attacker: Attacker, name: str) -> None:
    (attacker.src / name).mkdir()
    safetensors(attacker.src / name / "model.safetensors", {"w": entry((4,), 0, 12)}, bytes(16))
    attacker.refused()
