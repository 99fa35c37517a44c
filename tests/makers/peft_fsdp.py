"""Models with real PEFT adapters, trained (that is, drawn at random) and sharded by FSDP in verl's layout.

    peft_fsdp(root, "llama", adapters={"default": {"r": 8, "target_modules": ["q_proj"]}})

Beside the rank files stand what PEFT itself saves (`reference`), and the base model's tensors before PEFT.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.makers.fsdp import apply_fsdp2, check_gathered, layers_of, open_mesh, save_rank, whole_state
from tests.makers.layout import verl_leaf, write_huggingface_dir, write_verl_surroundings
from tests.makers.models import MODELS
from tests.makers.ranks import run_ranks

Mesh = tuple[tuple[str, int], ...]
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]


@dataclass(frozen=True)
class MadeLora:
    """A checkpoint on disk, and what went into it."""

    root: Path
    leaf: Path  # the folder of the rank files
    base: dict[str, torch.Tensor] = field(repr=False)  # before PEFT
    trained: dict[str, torch.Tensor] = field(repr=False)  # the PEFT model's, before it was sharded
    logits: dict[str, torch.Tensor] = field(repr=False)  # of PROMPT, by adapter

    @property
    def sidecars(self) -> Path:
        """The folder of config.json."""
        return self.leaf / "huggingface"

    def reference(self, adapter: str = "default") -> Path:
        """The folder that PEFT saved the adapter in."""
        return self.root / "reference" / ("" if adapter == "default" else adapter)


def peft_fsdp(
    root: Path,
    model_name: str,
    adapters: Mapping[str, Mapping[str, Any]],
    mesh: Mesh = (("fsdp", 2),),
    *,
    dtype: torch.dtype = torch.float32,
    version: int = 2,
    meta: Mapping[str, Any] | None = None,
    lora_only: bool = False,
    injected: bool = False,
) -> MadeLora:
    """The model with these adapters (name -> fields of LoraConfig), sharded by FSDP `version`.

    `meta` is verl's lora_train_meta.json; `lora_only` is its setting `save_lora_only`. `injected` puts the
    adapter into the model, without PeftModel around it.
    """
    leaf = verl_leaf(root)
    options = {"dtype": dtype, "version": version, "lora_only": lora_only, "injected": injected}
    base, trained, logits = run_ranks(
        _rank, _size(mesh), root, leaf, model_name, dict(adapters), mesh, options, timeout=120.0
    )[0]
    write_verl_surroundings(root, leaf, _size(mesh), version)
    if meta is not None:
        (leaf / "lora_train_meta.json").write_text(json.dumps(dict(meta), indent=4))
    return MadeLora(root, leaf, base, trained, logits)


def _size(mesh: Mesh) -> int:
    size = 1
    for _, length in mesh:
        size *= length
    return size


def build_base(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of tests.makers.models, or one of `OWN`, which computes what a loaded one does.

    Buffers that a loader computes (rotary frequencies) keep their values.
    """
    model = {**MODELS, **OWN}[name]().to(dtype)
    _draw(model, list(model.state_dict()), seed=0)
    return model.eval()


def _sequence_classifier() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=1, vocab_size=18, num_labels=5, pad_token_id=2, attention_bias=True
    )
    return transformers.LlamaForSequenceClassification(config)


OWN = {"classifier": _sequence_classifier}


# ---- in the ranks ----------------------------------------------------------------------------------------


def _rank(
    rank: int,
    root: Path,
    leaf: Path,
    model_name: str,
    adapters: dict[str, dict[str, Any]],
    mesh: Mesh,
    options: dict[str, Any],
) -> Any:
    warnings.simplefilter("ignore")
    model = build_base(model_name, options["dtype"])
    base = whole_state(model)
    if rank == 0:
        write_huggingface_dir(model, leaf / "huggingface", dtype=options["dtype"])
    wrapped = _with_adapters(model, adapters, injected=options["injected"])
    logits = {}
    if not options["injected"]:
        for name in adapters:
            wrapped.set_adapter(name)
            with torch.no_grad():  # LoRA on a parameter changes the order of the state dict here
                logits[name] = wrapped(input_ids=torch.tensor(PROMPT)).logits
        if rank == 0:
            wrapped.save_pretrained(root / "reference")
    truth = whole_state(wrapped)
    state = _sharded_state(wrapped, mesh, options["version"])
    check_gathered(state, truth)
    if options["lora_only"]:  # as verl's checkpoint manager chooses them
        state = {name: tensor for name, tensor in state.items() if "lora_" in name or ".adapter_" in name}
    save_rank(leaf, rank, _size(mesh), state)
    return (base, truth, logits) if rank == 0 else None


def _with_adapters(model: nn.Module, adapters: dict[str, dict[str, Any]], *, injected: bool) -> nn.Module:
    """The PEFT model, its adapters' tensors drawn at random, and trained biases moved."""
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    before = set(model.state_dict())
    (first, fields), *others = adapters.items()
    if injected:
        wrapped = inject_adapter_in_model(LoraConfig(**fields), model, first)
    else:
        wrapped = get_peft_model(model, LoraConfig(**fields), first, autocast_adapter_dtype=False)
        for name, more in others:
            wrapped.add_adapter(name, LoraConfig(**more), autocast_adapter_dtype=False)
    marks = ("lora_", "modules_to_save.", "trainable_tokens_delta.")
    trained = [name for name in wrapped.state_dict() if any(mark in name for mark in marks)]
    assert trained
    assert not before & set(trained)
    _draw(wrapped, trained, seed=1)
    return wrapped.eval()


def _draw(model: nn.Module, names: list[str], seed: int) -> None:
    """Random values for these tensors of the model, a quarter as large as a unit normal's."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    with torch.no_grad():
        for name in names:
            if state[name].is_floating_point():
                state[name].copy_(torch.randn(state[name].shape, generator=generator) / 4)


def _sharded_state(model: nn.Module, mesh: Mesh, version: int) -> dict[str, Any]:
    if version == 2:
        apply_fsdp2(model, open_mesh(mesh), "verl")
        return model.state_dict()
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    inner = layers_of(model)
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=open_mesh(mesh),
        device_id=torch.device("cpu"),
        use_orig_params=True,  # trained and frozen parameters in one unit
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: lambda_auto_wrap_policy(
            module, recurse, nonwrapped_numel, lambda_fn=lambda each: each in inner
        ),
    )
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, config):
        return dict(wrapped.state_dict())
