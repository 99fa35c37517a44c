"""Tiny models of every kind that transformers' table of conversions has, by default configs cut down.

A default config is as large as the model that it was written for. Cut are its counts (layers, experts,
vocabulary), and all of its widths by one factor, so that what has to divide still does: 32 heads of 128 out
of 4096 are 32 heads of 4 out of 128. Lists with an entry for each layer are cut with the layers.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.makers.fsdp import apply_fsdp2, open_mesh, save_rank
from tests.makers.layout import Made, verl_leaf, write_huggingface_dir, write_verl_surroundings
from tests.makers.ranks import run_ranks

MOST = 15_000_000
"""Elements of a model that is called tiny."""

FACTORS = (64, 32, 16, 8, 4, 2, 1)
LAYERS = 2

COUNTS = {  # pattern of a field -> what it is at most
    r"(^|_)(num|n)_(\w+_)?(layers?|blocks)$": LAYERS,
    r"^(depth|encoder_layers|decoder_layers|n_layers?)$": LAYERS,
    r"(^|_)(num|n)_(\w+_)?experts$": 4,
    r"^moe_num_experts$": 4,
    r"^(moe_topk|moe_k|num_experts_per_tok|num_experts_per_token|top_k|moe_top_k)$": 2,
    r"^(n_group|topk_group|num_expert_group)$": 1,
    r"^(first_k_dense_replace|num_dense_layers)$": 1,
    r"^(\w+_)?vocab_size(_\w+)?$": 256,
    r"^(max_position_embeddings|n_positions|max_source_positions)$": 64,
    r"^num_queries$": 10,
}
WIDTH = re.compile(
    r"(^|_)(hidden_size|size|sizes|dim|dims|dimension|rank|d_model|d_ff|d_kv|d_state|n_embd|n_inner|width|channels)$"
)
NO_WIDTH = re.compile(
    r"vocab|patch|image|window|kernel|chunk|tile|crop|batch|video|pad|temporal|spatial|grid|conv_k|in_channels"
    r"|num_channels|group|block_size|type_|scale|fft|pool|axis|frame|token|pos|resolution"
)
DROPPED = {"stage_names", "out_features", "out_indices", "_out_features", "_out_indices", "per_layer_config"}
"""What says of layers by number that they are there, and has a default."""

_DOTS3 = {
    "per_layer_config": {},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "index_head_dim": 8, "qk_rope_head_dim": 8},
}
_ERNIE_TEXT = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}

_DETR = (
    "ConditionalDetrForSegmentation",
    "ConditionalDetrModel",
    "DeformableDetrForObjectDetection",
    "DetrForSegmentation",
    "DetrModel",
)
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "out_indices": [1, 2, 3, 4],
    "stage_names": ["stem", "stage1", "stage2", "stage3", "stage4"],
}
_OVER_RESNET: dict[str, Any] = {
    "backbone_config": _RESNET,
    "use_timm_backbone": False,
    "backbone": None,
}
_MIMI = {
    "hidden_size": 64,
    "num_filters": 4,
    "upsample_groups": 64,
    "intermediate_size": 32,
    "codebook_dim": 16,
    "codebook_size": 32,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": 4,
}
_NARROW = {"num_filters": 2}
_VIBE_VOICE = {"acoustic_tokenizer_encoder_config": _NARROW, "semantic_tokenizer_encoder_config": _NARROW}
_PADDED = {"vocab_size": 256, "unpadded_vocab_size": 250}
_EMU3 = {"vocabulary_map": {"<|extra_200|>": 5, "<image>": 6, "<|visual token 000001|>": 7}}
_SAPIENS2 = [
    f"Sapiens2For{kind}"
    for kind in (
        "SemanticSegmentation",
        "NormalEstimation",
        "PointmapEstimation",
        "PoseEstimation",
        "ImageMatting",
    )
]
_SAPIENS2_HEAD: dict[str, Any] = {
    "head_config": {
        "upsample_out_channels": [8, 8],
        "upsample_kernel_sizes": [4, 4],
        "conv_out_channels": [8, 8],
        "conv_kernel_sizes": [1, 1],
    }
}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "AyaVisionModel": {"vision_config": {"num_attention_heads": 2}},
    "AyaVisionForConditionalGeneration": {"vision_config": {"num_attention_heads": 2}},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    **dict.fromkeys(_DETR, _OVER_RESNET),
    "Cosmos3EdgeForConditionalGeneration": {"text_config": {"head_dim": 128}},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteForConditionalGeneration": {"text_config": _DOTS3},
    "Dots3NoteModel": {"text_config": _DOTS3},
    "Dots3NoteTextModel": _DOTS3,
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "DoryForCausalLM": {
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
    },
    "Emu3Model": _EMU3,
    "Emu3ForConditionalGeneration": _EMU3,
    "Ernie4_5_VLMoeForConditionalGeneration": {"text_config": _ERNIE_TEXT},
    "EsmModel": {"vocab_size": 33, "pad_token_id": 1},
    "Gemma3nForCausalLM": {"intermediate_size": [32, 32], "num_kv_shared_layers": 0},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 16, "mamba_d_head": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 4, "num_experts": 4},
    "HunYuanVLForConditionalGeneration": {"text_config": {"head_dim": 4}},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    **dict.fromkeys(["Inkling2ForCausalLM", "Inkling2LoopForCausalLM"], _PADDED),
    "Inkling2ForConditionalGeneration": {"text_config": _PADDED},
    "Inkling2LoopForConditionalGeneration": {"text_config": _PADDED},
    "Kimi_K25ForConditionalGeneration": {"vision_config": {"hidden_size": 64, "num_attention_heads": 4}},
    "MimiModel": _MIMI,
    "MimiDecoderModel": _MIMI,
    "VibeVoiceAsrModel": _VIBE_VOICE,
    "VibeVoiceAsrForConditionalGeneration": _VIBE_VOICE,
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "Qwen3OmniMoeForConditionalGeneration": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 16}}
    },
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    **dict.fromkeys(_SAPIENS2, _SAPIENS2_HEAD),
    "MaskFormerModel": {"backbone_config": {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}},
}
"""Class name -> fields of its config, of its parts too, that the cutting does not get right."""

LEAST_CUT = {"MLCDVisionModel": 16, "Step3p7ForConditionalGeneration": 8}
"""Class name -> the largest factor, where heads would be cut to nothing that its conversion can permute."""

NOT_BUILT = {
    "d_fine": "its backbone's lists of stages hang together in a way that cutting breaks",
    "inkling_mm_model": "needs scipy",
    "t5gemma2_encoder": "its class does not take the config that transformers has for it",
    "timm_wrapper": "needs timm and PIL",
    **dict.fromkeys(
        [
            "MaskFormerDetrDecoder",
            "MtpModel",
            "PPChart2TableModel",
            "UnlimitedOcrSamVisionEncoder",
            "UnlimitedOcrVisionEncoder",
            "dots3_note_audio_encoder",
            "dots3_note_vision_encoder",
            "mlcd_vision",
            "qwen3_omni_moe_text",
            "step3p5_vision",
            "xCLIPTextModel",
            "xCLIPVisionModel",
        ],
        "transformers exports no class of its own for this part of other models",
    ),
}
"""Entries of the table without a tiny model -> why."""


def entries() -> list[str]:
    """All entries of transformers' table: types of models and names of classes."""
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    return sorted(set(_build_checkpoint_conversion_mapping()) - {"legacy"})


