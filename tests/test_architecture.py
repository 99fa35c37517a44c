"""The check of names and shapes: what transformers writes of a model is the truth, never the code under test.

Most tests ask for the model in this process, which has transformers loaded; those of the process apart,
which takes seconds to start, are at the end.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lazymerge
from lazymerge.checkpoint import Checkpoint
from lazymerge.conversions import architecture as module
from lazymerge.conversions import meta_model
from lazymerge.conversions.architecture import (
    Architecture,
    check,
    compare,
    differences,
    expected,
    why_unknown,
)
from lazymerge.conversions.model_process import ANSWER, Contradiction
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    LazymergeError,
    PlanError,
)
from lazymerge.files.dtype import DTYPES
from lazymerge.gather import Constant, Shards
from tests.makers.models import TEXT

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 20}
DEEPSEEK = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GLM_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "num_hidden_layers": 4,
}
HEAD = {"head_dim": 4}
LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": 20, **HEAD}
SIGHT = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "out_hidden_size": 16,
    "patch_size": 4,
    "fullatt_block_indexes": [1],
}
SEES_GEMMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
SEES_LLAMA4 = {
    **SEES_GEMMA,
    "intermediate_size": 64,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def both(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    return {"text_config": {**TEXT, **text}, "vision_config": {**vision}}


CONDITIONAL = "ForConditionalGeneration"
DEEPSTACK = {**SIGHT, "deepstack_visual_indexes": [0]}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # model_type -> config, head, settings
    "llama": ("Llama", "ForCausalLM", {}),
    "mistral": ("Mistral", "ForCausalLM", {}),
    "qwen2": ("Qwen2", "ForCausalLM", {}),
    "qwen3": ("Qwen3", "ForCausalLM", {"head_dim": 8}),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", SHARED),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", {**EXPERTS, **HEAD}),
    "mixtral": ("Mixtral", "ForCausalLM", {"num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", DEEPSEEK),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", DEEPSEEK),
    "glm4": ("Glm4", "ForCausalLM", HEAD),
    "glm4_moe": ("Glm4Moe", "ForCausalLM", {**GLM_MOE, **HEAD}),
    "gemma2": ("Gemma2", "ForCausalLM", HEAD),
    "gemma3_text": ("Gemma3Text", "ForCausalLM", HEAD),
    "phi3": ("Phi3", "ForCausalLM", {}),
    "gpt_oss": ("GptOss", "ForCausalLM", {"num_local_experts": 4, **HEAD}),
    "qwen3_next": ("Qwen3Next", "ForCausalLM", {**SHARED, **DELTA, **HEAD}),
    "llama4_text": ("Llama4Text", "ForCausalLM", LLAMA4),
    "gemma3": ("Gemma3", CONDITIONAL, {**both(HEAD, SEES_GEMMA), "mm_tokens_per_image": 4}),
    "llama4": ("Llama4", CONDITIONAL, both(LLAMA4, SEES_LLAMA4)),
    "qwen2_5_vl": ("Qwen2_5_VL", CONDITIONAL, both({}, SIGHT)),
    "qwen3_vl": ("Qwen3VL", CONDITIONAL, both(HEAD, DEEPSTACK)),
    "qwen3_vl_moe": ("Qwen3VLMoe", CONDITIONAL, both({**EXPERTS, **HEAD}, DEEPSTACK)),
    "qwen2-value": ("Qwen2", "ForTokenClassification", {"num_labels": 1}),
    "llama-value": ("Llama", "ForTokenClassification", {"num_labels": 1}),
    "qwen2-reward": ("Qwen2", "ForSequenceClassification", {"num_labels": 1}),
    "qwen3_moe-reward": ("Qwen3Moe", "ForSequenceClassification", {**EXPERTS, **HEAD, "num_labels": 3}),
}
OF_TEXT = [name for name, (_, head, _) in MODELS.items() if head == "ForCausalLM"]

Saved = Callable[..., tuple[dict[str, Any], dict[str, tuple[int, ...]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    """`saved(name, **changes)`: config.json of a tiny model, and the names and shapes in its files."""
    made: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {}

    def save(name: str, **changes: Any) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        key = f"{name} {changes}"
        if key not in made:
            made[key] = save_pretrained(name, changes, tmp_path_factory.mktemp(name))
        config, shapes = made[key]
        return copy.deepcopy(config), dict(shapes)

    return save


def save_pretrained(
    name: str, changes: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    import transformers

    kind, head, settings = MODELS[name]
    front = "Gemma3" if kind == "Gemma3Text" else "Llama4" if kind == "Llama4Text" else kind
    own = {} if "text_config" in settings else TEXT
    config = getattr(transformers, f"{kind}Config")(**{**own, **settings, **changes})
    getattr(transformers, f"{front}{head}")(config).save_pretrained(folder)
    shapes = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        shapes |= {key: tuple(entry["shape"]) for key, entry in header.items() if key != "__metadata__"}
    return json.loads((folder / "config.json").read_text()), shapes


@pytest.fixture
def here(monkeypatch) -> None:
    """The model is built in this process."""

    def ask(request: dict[str, Any]) -> dict[str, Any] | None:
        code = None if request["code"] is None else Path(request["code"])
        try:
            answer = meta_model._answer(json.loads(json.dumps(request)), code)
        except meta_model.Contradiction as error:
            raise Contradiction(str(error), "mend it") from error
        except meta_model.Refused as error:
            raise InconsistentCheckpoint(str(error), "mend it") from error
        return None if "unknown" in answer else answer

    monkeypatch.setattr(module, "_ask", ask)


def checkpoint_of(shapes: Mapping[str, tuple[int, ...]], kind: str = "made") -> Checkpoint:
    gathers = {name: Shards(shape, DTYPES["float32"], Constant([])) for name, shape in shapes.items()}
    return Checkpoint(gathers, kind)


def built(config: Mapping[str, Any]) -> Architecture:
    found = expected(config)
    assert found is not None
    return found


# ---- names and shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_that_save_pretrained_writes(saved, here, name):
    config, shapes = saved(name)
    found = built(config)
    assert {key: shape for key, shape in found.shapes.items() if key not in found.tied} == shapes
    assert check(checkpoint_of(shapes), found).notes == ()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", OF_TEXT)
def test_a_tied_name_may_be_absent_or_present(saved, here, name, tied):
    config, shapes = saved(name, tie_word_embeddings=tied)
    found = built(config)
    assert ("lm_head.weight" in shapes) is not tied
    assert found.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    embedding = shapes["model.embed_tokens.weight"]
    check(checkpoint_of({**shapes, "lm_head.weight": embedding}), found)
    without = {key: shape for key, shape in shapes.items() if key != "model.embed_tokens.weight"}
    with pytest.raises(IncompleteCheckpoint, match="embed_tokens"):
        check(checkpoint_of({key: shape for key, shape in without.items() if key != "lm_head.weight"}), found)
    if tied:
        check(checkpoint_of({**without, "lm_head.weight": embedding}), found)


def test_a_sharded_checkpoint_is_compared_without_reading_it(four, here):
    config = json.loads(next(four.root.rglob("config.json")).read_text())
    found = compare(lazymerge.open(four.root), built(config))
    assert found.wrong == frozenset()
    assert found.unexpected == ()


def test_a_large_model_takes_seconds(here):
    """DeepSeek-V3 with all its layers and experts; its own index on the hub has 45,395 such names."""
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    expected({**config, "num_hidden_layers": 1})  # imports
    started = time.process_time()
    found = built(config)
    assert time.process_time() - started < 20
    assert found.shapes["model.layers.60.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert len([name for name in found.shapes if ".mlp.experts." in name]) == 58 * 256 * 3


# ---- what is wrong with which tensor --------------------------------------------------------------------


WRONG = [
    ("llama", {"vocab_size": 40}, "vocab_size = 32"),
    ("llama", {"intermediate_size": 32}, "intermediate_size = 24"),
    ("llama", {"hidden_size": 32}, "hidden_size = 16"),
    ("llama", {"num_attention_heads": 8}, "num_attention_heads = 4"),
    ("llama", {"num_key_value_heads": 4}, "num_key_value_heads = 2"),
    ("llama", {"head_dim": 8}, "head_dim = 4"),
    ("llama", {"num_hidden_layers": 3}, "num_hidden_layers = 2"),
    ("llama", {"num_hidden_layers": 1}, "num_hidden_layers = 2"),
    ("llama", {"attention_bias": True}, "attention_bias = false"),
    ("llama", {"mlp_bias": True}, "mlp_bias = false"),
    ("qwen2", {"num_key_value_heads": 4}, "num_key_value_heads = 2"),
    ("qwen2", {"num_attention_heads": 8}, "num_attention_heads = 4"),
    ("qwen2", {"num_hidden_layers": 3}, "num_hidden_layers = 2"),  # layer_types has an entry for each
    ("qwen3", {"head_dim": 4}, "head_dim = 8"),
    ("qwen3_moe", {"moe_intermediate_size": 16}, "moe_intermediate_size = 12"),
    ("qwen3_moe", {"num_local_experts": 8}, "num_local_experts = 6"),
    ("qwen3_moe", {"num_local_experts": 4}, "num_local_experts = 6"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 12}, "shared_expert_intermediate_size = 20"),
    ("mixtral", {"num_local_experts": 5}, "num_local_experts = 4"),
    ("deepseek_v3", {"kv_lora_rank": 12}, "kv_lora_rank = 8"),
    ("deepseek_v3", {"q_lora_rank": 12}, "q_lora_rank = 8"),
    ("deepseek_v3", {"v_head_dim": 8}, "v_head_dim = 4"),
    ("deepseek_v3", {"qk_rope_head_dim": 8}, "qk_rope_head_dim = 4"),
    ("deepseek_v3", {"n_routed_experts": 8}, "n_routed_experts = 4"),
    ("deepseek_v3", {"n_shared_experts": 2}, "n_shared_experts = 1"),
    ("deepseek_v3", {"first_k_dense_replace": 0}, "first_k_dense_replace = 1"),
    ("qwen3_next", {"linear_num_key_heads": 4}, "linear_num_key_heads = 2"),
    ("qwen2-value", {"num_labels": 2}, "num_labels = 1"),
]


@pytest.mark.parametrize(("name", "change", "said"), WRONG)
def test_the_message_names_the_field_that_is_wrong_and_what_would_fit(saved, here, name, change, said):
    config, shapes = saved(name)
    (field, value), *_ = change.items()
    if field == "num_hidden_layers" and "layer_types" in config:
        config["layer_types"] = ["full_attention"] * value
    with pytest.raises(LazymergeError) as caught:
        check(checkpoint_of(shapes), built({**config, **change}))
    error = caught.value
    assert said in error.hint
    assert f"it says {json.dumps(value)}" in error.hint
    assert "config.json" in error.problem
    assert "\n" not in error.problem + error.hint


def test_a_field_of_the_text_part_is_named_with_its_part(saved, here):
    config, shapes = saved("qwen3_vl")
    config["text_config"]["head_dim"] = 8
    with pytest.raises(InconsistentCheckpoint, match=r"text_config\.head_dim = 4 would fit, it says 8"):
        check(checkpoint_of(shapes), built(config))


def test_an_untied_head_that_is_not_there_is_explained_by_the_flag(saved, here):
    config, shapes = saved("llama", tie_word_embeddings=True)
    with pytest.raises(IncompleteCheckpoint, match="tie_word_embeddings = true would fit") as caught:
        check(checkpoint_of(shapes), built({**config, "tie_word_embeddings": False}))
    assert "missing: lm_head.weight" in caught.value.problem
    assert "makes another model" in caught.value.hint
    assert "--force-shape-match" not in caught.value.hint


def test_two_wrong_fields_are_both_named(saved, here):
    config, shapes = saved("llama")
    with pytest.raises(InconsistentCheckpoint) as caught:
        check(checkpoint_of(shapes), built({**config, "vocab_size": 48, "intermediate_size": 20}))
    assert "vocab_size = 32" in caught.value.hint
    assert "intermediate_size = 24" in caught.value.hint


def test_tensors_are_listed_with_both_shapes_five_and_how_many_more(saved, here):
    config, shapes = saved("llama")
    with pytest.raises(InconsistentCheckpoint) as caught:
        check(checkpoint_of(shapes, "megatron"), built({**config, "intermediate_size": 32}))
    problem = caught.value.problem
    assert problem.startswith("6 tensors do not fit the LlamaForCausalLM of config.json: ")
    assert "model.layers.0.mlp.gate_proj.weight is 24x16, not 32x16" in problem
    assert problem.count(".weight is ") == 5
    assert problem.endswith("and 1 more")
    assert "--force-shape-match" in caught.value.hint


def test_what_no_field_explains_is_refused_all_the_same(saved, here):
    config, shapes = saved("llama")
    shapes["model.norm.weight"] = (17,)
    with pytest.raises(InconsistentCheckpoint, match=r"model\.norm\.weight is 17, not 16") as caught:
        check(checkpoint_of(shapes), built(config))
    assert "would fit" not in caught.value.hint


OTHER_NAMES = [
    (
        "llama",
        {"architectures": ["LlamaModel"]},
        "LlamaModel has layers.0.",
        "checkpoint has model.layers.0.",
    ),
    (
        "llama",
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        " has transformer.h.0.",
        "model.l",
    ),
    ("llama", {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, ".block.0.", "model.l"),
]


@pytest.mark.parametrize(("name", "change", "ours", "theirs"), OTHER_NAMES)
def test_names_of_another_class_are_said_to_be_that(saved, here, monkeypatch, name, change, ours, theirs):
    config, shapes = saved(name)
    found = built({**config, **change})
    monkeypatch.setattr(module, "_ask", lambda request: pytest.fail("no field would do"))
    with pytest.raises(LazymergeError) as caught:
        check(checkpoint_of(shapes), found)
    assert "the names are those of another class" in caught.value.hint
    assert ours in caught.value.hint
    assert theirs in caught.value.hint
    assert "would fit" not in caught.value.hint


def test_the_example_of_other_names_is_the_same_tensor_where_there_is_one(saved, here):
    config, shapes = saved("llama")
    with pytest.raises(LazymergeError) as caught:
        check(
            checkpoint_of(dict(reversed(shapes.items()))), built({**config, "architectures": ["LlamaModel"]})
        )
    ours, theirs = (
        caught.value.hint.split(f" {word} ")[-1].split()[0].strip(",;")
        for word in ("LlamaModel has", "the checkpoint has")
    )
    assert theirs == f"model.{ours}"


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_fewer_layers_are_no_hint_where_the_layers_have_other_names(saved, here, name):
    config, shapes = saved(name)
    renamed = {key.replace("layers.", "stack."): shape for key, shape in shapes.items()}
    with pytest.raises(LazymergeError) as caught:
        check(checkpoint_of(renamed), built(config))
    assert "would fit" not in caught.value.hint


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize(("count", "said"), [(None, "it has none"), (0, "it says 0")])
def test_layers_that_predict_further_tokens_and_are_not_counted(saved, here, monkeypatch, name, count, said):
    config, shapes = saved(name)
    config.pop("num_nextn_predict_layers", None)
    last = "model.layers.1."
    mtp = {key.replace(last, "model.layers.2."): shape for key, shape in shapes.items() if last in key}
    mtp |= {f"model.layers.2.{key}.weight": (16,) for key in ("enorm", "hnorm", "shared_head.norm")}
    mtp["model.layers.2.eh_proj.weight"] = (16, 32)
    found = built({**config, **({} if count is None else {"num_nextn_predict_layers": count})})
    answer = module._ask
    monkeypatch.setattr(module, "_ask", lambda request: pytest.fail("this explains all"))
    with pytest.raises(InconsistentCheckpoint) as caught:
        check(checkpoint_of({**shapes, **mtp}), found)
    assert f"in config.json, num_nextn_predict_layers = 1 would fit, {said};" in caught.value.hint
    assert built_from(answer, monkeypatch, {**config, "num_nextn_predict_layers": 1}, {**shapes, **mtp})
    with pytest.raises(InconsistentCheckpoint) as caught:
        check(checkpoint_of({**shapes, **mtp}), built({**found.config, "vocab_size": 40}))
    assert "num_nextn_predict_layers = 1 would fit" in caught.value.hint
    assert "and vocab_size = 32 would fit, it says 40" in caught.value.hint


def built_from(answer: Any, monkeypatch: Any, config: dict[str, Any], shapes: Any) -> bool:
    """Whether the checkpoint fits this config, with the process's answers back in place."""
    monkeypatch.setattr(module, "_ask", answer)
    return compare(checkpoint_of(shapes), built(config)).wrong == frozenset()


