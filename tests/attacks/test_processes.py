"""What a merge starts: nothing, or the one process that asks transformers, which is offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.attacks.forge import entry, safetensors
from tests.attacks.harness import PLAIN, Attacker

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


@pytest.mark.slow
def test_one_with_the_check_and_none_the_second_time(attacker: Attacker, tmp_path: Path) -> None:
    """Its command is the same whatever the config says, it is offline, and its answer is remembered."""
    model(attacker)
    work = attacker.out.parent
    for name in ("cache", "tmp"):
        (work / name).mkdir(parents=True)
    spy = tmp_path / "spy"
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(SPY)
    environment = {"LAZYMERGE_CACHE": str(work / "cache"), "TMPDIR": str(work / "tmp")}
    environment |= {"PYTHONPATH": str(spy), "SPY_LOG": str(work / "log")}
    control = f"import sys; sys.path.insert(0, {str(spy)!r})"  # the process is given this path
    options = ("--max-ram", "250MiB")
    first = attacker.merge(*options, environment=environment, memory=4 << 30, seconds=60, control=control)
    assert first.code == 0, first.stderr
    assert len(first.processes) == 1
    command, given = first.processes[0]
    assert command == [sys.executable, "-P", "-W", "ignore", "-m", "lazymerge.conversions.meta_model"]
    assert given["HF_HUB_OFFLINE"] == "1"
    seen = (work / "log").read_text().splitlines()
    assert seen[0] == "watching"
    reached = [
        line for line in seen if line.startswith(("socket.connect", "socket.getaddrinfo", "socket.sendto"))
    ]
    started = [line for line in seen if line.startswith(("subprocess", "os."))]
    assert (reached, started) == ([], [])
    for path in attacker.out.iterdir():
        path.unlink()
    attacker.out.rmdir()
    second = attacker.merge(*options, environment=environment, memory=4 << 30, control=control)
    assert (second.code, second.processes) == (0, ())
