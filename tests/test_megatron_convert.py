"""Megatron's canonical names to the hub's: what is used, refused, cut, tied; on checkpoints in memory."""

from __future__ import annotations

import contextlib
import re
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lazymerge.checkpoint import Checkpoint, Copy
from lazymerge.conversions.megatron import families
from lazymerge.conversions.megatron.convert import Converted, convert
from lazymerge.conversions.megatron.families import family_of, load_family
from lazymerge.conversions.megatron.family import Family, Rule
from lazymerge.elements import in_memory
from lazymerge.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    LazymergeError,
    PlanError,
    UnsupportedCheckpoint,
)

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
HIDDEN, HEADS, GROUPS, WIDTH, FFN, VOCABULARY, LAYERS = 4, 4, 2, 2, 6, 20, 2
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 3}
Tensors = dict[str, torch.Tensor]


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    size = int(torch.Size(shape).numel())
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def llama(layers: int = LAYERS, rows: int = VOCABULARY) -> Tensors:
    """A Llama under canonical names, TE's norms; every layer has values of its own."""
    tensors = {
        EMBEDDING: numbered(rows, HIDDEN),
        "decoder.final_layernorm.weight": numbered(HIDDEN, start=7),
        OUTPUT: numbered(rows, HIDDEN, start=5000),
    }
    for layer in range(layers):
        at = 1000 * layer
        parts = {
            "self_attention.linear_qkv.layer_norm_weight": numbered(HIDDEN, start=at + 1),
            "self_attention.linear_qkv.weight": numbered((HEADS + 2 * GROUPS) * WIDTH, HIDDEN, start=at + 2),
            "self_attention.linear_proj.weight": numbered(HIDDEN, HEADS * WIDTH, start=at + 3),
            "mlp.linear_fc1.layer_norm_weight": numbered(HIDDEN, start=at + 4),
            "mlp.linear_fc1.weight": numbered(2 * FFN, HIDDEN, start=at + 5),
            "mlp.linear_fc2.weight": numbered(HIDDEN, FFN, start=at + 6),
        }
        tensors |= {f"decoder.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return tensors


def mixtral(experts: int = 3) -> Tensors:
    tensors = {name: tensor for name, tensor in llama().items() if ".mlp.linear_fc" not in name}
    for layer in range(LAYERS):
        mlp = f"decoder.layers.{layer}.mlp"
        tensors[f"{mlp}.router.weight"] = numbered(experts, HIDDEN)
        tensors[f"decoder.layers.{layer}.pre_mlp_layernorm.weight"] = numbered(HIDDEN)
        for expert in range(experts):
            at = 1000 * layer + 100 * expert
            name = f"{mlp}.experts.local_experts.{expert}"
            tensors[f"{name}.linear_fc1.weight"] = numbered(2 * FFN, HIDDEN, start=at)
            tensors[f"{name}.linear_fc2.weight"] = numbered(HIDDEN, FFN, start=at)
    return tensors


def checkpoint(tensors: Tensors, **settings: Any) -> Checkpoint:
    return Checkpoint({name: in_memory(each) for name, each in tensors.items()}, "test", settings=settings)


def converted(
    tensors: Tensors, config: dict[str, Any] = LLAMA, *, settings: Any = None, **how: Any
) -> Converted:
    return convert(checkpoint(tensors, **(settings or {})), config, **how)


def values(result: Converted) -> Tensors:
    return {name: tensor.materialize() for name, tensor in result.checkpoint.items()}


def notes(result: Converted) -> list[str]:
    """What is noted, but for the trainer's arguments, which these checkpoints do not have."""
    texts = [note.text for note in result.checkpoint.notes]
    assert sum("arguments are not recorded" in text for text in texts) == 1
    return [text for text in texts if "arguments are not recorded" not in text]


def refused(kind: type[LazymergeError], tensors: Tensors, config: Any = LLAMA, **how: Any) -> str:
    """The message of the refusal, which is of exactly that kind and has two lines."""
    with pytest.raises(kind) as refusal:
        converted(tensors, config, **how)
    assert type(refusal.value) is kind
    assert refusal.value.hint and "\n" not in refusal.value.problem + refusal.value.hint
    return str(refusal.value)


# ---- what becomes of a checkpoint --------------------------------------------------------------------------


def test_a_llama_has_the_hubs_names_and_layouts():
    source = llama()
    result = converted(source)
    made = values(result)
    expected = {"model.embed_tokens.weight": source[EMBEDDING], "lm_head.weight": source[OUTPUT]}
    expected["model.norm.weight"] = source["decoder.final_layernorm.weight"]
    for layer in range(LAYERS):
        megatron, hub = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = source[f"{megatron}self_attention.linear_qkv.weight"]
        fc1 = source[f"{megatron}mlp.linear_fc1.weight"]
        expected |= {
            f"{hub}input_layernorm.weight": source[f"{megatron}self_attention.linear_qkv.layer_norm_weight"],
            f"{hub}post_attention_layernorm.weight": source[f"{megatron}mlp.linear_fc1.layer_norm_weight"],
            f"{hub}self_attn.q_proj.weight": torch.cat([qkv[0:4], qkv[8:12]]),
            f"{hub}self_attn.k_proj.weight": torch.cat([qkv[4:6], qkv[12:14]]),
            f"{hub}self_attn.v_proj.weight": torch.cat([qkv[6:8], qkv[14:16]]),
            f"{hub}self_attn.o_proj.weight": source[f"{megatron}self_attention.linear_proj.weight"],
            f"{hub}mlp.gate_proj.weight": fc1[:FFN],
            f"{hub}mlp.up_proj.weight": fc1[FFN:],
            f"{hub}mlp.down_proj.weight": source[f"{megatron}mlp.linear_fc2.weight"],
        }
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []
    assert result.config_changes == {} and notes(result) == [] and result.checkpoint.left_out == {}


def test_norms_may_be_modules_of_their_own():
    source = llama()
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}."
        source[f"{name}input_layernorm.weight"] = source.pop(
            f"{name}self_attention.linear_qkv.layer_norm_weight"
        )
        source[f"{name}pre_mlp_layernorm.weight"] = source.pop(f"{name}mlp.linear_fc1.layer_norm_weight")
    made, fused = values(converted(source)), values(converted(llama()))
    assert made.keys() == fused.keys()
    assert all(torch.equal(made[name], fused[name]) for name in made)


