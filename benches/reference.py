"""What verl does with an FSDP checkpoint, step by step, so that it can be measured where verl is not.

Rank 0 is loaded for its mesh; then all ranks are, in a pool of threads; each key's local tensors are
cast to bfloat16 and concatenated; an empty model of the config saves the state dict.

    python -m benches.reference SOURCE TARGET
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Shard


def main(source: Path, target: Path) -> None:
    world = json.loads((source / "fsdp_config.json").read_text())["world_size"]

    def load(rank: int) -> dict[str, Any]:
        path = source / f"model_world_size_{world}_rank_{rank}.pt"
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        return state

    first = load(0)  # verl keeps it while it merges
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        ranks = list(pool.map(load, range(world)))
    parts = {name: [rank.pop(name) for rank in ranks] for name in list(first)}
    whole = {name: merged(parts.pop(name)) for name in list(parts)}
    target.mkdir()
    (target / "config.json").write_bytes((source / "huggingface" / "config.json").read_bytes())
    save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
    del first


def merged(parts: list[torch.Tensor]) -> torch.Tensor:
    """A key's tensors of all ranks as one."""
    first = parts[0]
    if not isinstance(first, DTensor):
        return first.bfloat16()
    placement = first.placements[0]
    assert isinstance(placement, Shard)
    local = [part.to_local().bfloat16() for part in parts if isinstance(part, DTensor)]
    return torch.cat(local, placement.dim).contiguous()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
