"""Tiny random models, built alike in every process: transformers architectures and a zoo of odd shapes.

Every floating parameter and buffer is drawn at random, norms and biases included: two shards that are
equal by chance would hide a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 2,
}


def build_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The model called `name` (see `MODELS`), the same for the same arguments."""
    model = MODELS[name]().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:  # a tied pair comes once
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model.eval()


def hub_state(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Copies of the tensors as transformers' own `save_pretrained` has them; None for no model of its.

    Of a model with LoRA those of its base, without the LoRA. Tied ones come under each of their names.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if isinstance(model, PeftLike):
        front, base = "base_model.model.", ".base_layer"
        plain = {name.removeprefix(front): tensor for name, tensor in state.items() if "lora_" not in name}
        return {name.replace(base, ""): tensor for name, tensor in plain.items()}
    return revert_weight_conversion(model, state) if isinstance(model, PreTrainedModel) else None


def model_dtype(model: nn.Module) -> torch.dtype:
    """The element type of the model's parameters."""
    return next(model.parameters()).dtype


class Zoo(nn.Module):
    """Shapes that rank counts do not divide, dimensions of nothing, and buffers of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.five = nn.Parameter(torch.empty(5, 6))  # over 4 ranks: 2, 2, 1 and 0 rows
        self.three = nn.Parameter(torch.empty(3, 4))  # fewer rows than 4 ranks
        self.one = nn.Parameter(torch.empty(1))
        self.linear = nn.Linear(3, 7)
        self.deep = nn.Parameter(torch.empty(6, 3, 5))
        self.inner = nn.Sequential(nn.Linear(7, 9, bias=False), nn.LayerNorm(9))
        self.frozen = nn.Parameter(torch.empty(4, 2), requires_grad=False)
        self.register_buffer("count", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("ids", torch.arange(10, dtype=torch.int32).reshape(5, 2))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("passing", torch.empty(3), persistent=False)


class ScalarZoo(Zoo):
    """The zoo with a parameter of no dimension, which FSDP does not take everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(()))


class LoraLinear(nn.Module):
    """A linear layer with the parameter names that peft gives to an adapted one."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        down = nn.Linear(base.in_features, rank, bias=False)
        up = nn.Linear(rank, base.out_features, bias=False)
        self.lora_A = nn.ModuleDict({"default": down})
        self.lora_B = nn.ModuleDict({"default": up})


class _Holder(nn.Module):
    """A module whose only job is its one child's name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class PeftLike(nn.Module):
    """The state-dict names of a `PeftModel` with LoRA of rank 8 on q_proj, v_proj and down_proj."""

    def __init__(self, model: nn.Module, rank: int = 8) -> None:
        super().__init__()
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj, rank)
            layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj, rank)
            layer.mlp.down_proj = LoraLinear(layer.mlp.down_proj, rank)
        self.base_model = _Holder(model)
        self.config = model.config


def _transformer(kind: str, head: str = "ForCausalLM", **changes: Any) -> Callable[[], nn.Module]:
    """A constructor of `<kind><head>` with the settings of `TEXT` and `changes`."""

    def construct() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{**TEXT, **changes})
        return getattr(transformers, f"{kind}{head}")(config)

    return construct


def _gpt2() -> nn.Module:
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24, "vocab_size": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=1, bos_token_id=0))


MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
QWEN3 = {"head_dim": 8}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _transformer("Llama", tie_word_embeddings=False),
    "llama-tied": _transformer("Llama", tie_word_embeddings=True),
    "qwen2": _transformer("Qwen2", tie_word_embeddings=True),
    "qwen2-untied": _transformer("Qwen2", tie_word_embeddings=False),
    "qwen2-151": _transformer("Qwen2", tie_word_embeddings=True, vocab_size=151),
    "qwen2-37": _transformer("Qwen2", tie_word_embeddings=False, vocab_size=37),
    "qwen3": _transformer("Qwen3", tie_word_embeddings=False, **QWEN3),
    "qwen3-moe": _transformer("Qwen3Moe", tie_word_embeddings=False, **MOE),
    "gpt2": _gpt2,
    "qwen2-value": _transformer("Qwen2", "ForTokenClassification", num_labels=1),
    "llama-value": _transformer("Llama", "ForTokenClassification", num_labels=1, tie_word_embeddings=False),
    "llama-lora": lambda: PeftLike(_transformer("Llama", tie_word_embeddings=False)()),
    "zoo": Zoo,
    "scalar-zoo": ScalarZoo,
}
