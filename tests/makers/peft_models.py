"""Tiny models with real PEFT adapters, trained as far as random numbers go; and what PEFT makes of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of a tiny Llama or one of its kin."""

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(3, 11).reshape(2, 4)


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT and transformers warn of much that is meant here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def llama(**fields: Any) -> nn.Module:
    """A tiny Llama in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **fields})
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """A tiny GPT-2, whose layers are Conv1D and whose head is tied."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def save_base(model: nn.Module, folder: Path) -> Path:
    """Write the model as transformers does."""
    with quiet():
        model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def randomised(peft_model: nn.Module, *, integers: bool = False, seed: int = 1) -> nn.Module:
    """The adapter's tensors with random values: PEFT starts with products of zero.

    With `integers`, those of the base and of products are small whole numbers, so that sums are exact.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if integers:
                parameter.copy_(
                    torch.randint(-4, 5, parameter.shape, generator=generator).to(parameter.dtype)
                )
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
            elif parameter.requires_grad or "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return peft_model


def adapted(
    base: Path, folder: Path, lora: dict[str, Any], *, make: Callable[..., Any] | None = None, **options: Any
) -> Path:
    """An adapter for the model in the folder `base`, made by PEFT with these fields and saved in `folder`."""
    import peft

    integers = options.pop("integers", False)
    seed = options.pop("seed", 1)
    with quiet():
        model = load(base, make)
        if "resize" in options:
            model.resize_token_embeddings(options.pop("resize"))
        torch.manual_seed(seed)
        model = peft.get_peft_model(model, peft.LoraConfig(**lora))
        randomised(model, integers=integers, seed=seed)
        if integers:  # the base too
            model.unload().save_pretrained(base)
            model = peft.get_peft_model(load(base, make), peft.LoraConfig(**lora))
            randomised(model, integers=True, seed=seed)
        model.save_pretrained(folder, **options)
    return folder


def load(base: Path, make: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The model in a folder, in float32, by the class that config.json names unless `make` says otherwise."""
    with quiet():
        if make is None:
            config = transformers.AutoConfig.from_pretrained(base)
            make = getattr(transformers, config.architectures[0]).from_pretrained
        return make(base, **options).eval()


def with_adapter(base: Path, adapter: Path, make: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The model with the adapter on it, as PEFT loads it."""
    import peft

    with quiet():
        return peft.PeftModel.from_pretrained(load(base, make, **options), adapter).eval()


def scalings(peft_model: nn.Module) -> dict[str, float]:
    """PEFT's own scale of every adapted module."""
    prefix = "base_model.model."
    return {
        name.removeprefix(prefix): module.scaling["default"]
        for name, module in peft_model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }


def logits(model: nn.Module) -> torch.Tensor:
    """What the model answers to a fixed prompt."""
    with torch.no_grad():
        return model(input_ids=IDS).logits
