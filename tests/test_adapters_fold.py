"""Adapters folded into their base, against PEFT: its merged weights, its scales, its model's answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lazymerge.conversions.adapters.read import read_adapter
from lazymerge.conversions.adapters.settings import understand
from lazymerge.errors import InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from tests import folding
from tests.makers import peft_models as makers

WEIGHTS = "model.safetensors"
ATTENTION = ["q_proj", "v_proj"]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return tmp_path


def fold_case(
    folder: Path,
    model: torch.nn.Module,
    lora: dict[str, Any],
    make: Callable[..., Any] | None = None,
    **how: Any,
) -> tuple[folding.Folded, Path, Path, Path]:
    """(result, base, adapter, written result) of one adapter that PEFT made for the model."""
    base = makers.save_base(model, folder / "base")
    adapter = makers.adapted(base, folder / "adapter", {"r": 4, "lora_alpha": 8, **lora}, make=make, **how)
    result = folding.folded(base, adapter)
    return result, base, adapter, folding.write(result, base, folder / "out")


def check_merged(
    base: Path, adapter: Path, out: Path, make: Callable[..., Any] | None = None, *, exact: bool = True
) -> None:
    """The written weights are those of PEFT's merge, and the model answers as the adapted one does."""
    adapted = makers.with_adapter(base, adapter, make)
    expected = makers.logits(adapted)
    merged = makers.load(out)
    assert (makers.logits(merged) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    with makers.quiet():
        peft_merged = adapted.merge_and_unload().state_dict()
    mine = merged.state_dict()
    assert mine.keys() == peft_merged.keys()
    for name, weight in peft_merged.items():
        if exact:
            assert torch.equal(mine[name], weight), name
        else:
            torch.testing.assert_close(mine[name], weight, rtol=1e-6, atol=1e-6, msg=name)


PLAIN = {
    "linear": {"target_modules": makers.LINEAR},
    "rslora": {"target_modules": makers.LINEAR, "use_rslora": True, "lora_alpha": 3},
    "patterns": {
        "target_modules": makers.LINEAR,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 8, "^model.layers.0.mlp.up_proj": 3},
        "alpha_pattern": {"model.layers.0.self_attn.v_proj": 3, "down_proj": 5},
    },
    "rs-patterns": {
        "target_modules": makers.LINEAR,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, "proj": 6},
        "alpha_pattern": {"(k|v)_proj": 7},
    },
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding-and-head": {"target_modules": ["embed_tokens", "lm_head"]},
    "token-rows": {"target_modules": ATTENTION, "trainable_token_indices": [5, 3, 9]},
    "modules": {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "norm"]},
    "some-layers": {"target_modules": ATTENTION, "layers_to_transform": [1]},
}


@pytest.mark.parametrize("name", PLAIN)
def test_weights_are_those_of_pefts_merge(folders: Path, name: str) -> None:
    _, base, adapter, out = fold_case(folders, makers.llama(), PLAIN[name])
    check_merged(base, adapter, out)


BIASED = {
    "all": {"bias": "all"},
    "lora_only": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True, "alpha_pattern": {"q_proj": 5}},
}


@pytest.mark.parametrize("name", BIASED)
def test_biases(folders: Path, name: str) -> None:
    lora = {"target_modules": ATTENTION, **BIASED[name]}
    _, base, adapter, out = fold_case(folders, makers.llama(attention_bias=True), lora)
    check_merged(base, adapter, out)


CONV1D = {
    "all": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "square too": {"target_modules": ["c_proj"]},
}


@pytest.mark.parametrize("name", CONV1D)
@pytest.mark.parametrize("said", [True, False])
def test_conv1d_of_gpt2(folders: Path, name: str, said: bool) -> None:
    base = makers.save_base(makers.gpt2(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "lora_alpha": 8, **CONV1D[name]})
    change_config(adapter, fan_in_fan_out=said)  # PEFT goes by the layer's class too
    out = folding.write(folding.folded(base, adapter), base, folders / "out")
    check_merged(base, adapter, out)


