"""A tiny random Hugging Face model for each family that Megatron trains, saved as the hub has it.

`original(name, folder)` builds it and saves it with `save_pretrained`, so the names, dtypes and bytes of
the truth are transformers' own. Every tensor is random, norms and biases included, and seeded by the
family's name. Multi-token-prediction layers, which transformers does not build, are added to the saved
file under the names of the hub's releases (deepseek-ai/DeepSeek-V3, zai-org/GLM-4.5, Qwen/Qwen3-Next).
"""

from __future__ import annotations

import json
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

VOCABULARY = 120
HIDDEN = 32
HEADS = 4
GROUPS = 2
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
WIDE = {"head_dim": 16}  # not hidden / heads
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": HEADS,
}
GROUPED = {"n_group": 2, "topk_group": 1, "n_shared_experts": 2, "n_routed_experts": 4, **MOE}
SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 40, **MOE}
DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}
LLAMA4 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
}


IMAGE_TOKENS = {"image_token_id": 101, "video_token_id": 102, "vision_start_token_id": 103}
DEEPSEEK_MTP = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "eh_proj.weight")
QWEN3_NEXT_MTP = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", "fc.weight")


@dataclass(frozen=True)
class Spec:
    """Which classes of transformers, and the settings beyond `BASE`; `vision` makes it a vision model."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    head: str = "ForCausalLM"
    vision: dict[str, Any] | None = None
    mtp: int = 0


QWEN2_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "fullatt_block_indexes": [1],
    "window_size": 16,
}
QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}


def _mrope(*section: int) -> dict[str, Any]:
    """Rotary settings of a vision-language model; the sections add up to half of head_dim."""
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}
    }


SPECS: dict[str, Spec] = {
    "llama": Spec("Llama", {"num_hidden_layers": 4, **WIDE}),
    "llama-tied": Spec("Llama", {"tie_word_embeddings": True}),
    "llama-mha": Spec("Llama", {"num_key_value_heads": HEADS}),
    "mistral": Spec("Mistral", WIDE),
    "qwen2": Spec("Qwen2", {"num_hidden_layers": 4}),
    "qwen2-tied": Spec("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-value": Spec("Qwen2", {"num_labels": 1}, "ForTokenClassification"),
    "qwen2-reward": Spec("Qwen2", {"num_labels": 1}, "ForSequenceClassification"),
    "qwen3": Spec("Qwen3", {"num_hidden_layers": 4, **WIDE}),
    "qwen2-moe": Spec("Qwen2Moe", SHARED),
    "qwen3-moe": Spec("Qwen3Moe", {"num_hidden_layers": 4, "num_experts": 4, **MOE, **WIDE}),
    "mixtral": Spec("Mixtral", {"num_local_experts": 4, **WIDE}),
    "deepseek-v2": Spec("DeepseekV2", {**GROUPED, **MLA, "first_k_dense_replace": 1}),
    "deepseek-v2-lite": Spec(
        "DeepseekV2", {**GROUPED, **MLA, "first_k_dense_replace": 1, "q_lora_rank": None}
    ),
    "deepseek-v3": Spec("DeepseekV3", {**GROUPED, **MLA, "first_k_dense_replace": 1}),
    "deepseek-v3-mtp": Spec("DeepseekV3", {**GROUPED, **MLA, "first_k_dense_replace": 1}, mtp=2),
    "moonlight": Spec("DeepseekV3", {**GROUPED, **MLA, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "glm4": Spec("Glm4", {"attention_bias": True, **WIDE}),
    "glm4-moe": Spec(
        "Glm4Moe",
        {**GROUPED, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True, **WIDE},
        mtp=1,
    ),
    "gemma2": Spec("Gemma2", {"tie_word_embeddings": True, **WIDE}),
    "gemma3": Spec("Gemma3", {"tie_word_embeddings": True, **WIDE}),
    "phi3": Spec("Phi3"),
    "gpt-oss": Spec(
        "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, **WIDE}
    ),
    "qwen3-next": Spec("Qwen3Next", {**SHARED, **DELTA, **WIDE}, mtp=1),
    "qwen3-next-one-group": Spec("Qwen3Next", {**SHARED, **DELTA, **WIDE, "num_key_value_heads": 1}),
    "llama4": Spec("Llama4", {**LLAMA4, **WIDE}),
    "qwen2.5-vl": Spec("Qwen2_5_VL", _mrope(1, 1, 2), "ForConditionalGeneration", QWEN2_VISION),
    "qwen3-vl": Spec("Qwen3VL", {**_mrope(2, 3, 3), **WIDE}, "ForConditionalGeneration", QWEN3_VISION),
    "qwen3-vl-tied": Spec(
        "Qwen3VL",
        {**_mrope(2, 3, 3), **WIDE, "tie_word_embeddings": True},
        "ForConditionalGeneration",
        QWEN3_VISION,
    ),
    "qwen3-vl-moe": Spec(
        "Qwen3VLMoe",
        {**_mrope(2, 3, 3), **WIDE, "num_experts": 4, **MOE},
        "ForConditionalGeneration",
        QWEN3_VISION,
    ),
}


@dataclass(frozen=True)
class Original:
    """A model as transformers saved it, and the bytes that a merge has to give back."""

    name: str
    folder: Path
    config: dict[str, Any]
    text_config: dict[str, Any]  # of the language model, with the defaults of its class
    truth: dict[str, torch.Tensor] = field(repr=False)


def original(name: str, folder: Path) -> Original:
    """The model called `name` (see `SPECS`), saved in `folder`, as it comes back from there."""
    spec = SPECS[name]
    model = _randomised(_built(spec), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a random config is not one that transformers expects
        model.save_pretrained(folder)  # type: ignore[operator]
    path = folder / "model.safetensors"
    truth = _as_on_the_hub(spec, load_file(path))
    truth |= _mtp_tensors(name, truth, spec)
    save_file(truth, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = model.config.get_text_config().to_dict()  # type: ignore[operator, union-attr]
    return Original(name, folder, config, text, truth)


def load(spec_name: str, folder: Path) -> nn.Module:
    """The model in `folder` as transformers loads it; every tensor of the model has to be there."""
    import transformers

    spec = SPECS[spec_name]
    cls = getattr(transformers, spec.kind + spec.head)
    model, info = cls.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    assert all(".layers." in key or key.startswith("mtp.") for key in info["unexpected_keys"]), info
    loaded: nn.Module = model.eval()
    return loaded


def logits(model: nn.Module) -> torch.Tensor:
    """Of one fixed sequence; a model with a vision tower is shown one image too."""
    ids = torch.arange(3, 19)[None] % VOCABULARY
    inputs: dict[str, torch.Tensor] = {}
    config: Any = model.config
    if hasattr(config, "vision_config"):
        vision = config.vision_config
        ids[0, 4] = config.image_token_id
        patch = 3 * vision.temporal_patch_size * vision.patch_size**2
        inputs["image_grid_thw"] = torch.tensor([[1, 2, 2]])
        inputs["pixel_values"] = torch.randn(4, patch, generator=torch.Generator().manual_seed(1))
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).long()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, **inputs).logits
    return result


def ask_here(patch: pytest.MonkeyPatch) -> None:
    """Has lazymerge ask transformers about a config in this process, which has it loaded, and keep nothing.

    What is asked and how answers are compared stays as it is; a process for each family costs seconds.
    """
    from lazymerge.conversions import architecture, meta_model

    def ask(request: dict[str, Any]) -> dict[str, Any] | None:
        model = meta_model.build(request["config"])
        return None if model is None else {"architecture": meta_model.describe(model)}

    patch.setenv("LAZYMERGE_CACHE", "")
    patch.setattr(architecture, "_ask", ask)


def _built(spec: Spec) -> nn.Module:
    """The model of a specification, in bfloat16."""
    import transformers

    settings = {**BASE, **spec.settings}
    if spec.mtp:
        settings["num_nextn_predict_layers"] = spec.mtp
    if spec.vision is not None:
        config = getattr(transformers, spec.kind + "Config")(
            text_config=settings,
            vision_config=spec.vision,
            **IMAGE_TOKENS,
            tie_word_embeddings=settings["tie_word_embeddings"],
        )
    else:
        config_name = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}.get(spec.kind)
        config = getattr(transformers, config_name or spec.kind + "Config")(**settings)
    model: nn.Module = getattr(transformers, spec.kind + spec.head)(config)
    return model.to(torch.bfloat16)


def _randomised(model: nn.Module, name: str) -> nn.Module:
    """The model with random values, the same for the same name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for key, tensor in model.state_dict(keep_vars=True).items():
            values = 0.3 * torch.randn(tensor.shape, generator=generator)
            if key.endswith("e_score_correction_bias"):
                tensor.data = tensor.data.float()  # the hub ships it in float32 beside bfloat16 weights
            if key.endswith("linear_attn.norm.weight"):
                values = _exact_around_one(tensor.shape, generator)
            tensor.copy_(values)
    return model


