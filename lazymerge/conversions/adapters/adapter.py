"""An adapter as PEFT keeps it in a folder: what its config says, and its tensors, unread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lazymerge.files.local import LocalFile
from lazymerge.gather import Gather

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BIN = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, whether it was read from a folder of PEFT's or taken out of a trainer's checkpoint.

    name     how messages call it: its folder, or its name in the trainer's checkpoint ("default")
    config   the fields of adapter_config.json
    gathers  by the names of adapter_model.safetensors: ``base_model.model.<module>.lora_A.weight``
    files    the files that were opened for it
    """

    name: str
    config: Mapping[str, Any]
    gathers: Mapping[str, Gather]
    files: tuple[LocalFile, ...] = ()

    @property
    def folder(self) -> str:
        """Where PEFT looks for it in a folder of adapters: "" for the folder itself, else "NAME/"."""
        return "" if self.name == "default" else f"{self.name}/"

    def config_json(self) -> bytes:
        """adapter_config.json as PEFT writes it."""
        return json.dumps(dict(self.config), indent=2, sort_keys=True).encode()
