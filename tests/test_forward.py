"""`verify --forward`: its process, how it may end, and that a stranger's config costs little."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lazymerge import forward
from lazymerge.conversions import logits
from lazymerge.errors import PlanError, SourceError
from lazymerge.forward import MEMORY, SECONDS, compare_logits

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "vocab_size": 4,
    "tie_word_embeddings": True,
}


def model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    tensors = {"model.embed_tokens.weight": torch.ones(4, 8), "model.norm.weight": torch.ones(8)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def test_the_process_may_take_what_the_weights_need(tmp_path, monkeypatch):
    asked = []

    def run(command: list[str], *, input: bytes, **options: Any) -> Any:  # noqa: A002 # its name
        asked.append(json.loads(input))
        assert options["env"]["HF_HUB_OFFLINE"] == "1"
        assert command[1:] == ["-P", "-W", "ignore", "-m", "lazymerge.conversions.logits"]
        return subprocess.CompletedProcess(command, -signal.SIGXCPU, b"")

    monkeypatch.setattr(forward.subprocess, "run", run)
    folder = model(tmp_path / "model", vocab_size=10**9)  # which config.json does not decide
    with pytest.raises(SourceError, match=r"not run within \d+ s of processor time"):
        compare_logits(folder, folder)
    (request,) = asked
    assert (request["seconds"], request["memory"]) == (SECONDS, MEMORY + 2 * 4 * (4 * 8 + 8))


def test_the_model_that_an_adapter_names_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(forward.subprocess, "run", lambda *args, **options: pytest.fail("started"))
    folder = model(tmp_path / "model")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/"}')
    with pytest.raises(PlanError, match="adapter_config"):
        compare_logits(folder, folder)


@pytest.mark.parametrize(
    ("names", "references"),
    [
        (["pipeline"], {}),
        (["AutoModelForCausalLM"], {}),
        (["LlamaTokenizer"], {}),
        (["LlamaConfig"], {}),
        (["__dict__"], {}),
        ([7], {}),
        ("LlamaForCausalLM", {}),
        ([], {}),
        (["Own"], {"pipeline": "own.Own"}),
        (["Own"], {"PreTrainedConfig": "own.Own"}),
    ],
)
def test_only_models_are_loaded(names, references):
    with pytest.raises(logits.Refused):
        logits._class_of(SimpleNamespace(architectures=names, auto_map=references), trust=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"intermediate_size": 1 << 28, "num_hidden_layers": 8}, "asks for more memory"),
        ({"num_hidden_layers": 1}, ""),
    ],
)
def test_a_model_that_is_larger_than_its_weights_is_not_run(tmp_path, change, said):
    """A folder of 500 bytes: all layers would take 200 GB, and what is missing is random."""
    folder = model(tmp_path / "model", **change)
    if said:
        with pytest.raises(SourceError, match=said):
            compare_logits(folder, folder)
        return
    report = compare_logits(folder, folder)
    assert [len(missing) for missing in report.missing] == [9, 9]
    assert (report.largest, report.positions, report.same) == (None, 0, False)