def test_force_shape_match_is_not_offered_for_what_it_refuses(saved, here):
    """Nor for other checkpoints than Megatron's, which do not have it."""
    for name, kind in (("phi3", "megatron"), ("llama", "fsdp")):
        config, shapes = saved(name)
        with pytest.raises(InconsistentCheckpoint) as caught:
            check(checkpoint_of(shapes, kind), built({**config, "intermediate_size": 32}))
        assert "24" in caught.value.problem
        assert "--force-shape-match" not in caught.value.hint


def test_a_checkpoint_of_nothing_is_incomplete(saved, here):
    config, shapes = saved("llama")
    with pytest.raises(IncompleteCheckpoint, match=f"{len(shapes)} tensors do not fit"):
        check(checkpoint_of({}), built(config))


def test_a_single_missing_tensor_is_incomplete(saved, here):
    config, shapes = saved("deepseek_v3")
    del shapes["model.layers.1.mlp.experts.3.up_proj.weight"]
    del shapes["model.layers.1.mlp.gate.e_score_correction_bias"]  # a buffer that is saved
    with pytest.raises(IncompleteCheckpoint) as caught:
        check(checkpoint_of(shapes), built(config))
    assert "2 tensors" in caught.value.problem
    assert "experts.3.up_proj.weight" in caught.value.problem
    assert "e_score_correction_bias" in caught.value.problem


