"""What the tests of folding share: fold into a model folder, write the result, load it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint
from lazymerge.conversions.adapters.fold import Folded, fold
from lazymerge.conversions.adapters.read import read_adapter
from lazymerge.execute import write_file
from lazymerge.formats.huggingface import read_model
from lazymerge.plan import make_plan
from lazymerge.sidecars import with_fields


def base_checkpoint(folder: Path) -> Checkpoint:
    """The model in a folder, unread."""
    gathers, files = read_model(folder)
    return Checkpoint(gathers, "huggingface", files=tuple(files))


def config_of(folder: Path) -> dict[str, Any]:
    """What config.json says."""
    import json

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def folded(base: Path, *adapters: Path, weights: Sequence[float] = ()) -> Folded:
    """The adapters folded into the model in the folder `base`, nothing written."""
    pairs = [(read_adapter(adapter), 1.0) for adapter in adapters]
    pairs = [
        (adapter, weight) for (adapter, _), weight in zip(pairs, weights or [1.0] * len(pairs), strict=True)
    ]
    return fold(base_checkpoint(base), pairs, config_of(base))


def write(result: Folded, base: Path, out: Path, *, block: int = 1 << 20, workers: int = 1) -> Path:
    """Write a folded model to the folder `out`, with the base's config.json as it has to be."""
    out.mkdir()
    for file in make_plan(result.checkpoint.gathers).files:
        descriptor = os.open(out / file.name, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, file.size)
        write_file(file, descriptor, block=block, workers=workers, on_bytes=lambda _: None)
        os.close(descriptor)
    for path in base.glob("*.json"):
        if path.name != "config.json":
            shutil.copy(path, out)
    (out / "config.json").write_bytes(with_fields((base / "config.json").read_bytes(), result.config_changes))
    return out
