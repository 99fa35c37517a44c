"""What `--stage merge` leaves beside the weights, so that `--stage convert` can go on from there.

    lazymerge-stage.json    {"format": "megatron", "settings": {...}}

The weights are under the trainer's own names, which only the format that they came from explains.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazymerge.errors import DamagedFile, SourceError
from lazymerge.files.json_text import read_object
from lazymerge.files.local import LocalFile, refuse_no_file

STAGE = "lazymerge-stage.json"
_LARGEST = 16 << 20


@dataclass(frozen=True, slots=True)
class Staged:
    """The format that the tensors came from, what the trainer recorded of its own arguments, and where."""

    format: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[LocalFile, ...] = ()

    def to_json(self) -> bytes:
        """The file's content."""
        return (
            json.dumps({"format": self.format, "settings": dict(self.settings)}, indent=2) + "\n"
        ).encode()


def read_staged(folder: Path) -> Staged:
    """What the folder's tensors came from; "huggingface" where it does not say."""
    path = folder / STAGE
    if not os.path.lexists(path):
        return Staged("huggingface")
    if path.is_symlink():
        raise SourceError(f"{path}: is a link", "put the file itself there")
    refuse_no_file(path)
    file = LocalFile(path)
    try:
        content = read_object(file, _LARGEST)
        name, settings = content.get("format"), content.get("settings")
        if not isinstance(name, str) or not isinstance(settings, dict):
            raise ValueError("no format and settings")
    except ValueError as error:
        raise DamagedFile(
            f"{path}: does not say what the tensors came from ({error})", "run --stage merge again"
        ) from None
    return Staged(name, settings, (file,))