DORA = {
    "linear": (makers.llama, {"target_modules": makers.LINEAR}),
    "embedding": (makers.llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "conv1d": (makers.gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("name", DORA)
def test_dora(folders: Path, name: str) -> None:
    model, lora = DORA[name]
    _, base, adapter, out = fold_case(folders, model(), {"use_dora": True, **lora})
    check_merged(base, adapter, out, exact=False)


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True, "lora_alpha": 8, "r": 4}])
def test_whole_numbers_are_exact(folders: Path, fields: dict[str, Any]) -> None:
    _, base, adapter, out = fold_case(
        folders, makers.llama(), {"target_modules": makers.LINEAR, **fields}, integers=True
    )
    adapted = makers.with_adapter(base, adapter)
    with makers.quiet():
        expected = adapted.merge_and_unload().state_dict()
    written = load_file(out / WEIGHTS)
    assert all(torch.equal(written[name], expected[name]) for name in written)
    assert not torch.equal(
        written["model.layers.0.mlp.up_proj.weight"],
        load_file(base / WEIGHTS)["model.layers.0.mlp.up_proj.weight"],
    )


@pytest.mark.parametrize("name", [name for name in PLAIN if "module" not in name])
def test_scales_are_pefts(folders: Path, name: str) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "lora_alpha": 8, **PLAIN[name]})
    expected = makers.scalings(makers.with_adapter(base, adapter))
    settings = understand(read_adapter(adapter))
    assert expected and {module: settings.scale(module) for module in expected} == expected


BF16 = {
    "plain": {},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "pattern": {"alpha_pattern": {"layers.0.self_attn.q_proj": 32}},
    "bias": {"bias": "lora_only"},
}


@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(folders: Path, name: str, dtype: torch.dtype) -> None:
    base = makers.save_base(makers.llama(attention_bias=True), folders / "base")
    fields = {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION, **BF16[name]}
    adapter = makers.adapted(base, folders / "adapter", fields)
    half = {name: weight.to(dtype) for name, weight in load_file(base / WEIGHTS).items()}
    save_file(half, base / WEIGHTS, {"format": "pt"})
    written = load_file(folding.write(folding.folded(base, adapter), base, folders / "out") / WEIGHTS)
    scales = {"rslora": 4.0}
    tensors = load_file(adapter / "adapter_model.safetensors")
    for weight_name, weight in half.items():
        module = "base_model.model." + weight_name.removesuffix(".weight").removesuffix(".bias")
        expected = weight
        if weight_name.endswith(".bias") and f"{module}.base_layer.bias" in tensors:
            expected = tensors[f"{module}.base_layer.bias"].to(dtype)
        elif weight_name.endswith(".weight") and f"{module}.lora_A.weight" in tensors:
            scale = scales.get(name, 2.0)
            if name == "pattern" and "layers.0.self_attn.q_proj" in module:
                scale = 4.0
            product = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
            expected = (weight.float() + scale * product).to(dtype)
        assert torch.equal(written[weight_name], expected), weight_name


def test_several_adapters_with_weights(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    one = makers.adapted(base, folders / "one", {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION})
    two = makers.adapted(
        base, folders / "two", {"r": 2, "lora_alpha": 3, "target_modules": ["v_proj", "up_proj"]}, seed=2
    )
    result = folding.folded(base, one, two, weights=[0.5, -2])
    written = load_file(folding.write(result, base, folders / "out") / WEIGHTS)
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in (one, two)]
    for name, weight in load_file(base / WEIGHTS).items():
        expected = weight.clone()
        for held, factor in zip(tensors, (0.5 * 2, -2 * 1.5), strict=True):
            module = "base_model.model." + name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in held:
                expected += factor * (held[f"{module}.lora_B.weight"] @ held[f"{module}.lora_A.weight"])
        assert torch.equal(written[name], expected), name


# ---------------------------------------------------------------------------------- tied embeddings


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_lora_of_one_tied_layer_unties(folders: Path, target: str) -> None:
    """PEFT's adapted model computes with two weights; its merge would change both, and its answers."""
    model = makers.llama(tie_word_embeddings=True)
    result, base, adapter, out = fold_case(folders, model, {"target_modules": [target, "q_proj"]})
    expected = makers.logits(makers.with_adapter(base, adapter))
    torch.testing.assert_close(makers.logits(makers.load(out)), expected, rtol=1e-5, atol=1e-5)
    assert result.config_changes == {"tie_word_embeddings": False}
    assert any("tied" in note.text and note.level == "warning" for note in result.checkpoint.notes)