def test_two_names_for_one_norm_are_refused():
    source = llama() | {"decoder.layers.0.input_layernorm.weight": numbered(HIDDEN)}
    message = refused(InconsistentCheckpoint, source)
    assert "decoder.layers.0.input_layernorm.weight" in message
    assert "model.layers.0.input_layernorm.weight" in message


@pytest.mark.parametrize("norm", ["mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"])
def test_experts_have_names_of_their_own_and_either_norm(norm):
    source = {name.replace("pre_mlp_layernorm.weight", norm): each for name, each in mixtral().items()}
    made = values(converted(source, MIXTRAL))
    assert "model.layers.1.post_attention_layernorm.weight" in made
    for layer in range(LAYERS):
        for expert in range(3):
            fc1 = source[f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"]
            hub = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            assert torch.equal(made[f"{hub}.w1.weight"], fc1[:FFN])
            assert torch.equal(made[f"{hub}.w3.weight"], fc1[FFN:])


def test_collected_experts_are_in_the_order_of_their_numbers():
    """Twelve of them, given as text would sort them."""
    experts = {
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.bias": numbered(
            2, start=expert
        )
        for layer in range(LAYERS)
        for expert in sorted(range(12), key=str)
    }
    source = {name: each for name, each in llama().items() if ".mlp.linear_fc" not in name} | experts
    made = values(converted(source, {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 12}))
    assert made["model.layers.1.mlp.experts.down_proj_bias"][:, 0].tolist() == list(range(12))


def test_norms_that_the_trainer_centred_get_one_added_and_the_report_says_so():
    source = llama()
    result = converted(source, settings={"apply_layernorm_1p": True})
    expected = source["decoder.final_layernorm.weight"] + 1
    assert torch.equal(values(result)["model.norm.weight"], expected)
    assert [note.text for note in result.checkpoint.notes if note.text.startswith("5 norms")]