# ---- what is not in the model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",  # a layer too many
        "model.layers.0.self_attn.q_proj.bias",  # of a module that has none
        "model.layers.1.self_attn.q_norm.weight",  # a module that the layer has not
    ],
)
def test_what_a_loader_would_drop_from_a_part_of_the_model_is_refused(saved, here, name):
    config, shapes = saved("llama")
    with pytest.raises(InconsistentCheckpoint, match="not in the model: " + name.replace(".", r"\.")):
        check(checkpoint_of({**shapes, name: (16,)}), built(config))


def test_a_value_head_beside_the_model_is_a_warning(saved, here):
    config, shapes = saved("qwen2")
    shapes |= {"v_head.summary.weight": (1, 16), "v_head.summary.bias": (1,)}
    (note,) = check(checkpoint_of(shapes), built(config)).notes
    assert note.level == "warning"
    assert "v_head.summary.weight, v_head.summary.bias" in note.text
    assert "2 tensors" in note.text


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        ("deepseek_v3", "model.layers.2.eh_proj.weight", {"num_nextn_predict_layers": 1}),
        ("glm4_moe", "model.layers.2.shared_head.norm.weight", {"num_nextn_predict_layers": 1}),
        ("qwen3_next", "mtp.fc.weight", {}),  # the class says so
        ("llama", "model.rotary_emb.inv_freq", {}),  # a buffer that is not saved
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", {}),  # where it once was, saved
    ],
)
def test_what_the_loader_says_it_ignores_is_only_mentioned(saved, here, name, tensor, change):
    config, shapes = saved(name)
    (note,) = check(checkpoint_of({**shapes, tensor: (2,)}), built({**config, **change})).notes
    assert note.level == "info"
    assert tensor in note.text


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen2_5_vl", ["visual"]),
        ("qwen3_vl", ["visual"]),
        ("gemma3", ["vision_tower", "multi_modal_projector"]),
        ("llama4", ["vision_model", "multi_modal_projector"]),
    ],
)
def test_a_whole_part_beside_the_text_may_be_absent_but_not_half_of_it(saved, here, name, parts):
    config, shapes = saved(name)
    found = built(config)
    beside = {key for key in shapes for part in parts if part in key.split(".")}
    text = {key: shape for key, shape in shapes.items() if key not in beside}
    notes = check(checkpoint_of(text), found).notes
    assert {note.level for note in notes} == {"warning"}
    assert [note.text.split()[0] for note in notes] == parts
    assert f"({len([key for key in beside if parts[0] in key.split('.')])} tensors)" in notes[0].text
    one = min(key for key in beside if parts[0] in key.split("."))
    with pytest.raises(IncompleteCheckpoint):
        check(checkpoint_of({**text, one: shapes[one]}), found)