def test_gpt2s_embedding_unties_too(folders: Path) -> None:
    result, base, adapter, out = fold_case(folders, makers.gpt2(), {"target_modules": ["wte", "c_attn"]})
    expected = makers.logits(makers.with_adapter(base, adapter))
    torch.testing.assert_close(makers.logits(makers.load(out)), expected, rtol=1e-5, atol=1e-5)
    assert result.config_changes == {"tie_word_embeddings": False}


@pytest.mark.parametrize("saved", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_tied_layer_that_was_saved_whole_unties(folders: Path, saved: list[str]) -> None:
    model = makers.llama(tie_word_embeddings=True)
    _, base, adapter, out = fold_case(folders, model, {"target_modules": ATTENTION, "modules_to_save": saved})
    check_merged(base, adapter, out)


KEPT = {
    "saved": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "rows": {"trainable_token_indices": {"embed_tokens": [5, 3, 9]}},
    "lora": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("name", KEPT)
def test_tied_layers_that_were_trained_as_one_stay_tied(folders: Path, name: str) -> None:
    model = makers.llama(tie_word_embeddings=True)
    lora = {"target_modules": ATTENTION, **KEPT[name]}
    result, base, adapter, out = fold_case(folders, model, lora)
    assert not result.config_changes and "lm_head.weight" not in load_file(out / WEIGHTS)
    expected = makers.logits(makers.with_adapter(base, adapter))
    torch.testing.assert_close(makers.logits(makers.load(out)), expected, rtol=1e-5, atol=1e-5)


def test_a_tied_head_that_the_base_has_too(folders: Path) -> None:
    """Rows that were trained for both are in both; LoRA of one of them unties."""
    base = makers.save_base(makers.llama(tie_word_embeddings=True), folders / "base")
    weights = load_file(base / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, base / WEIGHTS, {"format": "pt"})
    rows = {"r": 4, "target_modules": ATTENTION, "trainable_token_indices": {"embed_tokens": [5, 3]}}
    result = folding.folded(base, makers.adapted(base, folders / "rows", rows))
    written = load_file(folding.write(result, base, folders / "one") / WEIGHTS)
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert not torch.equal(written["lm_head.weight"], weights["lm_head.weight"])
    lora = {"r": 4, "target_modules": ["embed_tokens"]}
    result = folding.folded(base, makers.adapted(base, folders / "lora", lora))
    written = load_file(folding.write(result, base, folders / "two") / WEIGHTS)
    assert torch.equal(written["lm_head.weight"], weights["lm_head.weight"])
    assert result.config_changes == {"tie_word_embeddings": False}


# ------------------------------------------------------------------------------ vocabularies, heads

GROWN = {
    "saved modules": ({"modules_to_save": ["embed_tokens", "lm_head"]}, {}),
    "saved layers": ({}, {"save_embedding_layers": True}),
    "token rows": ({"trainable_token_indices": [33, 3]}, {"save_embedding_layers": True}),
}


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.parametrize("tied", [False, True])
def test_longer_vocabularies(folders: Path, name: str, tied: bool) -> None:
    lora, how = GROWN[name]
    base = makers.save_base(makers.llama(tie_word_embeddings=tied), folders / "base")
    adapter = makers.adapted(
        base, folders / "adapter", {"r": 4, "target_modules": ATTENTION, **lora}, resize=36, **how
    )
    result = folding.folded(base, adapter)
    assert result.config_changes["vocab_size"] == 36

    def resized(folder: Path, **options: Any) -> Any:
        model = makers.load(folder, **options)
        model.resize_token_embeddings(36)
        return model

    import peft

    with makers.quiet():
        adapted = peft.PeftModel.from_pretrained(resized(base), adapter).eval()
    merged = makers.load(folding.write(result, base, folders / "out"))
    torch.testing.assert_close(makers.logits(merged), makers.logits(adapted), rtol=1e-5, atol=1e-5)


def test_an_embedding_that_grew_without_the_head_is_refused(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ATTENTION})
    add(adapter, {"base_model.model.model.embed_tokens.weight": torch.ones(36, 16)})
    with pytest.raises(InconsistentCheckpoint, match=r"36 rows.*lm_head.weight has 32"):
        folding.folded(base, adapter)


def classifier(kind: Any, **fields: Any) -> Callable[..., Any]:
    return lambda folder, **options: kind.from_pretrained(folder, **fields, **options)


HEADS = {
    "sequence": ("SEQ_CLS", transformers.LlamaForSequenceClassification),
    "token": ("TOKEN_CLS", transformers.LlamaForTokenClassification),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_new_head(folders: Path, name: str, tied: bool) -> None:
    task, kind = HEADS[name]
    make = classifier(kind, num_labels=5)
    model = makers.llama(tie_word_embeddings=tied)
    lora = {"target_modules": ATTENTION, "task_type": task}
    result, base, adapter, out = fold_case(folders, model, lora, make)
    check_merged(base, adapter, out, make)
    config = transformers.AutoConfig.from_pretrained(out)
    assert config.architectures == [kind.__name__] and config.num_labels == 5
    assert ("lm_head.weight" in result.checkpoint.left_out) is not tied


def test_labels_of_the_base_are_kept(folders: Path) -> None:
    with makers.quiet():
        config = transformers.LlamaConfig(**makers.SIZES, num_labels=3, id2label={0: "a", 1: "b", 2: "c"})
        model = transformers.LlamaForSequenceClassification(config)
    lora = {"target_modules": ATTENTION, "task_type": "SEQ_CLS"}
    result, base, adapter, out = fold_case(folders, model, lora)
    check_merged(base, adapter, out)
    assert result.config_changes == {}


# --------------------------------------------------------------------------------------- experts

TINY = {
    key: value
    for key, value in makers.SIZES.items()
    if key not in {"pad_token_id", "bos_token_id", "eos_token_id"}
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def qwen3(size: int = 12) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **TINY, moe_intermediate_size=size, num_experts=4, num_experts_per_tok=2, head_dim=4
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(size: int = 24) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {**TINY, "intermediate_size": size}
    config = transformers.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, head_dim=4)
    return transformers.GptOssForCausalLM(config)


def llama4() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **TINY,
        intermediate_size_mlp=24,
        num_local_experts=4,
        num_experts_per_tok=1,
        head_dim=4,
        interleave_moe_layer_step=1,
        attention_chunk_size=16,
    )
    return transformers.Llama4ForCausalLM(config)


MOE = {
    "mixtral": (mixtral, {"target_parameters": EXPERTS}),
    "mixtral, one of two": (mixtral, {"target_parameters": EXPERTS[1:]}),
    "qwen3": (qwen3, {"target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 3}}),
    "qwen3, a square one": (lambda: qwen3(16), {"target_parameters": EXPERTS}),
    "qwen3, router": (
        qwen3,
        {"target_parameters": [*EXPERTS, "mlp.gate.weight"], "alpha_pattern": {"gate.weight": 7}},
    ),
    "gpt_oss": (gpt_oss, {"target_parameters": EXPERTS}),
    "gpt_oss, a square one": (lambda: gpt_oss(16), {"target_parameters": EXPERTS[1:]}),
    "llama4": (
        llama4,
        {"target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("name", MOE)
def test_parameters_of_all_experts(folders: Path, name: str) -> None:
    make, lora = MOE[name]
    _, base, adapter, out = fold_case(folders, make(), {"target_modules": ["q_proj"], **lora})
    check_merged(base, adapter, out, exact=False)
    if "gpt_oss" not in name and "llama4" not in name:  # the base with all experts in one tensor, too
        fused = as_at_run_time(base, folders / "fused")
        folded = load_file(folding.write(folding.folded(fused, adapter), fused, folders / "out2") / WEIGHTS)
        assert_same(folded, makers.load(out).state_dict())


@pytest.mark.parametrize(
    ("make", "container", "leaves"),
    [
        (mixtral, "block_sparse_moe", ["w1", "w2", "w3"]),
        (qwen3, "mlp", ["gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_layers_of_every_expert(
    folders: Path, make: Callable[[], torch.nn.Module], container: str, leaves: list[str]
) -> None:
    """Adapters of transformers 4, which PEFT converts when it loads them."""
    base = makers.save_base(make(), folders / "base")
    adapter = folders / "adapter"
    adapter.mkdir()
    tensors = {}
    weights = load_file(base / WEIGHTS)
    for name in weights:
        if f"{container}.experts." in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            out, in_ = weights[name].shape
            tensors[f"{module}.lora_A.weight"] = 0.3 * torch.randn(2, in_)
            tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(out, 2)
    save_file(tensors, adapter / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": leaves}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    out = folding.write(folding.folded(base, adapter), base, folders / "out")
    check_merged(base, adapter, out, exact=False)
    expected = makers.load(out).state_dict()
    fused = as_at_run_time(base, folders / "fused")
    written = folding.write(folding.folded(fused, adapter), fused, folders / "out2")
    assert_same(load_file(written / WEIGHTS), expected)
    with makers.quiet():  # and as PEFT saves what it has converted
        makers.with_adapter(base, adapter).save_pretrained(folders / "converted")
    written = folding.write(folding.folded(base, folders / "converted"), base, folders / "out3")
    assert_same(makers.load(written).state_dict(), expected)


def as_at_run_time(base: Path, folder: Path) -> Path:
    folder.mkdir()
    state = {name: weight.contiguous() for name, weight in makers.load(base).state_dict().items()}
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    shutil.copy(base / "config.json", folder)
    return folder


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


# ----------------------------------------------------------------------------------------- names


def test_a_text_model_in_a_vision_model(folders: Path) -> None:
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**makers.SIZES, tie_word_embeddings=False)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
    )
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=31)
    )
    _, base, adapter, out = fold_case(folders, model, {"target_modules": ["q_proj", "down_proj", "fc1"]})
    hub = load_file(base / WEIGHTS).keys()
    assert not all(f"base_model.model.{name}" in hub for name in makers.load(base).state_dict())
    check_merged(base, adapter, out)


@pytest.mark.parametrize("front", ["base_model.model.", "base_model.model.model.language_model.", ""])
@pytest.mark.parametrize("adapter_name", ["", ".default"])
def test_other_spellings(folders: Path, front: str, adapter_name: str) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ATTENTION})
    expected = load_file(folding.write(folding.folded(base, adapter), base, folders / "out") / WEIGHTS)
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {
        name.replace("base_model.model.model.", front if front != "base_model.model." else f"{front}model.")
        .replace(".lora_A", f".lora_A{adapter_name}")
        .replace(".lora_B", f".lora_B{adapter_name}"): weight
        for name, weight in tensors.items()
    }
    save_file(renamed, adapter / "adapter_model.safetensors")
    written = folding.write(folding.folded(base, adapter), base, folders / "again")
    assert_same(load_file(written / WEIGHTS), expected)


# -------------------------------------------------------------------------------------- convolutions


class Convolutions(torch.nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = torch.nn.Conv1d(6, 8, 3)
        self.two = torch.nn.Conv2d(6, 8, (3, 2), groups=groups)
        self.point = torch.nn.Conv2d(6, 8, 1)
        self.three = torch.nn.Conv3d(6, 8, 2)


@pytest.mark.parametrize("dora", [False, True])
def test_convolutions(folders: Path, dora: bool) -> None:
    with makers.quiet():
        expected = convolved(folders, Convolutions(), dora=dora).merge_and_unload().state_dict()
    result = folding.folded(folders / "base", folders / "adapter")
    written = load_file(folding.write(result, folders / "base", folders / "out") / WEIGHTS)
    assert written.keys() == expected.keys()
    for name, weight in written.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_grouped_convolutions_are_refused(folders: Path) -> None:
    convolved(folders, Convolutions(groups=2), dora=False)
    with pytest.raises(UnsupportedCheckpoint, match=r"two is a convolution of several groups"):
        folding.folded(folders / "base", folders / "adapter")


def convolved(folder: Path, model: torch.nn.Module, *, dora: bool) -> Any:
    """A base and an adapter in two folders; returns the adapted model."""
    import peft

    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text("{}")
    save_file(model.state_dict(), folder / "base" / WEIGHTS)
    with makers.quiet():
        lora = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["one", "two", "point", "three"], use_dora=dora
        )
        adapted = makers.randomised(peft.get_peft_model(model, lora))
        adapted.save_pretrained(folder / "adapter")
    return adapted


# ------------------------------------------------------------------------------- nothing, and refusals


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_a_product_of_zero_is_told(folders: Path, half: str) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ATTENTION})
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: -0.0 * weight if half in name else weight for name, weight in tensors.items()},
        adapter / "adapter_model.safetensors",
    )
    result = folding.folded(base, adapter)
    assert result.unchanged
    assert [note.level for note in result.checkpoint.notes if note.level != "info"] == ["warning"]
    written = load_file(folding.write(result, base, folders / "out") / WEIGHTS)
    assert_same(written, load_file(base / WEIGHTS))
    assert not folding.folded(
        base, makers.adapted(base, folders / "b", {"r": 4, "target_modules": ATTENTION})
    ).unchanged


