"""What a merge starts: nothing, or the one process that asks transformers, which is offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lazymerge.conversions.model_process import MEMORY as CHILD
from lazymerge.conversions.model_process import SECONDS
from tests.attacks.forge import entry, safetensors
from tests.attacks.harness import MEMORY, PLAIN, Attacker, Outcome

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "vocab_size": 2,
    "tie_word_embeddings": True,
    "_name_or_path": "https://192.0.2.1/model",
    "auto_map": {"AutoModelForCausalLM": "192.0.2.1/evil--modeling.X"},
}
SPY = """
import os, sys
def spy(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork")):
        with open(os.environ["SPY_LOG"], "a") as log:
            log.write(f"{event} {arguments!r:.200}\\n")
if sys.argv[:1] == ["-m"] or "meta_model" in " ".join(sys.orig_argv):
    sys.addaudithook(spy)
    with open(os.environ["SPY_LOG"], "a") as log:
        log.write("watching\\n")
"""


def model(attacker: Attacker) -> None:
    header = {"model.embed_tokens.weight": entry((2, 4), 0, 32), "model.norm.weight": entry((4,), 32, 48)}
    safetensors(attacker.src / "model.safetensors", header, bytes(48))
    (attacker.src / "config.json").write_text(json.dumps(CONFIG))


def test_none_without_the_check(attacker: Attacker) -> None:
    model(attacker)
    outcome = attacker.merge(*PLAIN)
    assert (outcome.code, outcome.processes, outcome.violations) == (0, (), ())


COMMAND = [sys.executable, "-P", "-W", "ignore", "-m", "lazymerge.conversions.meta_model"]
OPTIONS = ("--max-ram", "250MiB")


class Spied:
    """Merges with the check, whose process reports what it does to the log."""

    def __init__(self, attacker: Attacker, folder: Path) -> None:
        self.attacker = attacker
        work = attacker.out.parent
        for name in ("cache", "tmp"):
            (work / name).mkdir(parents=True)
        self.log = work / "log"
        (folder / "sitecustomize.py").write_text(SPY)
        self.environment = {"LAZYMERGE_CACHE": str(work / "cache"), "TMPDIR": str(work / "tmp")}
        self.environment |= {"PYTHONPATH": str(folder), "SPY_LOG": str(self.log)}
        self.control = f"import sys; sys.path.insert(0, {str(folder)!r})"  # the process is given this path

    def merge(self) -> Outcome:
        """The outcome, of which the processor time and the memory are to be looked at.

        At most one process is started, by the one command; it is offline, starts nothing itself, and never
        goes for the network.
        """
        outcome = self.attacker.merge(
            *OPTIONS, environment=self.environment, memory=4 << 30, seconds=60, control=self.control
        )
        assert not outcome.killed
        assert outcome.violations == ()
        assert [command for command, _ in outcome.processes] in ([], [COMMAND])
        assert all(given["HF_HUB_OFFLINE"] == "1" for _, given in outcome.processes)
        seen = self.log.read_text().splitlines() if outcome.processes else ["watching"]
        assert seen[0] == "watching"
        forbidden = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess", "os.")
        assert [line for line in seen if line.startswith(forbidden)] == []
        assert outcome.own_peak < MEMORY, f"{outcome.own_peak >> 20} MB"
        return outcome


@pytest.fixture
def spied(attacker: Attacker, tmp_path: Path) -> Spied:
    folder = tmp_path / "spy"
    folder.mkdir()
    return Spied(attacker, folder)


@pytest.mark.slow
def test_one_with_the_check_and_none_the_second_time(attacker: Attacker, spied: Spied) -> None:
    """Its command is the same whatever the config says, it is offline, and its answer is remembered."""
    model(attacker)
    first = spied.merge()
    assert first.code == 0, first.stderr
    assert len(first.processes) == 1
    for path in attacker.out.iterdir():
        path.unlink()
    attacker.out.rmdir()
    second = spied.merge()
    assert (second.code, second.processes) == (0, ())


@pytest.mark.parametrize(
    "change",
    [
        {"num_labels": 800_000},
        {"text_config": {"num_labels": 10**4000}},
        {"num_hidden_layers": 10**9},
        {"vision_config": {"depth": 1e300}},
        {"sub": {"moe_num_experts": 1 << 62}},
    ],
    ids=range(5),
)
def test_what_no_model_has_is_refused_before_anything_is_started(attacker: Attacker, change: Any) -> None:
    """With the check, and within the bounds of all attacks."""
    model(attacker)
    (attacker.src / "config.json").write_text(json.dumps({**CONFIG, **change}))
    attacker.refused("config.json", options=OPTIONS)


OF_OTHERS = {
    "_name_or_path": "https://192.0.2.1/model",
    "_attn_implementation": "192.0.2.1/kernel",
    "attn_implementation": "192.0.2.1/kernel",
    "experts_implementation": "192.0.2.1/kernel",
    "use_kernels": True,
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "transformers_weights": "/etc/passwd",
    "tokenizer_class": "os.system",
    "auto_map": {"AutoModelForCausalLM": "modeling.X", "AutoConfig": "modeling.C"},
}
ENDLESS = [
    {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "attention_types": [[["global"], 10**9]],
    },
    {"architectures": ["MusicgenForCausalLM"], "model_type": "musicgen_decoder", "num_codebooks": 10**7},
    {
        "architectures": ["SwinForImageClassification"],
        "model_type": "swin",
        "depths": [10**6],
        "num_heads": [1],
    },
    {"architectures": ["DetrForObjectDetection"], "model_type": "detr", "backbone": "192.0.2.1/backbone"}
    | {"use_timm_backbone": False, "use_pretrained_backbone": True, "backbone_config": None},
    {"a": json.loads('{"a":' * 900 + "1" + "}" * 900)},
    {"id2label": {str(at): "x" for at in range(300_000)}},
]


@pytest.mark.parametrize(
    "change", [OF_OTHERS, *(pytest.param(each, marks=pytest.mark.slow) for each in ENDLESS)], ids=range(7)
)
def test_a_config_decides_nothing_but_its_own_answer(attacker: Attacker, spied: Spied, change: Any) -> None:
    """Nothing of it is fetched, run or started, and what the process may take is what trust.md says."""
    model(attacker)
    canary = attacker.out.parent / "canary"
    (attacker.src / "modeling.py").write_text(f"open({str(canary)!r}, 'w')")
    (attacker.src / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {}, **change}))
    outcome = spied.merge()
    assert outcome.code in ({0} if change is OF_OTHERS else {0, 2}), outcome.stderr
    assert not canary.exists()
    assert "Traceback" not in outcome.stderr
    assert len(outcome.stderr) < 20_000
    assert outcome.seconds < SECONDS + 15, "with the imports"
    assert outcome.peak < CHILD + (1 << 30), f"{outcome.peak >> 20} MB"