def test_the_text_model_may_not_be_absent(saved, here):
    config, shapes = saved("qwen2_5_vl")
    found = differences({key: shape for key, shape in shapes.items() if "visual" in key}, built(config))
    assert "lm_head.weight" in found.missing
    assert "model.embed_tokens.weight" in found.missing


# ---- configs ---------------------------------------------------------------------------------------------


NAMES_NONE = "config.json names no class (architectures)"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, NAMES_NONE),
        ({"architectures": []}, NAMES_NONE),
        (
            {"architectures": "LlamaForCausalLM"},
            "config.json has a text as architectures, which is a list of names: [...]",
        ),
        ({"architectures": [7]}, NAMES_NONE),
        ({"architectures": ["os.system"]}, NAMES_NONE),
        ({"architectures": ["AutoModel"]}, NAMES_NONE),
        ({"architectures": ["AutoModelForCausalLM"]}, NAMES_NONE),
        (
            {"architectures": ["NoSuchModelForCausalLM"], "auto_map": {"AutoModelForCausalLM": "x.NoSuch"}},
            "transformers has no class NoSuchModelForCausalLM",
        ),
        ({"architectures": ["PreTrainedModel"]}, "transformers has no class PreTrainedModel"),
        ({"architectures": ["pipeline"]}, "transformers has no class pipeline"),
    ],
)
def test_a_class_that_transformers_does_not_know_is_none_and_why(here, config, why):
    assert expected(config) is None
    assert why_unknown(config) == why


