"""What the way back to hub names costs: a model of 128 experts, fused as it runs under transformers 5."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

from benches import roads
from benches.measure import alternate, remove
from benches.merging import Row, Settings

EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, RANKS = 128, 1024, 384, 12, 4
PLAIN = "lazymerge merge --names runtime"
HUB = "lazymerge merge (hub names)"


def experts(settings: Settings) -> list[Row]:
    """Qwen3-MoE in bf16, 4 GB, over four ranks: as it is, and as 128 experts a layer."""
    layers = 2 if settings.quick else LAYERS
    rows = []
    for place in settings.places:
        source = place.folder / "experts"
        subprocess.run([sys.executable, "-m", "benches.experts", str(source), str(layers)], check=True)
        settings.tell("experts")
        roads.ask(source)
        roads.ask(source, "--names", "runtime")
        ways = [
            roads.cp(source),
            roads.merge(source, "--names", "runtime", name=PLAIN),
            roads.merge(source, name=HUB),
        ]
        runs = alternate(ways, place, place.folder, settings.repeat, settings.tell)
        nbytes = 2 * sum(prod(shape) for shape in shapes(layers).values())
        rows += [Row("experts", place.name, name, nbytes, done) for name, done in runs.items()]
        remove(source)
    return rows


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Run-time name -> shape."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32_000, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            "self_attn.k_proj.weight": (HIDDEN // 4, HIDDEN),
            "self_attn.v_proj.weight": (HIDDEN // 4, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            "self_attn.q_norm.weight": (64,),
            "self_attn.k_norm.weight": (64,),
            "mlp.gate.weight": (EXPERTS, HIDDEN),
            "mlp.experts.gate_up_proj": (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            "mlp.experts.down_proj": (EXPERTS, HIDDEN, INTERMEDIATE),
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
        }.items():
            found[f"{at}.{name}"] = shape
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (32_000, HIDDEN)}


def main(folder: Path, layers: int) -> None:
    """Write the rank files, as `benches.checkpoints` does."""
    from benches.checkpoints import write_ranks

    write_ranks(folder, shapes(layers), RANKS)
    config = {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16"},
        **{"hidden_size": HIDDEN, "num_hidden_layers": layers, "num_experts": EXPERTS, "vocab_size": 32_000},
        **{"moe_intermediate_size": INTERMEDIATE, "intermediate_size": 4096, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "head_dim": 64, "num_experts_per_tok": 8, "decoder_sparse_step": 1},
        **{"mlp_only_layers": [], "tie_word_embeddings": False, "transformers_version": "5.24.0"},
    }
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
