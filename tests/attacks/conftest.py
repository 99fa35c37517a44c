"""Fixtures of the attacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.harness import Attacker, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One for all attacks of a test worker."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def attacker(zygote: Zygote, tmp_path: Path) -> Attacker:
    """Attacks in a folder of this test's own."""
    return Attacker(zygote, tmp_path)
