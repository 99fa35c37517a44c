"""Checkpoints in verl's layout, of any size and world, made by torch's own DTensor and `torch.save`.

One process plays all ranks, one after the other, in a process group that does nothing (torch's "fake"
backend): the files are those of real ranks, and 512 of them take half a minute. Shapes are those of a
Llama, so that an index, a config and verl's own merger work on the result. Run as a process, since
torch's memory stays where it was used:

    python -m benches.checkpoints FOLDER '{"name": "bf16-4.4", "layers": 29}'
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

VOCABULARY = 32_000
HIDDEN = 2560
INTERMEDIATE = 6912
HEADS = 32
KV_HEADS = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to write. `cut` is the dimension along which matrices are sharded; `tiny` gives every rank
    one row of eight elements of each tensor; `single` makes one square tensor of that length and no model.
    """

    name: str
    layers: int = 29
    ranks: int = 4
    dtype: str = "bfloat16"
    cut: int = 0
    tiny: bool = False
    single: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(shape) for shape in self.shapes().values()) * (4 if self.dtype == "float32" else 2)

    def shapes(self) -> dict[str, Shape]:
        """Name -> global shape, in the order of a state dict."""
        if self.single:
            return {"model.embed_tokens.weight": (self.single, self.single)}
        return dict(_tiny(self.layers, self.ranks) if self.tiny else _llama(self.layers))


def _llama(layers: int) -> Iterator[tuple[str, Shape]]:
    kv = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{at}.self_attn.k_proj.weight", (kv, HIDDEN)
        yield f"{at}.self_attn.v_proj.weight", (kv, HIDDEN)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{at}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def _tiny(layers: int, ranks: int) -> Iterator[tuple[str, Shape]]:
    for name, shape in _llama(layers):
        yield name, (ranks, 8)[: len(shape)]


def make(recipe: Recipe, root: Path) -> Path:
    """The folder of the rank files under `root`, written by a process of its own unless it is there."""
    leaf = root / recipe.name / "global_step_1" / "actor"
    if not (leaf / "fsdp_config.json").exists():  # written last
        command = [sys.executable, "-m", "benches.checkpoints", str(leaf), json.dumps(asdict(recipe))]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return leaf


# ---- in the process that writes ------------------------------------------------------------------------


def write(leaf: Path, recipe: Recipe) -> None:
    """Writes every rank's file, and what verl puts beside them."""
    write_ranks(leaf, recipe.shapes(), recipe.ranks, recipe.dtype, recipe.cut)
    write_config(leaf / "huggingface", recipe)
    config = {"FSDP_version": 2, "world_size": recipe.ranks}
    (leaf / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def write_ranks(
    leaf: Path, shapes: Mapping[str, Shape], ranks: int, dtype: str = "bfloat16", cut: int = 0
) -> None:
    """Writes every rank's file of tensors of these shapes, sharded along `cut`."""
    import torch

    leaf.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    noise = torch.randn(1 << 24).to(getattr(torch, dtype))
    for rank in range(ranks):
        state = _state(shapes, ranks, cut, rank, noise)
        torch.save(state, leaf / f"model_world_size_{ranks}_rank_{rank}.pt")


def _state(
    shapes: Mapping[str, Shape], ranks: int, dim: int, rank: int, noise: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The state dict of one rank: DTensors on a one-dimensional mesh."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    state: dict[str, torch.Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        cut = min(dim, len(shape) - 1)
        assert shape[cut] % ranks == 0, f"{name}: {shape} over {ranks} ranks"
        local = [*shape]
        local[cut] //= ranks
        state[name] = DTensor.from_local(
            values(noise, prod(local), number * 7919 + rank * 104729).view(local),
            mesh,
            [Shard(cut)],
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(prod(shape[at + 1 :]) for at in range(len(shape))),
        )
    return state


def values(noise: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """`count` elements of the noise from another place for each seed, in a storage of their own."""
    import torch

    start = seed % (len(noise) // 2)
    cycle = noise[start:]
    repeats = -(-count // len(cycle))
    values = cycle.repeat(repeats)[:count] if repeats > 1 else cycle[:count]
    return torch.clone(values, memory_format=torch.contiguous_format)


def write_config(folder: Path, recipe: Recipe) -> None:
    """A tokenizer, without which verl's merger stops, and the config of the shapes."""
    from tests.makers.layout import write_huggingface_dir

    write_huggingface_dir(None, folder)
    (folder / "generation_config.json").unlink()  # transformers refuses to save that of the tests
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": recipe.layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": recipe.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Recipe(**json.loads(sys.argv[2])))