def test_a_model_with_a_text_config_uses_it():
    text = {key: value for key, value in LLAMA.items() if key not in {"model_type", "architectures"}}
    source = llama() | {"vision_model.patch_embed.proj.weight": numbered(4, 3, 2, 2, 2)}
    made = values(converted(source, {"model_type": "qwen2_5_vl", "text_config": text}))
    assert made["visual.patch_embed.proj.weight"].shape == (4, 3, 2, 2, 2)
    assert made["model.layers.0.self_attn.q_proj.weight"].shape == (8, HIDDEN)


LAST = f"decoder.layers.{LAYERS - 1}."


def test_mtp_layers_come_after_the_last():
    mtp = {
        f"mtp.layers.0.{name}": numbered(HIDDEN)
        for name in ("enorm.weight", "hnorm.weight", "final_layernorm.weight")
    }
    mtp["mtp.layers.0.eh_proj.weight"] = numbered(HIDDEN, 2 * HIDDEN)
    inner = "mtp.layers.0.transformer_layer."
    mtp |= {name.replace(LAST, inner): tensor for name, tensor in llama().items() if name.startswith(LAST)}
    config = {**LLAMA, "model_type": "glm4_moe", "num_nextn_predict_layers": 1}
    names = set(values(converted(llama() | mtp, config))) - set(values(converted(llama(), config)))
    assert names == {
        f"model.layers.{LAYERS}.{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    } | {
        name.replace(f"layers.{LAYERS - 1}.", f"layers.{LAYERS}.")
        for name in values(converted(llama(), config))
        if f"layers.{LAYERS - 1}." in name
    }
    message = refused(InconsistentCheckpoint, llama() | mtp, {**config, "num_nextn_predict_layers": 0})
    assert "1 MTP layers, expected 0" in message
    (note,) = notes(converted(llama(), config))
    assert "num_nextn_predict_layers" in note
    assert notes(converted(llama(), {**config, "num_nextn_predict_layers": 0})) == []
    (note,) = notes(converted(llama() | mtp, config))
    assert "copies" in note


def glm_with_mtp() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    inner = "mtp.layers.0.transformer_layer."
    source = llama()
    source |= {name.replace(LAST, inner): tensor for name, tensor in llama().items() if name.startswith(LAST)}
    for name in ("enorm", "hnorm", "final_layernorm"):
        source[f"mtp.layers.0.{name}.weight"] = numbered(HIDDEN)
    source["mtp.layers.0.eh_proj.weight"] = numbered(HIDDEN, 2 * HIDDEN)
    return source, {**LLAMA, "model_type": "glm4_moe", "num_nextn_predict_layers": 1}


def test_every_part_of_an_mtp_layer_has_to_be_there_and_of_its_shape():
    """No class of transformers has them, so that nothing else would miss them."""
    whole, config = glm_with_mtp()
    parts = [name for name in whole if name.startswith("mtp.")]
    assert len(parts) > 8
    converted(whole, config)
    for part in parts:
        less = {name: tensor for name, tensor in whole.items() if name != part}
        assert part in refused(IncompleteCheckpoint, less, config)
        rows, *rest = whole[part].shape
        message = refused(InconsistentCheckpoint, whole | {part: numbered(2 * rows, *rest)}, config)
        assert part in message
    inner = {name: tensor for name, tensor in whole.items() if "transformer_layer" not in name}
    assert "transformer_layer" in refused(IncompleteCheckpoint, inner, config)
    columns = {"mtp.layers.0.eh_proj.weight": numbered(HIDDEN, 5)}
    assert f"expected ({HIDDEN}, {2 * HIDDEN})" in refused(InconsistentCheckpoint, whole | columns, config)


def test_an_mtp_layer_may_be_left_out_by_name():
    whole, config = glm_with_mtp()
    del whole["mtp.layers.0.enorm.weight"]
    mapping = [(name, "") for name in whole if name.startswith("mtp.")]
    made = values(convert(checkpoint(whole), config, mapping=mapping))
    assert set(made) == set(values(converted(llama(), LLAMA)))


