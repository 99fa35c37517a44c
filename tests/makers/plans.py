"""A checkpoint for each kind of plan, as large as is asked for, made by the framework that is its own.

What they have in common is what bounds their memory: how the bytes of a tensor are found, or computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import Partial, Shard

from tests.makers.dtensors import Entry, Local, dtensors
from tests.makers.megatron_files import megatron_run, write_torch
from tests.makers.megatron_inverse import LOCAL, to_megatron
from tests.makers.megatron_models import Original
from tests.makers.megatron_shards import Parallel
from tests.makers.peft_models import LINEAR, SIZES, adapted, llama, quiet, save_base


@dataclass(frozen=True)
class Kind:
    """What `lazymerge.merge` is given; and whether it imports torch."""

    src: Path
    options: dict[str, Any] = field(default_factory=dict)
    torch: bool = False


def sharded(root: Path, width: int, dim: int, **options: Any) -> Kind:
    """Two tensors of [4 x width, width] over two ranks."""
    entries: dict[str, Entry] = {f"w{i}": (torch.randn(4 * width, width), (Shard(dim),)) for i in range(2)}
    return Kind(dtensors(root, (("fsdp", 2),), entries).root, options, options.get("dtype") == "fp16")


def turned(root: Path, width: int, **options: Any) -> Kind:
    """Two tensors that were saved transposed."""
    root.mkdir()
    torch.save({f"w{i}": torch.randn(4 * width, width).t() for i in range(2)}, root / "model.pt")
    return Kind(root, options)


def tied(root: Path, width: int) -> Kind:
    """A head that is tied to the embedding and was saved apart: both are compared while it is planned."""
    root.mkdir()
    embedding = torch.randn(4 * width, width)
    torch.save(
        {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}, root / "model.pt"
    )
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (root / "config.json").write_text(json.dumps(config))
    return Kind(root, {"check": False, "names": "runtime"})


def partial(root: Path, width: int) -> Kind:
    """A sum over two ranks, in bf16."""
    parts = tuple(torch.randn(4 * width, width).bfloat16() for _ in range(2))
    entry = Local(parts, (Partial(),), parts[0].shape)
    return Kind(dtensors(root, (("tp", 2),), {"w": entry}).root, torch=True)


def adapter(root: Path, width: int, *, columns: bool = False, **lora: Any) -> Kind:
    """A Llama in bf16, or a GPT-2 whose matrices lie in columns, and PEFT's adapter on all linear layers."""
    if columns:
        config = transformers.GPT2Config(vocab_size=32, n_embd=width, n_layer=1, n_head=4, n_positions=32)
        model: Any = transformers.GPT2LMHeadModel(config)
        lora |= {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    else:
        model = llama(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=1)
        lora["target_modules"] = LINEAR
    base = save_base(model.bfloat16(), root / "base")
    made = adapted(base, root / "adapter", {"r": 16, **lora})
    return Kind(base, {"adapter": str(made)})


def experts(root: Path, width: int) -> Kind:
    """Experts fused as they are when they run, which the hub has one by one."""
    config = transformers.Qwen3MoeConfig(
        **{**SIZES, "hidden_size": width, "moe_intermediate_size": width // 2, "num_hidden_layers": 1},
        **{"num_experts": 8, "num_experts_per_tok": 2, "head_dim": width // 4},
        tie_word_embeddings=False,
    )
    with quiet():
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    state: dict[str, Entry] = {name: (tensor, (Shard(0),)) for name, tensor in model.state_dict().items()}
    made = dtensors(root, (("fsdp", 2),), state)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(made.leaf / "huggingface")
    return Kind(made.root)


def megatron(root: Path, width: int) -> Kind:
    """A Llama over two tensor-parallel ranks: query, key and value in one, gate and up in another."""
    hub = save_base(llama(hidden_size=width, intermediate_size=4 * width).bfloat16(), root / "hub")
    config = json.loads((hub / "config.json").read_text())
    original = Original("llama", hub, config, config, load_file(hub / "model.safetensors"))
    model = to_megatron(original, norms=LOCAL)
    run = megatron_run(root / "run", lambda step: write_torch(step, model, Parallel(tp=2)))
    return Kind(run, {"hf_config": str(hub)})


KINDS: dict[str, Callable[[Path, int], Kind]] = {
    "rows": lambda root, width: sharded(root, width, 0),
    "columns": lambda root, width: sharded(root, width, 1),
    "bin": lambda root, width: sharded(root, width, 0, output_format="bin"),
    "cast": lambda root, width: sharded(root, width, 0, dtype="bf16"),
    "cast columns": lambda root, width: sharded(root, width, 1, dtype="bf16"),
    "cast by torch": lambda root, width: sharded(root, width, 0, dtype="fp16"),
    "transposed": turned,
    "transposed cast": lambda root, width: turned(root, width, dtype="bf16"),
    "tied": tied,
    "partial": partial,
    "fold": adapter,
    "DoRA": lambda root, width: adapter(root, width, use_dora=True),
    "DoRA in columns": lambda root, width: adapter(root, width, columns=True, use_dora=True),
    "experts": experts,
    "megatron": megatron,
}
"""By name: from an empty folder and the width of its matrices."""
