"""Fixtures of all tests."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.makers.layout import Made, copy_of

pytest_plugins = ["tests.makers.fixtures"]

Source = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    """What is kept between runs is kept for this one alone, and for all of its workers."""
    if not hasattr(config, "workerinput"):
        os.environ["LAZYMERGE_CACHE"] = tempfile.mkdtemp(prefix="lazymerge-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["LAZYMERGE_CACHE"], ignore_errors=True)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A destination that does not exist, nor does the folder around it."""
    return tmp_path / "results" / "model"


@pytest.fixture(scope="session")
def source() -> Source:
    """`source(folder, state, config=None)`: a new folder with a full state dict, and its config.json."""

    def save(
        folder: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None
    ) -> Path:
        folder.mkdir()
        torch.save(dict(state), folder / "pytorch_model.bin")
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return save


@pytest.fixture
def four(checkpoint: Callable[[str], Made], tmp_path: Path) -> Made:
    """Four ranks, each with a quarter."""
    return copy_of(checkpoint("fsdp2-llama"), tmp_path / "run")
