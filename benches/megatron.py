"""A Megatron checkpoint of any size in the `torch` layout, and the bench that merges it.

The files are what Megatron-LM writes (megatron/training/checkpointing.py: get_checkpoint_name and
generate_state_dict): names of Transformer Engine modules, each rank's own part of every tensor. Run as a
process, since torch's memory stays where it was used:

    python -m benches.megatron FOLDER '{"name": "megatron-4.4", "layers": 29}'
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path

from benches import roads
from benches.checkpoints import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    VOCABULARY,
    Recipe,
    Shape,
    values,
    write_config,
)
from benches.measure import remove
from benches.merging import Row, Settings, measured

GB4 = Recipe("megatron-4.4", layers=30, ranks=8)
TP, PP = 4, 2


def megatron(settings: Settings) -> list[Row]:
    """4.4 GB of bf16 over TP=4 and PP=2, converted to Hugging Face: against `cp -r`."""
    rows = []
    for place in settings.places:
        recipe = settings.scaled(GB4)
        source = make(recipe, place.folder)
        config = ("--hf-config", str(source / "huggingface"))
        ways = [
            roads.cp(source),
            roads.merge(source, *config),
            roads.merge(source, *config, "--no-check", name=roads.MERGE_UNCHECKED),
        ]
        if place.name != "shm":
            ways.insert(1, roads.cp_sync(source))
        rows += measured(settings, place, recipe, source, ways, options=config)
        remove(place.folder / recipe.name)
    return rows


def make(recipe: Recipe, root: Path) -> Path:
    """The run folder under `root`, written by a process of its own unless it is there."""
    run = root / recipe.name
    if not (run / "latest_checkpointed_iteration.txt").exists():  # written last
        command = [sys.executable, "-m", "benches.megatron", str(run), json.dumps(asdict(recipe))]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return run


# ---- in the process that writes ------------------------------------------------------------------------


def write(run: Path, recipe: Recipe) -> None:
    """Writes every rank's file, the config and the pointer."""
    import torch

    torch.manual_seed(0)
    noise = torch.randn(1 << 24).bfloat16()
    args = Namespace(
        num_layers=recipe.layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=KV_HEADS,
        kv_channels=HIDDEN // HEADS,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        padded_vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=128,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        params_dtype=torch.bfloat16,
    )
    for pp in range(PP):
        for tp in range(TP):
            model = {}
            for number, (name, shape) in enumerate(_shapes(recipe.layers // PP, pp)):
                own = tp if len(shape) > 1 else 0  # norms are the same on all tensor-parallel ranks
                model[name] = values(noise, prod(shape), number * 7919 + own).view(shape)
            folder = run / "iter_0000001" / f"mp_rank_{tp:02d}_{pp:03d}"
            folder.mkdir(parents=True)
            state = {"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": model}
            torch.save(state, folder / "model_optim_rng.pt")
    write_config(run / "huggingface", recipe)
    (run / "latest_checkpointed_iteration.txt").write_text("1")


def _shapes(layers: int, pp: int) -> Iterator[tuple[str, Shape]]:
    """Name -> shape of one rank's tensors; the same for all tensor-parallel ranks."""
    head = HIDDEN // HEADS
    if pp == 0:
        yield "embedding.word_embeddings.weight", (VOCABULARY // TP, HIDDEN)
    for layer in range(layers):
        at = f"decoder.layers.{layer}"
        yield f"{at}.self_attention.linear_proj.weight", (HIDDEN, HIDDEN // TP)
        yield f"{at}.self_attention.linear_qkv.layer_norm_weight", (HIDDEN,)
        yield f"{at}.self_attention.linear_qkv.weight", ((HEADS + 2 * KV_HEADS) * head // TP, HIDDEN)
        yield f"{at}.mlp.linear_fc1.layer_norm_weight", (HIDDEN,)
        yield f"{at}.mlp.linear_fc1.weight", (2 * INTERMEDIATE // TP, HIDDEN)
        yield f"{at}.mlp.linear_fc2.weight", (HIDDEN, INTERMEDIATE // TP)
    if pp == PP - 1:
        yield "decoder.final_layernorm.weight", (HIDDEN,)
        yield "output_layer.weight", (VOCABULARY // TP, HIDDEN)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Recipe(**json.loads(sys.argv[2])))