def test_copies_on_other_ranks_go_by_the_hubs_names():
    source = checkpoint(mixtral())
    fc1 = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"

    def copies() -> Iterator[Copy]:
        for name in (fc1, "decoder.final_layernorm.weight", "not.there"):
            (piece,) = source.gathers[EMBEDDING].pieces()
            yield Copy(name, piece.region, piece.region)

    made = convert(replace(source, copies=copies), MIXTRAL).checkpoint
    names = [copy.name for copy in made.copies()]
    assert names == ["model.layers.0.block_sparse_moe.experts.1.w1.weight", "model.norm.weight", "not.there"]


# ---- what is not complete, or too much ---------------------------------------------------------------------


def test_megatron_needs_a_config():
    assert "--hf-config" in refused(PlanError, llama(), None)


@pytest.mark.parametrize(("layers", "kind"), [(1, InconsistentCheckpoint), (3, IncompleteCheckpoint)])
def test_layers_are_as_many_as_the_config_says(layers, kind):
    message = refused(kind, llama(), {**LLAMA, "num_hidden_layers": layers})
    assert f"2 decoder layers, expected {layers}" in message and "num_hidden_layers" in message


def test_a_layer_in_the_middle_that_is_missing_is_named():
    source = {name: each for name, each in llama(4).items() if ".layers.2." not in name}
    message = refused(IncompleteCheckpoint, source, {**LLAMA, "num_hidden_layers": 4})
    assert "3 decoder layers, expected 4" in message and "missing 2" in message


def test_no_layers_at_all_are_missing_too():
    source = {name: each for name, each in llama().items() if ".layers." not in name}
    assert "0 decoder layers, expected 2" in refused(IncompleteCheckpoint, source)


@pytest.mark.parametrize(("experts", "kind"), [(2, InconsistentCheckpoint), (4, IncompleteCheckpoint)])
def test_experts_are_as_many_as_the_config_says(experts, kind):
    message = refused(kind, mixtral(), {**MIXTRAL, "num_local_experts": experts})
    assert f"3 experts, expected {experts}" in message


def test_an_expert_that_is_missing_is_named():
    source = mixtral()
    del source["decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"]
    message = refused(IncompleteCheckpoint, source, MIXTRAL)
    assert "decoder.layers.1.mlp.experts" in message and "linear_fc2" in message and "missing 1" in message


def test_experts_of_a_dense_config_are_refused():
    config = {key: value for key, value in MIXTRAL.items() if key != "num_local_experts"}
    assert "num_experts" in refused(InconsistentCheckpoint, mixtral(), config)


def test_a_dense_model_may_say_that_it_has_no_experts():
    assert converted(llama(), {**LLAMA, "num_local_experts": 0}).config_changes == {}


def test_a_part_that_is_missing_is_named():
    parts = ("query", "key", "value", "z", "beta")
    source = {name: each for name, each in llama().items() if "linear_qkv.weight" not in name} | {
        f"decoder.layers.0.self_attention.in_proj.weight.{part}": numbered(2, HIDDEN) for part in parts
    }
    message = refused(IncompleteCheckpoint, source, {**LLAMA, "model_type": "qwen3_next"})
    assert message.startswith("decoder.layers.0.self_attention.in_proj.weight.alpha: not in the checkpoint")


def test_parts_of_different_dtypes_are_not_cast():
    source = mixtral()
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}.mlp.experts.local_experts.1.linear_fc1.weight"
        source[name] = source[name].bfloat16()
    config = {**MIXTRAL, "model_type": "qwen3_vl_moe"}
    message = refused(InconsistentCheckpoint, source, config)
    assert "bfloat16 and float32" in message


def test_a_wrong_shape_is_named_with_the_fields_that_may_be_wrong():
    message = refused(InconsistentCheckpoint, llama(), {**LLAMA, "head_dim": 3})
    assert "decoder.layers.0.self_attention.linear_qkv.weight: has 16 rows, expected 24" in message
    assert "num_attention_heads, num_key_value_heads, head_dim" in message