def test_a_weight_of_zero_is_told(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ATTENTION})
    assert folding.folded(base, adapter, weights=[0]).unchanged


def change_config(adapter: Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def add(adapter: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({**load_file(path), **tensors}, path)


FRONT = "base_model.model.model.layers.0.self_attn"
WRONG = {
    "no such module": (
        {
            f"{FRONT}.qq_proj.lora_A.weight": torch.ones(4, 16),
            f"{FRONT}.qq_proj.lora_B.weight": torch.ones(16, 4),
        },
        r"2 of \d+ tensors match nothing.*qq_proj.*nearest there: .*q_proj",
    ),
    "no such tensor": ({"base_model.model.pooler.weight": torch.ones(2)}, "match nothing.*pooler"),
    "another size": (
        {
            f"{FRONT}.o_proj.lora_A.weight": torch.ones(4, 17),
            f"{FRONT}.o_proj.lora_B.weight": torch.ones(16, 4),
        },
        r"weight of shape \(16, 17\), the base's has \(16, 16\)",
    ),
    "another rank": (
        {
            f"{FRONT}.o_proj.lora_A.weight": torch.ones(5, 16),
            f"{FRONT}.o_proj.lora_B.weight": torch.ones(16, 5),
        },
        "rank 5, expected 4",
    ),
    "one dimension": (
        {f"{FRONT}.o_proj.lora_A.weight": torch.ones(64), f"{FRONT}.o_proj.lora_B.weight": torch.ones(16, 4)},
        "make no product",
    ),
    "nothing": (
        {
            f"{FRONT}.o_proj.lora_A.weight": torch.ones(4, 0),
            f"{FRONT}.o_proj.lora_B.weight": torch.ones(16, 4),
        },
        "make no product",
    ),
    "a magnitude": ({f"{FRONT}.q_proj.lora_magnitude_vector": torch.ones(16)}, "use_dora is false"),
    "one module twice": (
        {
            "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(
                4, 16
            ),
            "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(
                16, 4
            ),
        },
        "both mean",
    ),
    "another norm": ({"base_model.model.model.norm.weight": torch.ones(17)}, r"shape \(17,\), the base's"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_of_this_base_is_refused(folders: Path, name: str) -> None:
    tensors, message = WRONG[name]
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ATTENTION})
    add(adapter, tensors)
    with pytest.raises(InconsistentCheckpoint, match=message):
        folding.folded(base, adapter)


