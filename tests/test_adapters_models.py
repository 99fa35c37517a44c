"""Folding into models that are not one text model, through a whole merge: renamed, joined, tied, mixed."""

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

import lazymerge
from lazymerge.errors import InconsistentCheckpoint, OutputError, PlanError, UnsupportedCheckpoint
from tests.checks import refused
from tests.makers import peft_models as makers

WEIGHTS = "model.safetensors"
LORA = {"r": 2, "lora_alpha": 4}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
BERT = {**SMALL, "vocab_size": 32, "max_position_embeddings": 32}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}


def bert_and_gpt2() -> Any:
    decoder = transformers.GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=32,
        add_cross_attention=True,
        is_decoder=True,
    )
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**BERT), decoder
    )
    return transformers.EncoderDecoderModel(both)


def vit() -> Any:
    sizes = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


def qwen3_moe() -> Any:
    sizes = {**makers.SIZES, "num_hidden_layers": 1, "moe_intermediate_size": 12, "num_experts": 4}
    config = transformers.Qwen3MoeConfig(
        **sizes, num_experts_per_tok=2, head_dim=4, tie_word_embeddings=False
    )
    return transformers.Qwen3MoeForCausalLM(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "square layers of BERT and of GPT-2": (bert_and_gpt2, {"target_modules": ["query", "c_attn", "c_proj"]}),
    "renamed modules": (vit, {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}),
    "a renamed module saved whole": (vit, {"target_modules": ["q_proj"], "modules_to_save": ["o_proj"]}),
    "fused experts saved whole": (
        qwen3_moe,
        {"target_modules": ["q_proj"], "modules_to_save": ["experts"]},
    ),
    "fused experts": (
        qwen3_moe,
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "T5": (t5, {"target_modules": ["q", "v", "wo"]}),
}


def made(folder: Path, model: Callable[[], Any], lora: dict[str, Any]) -> tuple[Path, Path, Any]:
    """(base, adapter, what loads such a model)."""
    torch.manual_seed(0)
    built = model()
    make = type(built).from_pretrained
    base = makers.save_base(built, folder / "base")
    return base, makers.adapted(base, folder / "adapter", {**LORA, **lora}, make=make), make


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in {"T5", "fused experts"} else [])
        for name in CASES
    ],
)
def test_result_is_what_peft_saves(tmp_path: Path, out: Path, name: str) -> None:
    base, adapter, make = made(tmp_path, *CASES[name])
    lazymerge.merge(base, out, adapter=str(adapter))
    with makers.quiet():
        makers.with_adapter(base, adapter, make).merge_and_unload().save_pretrained(tmp_path / "truth")
    mine, truth = load_file(out / WEIGHTS), load_file(tmp_path / "truth" / WEIGHTS)
    assert mine.keys() == truth.keys()
    assert not all(torch.equal(mine[each], load_file(base / WEIGHTS)[each]) for each in mine)
    for each, tensor in truth.items():
        torch.testing.assert_close(mine[each], tensor, rtol=1e-6, atol=1e-6, msg=each)


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["word_embeddings"]},
        {"target_modules": ["query"], "modules_to_save": ["decoder"]},
    ],
    ids=["embedding", "decoder"],
)
@pytest.mark.slow
def test_tied_layers_of_bert_come_apart(tmp_path: Path, out: Path, lora: dict[str, Any]) -> None:
    base, adapter, make = made(tmp_path, bert, lora)
    report = lazymerge.merge(base, out, adapter=str(adapter))
    assert any("tied no more" in note.text for note in report.notes)
    expected = makers.logits(makers.with_adapter(base, adapter, make))
    torch.testing.assert_close(makers.logits(makers.load(out, make)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q", "shared"]},
    ],
    ids=["head", "shared"],
)
def test_tied_layers_of_t5_stay_so_or_are_refused(tmp_path: Path, out: Path, lora: dict[str, Any]) -> None:
    """T5 scales its output by the flag that would have to say that they are two."""
    base, adapter, _ = made(tmp_path, t5, lora)
    with refused(UnsupportedCheckpoint, "are tied in the base", dst=out):
        lazymerge.merge(base, out, adapter=str(adapter))


# ---- tensors and modules of another model ------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, adapter) of a Llama with LoRA on q_proj."""
    folder = tmp_path_factory.mktemp("plain")
    base = makers.save_base(makers.llama(), folder / "base")
    return base, makers.adapted(base, folder / "adapter", {**LORA, "target_modules": ["q_proj"]})


