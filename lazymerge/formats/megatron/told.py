"""Whether the trainer's arguments are those of the model whose tensors are here, by the sizes of both.

Arguments decide how rows are put in order and whether norms are centred at zero. Those of another model
would do so in silence, and do not differ in one size only.

    num_layers, num_experts               numbers of decoder.layers.L and of experts in a layer
    hidden_size                           columns of the embedding
    ffn_hidden_size                       columns of a dense layer's linear_fc2
    moe_ffn_hidden_size                   those of an expert's, ffn_hidden_size where it is not said
    moe_shared_expert_intermediate_size   those of the shared experts'
    multi_latent_attention                linear_kv_down_proj and linear_kv_up_proj, or linear_qkv
    swiglu, gated_linear_unit, ...        as many rows of linear_fc1 as linear_fc2 has columns, or twice
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint
from lazymerge.formats.megatron.experts import expert_count
from lazymerge.formats.megatron.grid import size
from lazymerge.formats.megatron.settings import is_gated
from lazymerge.gather import Gather

_LAYER = re.compile(r"decoder\.layers\.([0-9]+)\.")
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.([0-9]+)\.")
_FC2 = re.compile(
    r"(?:decoder|mtp)\.layers\..*\.mlp\.(experts\.local_experts\.[0-9]+\.|shared_experts\.)?linear_fc2\.weight"
)
_ATTENTION = re.compile(
    r"decoder\.layers\.[0-9]+\.self_attention\.(?:linear_qkv\.|(linear_kv_down_proj|linear_kv_up_proj)\.)"
)
_EMBEDDING = "embedding.word_embeddings.weight"
_FLAGS = (
    *("swiglu", "quick_geglu", "gated_linear_unit", "apply_layernorm_1p", "layernorm_zero_centered_gamma"),
    *("rotary_interleaved", "multi_latent_attention", "group_query_attention", "moe_extended_tp"),
    *("untie_embeddings_and_output_weights", "moe_grouped_gemm"),
)
_EACH_LAYER_ITS_OWN = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
_ANOTHER = "the arguments are those of another model, or files of the checkpoint are missing or were changed"


def check_told(folder: Path, gathers: Mapping[str, Gather], settings: Mapping[str, Any]) -> None:
    """Raise `InconsistentCheckpoint` where arguments and tensors contradict each other or a flag is none, and
    `IncompleteCheckpoint` for fewer layers than arguments say. What is not recorded is not compared.
    """
    for name in _FLAGS:
        if not isinstance(settings.get(name), bool | None):
            raise InconsistentCheckpoint(
                f"args: {name} is {str(settings[name])[:50]!r}, expected True or False",
                "the file is damaged or was changed; copy it again",
            )
    _check_layers(folder, gathers, size(settings, "num_layers", None))
    _check_experts(gathers, settings)
    _check_attention(gathers, settings.get("multi_latent_attention"))
    _check_gated(gathers, is_gated(settings))
    embedding = gathers.get(_EMBEDDING)
    if embedding is not None and len(embedding.shape) == 2:
        _check_columns(_EMBEDDING, embedding, settings, "hidden_size")
    if any(settings.get(name) for name in _EACH_LAYER_ITS_OWN):
        return
    of_experts = "ffn_hidden_size" if settings.get("moe_ffn_hidden_size") is None else "moe_ffn_hidden_size"
    for name, gather in gathers.items():
        match = _FC2.fullmatch(name)
        if match is None or len(gather.shape) != 2:
            continue
        if match[1] is None:
            _check_columns(name, gather, settings, "ffn_hidden_size")
        elif match[1].startswith("shared"):
            _check_columns(name, gather, settings, "moe_shared_expert_intermediate_size")
        else:
            _check_columns(name, gather, settings, of_experts)


def _check_layers(folder: Path, gathers: Mapping[str, Gather], said: int | None) -> None:
    found = len({match[1] for name in gathers if (match := _LAYER.match(name)) is not None})
    if said is not None and found != said:
        kind = IncompleteCheckpoint if found < said else InconsistentCheckpoint
        raise kind(f"{folder}: {found} decoder layers, expected {said} (num_layers)", _ANOTHER)


def _check_experts(gathers: Mapping[str, Gather], settings: Mapping[str, Any]) -> None:
    experts: dict[str, set[str]] = {}
    for name in gathers:
        match = _EXPERT.match(name)
        if match is not None:
            experts.setdefault(match[1], set()).add(match[2])
    said = expert_count(settings) if experts else None
    for where, numbers in experts.items():
        if said is not None and len(numbers) != said:
            raise InconsistentCheckpoint(
                f"{where[:-1]}: {len(numbers)} experts in the files, expected {said} (num_experts)", _ANOTHER
            )


def _check_attention(gathers: Mapping[str, Gather], latent: bool | None) -> None:
    for name in gathers:
        match = _ATTENTION.match(name)
        if match is not None and latent is not None and (match[1] is not None) != latent:
            raise InconsistentCheckpoint(f"{name}: args say multi_latent_attention = {latent}", _ANOTHER)


def _check_gated(gathers: Mapping[str, Gather], gated: bool | None) -> None:
    for name, gather in gathers.items() if gated is not None else ():
        if _FC2.fullmatch(name) is None or len(gather.shape) != 2:
            continue
        fc1 = gathers.get(name.replace(".linear_fc2.", ".linear_fc1."))
        other = gather.shape[1] * (1 if gated else 2)
        if fc1 is not None and fc1.shape[:1] == (other,):
            raise InconsistentCheckpoint(
                f"{name}: of shape {gather.shape}, with linear_fc1 of {other} rows:"
                f" {'one projection' if gated else 'gate and up'}, where args say"
                f" {'gated' if gated else 'not gated'} (swiglu, gated_linear_unit, quick_geglu)",
                _ANOTHER,
            )


def _check_columns(name: str, gather: Gather, settings: Mapping[str, Any], argument: str) -> None:
    said = size(settings, argument, None)
    if said is not None and gather.shape[1] != said:
        raise InconsistentCheckpoint(
            f"{name}: of shape {gather.shape}, expected {said} columns by the argument {argument}",
            _ANOTHER,
        )