def test_model_type_and_architectures_that_contradict_each_other_are_refused(saved, here):
    config, _ = saved("qwen2")
    with pytest.raises(InconsistentCheckpoint) as caught:
        expected({**config, "model_type": "llama"})
    for each in ("Qwen2ForCausalLM", "whose model_type is qwen2", "model_type is llama"):
        assert each in caught.value.problem


@pytest.mark.parametrize("own", ["gpt-sw3", "qwen2", None])
def test_a_model_type_that_transformers_lists_for_the_class_is_taken(saved, here, own):
    """transformers lists GPT2LMHeadModel for gpt-sw3; and a config may lack its type."""
    name = "GPT2LMHeadModel" if own == "gpt-sw3" else "Qwen2ForCausalLM"
    config = {"architectures": [name], **({} if own is None else {"model_type": own})}
    assert built(config).class_name == name


def test_a_class_under_a_model_type_that_transformers_does_not_know(saved, here):
    """Kimi-K2 is kimi_k2 with DeepSeek-V3's class; its experts are apart, as DeepSeek-V3's own are."""
    config, shapes = saved("deepseek_v3")
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in shapes
    assert check(checkpoint_of(shapes), built({**config, "model_type": "kimi_k2"})).notes == ()


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_defaults_are_the_whole_config(saved, here, name):
    config, _ = saved(name)
    least = {key: config[key] for key in ("architectures", "model_type")}
    defaults = built({**least, "num_hidden_layers": 3}).defaults
    assert defaults["num_hidden_layers"] == 3
    assert config.keys() - defaults.keys() <= {"_attn_implementation"}
    assert json.loads(json.dumps(defaults)) == defaults


