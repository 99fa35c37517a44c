"""Megatron checkpoints that megatron-core itself wrote, on a CPU, from tiny random Hugging Face models.

    python -m tests.makers.megatron_core tests/data/megatron_core [case ...]

megatron-core is no dependency of the tests: tests/data/megatron_core/README.md says how to install it, and
lies beside what this made. A case is made in three steps:

1. a transformers model in bfloat16 is drawn at random and saved: the truth;
2. its tensors are laid out as Megatron's (`megatron_core_layout`), and Megatron's own forward with them has
   to give the logits of transformers;
3. each rank builds its part of a `GPTModel`, fills it, and Megatron's code saves (`megatron_core_ranks`).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.makers.megatron_core_ranks import Case, check_rank, save_rank
from tests.makers.ranks import run_ranks

CASES = {
    "td_local_qwen2_tp2pp2": Case("qwen2", tp=2, pp=2),
    "td_local_qwen3_tied_tp2": Case("qwen3_tied", tp=2),
    "td_local_llama_pp2vpp2": Case("llama", pp=2, vpp=2),
    "td_local_llama_tp4": Case("llama_short", tp=4),  # more ranks than groups of query heads
    "td_local_qwen3moe_ep2": Case("qwen3_moe", ep=2),
    "td_local_mixtral_tp2ep2etp1": Case("mixtral", tp=2, ep=2, etp=1),
    "td_local_deepseek_tp2": Case("deepseek_v3", tp=2),
    "td_te_qwen3moe_tp2ep2etp1": Case("qwen3_moe", tp=2, ep=2, etp=1, spec="te"),
    "td_te_deepseek_tp2": Case("deepseek_v3", tp=2, spec="te"),
    "torch_local_qwen2_tp2pp2": Case("qwen2", tp=2, pp=2, format="torch"),
    "torch_local_deepseek_tp2ep2": Case("deepseek_v3", tp=2, ep=2, format="torch"),
    "torch_te_deepseek_pp2ep2": Case("deepseek_v3", pp=2, ep=2, spec="te", format="torch"),
}

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MLA = {
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
}
DEEPSEEK_MOE = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
QWEN_MOE = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 4}),
    "llama_short": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3_tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", QWEN_MOE),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", {**MLA, **DEEPSEEK_MOE}),
}


def write_truth(name: str, folder: Path) -> Any:
    """Writes config.json and model.safetensors of the model called `name`; returns the model."""
    import transformers

    kind, changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes}, dtype="bfloat16")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # a tied pair comes once
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    for module in model.modules():  # both sides keep it in float32; no value here is one of bfloat16
        if hasattr(module, "e_score_correction_bias"):
            shape = module.e_score_correction_bias.shape
            module.e_score_correction_bias = torch.rand(shape, generator=generator) * 0.1
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        folder.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(Path(temporary, file), folder / file)
    return model.eval()


def make(name: str, root: Path) -> Path:
    """Makes the case called `name` (see `CASES`) in a folder of that name in `root`, which is returned: `hf`
    and `ckpt`, the latter as Megatron-LM's --save.

    Raises `RankError` if Megatron's logits are not those of transformers, or if it cannot be run.
    """
    case, folder = CASES[name], root / name
    model = write_truth(case.model, folder / "hf")
    tokens = torch.arange(2, 26)[None]
    with torch.no_grad():
        expected = model.float()(tokens).logits  # the weights are those saved: float32 holds all of bfloat16
    run_ranks(check_rank, 1, Case(case.model), folder / "hf", tokens, expected)
    step = folder / "ckpt" / "iter_0000001"
    step.mkdir(parents=True)
    run_ranks(save_rank, case.world_size, case, folder / "hf", step, timeout=120.0)
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


if __name__ == "__main__":
    for chosen in sys.argv[2:] or CASES:
        print(make(chosen, Path(sys.argv[1])))