def class_of(key: str) -> Any:
    """The class of the model to build for an entry of the table; None if transformers exports none."""
    import transformers
    from transformers.models.auto import modeling_auto

    if isinstance(getattr(transformers, key, None), type):
        return getattr(transformers, key)
    lists = (
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
        "MODEL_MAPPING_NAMES",
    )
    for name in [*lists, *(each for each in vars(modeling_auto) if each.endswith("_MAPPING_NAMES"))]:
        found = getattr(modeling_auto, name, {}).get(key)
        if isinstance(found, list | tuple):
            found = found[0]
        made = getattr(transformers, found, None) if isinstance(found, str) else None
        if isinstance(made, type) and issubclass(made, transformers.PreTrainedModel):
            return made
    return None


def tiny(model_class: Any) -> Any:
    """A model of the class on the meta device, as small as cutting makes it; raises the last try's error."""
    best: Any = None
    error: Exception | None = None
    for factor in FACTORS:
        if factor > LEAST_CUT.get(model_class.__name__, factor):
            continue
        try:
            model = on_meta(model_class, tiny_config(model_class, factor))
        except Exception as caught:  # what classes raise for sizes that do not fit has no common kind
            error = caught
            continue
        count = sum(each.numel() for each in model.state_dict().values())
        if best is None or count < best[0]:
            best = count, model
        if count < MOST:
            return model
        break
    if best is None:
        assert error is not None
        raise error
    if best[0] > MOST:
        raise ValueError(f"{best[0]:,} elements")
    return best[1]