def test_numbers_that_json_has_not_are_taken_as_transformers_writes_them(saved, here):
    config, shapes = saved("llama")
    config["rms_norm_eps"] = {"__float__": "Infinity"}  # as Nemotron-H's time_step_limit
    assert check(checkpoint_of(shapes), built(config)).notes == ()
    with pytest.raises(InconsistentCheckpoint, match="rms_norm_eps"):
        built({**config, "rms_norm_eps": {"__float__": "much"}})


def test_defaults_have_what_gemma_3_leaves_to_its_class(here):
    """google/gemma-3-4b-it's config.json has these fields, and no others of sizes."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14}
        | {"num_attention_heads": 16, "num_hidden_layers": 27},
    }
    text = built(config).defaults["text_config"]
    sizes = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    assert [text[size] for size in sizes] == [262208, 8, 4, 256, 2560]  # its tensors on the hub
    assert built(config).defaults["vision_config"]["num_channels"] == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_size": 10**12, "intermediate_size": 10**12}, "overflow"),
        ({"layer_types": ["no_attention"] * 2}, "no_attention|layer_types"),
    ],
)
def test_a_config_that_the_class_refuses(saved, here, change, said):
    config, _ = saved("llama")
    with pytest.raises(LazymergeError, match=said):
        expected({**config, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1001},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 1e300},
        {"num_experts": 10**9},
        {"n_routed_experts": 10**9},
        {"vision_config": {"depth": 10**9}},
        {"n_layer": 10**9},
        {"num_hidden_layers": 10**4000},
    ],
)
def test_layers_without_end_are_refused_before_anything_is_built(monkeypatch, change):
    monkeypatch.setattr(module, "_ask", lambda request: pytest.fail("asked"))
    with pytest.raises(DamagedFile, match=r"config\.json: \w+ is (1|above).*expected at most 1,000"):
        expected({"architectures": ["LlamaForCausalLM"], **change})


@pytest.mark.parametrize("place", [{}, {"text_config": {}}])
@pytest.mark.parametrize("count", [100_001, 1e300, 10**4000])
def test_labels_without_end_are_refused_before_anything_is_built(monkeypatch, place, count):
    """800,000 of them were a name each in the answer, 39 MB of it."""
    monkeypatch.setattr(module, "_ask", lambda request: pytest.fail("asked"))
    labels = {"num_labels": count}
    config = {"architectures": ["LlamaForCausalLM"], **({"text_config": labels} if place else labels)}
    with pytest.raises(DamagedFile, match=r"config\.json: num_labels is .*expected at most 100,000"):
        expected(config)


def test_a_class_is_asked_for_once_and_of_many_none(here):
    """Each of them is a process of its own."""
    config = {
        "model_type": "llama",
        "architectures": ["Own", *["LlamaForCausalLM", "MistralForCausalLM"] * 100],
    }
    assert meta_model.classes(config) == ["LlamaForCausalLM", "MistralForCausalLM"]
    many = [*(f"Own{number}" for number in range(8)), "LlamaForCausalLM"]
    assert meta_model.classes({**config, "architectures": many}) == []


def test_labels_are_not_in_the_answer(saved, here):
    few, _ = saved("qwen3_moe-reward")
    answers = []
    for count in (3, 50_000):
        few.pop("id2label", None)
        few.pop("label2id", None)
        answers.append(built({**few, "num_labels": count, "vocab_size": 50_000}))
        assert answers[-1].shapes["score.weight"] == (count, 16)
    sizes = [len(json.dumps(answer.defaults)) for answer in answers]
    assert sizes[0] == sizes[1]


def test_the_text_part_has_no_labels_in_the_answer_either(saved, here):
    config, _ = saved("qwen2_5_vl")
    config["text_config"] |= {"num_labels": 50_000}
    assert len(json.dumps(built(config).defaults)) < 20_000


def test_a_config_too_deep_to_hand_on_is_refused():
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(DamagedFile, match=r"config\.json"):
        expected({"architectures": ["LlamaForCausalLM"], "rope_parameters": deep})


def test_kernels_that_are_not_installed_are_not_asked_for(saved, here):
    config, shapes = saved("qwen3_moe")
    config |= {"_attn_implementation": "flash_attention_3", "attn_implementation": "flash_attention_2"}
    assert check(checkpoint_of(shapes), built(config)).notes == ()


# ---- the process apart -----------------------------------------------------------------------------------


ASKING = """
import json, sys
from lazymerge.conversions.architecture import expected
found = expected(json.loads(sys.stdin.read()))
print(json.dumps([found.shapes, found.tied, sorted({"torch", "transformers"} & set(sys.modules))]))
"""


def test_the_process_apart_answers_the_same_and_the_one_that_asks_stays_small(saved, tmp_path):
    """gpt-oss says something about its RoPE when it is built; a torch.py in the way is not taken."""
    config, shapes = saved("gpt_oss", tie_word_embeddings=True)
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')")
    done = subprocess.run(
        [sys.executable, "-c", ASKING],
        input=json.dumps(config).encode(),
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(lazymerge.__file__).parents[1])},
        check=False,
    )
    assert done.stderr == b""
    found, tied, loaded = json.loads(done.stdout)
    assert loaded == []
    assert {key: tuple(shape) for key, shape in found.items() if key not in tied} == shapes
    assert list(tied) == ["lm_head.weight"]


@pytest.mark.slow
def test_a_config_that_takes_all_memory_ends_with_a_message():
    """10^9 kinds of attention are a list that long, made by the config's class before there is a model."""
    kinds = {"attention_types": [[["global"], 10**9]], "num_layers": 2}
    with pytest.raises(DamagedFile, match="GPTNeoForCausalLM that it asks for takes more than"):
        expected({"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", **kinds})