HOSTILE: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 10**30},
    {"num_hidden_layers": None},
    {"num_hidden_layers": "2"},
    {"num_hidden_layers": True},
    {"num_attention_heads": -1},
    {"num_attention_heads": [4]},
    {"vocab_size": None},
    {"vocab_size": 0},
    {"tie_word_embeddings": "no"},
    {"model_type": ["llama"]},
    {"model_type": None},
    {"num_key_value_heads": 1 << 30},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_a_config_that_makes_no_sense_is_refused(change):
    started = time.monotonic()
    with pytest.raises(LazymergeError) as refusal:
        converted(llama(), {**LLAMA, **change})
    assert re.search(next(iter(change)), str(refusal.value))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (16, 0), (16, 4, 1)], ids=str)
def test_a_tensor_of_a_strange_shape_is_no_traceback(shape):
    for name in llama():
        with contextlib.suppress(LazymergeError):
            converted(llama() | {name: torch.zeros(shape)})


# ---- dead ends and --param-mapping -------------------------------------------------------------------------

STRANGE = "decoder.layers.1.mlp.linear_fc3.weight"


def test_a_dead_end_names_the_parameter_the_nearest_and_the_flag():
    message = refused(UnsupportedCheckpoint, llama() | {STRANGE: numbered(2), "other.x": numbered(2)})
    assert message.startswith(f"{STRANGE} (and 1 more)")
    assert "decoder.layers.1.mlp.linear_fc1.weight" in message
    assert f"--param-mapping {STRANGE}:" in message


@pytest.mark.parametrize("number", ["01", "٣", "-1", "1" * 5000, "1e3"])
def test_what_is_no_number_is_no_layer(number):
    refused(UnsupportedCheckpoint, llama() | {f"decoder.layers.{number}.mlp.linear_fc2.weight": numbered(2)})


def test_a_number_that_the_table_asks_for_is_no_other():
    """Qwen2.5-VL's merger has layers 0 and 2."""
    config = {**LLAMA, "model_type": "qwen2_5_vl"}
    names = [f"visual.merger.mlp.{index}.weight" for index in range(3)]
    assert names[2] in converted(llama() | {names[2]: numbered(2)}, config).checkpoint
    assert names[1] in refused(UnsupportedCheckpoint, llama() | {names[1]: numbered(2)}, config)


def test_a_mapping_comes_before_the_table():
    mapping = [(STRANGE, "model.extra"), ("decoder.layers.{}.mlp.linear_fc2.{}", "layer_{}.{}")]
    source = llama() | {STRANGE: numbered(3)}
    made = values(converted(source, mapping=mapping))
    assert torch.equal(made["model.extra"], numbered(3))
    assert torch.equal(made["layer_1.weight"], source["decoder.layers.1.mlp.linear_fc2.weight"])
    assert "model.layers.1.mlp.down_proj.weight" not in made


def test_a_mapping_to_nothing_leaves_out_and_says_so():
    result = converted(llama() | {STRANGE: numbered(3)}, mapping=[(STRANGE, "")])
    assert STRANGE in result.checkpoint.left_out and "--param-mapping" in result.checkpoint.left_out[STRANGE]
    assert result.checkpoint.keys() == converted(llama()).checkpoint.keys()


def test_a_mapping_onto_a_name_of_the_table_is_refused():
    name = "model.norm.weight"
    message = refused(InconsistentCheckpoint, llama() | {STRANGE: numbered(3)}, mapping=[(STRANGE, name)])
    assert STRANGE in message and name in message


def test_what_is_no_weight_is_left_out_with_a_reason():
    result = converted(llama() | {"rotary_pos_emb.inv_freq": numbered(2)})
    assert "config" in result.checkpoint.left_out["rotary_pos_emb.inv_freq"]


# ---- vocabulary --------------------------------------------------------------------------------------------


def padded(rows: int, vocabulary: int, **settings: Any) -> Converted:
    return converted(llama(rows=rows), {**LLAMA, "vocab_size": vocabulary}, settings=settings)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "settings"),
    [
        (128, 120, {}),
        (256, 120, {}),  # 128 x 2 ranks
        (152064, 151936, {}),  # Qwen2.5 at 512
        (256, 120, {"tensor_model_parallel_size": 2}),
        (24, 20, {"make_vocab_size_divisible_by": 4, "tensor_model_parallel_size": 2}),
        (256, 120, {"padded_vocab_size": 256, "tensor_model_parallel_size": 1}),  # was padded for another TP
        (120, 120, {"padded_vocab_size": 256}),
    ],
)
def test_padding_is_cut_off(rows, vocabulary, settings):
    made = padded(rows, vocabulary, **settings).checkpoint
    for name, source in (("model.embed_tokens.weight", EMBEDDING), ("lm_head.weight", OUTPUT)):
        assert torch.equal(made[name].materialize(), llama(rows=rows)[source][:vocabulary])