def tiny_config(model_class: Any, factor: int) -> Any:
    """The class's default config, cut down."""
    config_class = model_class.config_class
    plain = cut(config_class().to_dict(), factor)
    return config_class.from_dict(_with(plain, EXCEPTIONS.get(model_class.__name__, {})))


def _with(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config's plain form with other fields, of its parts too."""
    inner = {
        key: _with(plain.get(key) or {}, each) for key, each in changes.items() if isinstance(each, dict)
    }
    return {**plain, **changes, **inner}


def cut(plain: Mapping[str, Any], factor: int) -> dict[str, Any]:
    """A config's plain form with counts and widths cut; those of its parts too."""
    if not all(isinstance(key, str) for key in plain):  # of numbers to labels
        return dict(plain)
    done: dict[str, Any] = {}
    lengths = {value for key, value in plain.items() if isinstance(value, int) and _count(key) == LAYERS}
    for key, value in plain.items():
        most = _count(key)
        if key in DROPPED:
            continue
        if isinstance(value, dict):
            done[key] = cut(value, factor)
        elif isinstance(value, bool):
            done[key] = value
        elif isinstance(value, int) and most is not None:
            done[key] = min(value, most)
        elif isinstance(value, int) and _is_width(key):
            done[key] = _narrow(value, factor)
        elif isinstance(value, list | tuple) and _is_width(key) and all(type(v) is int for v in value):
            done[key] = [_narrow(each, factor) for each in value]
        elif isinstance(value, list | tuple) and len(value) in lengths and len(value) > LAYERS:
            done[key] = _some_of(list(value))
        elif isinstance(value, int) and key.endswith("token_id") and value > 255:
            done[key] = 3
        else:
            done[key] = value
    return done


def _some_of(values: list[Any]) -> list[Any]:
    """Two entries of a list with one for each layer: two different ones, if there are any."""
    other = next((each for each in values if each != values[0]), values[1])
    return [values[0], other]


def _count(key: str) -> int | None:
    return next((most for pattern, most in COUNTS.items() if re.search(pattern, key)), None)


def _is_width(key: str) -> bool:
    return bool(WIDTH.search(key)) and not NO_WIDTH.search(key)


def _narrow(value: int, factor: int) -> int:
    return value // factor if value % factor == 0 and value // factor >= 2 else value


def on_meta(model_class: Any, config: Any) -> Any:
    """The model without data."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return model_class(config)


def filled(model_class: Any, seed: int = 0) -> Any:
    """The tiny model of the class with data, all of it random: what is equal by chance hides mistakes."""
    config = tiny(model_class).config
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def fsdp2_of(key: str, root: Path, world_size: int) -> tuple[Made, Path]:
    """The tiny model of an entry, sharded by `fully_shard` in verl's files, and what it saved before."""
    leaf, saved = verl_leaf(root), root.parent / "saved"
    run_ranks(_fsdp2_rank, world_size, key, leaf, saved, timeout=120)
    write_verl_surroundings(root, leaf, world_size, 2)
    write_huggingface_dir(None, leaf / "huggingface")
    shutil.copy(saved / "config.json", leaf / "huggingface")
    return Made(root, leaf, {}, world_size, (("fsdp", world_size),), 2), saved


def _fsdp2_rank(rank: int, key: str, leaf: Path, saved: Path) -> None:
    model = filled(class_of(key))
    if rank == 0:
        model.save_pretrained(saved)
    mesh = open_mesh((("fsdp", torch.distributed.get_world_size()),))
    apply_fsdp2(model, mesh, "rows")
    save_rank(leaf, rank, mesh.size(), model.state_dict())
