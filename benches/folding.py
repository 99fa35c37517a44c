"""What folding an adapter costs, beside a plain merge of the same base and PEFT's own way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benches import roads
from benches.checkpoints import HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, Recipe, make
from benches.measure import Road, alternate, remove
from benches.merging import Row, Settings

GB2 = Recipe("bf16-2.0", layers=12)
RANK = 16
FOLD = "lazymerge merge --adapter"
PEFT = "PeftModel.from_pretrained, merge_and_unload, save_pretrained"


def folding(settings: Settings) -> list[Row]:
    """A base of 2 GB in bf16, and an adapter of rank 16 on all of its linear layers."""
    rows = []
    for place in settings.places:
        recipe = settings.scaled(GB2)
        model, adapter = place.folder / "model", place.folder / "adapter"
        ranks = make(recipe, place.folder)
        subprocess.run(
            roads.lazymerge("merge", str(ranks), str(model)), check=True, stdout=subprocess.DEVNULL
        )
        remove(place.folder / recipe.name)
        command = [sys.executable, "-m", "benches.folding", str(adapter), str(recipe.layers)]
        subprocess.run(command, check=True)
        settings.tell("fold")
        ways = [roads.merge(model), roads.merge(model, "--adapter", str(adapter), name=FOLD)]
        if place.name == "shm":
            peft = [sys.executable, "-m", "benches.peft_fold", str(model), str(adapter)]
            ways.append(Road(PEFT, lambda target, peft=peft: [*peft, str(target)], memory=10**10))
        runs = alternate(ways, place, place.folder, settings.repeat, settings.tell)
        rows += [Row("fold", place.name, name, recipe.nbytes, done) for name, done in runs.items()]
        for folder in (model, adapter):
            remove(folder)
    return rows


def main(folder: Path, layers: int) -> None:
    """Write the adapter as PEFT would, in bf16, with random values."""
    import torch
    from safetensors.torch import save_file

    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    tensors = {}
    for layer in range(layers):
        for module, (rows, columns) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, columns).bfloat16()
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, RANK).bfloat16() * 0.01
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        **{"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "bias": "none", "task_type": "CAUSAL_LM"},
        "target_modules": [name.rpartition(".")[2] for name in shapes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