@pytest.mark.parametrize(
    ("rows", "vocabulary", "settings"),
    [
        (121, 120, {}),  # no multiple
        (384, 120, {}),  # 128 x 3: no power of two, and 264 are too many
        (128256, 32000, {}),  # the config of another model
        (256, 120, {"tensor_model_parallel_size": 1}),
        (128, 120, {"padded_vocab_size": 256}),
        (119, 120, {}),
    ],
)
def test_rows_that_are_no_padding_are_refused_with_both_numbers(rows, vocabulary, settings):
    with pytest.raises(InconsistentCheckpoint) as refusal:
        padded(rows, vocabulary, **settings)
    message = str(refusal.value)
    assert f"{rows} rows" in message and str(vocabulary) in message and "--force-shape-match" in message


def test_a_forced_shape_is_left_to_a_later_step():
    config = {**LLAMA, "vocab_size": 19}
    made = values(converted(llama(), config, force_shapes=True))
    assert made["model.embed_tokens.weight"].shape == made["lm_head.weight"].shape == (20, HIDDEN)
    assert values(converted(llama(rows=128), config, force_shapes=True))["lm_head.weight"].shape[0] == 19


# ---- tied and untied ---------------------------------------------------------------------------------------


def without_output() -> Tensors:
    return {name: each for name, each in llama().items() if name != OUTPUT}


def untied(value: bool | None) -> dict[str, Any]:
    return {} if value is None else {"untie_embeddings_and_output_weights": value}


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("trainer", [True, False, None])
@pytest.mark.parametrize("output", [True, False])
def test_config_trainer_and_files_have_to_agree(flag, trainer, output):
    """`flag`: tied by the config; `trainer`: untied by the arguments; `output`: the layer is there."""
    source = llama() if output else without_output()
    config = {**LLAMA, "tie_word_embeddings": flag}
    if flag is not output and trainer in {None, output}:
        made = converted(source, config, settings=untied(trainer))
        assert ("lm_head.weight" in made.checkpoint) is output and made.config_changes == {}
        return
    message = refused(InconsistentCheckpoint, source, config, settings=untied(trainer))
    recorded = "not recorded" if trainer is None else str(trainer)
    assert f"tie_word_embeddings is {str(flag).lower()}" in message
    assert f"untie_embeddings_and_output_weights is {recorded}" in message
    assert ("has an output layer" if output else "has no output layer") in message
    assert "--tie-word-embedding" in message


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("output", [True, False])
def test_tied_can_be_forced(flag, output):
    source = llama() if output else without_output()
    made = converted(source, {**LLAMA, "tie_word_embeddings": flag}, settings=untied(True), tied=True)
    assert "lm_head.weight" not in made.checkpoint
    assert made.config_changes == ({} if flag else {"tie_word_embeddings": True})
    assert list(made.checkpoint.left_out) == ([OUTPUT] if output else [])


@pytest.mark.parametrize("rows", [20, 128])
def test_an_output_layer_that_is_left_out_and_no_copy_is_told(rows):
    source = llama(rows=rows)
    made = converted(source, LLAMA, settings=untied(True), tied=True).checkpoint
    assert any(note.lossy and "not the embedding's" in note.text for note in made.notes)
    source[OUTPUT] = source[EMBEDDING].clone()
    source[OUTPUT][20:] = 7  # of padding
    made = converted(source, LLAMA, settings=untied(True), tied=True).checkpoint
    assert not any("not the embedding's" in note.text for note in made.notes)


def test_a_config_that_does_not_say_is_read_as_its_class_does():
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert "by default" in refused(InconsistentCheckpoint, without_output(), config)
    gemma = converted(without_output(), {**config, "model_type": "gemma2"})
    assert gemma.config_changes == {} and "lm_head.weight" not in gemma.checkpoint