def altered(
    adapter: Path,
    folder: Path,
    tensors: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda given: given,
    **fields: Any,
) -> str:
    """A copy of the adapter with other tensors and fields."""
    shutil.copytree(adapter, folder)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file(tensors(load_file(weights)), weights, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return str(folder)


@pytest.mark.parametrize("front", ["audio_tower.", "mtp.", "model.decoder.", "draft.model."])
def test_an_adapter_of_another_part(plain: tuple[Path, Path], tmp_path: Path, out: Path, front: str) -> None:
    adapter = altered(
        plain[1],
        tmp_path / "adapter",
        lambda given: {
            each.replace("model.model.layers", f"model.{front}layers"): t for each, t in given.items()
        },
    )
    with refused(InconsistentCheckpoint, "match nothing in the base", dst=out):
        lazymerge.merge(plain[0], out, adapter=adapter)


@pytest.mark.parametrize(
    ("module", "name", "shape"),
    [
        ("embed_tokens", "model.decoder.embed_tokens.weight", (32, 16)),
        ("norm", "model.layers.99.input_layernorm.weight", (16,)),
        ("lm_head", "policy.net.lm_head.weight", (32, 16)),
        ("experts", "model.layers.0.mlp.experts.down_proj", (4, 16, 24)),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_new_tensor_that_the_model_has_not(
    plain: tuple[Path, Path], tmp_path: Path, out: Path, module: str, name: str, shape: Any, check: bool
) -> None:
    adapter = altered(
        plain[1],
        tmp_path / "adapter",
        lambda given: {**given, f"base_model.model.{name}": torch.ones(shape)},
        modules_to_save=[module],
    )
    with refused(InconsistentCheckpoint, "is in no such form in the base", dst=out):
        lazymerge.merge(plain[0], out, adapter=adapter, check=check)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.slow
def test_a_head_for_which_transformers_has_no_class(tmp_path: Path, out: Path, check: bool) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    base = makers.save_base(mamba, tmp_path / "base")
    plain = makers.adapted(base, tmp_path / "plain", {**LORA, "target_modules": ["in_proj"]})
    adapter = altered(
        plain,
        tmp_path / "adapter",
        lambda given: {**given, "base_model.model.score.weight": torch.ones(2, 16)},
        modules_to_save=["score"],
        task_type="SEQ_CLS",
    )
    with refused(UnsupportedCheckpoint, "no class MambaForSequenceClassification", dst=out):
        lazymerge.merge(base, out, adapter=adapter, check=check)


def test_square_layer_of_a_model_of_which_nothing_is_said(
    plain: tuple[Path, Path], tmp_path: Path, out: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(plain[0], base)
    config = json.loads((base / "config.json").read_text())
    config |= {"architectures": None, "model_type": "new", "decoder": {"model_type": "gpt2"}}
    (base / "config.json").write_text(json.dumps(config))
    with refused(UnsupportedCheckpoint, "nothing shows whether the square weight", "q_proj lies", dst=out):
        lazymerge.merge(base, out, adapter=str(plain[1]), check=False)


# ---- one rounding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_rounding_to_the_type_that_is_asked_for(tmp_path: Path, out: Path, dtype: torch.dtype) -> None:
    """Of sums, of modules saved whole, of rows of the embedding; a base in bfloat16."""
    base = makers.save_base(makers.llama().to(torch.bfloat16), tmp_path / "base")
    lora = {**LORA, "target_modules": ["q_proj"], "modules_to_save": ["norm"], "trainable_token_indices": [5]}
    adapter = makers.adapted(base, tmp_path / "adapter", lora)
    lazymerge.merge(base, out, adapter=str(adapter), dtype=str(dtype))
    was, given = load_file(base / WEIGHTS), load_file(adapter / "adapter_model.safetensors")
    mine = load_file(out / WEIGHTS)
    front = "base_model.model.model"
    name = "layers.0.self_attn.q_proj"
    a, b = given[f"{front}.{name}.lora_A.weight"], given[f"{front}.{name}.lora_B.weight"]
    truth = was[f"model.{name}.weight"].float() + 2.0 * (b.float() @ a.float())
    assert torch.equal(mine[f"model.{name}.weight"], truth.to(dtype))
    assert not torch.equal(mine[f"model.{name}.weight"], truth.bfloat16().to(dtype))
    assert torch.equal(mine["model.norm.weight"], given[f"{front}.norm.weight"].to(dtype))
    rows = next(tensor for each, tensor in given.items() if "trainable_tokens_delta" in each)
    assert torch.equal(mine["model.embed_tokens.weight"][5], rows[0].to(dtype))


def test_what_fits_is_judged_in_the_type_that_is_asked_for(
    plain: tuple[Path, Path], tmp_path: Path, out: Path
) -> None:
    base = makers.save_base(makers.llama().half(), tmp_path / "base")
    adapter = altered(plain[1], tmp_path / "adapter", lambda given: {n: t * 1e3 for n, t in given.items()})
    with pytest.raises(PlanError, match="infinite or no numbers in float16"):
        lazymerge.merge(base, tmp_path / "half", adapter=adapter)
    lazymerge.merge(base, out, adapter=adapter, dtype="float32")
    assert load_file(out / WEIGHTS)["model.layers.0.self_attn.q_proj.weight"].abs().max() > 65504


# ---- config and tensors ------------------------------------------------------------------------------------


def test_config_and_tensors_of_two_adapters(plain: tuple[Path, Path], tmp_path: Path, out: Path) -> None:
    adapter = altered(plain[1], tmp_path / "adapter", target_modules=["k_proj"])
    with refused(InconsistentCheckpoint, 'does not target: target_modules is ["k_proj"]', dst=out):
        lazymerge.merge(plain[0], out, adapter=adapter)


def test_halves_of_two_adapters(plain: tuple[Path, Path], tmp_path: Path, out: Path) -> None:
    def named(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n.replace("_A.", "_A.x.").replace("_B.", "_B.y."): tensor for n, tensor in given.items()}

    with refused(InconsistentCheckpoint, "are of two adapters", dst=out):
        lazymerge.merge(plain[0], out, adapter=altered(plain[1], tmp_path / "adapter", named))


@pytest.mark.parametrize("layers", [None, [0]])
def test_layers_that_the_config_names_and_the_adapter_has_not(
    plain: tuple[Path, Path], tmp_path: Path, out: Path, layers: list[int] | None
) -> None:
    adapter = altered(
        plain[1],
        tmp_path / "adapter",
        lambda given: {name: tensor for name, tensor in given.items() if "layers.0" in name},
        layers_to_transform=layers,
    )
    report = lazymerge.merge(plain[0], out, adapter=adapter)
    warned = [note.text for note in report.notes if "stay as they are" in note.text]
    assert len(warned) == (layers is None)
    assert all("model.layers.1.self_attn.q_proj" in text for text in warned)


def test_one_of_two_adapters_does_nothing(plain: tuple[Path, Path], tmp_path: Path, out: Path) -> None:
    idle = altered(plain[1], tmp_path / "idle", lora_alpha=0)
    report = lazymerge.merge(plain[0], out, adapter=[idle, str(plain[1])])
    texts = [note.text for note in report.notes if note.level == "warning"]
    assert texts == [f"folding {idle} changes no tensor"]


@pytest.mark.parametrize(
    "fields",
    [{"init_lora_weights": ["x"]}, {"init_lora_weights": {}}, {"bias": ["none"]}, {"bias": {"a": 1}}],
)
def test_values_of_other_types(
    plain: tuple[Path, Path], tmp_path: Path, out: Path, fields: dict[str, Any]
) -> None:
    with refused(UnsupportedCheckpoint, next(iter(fields)), dst=out):
        lazymerge.merge(plain[0], out, adapter=altered(plain[1], tmp_path / "adapter", **fields))


@pytest.mark.parametrize("pattern", ["[a-z0-9_.]?" * 80 + "X", "(.|.)" * 34 + "X", ".*" * 100 + "X"])
def test_patterns_that_would_never_end(
    plain: tuple[Path, Path], tmp_path: Path, out: Path, pattern: str
) -> None:
    lazymerge.merge(
        plain[0], out, adapter=altered(plain[1], tmp_path / "adapter", alpha_pattern={pattern: 3})
    )


def test_a_whole_number_that_was_saved(tmp_path: Path) -> None:
    """The count of batches in a normalisation that was trained whole."""
    from tests import folding

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    state = {"conv.weight": torch.ones(4, 4), "norm.num_batches_tracked": torch.tensor(1)}
    save_file(state, base / WEIGHTS)
    (base / "config.json").write_text("{}")
    lora = {"conv.lora_A.weight": torch.ones(2, 4), "conv.lora_B.weight": torch.ones(4, 2)}
    trained = {**lora, "norm.num_batches_tracked": torch.tensor(7)}
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in trained.items()},
        adapter / "adapter_model.safetensors",
    )
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "modules_to_save": ["norm"]}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    out = folding.write(folding.folded(base, adapter), base, tmp_path / "out")
    assert load_file(out / WEIGHTS)["norm.num_batches_tracked"] == torch.tensor(7)


# ---- where it goes -----------------------------------------------------------------------------------------


def test_a_folder_with_an_adapter_is_no_place_for_a_model(plain: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(plain[1], folder)
    with refused(OutputError, "holds adapter_config.json", dst=folder):
        lazymerge.merge(plain[0], folder, adapter=str(plain[1]), overwrite=True)


def test_increments(plain: tuple[Path, Path], tmp_path: Path, out: Path) -> None:
    lazymerge.merge(plain[0], out, adapter=str(plain[1]), include="*q_proj*")
    first = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    lazymerge.merge(plain[0], out, adapter=str(plain[1]), verify=True)
    assert set(first.values()) < {path.stat().st_ino for path in out.glob("*.safetensors")}
    lazymerge.merge(plain[0], tmp_path / "once", adapter=str(plain[1]))
    parts: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        parts |= load_file(path)
    truth = load_file(tmp_path / "once" / WEIGHTS)
    assert parts.keys() == truth.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in truth.items())
