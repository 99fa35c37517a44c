"""Files that Megatron wrote, loaded to be changed: without Megatron, whose classes become None."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "megatron":
            return lambda *arguments: None
        return super().find_class(module, name)


_PICKLE = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """Let `edit` change what is in a file of ``torch.save``."""
    content = torch.load(path, weights_only=False, pickle_module=_PICKLE)
    edit(content)
    torch.save(content, path)