@pytest.mark.parametrize(
    ("end", "kind", "said"),
    [
        (
            (0, b'{"refused": "ValueError: no such width"}'),
            InconsistentCheckpoint,
            "ValueError: no such width",
        ),
        ((0, b'{"too large": true}'), DamagedFile, "takes more than 30 s or 2 GiB"),
        ((0, b" " * (ANSWER + 1) + b"{}"), DamagedFile, "24 MiB of names"),
        ((-signal.SIGXCPU, b""), DamagedFile, "takes more than 30 s or 2 GiB"),
        ((1, b""), PlanError, "exit code 1"),
        ((-signal.SIGKILL, b'{"archi'), PlanError, "exit code -9"),
        (subprocess.TimeoutExpired("python", 600), DamagedFile, "takes more than"),
        (FileNotFoundError(2, "No such file or directory"), PlanError, "No such file"),
    ],
)
def test_however_the_process_ends_there_is_a_message(monkeypatch, end, kind, said):
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if isinstance(end, Exception):
            raise end
        return subprocess.CompletedProcess(command, end[0], end[1])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(kind) as caught:
        expected({"architectures": ["LlamaForCausalLM"]})
    assert type(caught.value) is kind
    assert said in caught.value.problem
    assert "--no-check" in caught.value.hint
    assert "\n" not in caught.value.problem + caught.value.hint