def test_dora_adds_up_with_nothing(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    plain = makers.adapted(base, folders / "plain", {"r": 4, "target_modules": ATTENTION})
    dora = makers.adapted(base, folders / "dora", {"r": 4, "target_modules": ATTENTION, "use_dora": True})
    with pytest.raises(UnsupportedCheckpoint, match="DoRA"):
        folding.folded(base, plain, dora)
    with pytest.raises(UnsupportedCheckpoint, match="DoRA"):
        folding.folded(base, dora, weights=[0.5])


def test_modules_saved_whole_do_not_mix(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    lora = {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["norm"]}
    one = makers.adapted(base, folders / "one", lora)
    two = makers.adapted(base, folders / "two", lora, seed=2)
    with pytest.raises(PlanError, match="another adapter too"):
        folding.folded(base, one, two)
    with pytest.raises(PlanError, match=r"weight of 0.5 for model.*norm.weight"):
        folding.folded(base, one, weights=[0.5])


@pytest.fixture(scope="module")
def of_embeddings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and adapters of its embedding or head: whole, of rows, by a product, by DoRA."""
    folder = tmp_path_factory.mktemp("embeddings")
    base = makers.save_base(makers.llama(), folder / "base")
    kinds: dict[str, dict[str, Any]] = {
        "whole": {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]},
        "rows": {"target_modules": ATTENTION, "trainable_token_indices": [5, 3]},
        "other rows": {"target_modules": ATTENTION, "trainable_token_indices": [7]},
        "product": {"target_modules": ["embed_tokens", "lm_head"]},
        "dora": {"target_modules": ["lm_head"], "use_dora": True},
    }
    for seed, (name, lora) in enumerate(kinds.items(), 1):
        makers.adapted(base, folder / name, {"r": 4, **lora}, seed=seed)
    return folder


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ["whole", "rows"],
        ["rows", "other rows"],
        ["whole", "product"],
        ["rows", "product"],
        ["whole", "dora"],
        ["whole", "rows", "other rows"],
    ],
    ids=" ".join,
)
def test_what_was_trained_whole_by_one_mixes_with_nothing(
    of_embeddings: Path, names: list[str], turned: bool
) -> None:
    adapters = [of_embeddings / name for name in (reversed(names) if turned else names)]
    with pytest.raises(PlanError, match="fold one of the two only"):
        folding.folded(of_embeddings / "base", *adapters)


def test_rows_have_no_weight_whatever_is_folded_before(of_embeddings: Path) -> None:
    for names in (["rows"], ["whole", "rows"]):
        weights = [1.0] * (len(names) - 1) + [0.5]
        with pytest.raises(PlanError, match=r"a weight of 0\.5"):
            folding.folded(of_embeddings / "base", *(of_embeddings / name for name in names), weights=weights)


def test_a_head_that_is_no_matrix_is_refused(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ATTENTION})
    add(adapter, {"base_model.model.score.weight": torch.tensor(1.0)})
    change_config(adapter, modules_to_save=["score"], task_type="SEQ_CLS")
    with pytest.raises(InconsistentCheckpoint, match=r"score.weight has shape \(\)"):
        folding.folded(base, adapter)


def test_a_quantised_base_is_refused(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ATTENTION})
    weights = {name: weight.to(torch.float8_e4m3fn) for name, weight in load_file(base / WEIGHTS).items()}
    save_file(weights, base / WEIGHTS)
    with pytest.raises(UnsupportedCheckpoint, match="float8_e4m3fn, to which nothing can be added"):
        folding.folded(base, adapter)


def test_an_adapter_without_lora_bias_in_the_base_is_refused(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(
        base, folders / "adapter", {"r": 4, "target_modules": ATTENTION, "lora_bias": True}
    )
    with pytest.raises(InconsistentCheckpoint, match="no bias in the base"):
        folding.folded(base, adapter)


def test_a_square_weight_that_may_lie_either_way_is_refused(folders: Path) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ["q_proj", "up_proj"]})
    change_config(adapter, fan_in_fan_out=True)
    with pytest.raises(UnsupportedCheckpoint, match="fan_in_fan_out is true"):
        folding.folded(base, adapter)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_are_numbers(folders: Path, weight: float) -> None:
    base = makers.save_base(makers.llama(), folders / "base")
    adapter = makers.adapted(base, folders / "adapter", {"r": 4, "target_modules": ATTENTION})
    with pytest.raises(PlanError, match="give it a number"):
        folding.folded(base, adapter, weights=[weight])