def test_a_flag_of_the_text_model_alone_is_written_where_the_loader_looks():
    config = {"model_type": "qwen3_vl", "text_config": {**LLAMA, "tie_word_embeddings": True}}
    assert converted(without_output(), config).config_changes == {"tie_word_embeddings": True}


# ---- value heads -------------------------------------------------------------------------------------------

LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def critic(rows: int = 1, *, bias: bool = False) -> Tensors:
    source = llama() | {OUTPUT: numbered(rows, HIDDEN)}
    return source | ({"output_layer.bias": numbered(rows)} if bias else {})


@pytest.mark.parametrize("value_model", [True, None])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_a_critic_has_a_score(value_model, bias, flag):
    config = {**LLAMA, "tie_word_embeddings": flag}
    made = converted(critic(bias=bias), config, value_model=value_model)
    assert torch.equal(values(made)["score.weight"], numbered(1, HIDDEN))
    assert "lm_head.weight" not in made.checkpoint and ("score.bias" in made.checkpoint) is bias
    expected = {"architectures": ["LlamaForTokenClassification"], **LABELS}
    assert made.config_changes == expected | ({} if bias else {"token_classification_bias": False})


def test_a_config_of_a_classifier_is_kept():
    config = {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}
    config["id2label"] = {str(index): f"grade {index}" for index in range(5)}
    made = converted(critic(5), config)
    assert made.config_changes == {} and made.checkpoint["score.weight"].shape == (5, HIDDEN)
    assert converted(critic(3), config, value_model=True).config_changes["id2label"]["2"] == "LABEL_2"


def test_what_is_no_value_head_is_refused():
    assert "--is-value-model" in refused(PlanError, llama(), value_model=True)
    assert "--is-value-model" in refused(IncompleteCheckpoint, without_output(), value_model=True)
    assert "1 rows" in refused(InconsistentCheckpoint, critic(), value_model=False)
    assert "3 rows" in refused(InconsistentCheckpoint, critic(3))


# ---- families ----------------------------------------------------------------------------------------------

WANTED = (
    *("llama", "mistral", "mixtral", "phi3", "llama4_text", "llama4"),
    *("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4", "glm4_moe"),
    *("gemma2", "gemma3_text", "gemma3", "gpt_oss"),
)


@pytest.mark.parametrize("model_type", WANTED)
def test_a_family_is_known_by_its_model_type(model_type):
    assert model_type in family_of({"model_type": model_type}).model_types


def test_an_unknown_family_is_told_the_known_the_closest_and_how_to_add_one():
    message = refused(UnsupportedCheckpoint, llama(), {**LLAMA, "model_type": "qwen4_moe"})
    assert re.search(r"'qwen4_moe' \(closest: qwen\d_moe; known: .*mixtral.*qwen3_moe", message)
    assert "--family" in message and "lazymerge.families" in message


OWN = """
    from lazymerge.conversions.megatron.family import Family, Rule

    def doubled(config, weight):
        import torch
        return torch.cat([weight, weight])

    FAMILY = Family("own", ("own",), (
        Rule("embedding.word_embeddings.weight", "wte.weight"),
        Rule("decoder.layers.{L}.mlp.linear_fc2.{p}", "h.{L}.down.{p}", doubled),
    ))
"""


