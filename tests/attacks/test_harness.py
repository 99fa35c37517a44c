"""The harness sees what it is there for: each control does what no merge may do, and is found out."""

from __future__ import annotations

import pytest

from tests.attacks.forge import entry, safetensors
from tests.attacks.harness import MEMORY, SECONDS, Attacker, assert_harmless


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("import os; os.system('true')", "os.system"),
        ("import os; os.posix_spawn('/bin/true', ['true'], dict())", "os.posix_spawn"),
        ("import os; os.fork() or os._exit(0)", "os.fork"),
        ("import socket; socket.socket().connect(('127.0.0.1', 9))", "socket.connect"),
        ("import socket; socket.getaddrinfo('localhost', 9)", "socket.getaddrinfo"),
        ("import this", "import this"),
        ("import hypothesis", "import hypothesis"),
        ("open('/etc/passwd')", "read /etc/passwd"),
        ("open('/dev/zero')", "read /dev/zero"),
        ("open('{outside}/secret')", "read"),
        ("open('{outside}/new', 'w')", "open for writing"),
        ("import os; os.mkdir('{outside}/new')", "os.mkdir"),
        ("import os; os.remove('{outside}/secret')", "os.remove"),
        ("import os; os.rename('{outside}/secret', '{out}')", "os.rename"),
        ("import os; os.symlink('{outside}', '{outside}/link')", "os.symlink"),
        ("import shutil; shutil.rmtree('{outside}')", "shutil.rmtree"),
        ("import pickle; pickle.loads(b'cos\\nsystem\\n.')", "pickle.find_class"),
        ("import ctypes; ctypes.CDLL(None)", "ctypes.dlopen"),
    ],
)
def test_violations_are_seen(attacker: Attacker, code: str, seen: str) -> None:
    outcome = attacker.merge(control=code.format(outside=attacker.outside, out=attacker.out))
    assert any(violation.startswith(seen) for violation in outcome.violations), outcome


def test_processes_are_seen(attacker: Attacker) -> None:
    outcome = attacker.merge(control="import subprocess; subprocess.run(['true'], env={'A': 'b'})")
    assert (["true"], {"A": "b"}) in outcome.processes


def test_bounds(attacker: Attacker) -> None:
    endless = attacker.merge(control="while True: pass", seconds=1)
    assert endless.killed
    assert endless.seconds > 0.9
    large = attacker.merge(control=f"x = bytearray({MEMORY})")
    assert "MemoryError" in large.stderr or large.peak > MEMORY
    touched = attacker.merge(control="x = bytearray(b'x') * (100 << 20)")
    assert touched.peak > 100 << 20


def test_a_merge_does_nothing_of_it(attacker: Attacker) -> None:
    """No process, no connection, no file elsewhere: with a result, not only in a refusal."""
    safetensors(attacker.src / "model.safetensors", {"w": entry((4,), 0, 16)}, bytes(16))
    (attacker.src / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    outcome = attacker.merge()
    assert_harmless(outcome)
    assert outcome.code == 0
    assert sorted(path.name for path in attacker.out.iterdir()) == ["config.json", "model.safetensors"]
    assert outcome.seconds < SECONDS / 5
    assert outcome.peak < MEMORY / 2