def _exact_around_one(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Values of which both w and w - 1 are bfloat16: steps of 1/128 from 0.5 up to 2."""
    steps = torch.randint(-64, 128, shape, generator=generator)
    return 1 + steps.float() / 128


def _as_on_the_hub(spec: Spec, truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in the hub's layout: transformers saves Qwen3-VL-MoE's experts as it holds them, (E, 2f,
    hidden) and (E, hidden, f), where Qwen/Qwen3-VL-30B-A3B-Instruct has them transposed. It loads both.
    """
    if spec.kind != "Qwen3VLMoe":
        return truth
    stacked = [name for name in truth if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    return truth | {name: truth[name].transpose(1, 2).contiguous() for name in stacked}


def _mtp_tensors(name: str, truth: dict[str, torch.Tensor], spec: Spec) -> dict[str, torch.Tensor]:
    """Multi-token-prediction layers like the last decoder layer, with random values of their own.

    The hub's DeepSeek-V3 and GLM-4.5 put them after the decoder's layers, Qwen3-Next under `mtp.`. The
    copies of embedding and head that DeepSeek-V3 ships with them are not in Megatron's files, so not here.
    """
    layers = {**BASE, **spec.settings}["num_hidden_layers"]
    template = f"model.layers.{layers - 1}."
    like: dict[str, torch.Tensor] = {}
    for depth in range(spec.mtp):
        at, outer, names = f"model.layers.{layers + depth}.", f"model.layers.{layers + depth}.", DEEPSEEK_MTP
        if spec.kind == "Qwen3Next":
            at, outer, names = f"mtp.layers.{depth}.", "mtp.", QWEN3_NEXT_MTP
        like |= {at + key.removeprefix(template): t for key, t in truth.items() if key.startswith(template)}
        like |= {outer + norm: torch.empty(HIDDEN, dtype=torch.bfloat16) for norm in names[:3]}
        like[outer + names[3]] = torch.empty(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} mtp".encode()))
    return {key: torch.randn(t.shape, generator=generator).to(t.dtype) for key, t in sorted(like.items())}