def own(tmp_path: Path, text: str = OWN) -> Path:
    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_family_of_the_users_own(tmp_path):
    source = {EMBEDDING: numbered(VOCABULARY, HIDDEN)}
    source |= {f"decoder.layers.{layer}.mlp.linear_fc2.weight": numbered(2, 2) for layer in range(LAYERS)}
    config = {**LLAMA, "model_type": "unheard_of", "tie_word_embeddings": True}
    made = values(converted(source, config, family=load_family(own(tmp_path))))
    assert made["h.1.down.weight"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert load_family("qwen3").name == "qwen3"


def test_a_family_that_is_not_the_models_is_noted(tmp_path):
    """The example of the page, on a Llama: it is of another model type, and its rule fits nothing."""
    page = (Path(__file__).parents[1] / "docs" / "megatron.md").read_text()
    (example,) = re.findall(r"```python\n(from.*?)```", page, re.DOTALL)
    told = notes(converted(llama(), family=load_family(own(tmp_path, example))))
    assert told == [
        "the family my_model is for model_type my_model, config.json says 'llama'",
        "my_model: no tensor of the checkpoint fits decoder.layers.{L}.self_attention.gate.weight",
    ]
    gates = {f"decoder.layers.{layer}.self_attention.gate.weight": numbered(4, 2) for layer in range(LAYERS)}
    config = {**LLAMA, "model_type": "my_model"}
    assert notes(converted(llama() | gates, config, family=load_family(own(tmp_path, example)))) == []
    assert notes(converted(llama(), family=load_family("llama"))) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FAMILY = 3", "is int"),
        ("", "is NoneType"),
        ("import", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        (OWN.replace("h.{L}.down", "h.{K}.down"), "placeholders"),
        (OWN.replace("h.{L}.down", "h.{layer}.down"), "placeholder"),
        (OWN.replace('"wte.weight"', "None"), "TypeError"),
    ],
)
def test_a_faulty_file_of_a_family_is_no_traceback(tmp_path, text, problem):
    with pytest.raises(PlanError, match=problem):
        load_family(own(tmp_path, text))


def test_a_family_that_is_not_there(tmp_path):
    with pytest.raises(PlanError, match="neither a file nor one of"):
        load_family(tmp_path / "none.py")
    (tmp_path / "family.txt").write_text("FAMILY")
    with pytest.raises(PlanError, match="no Python file"):
        load_family(tmp_path / "family.txt")


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (lambda config, weight: weight.view(7, 7), "RuntimeError"),
        (lambda config, weight: (weight, weight), "gives 2 results, expected 1"),
        (lambda config, weight: [3], "it gives int, expected a tensor"),
        (lambda config, weight: None, "TypeError"),
    ],
)
def test_a_faulty_layout_is_no_traceback(layout, problem):
    rules = (Rule(OUTPUT, "lm_head.weight", layout), *family_of(LLAMA).rules)
    message = refused(UnsupportedCheckpoint, llama(), family=Family("own", ("own",), rules))
    assert problem in message and OUTPUT in message


class _Entry:
    name, value = "theirs", "their_package:FAMILY"

    def __init__(self, family: object) -> None:
        self.family = family

    def load(self) -> object:
        if isinstance(self.family, Exception):
            raise self.family
        return self.family


def test_families_are_registered_by_entry_points(monkeypatch):
    theirs = Family("theirs", ("theirs", "llama"), (Rule(EMBEDDING, "x"),))
    monkeypatch.setattr(families, "entry_points", lambda group: [_Entry(theirs)])
    assert family_of({"model_type": "theirs"}) is theirs is family_of({"model_type": "llama"})
    assert family_of({"model_type": "qwen2"}).name == "qwen2"
    for faulty in (ImportError("no module"), "no family"):
        monkeypatch.setattr(families, "entry_points", lambda group, faulty=faulty: [_Entry(faulty)])
        with pytest.raises(PlanError, match="theirs"):
            family_of({"model_type": "qwen2"})


# ---- scale -------------------------------------------------------------------------------------------------


def test_many_experts_take_seconds():
    """61 layers x 64 experts: 8,000 tensors, of which half are split, in a quarter of the time allowed."""
    fc1, fc2, norm = (in_memory(numbered(*shape)) for shape in ((2 * FFN, HIDDEN), (HIDDEN, FFN), (HIDDEN,)))
    gathers = {name: in_memory(each) for name, each in llama(0).items()}
    for layer in range(61):
        gathers[f"decoder.layers.{layer}.pre_mlp_layernorm.weight"] = norm
        for expert in range(64):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
            gathers[f"{name}.linear_fc1.weight"] = fc1
            gathers[f"{name}.linear_fc2.weight"] = fc2
    config = {**LLAMA, "model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 64}
    started = time.process_time()
    made = convert(Checkpoint(gathers, "test"), config)
    assert len(made.checkpoint) == 3 + 61 * (1 + 64 * 3)
    assert time.process_time() - started < 2.5