CODE = """
import pathlib
import sys
import torch
from transformers import PretrainedConfig, PreTrainedModel

pathlib.Path({marker!r}).touch()
print("hello from the checkpoint")

class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, width=8, **others):
        self.width = width
        super().__init__(**others)

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.up = torch.nn.Linear(config.width, 3, bias=False)
        self.post_init()
"""


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A folder with a model's code, what the code makes when it is run, and config.json."""
    folder, marker = tmp_path / "own", tmp_path / "has run"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(CODE.format(marker=str(marker)))
    references = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModel": "someone/own--modeling_own.OwnForCausalLM",
    }
    config = {"architectures": ["OwnForCausalLM"], "model_type": "own", "width": 6, "auto_map": references}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, marker, config


def test_code_of_the_checkpoint_runs_only_where_it_is_trusted(own, capfd, monkeypatch):
    folder, marker, config = own
    monkeypatch.chdir(folder)
    assert expected(config) is None
    assert not marker.exists()
    found = expected(config, code=folder)
    assert found is not None
    assert marker.exists()
    assert found.shapes == {"up.weight": (3, 6)}
    assert capfd.readouterr() == ("", "")
    assert "modeling_own" not in "".join(sys.modules)
    with pytest.raises(InconsistentCheckpoint, match="width = 5 would fit, it says 6"):
        check(checkpoint_of({"up.weight": (3, 5)}), found)


def test_nothing_is_held_but_names(saved, here):
    """A model of any size is built without memory for its weights."""
    config, _ = saved("llama")
    found = built({**config, "vocab_size": 10**9, "hidden_size": 16})
    assert found.shapes["lm_head.weight"] == (10**9, 16)
    assert torch.get_default_device().type == "cpu"


def test_only_what_the_loader_swaps_may_be_transposed():
    shapes = {"experts.up": (4, 2, 3), "other.up": (4, 2, 3)}
    model = module.Architecture("X", shapes, swappable=(r"experts\.",))
    turned = {"experts.up": (4, 3, 2), "other.up": (4, 3, 2)}
    assert module.differences(turned, model).misshapen == {"other.up": ((4, 3, 2), (4, 2, 3))}
    cut = {"experts.up": (3, 3, 2), "other.up": (4, 2, 3)}
    assert module.differences(cut, model).misshapen == {"experts.up": ((3, 3, 2), (4, 2, 3))}
