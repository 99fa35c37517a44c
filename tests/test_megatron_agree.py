"""Config.json, the trainer's arguments and the flags of an earlier run: what contradicts is never mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lazymerge
from lazymerge.conversions.megatron.agree import check_agreement
from lazymerge.conversions.megatron.family import Config
from lazymerge.conversions.megatron.tables import GLM4, LLAMA4, LLAMA4_TEXT
from lazymerge.errors import InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from tests.checks import assert_same_model, refused
from tests.makers.megatron_files import megatron_run, write_torch
from tests.makers.megatron_inverse import to_megatron
from tests.makers.megatron_models import ask_here, original
from tests.makers.megatron_shards import Parallel

SAMPLES = Path(__file__).parent / "data" / "megatron"
QWEN2 = SAMPLES / "td_te_qwen2_tp2pp2"  # 4 heads, 2 groups, of 8 rows; 120 words in 256 rows


@pytest.fixture(autouse=True)
def asked_here(monkeypatch):
    ask_here(monkeypatch)


@pytest.fixture
def hf(tmp_path):
    """A copy of the sample's Hugging Face folder, whose config can be changed: `hf(field=value)`."""
    folder = tmp_path / "hf"
    shutil.copytree(QWEN2 / "hf", folder)

    def changed(**fields):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return folder

    return changed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, ("num_attention_heads is 8", "= 4")),
        ({"num_attention_heads": 2, "num_key_value_heads": 1}, ("num_attention_heads is 2", "= 4")),
        ({"num_key_value_heads": 4}, ("num_key_value_heads is 4", "num_query_groups = 2")),
        ({"num_key_value_heads": None}, ("num_key_value_heads is 4", "num_query_groups = 2")),
        ({"head_dim": 16}, ("head_dim is 16", "kv_channels = 8")),
    ],
)
def test_heads_that_the_trainer_had_otherwise(hf, tmp_path, fields, words):
    """The shapes of the first two fit: only the arguments show that the rows are in another order."""
    for check in (True, False):
        with refused(InconsistentCheckpoint, *words, dst=tmp_path / "out"):
            lazymerge.merge(QWEN2 / "ckpt", tmp_path / "out", hf_config=hf(**fields), check=check)


def test_interleaved_rotary_dimensions(hf, tmp_path, monkeypatch):
    from lazymerge.formats.megatron import arguments

    original = arguments.settings_of
    monkeypatch.setattr(
        arguments, "settings_of", lambda value: {**original(value), "rotary_interleaved": True}
    )
    with refused(UnsupportedCheckpoint, "rotary_interleaved", "--family", dst=tmp_path / "out"):
        lazymerge.merge(QWEN2 / "ckpt", tmp_path / "out", hf_config=hf())


@pytest.mark.parametrize("family", [GLM4, LLAMA4, LLAMA4_TEXT])
def test_families_whose_rotary_dimensions_are_interleaved(family):
    """As transformers rotates pairs of neighbours in these (modeling_glm4.py, modeling_llama4.py)."""
    check_agreement(Config({}, {}, {"rotary_interleaved": True}), family)
    with pytest.raises(UnsupportedCheckpoint):
        check_agreement(Config({}, {}, {"rotary_interleaved": False}), family)


def test_a_config_of_quantised_weights(hf, tmp_path):
    """DeepSeek-V3's own config says fp8: a loader would look for scales that a trained model has not."""
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    report = lazymerge.merge(QWEN2 / "ckpt", tmp_path / "out", hf_config=hf(**quantised))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert any("quantization_config" in note.text for note in report.notes)


def test_a_tied_value_head(tmp_path):
    case = SAMPLES / "verl2_te_qwen2_value"
    with refused(PlanError, "value head", "--tie-word-embedding", dst=tmp_path / "out"):
        lazymerge.merge(case / "ckpt", tmp_path / "out", hf_config=case / "hf", tie_word_embedding=True)


def test_a_layer_that_has_less_than_another(hf, tmp_path):
    """Nobody else would say it where names and shapes are not checked."""
    report = lazymerge.merge(
        QWEN2 / "ckpt",
        tmp_path / "out",
        hf_config=hf(),
        param_mapping=["decoder.layers.2.mlp.linear_fc2.weight:"],
        check=False,
    )
    (warning,) = report.warnings
    assert "model.layers.2.mlp.down_proj.weight is not in the checkpoint" in warning.text


def test_trained_rows_are_not_cut_as_padding(hf, tmp_path):
    """The trainer's tokenizer had 119 words, so that a vocabulary of 100 is another model's."""
    with refused(InconsistentCheckpoint, "256 rows", "100", "vocabulary of 119", dst=tmp_path / "out"):
        lazymerge.merge(QWEN2 / "ckpt", tmp_path / "out", hf_config=hf(vocab_size=100))
    report = lazymerge.merge(
        QWEN2 / "ckpt", tmp_path / "forced", hf_config=hf(vocab_size=100), force_shape_match=True
    )
    cropped = [note for note in report.warnings if "cropped" in note.text]
    assert {note.tensor for note in cropped} == {"model.embed_tokens.weight", "lm_head.weight"}


def test_padding_that_is_cut_is_named(hf, tmp_path):
    report = lazymerge.merge(QWEN2 / "ckpt", tmp_path / "out", hf_config=hf())
    cut = [note for note in report.notes if "136 of 256 rows are cut as padding" in note.text]
    assert [note.level for note in cut] == ["info", "info"]


@pytest.mark.parametrize("new", ["v_head.weight", ""])
def test_an_output_layer_that_the_user_has_dealt_with(hf, tmp_path, new):
    """It is there, so that it is no question whether it is tied."""
    report = lazymerge.merge(
        QWEN2 / "ckpt",
        tmp_path / "out",
        hf_config=hf(),
        param_mapping=[f"output_layer.weight:{new}"],
        check=False,
    )
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "lm_head.weight" not in names
    assert ("v_head.weight" in names) == bool(new)
    assert ("output_layer.weight" in report.left_out) == (not new)


def test_the_class_that_loads_a_value_head(tmp_path):
    case = SAMPLES / "verl2_te_qwen2_value"
    report = lazymerge.merge(case / "ckpt", tmp_path / "out", hf_config=case / "hf")
    assert "Qwen2ForTokenClassification.from_pretrained" in report.how_to_load


def test_a_config_that_holds_half_of_a_pair(hf, tmp_path):
    """JSON may escape what UTF-8 cannot hold; it stays as it was where the config is changed."""
    lazymerge.merge(QWEN2 / "ckpt", tmp_path / "out", hf_config=hf(odd="\ud800"), dtype="float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["odd"] == "\ud800"


# ---- a run that goes on with what has changed since --------------------------------------------------------


def killed_after_two_files(monkeypatch, **options):
    """The merge, ended after two of its files as a kill ends it: nothing is tidied up."""
    from lazymerge import api

    write, written = api.write_file, []

    def failing(file, *args, **kwargs):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(file.name)
        write(file, *args, **kwargs)

    monkeypatch.setattr(api, "write_file", failing)
    with pytest.raises(KeyboardInterrupt):
        lazymerge.merge(max_shard_size=20_000, **options)
    monkeypatch.setattr(api, "write_file", write)


def test_a_config_that_was_corrected_begins_anew(hf, tmp_path, monkeypatch):
    """A wrong vocabulary says nothing of order; the tie flag decides which tensors there are."""
    options = {"src": QWEN2 / "ckpt", "dst": tmp_path / "out"}
    killed_after_two_files(monkeypatch, **options, hf_config=hf(rms_norm_eps=0.1))
    report = lazymerge.merge(max_shard_size=20_000, **options, hf_config=hf(rms_norm_eps=1e-6))
    assert report.resumed == ()
    assert_same_model(tmp_path / "out", load_file(QWEN2 / "hf" / "model.safetensors"))


SWAPPED = """
from lazymerge.conversions.megatron.family import Family, Rule
from lazymerge.conversions.megatron.tables.qwen import QWEN2
from lazymerge.conversions.megatron.layouts import split_gate_up

def swapped(config, fc1):
    gate, up = split_gate_up(config, fc1)
    return {}

GATED = Rule("decoder.layers.{{L}}.mlp.linear_fc1.{{p}}",
             ("model.layers.{{L}}.mlp.gate_proj.{{p}}", "model.layers.{{L}}.mlp.up_proj.{{p}}"), swapped)
FAMILY = Family("own", ("qwen2",), (GATED, *QWEN2.rules))
"""


def test_a_family_file_that_was_corrected_begins_anew(hf, tmp_path, monkeypatch):
    family = tmp_path / "own.py"
    options = {"src": QWEN2 / "ckpt", "dst": tmp_path / "out", "hf_config": hf(), "family": str(family)}
    family.write_text(SWAPPED.format("up, gate"))
    killed_after_two_files(monkeypatch, **options)
    family.write_text(SWAPPED.format("gate, up"))
    report = lazymerge.merge(max_shard_size=20_000, **options)
    assert report.resumed == ()
    assert_same_model(tmp_path / "out", load_file(QWEN2 / "hf" / "model.safetensors"))


def test_a_mapping_file_that_was_corrected_begins_anew(hf, tmp_path, monkeypatch):
    mapping = tmp_path / "names"
    options = {"src": QWEN2 / "ckpt", "dst": tmp_path / "out", "hf_config": hf(), "check": False}
    final = "decoder.final_layernorm.weight:model.norm.{}\n"
    mapping.write_text(final.format("wrong"))
    killed_after_two_files(monkeypatch, **options, param_mapping=[str(mapping)])
    mapping.write_text(final.format("weight"))
    report = lazymerge.merge(max_shard_size=20_000, **options, param_mapping=[str(mapping)])
    assert report.resumed == ()
    assert_same_model(tmp_path / "out", load_file(QWEN2 / "hf" / "model.safetensors"))


def test_the_same_command_goes_on(hf, tmp_path, monkeypatch):
    options = {"src": QWEN2 / "ckpt", "dst": tmp_path / "out", "hf_config": hf()}
    killed_after_two_files(monkeypatch, **options)
    report = lazymerge.merge(max_shard_size=20_000, **options)
    assert len(report.resumed) == 2
    assert_same_model(tmp_path / "out", load_file(QWEN2 / "hf" / "model.safetensors"))


# ---- files of the user's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import sys; sys.exit()", "1 / 0", "def"])
def test_a_family_file_that_ends_the_process(hf, tmp_path, code):
    (tmp_path / "own.py").write_text(code)
    with refused(PlanError, "--family", "own.py", dst=tmp_path / "out"):
        lazymerge.merge(QWEN2 / "ckpt", tmp_path / "out", hf_config=hf(), family=str(tmp_path / "own.py"))


@pytest.mark.parametrize("family", ["x" * 300, "a\0b", ""])
def test_a_family_that_no_file_can_be(hf, tmp_path, family):
    with refused(PlanError, "--family", dst=tmp_path / "out"):
        lazymerge.merge(QWEN2 / "ckpt", tmp_path / "out", hf_config=hf(), family=family)


def test_a_name_that_is_no_text(hf, tmp_path):
    with refused(PlanError, "--param-mapping", "UTF-8", dst=tmp_path / "out"):
        lazymerge.merge(
            QWEN2 / "ckpt",
            tmp_path / "out",
            hf_config=hf(),
            param_mapping=["decoder.final_layernorm.weight:a\udcff"],
        )


def test_sizes_that_a_config_leaves_to_its_class(tmp_path):
    """As google/gemma-3-4b-it does; here num_key_value_heads, which Llama's class takes from the heads."""
    base = original("llama-mha", tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    for field in ("num_key_value_heads", "head_dim"):
        config.pop(field, None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    step = megatron_run(tmp_path / "run", lambda step: write_torch(step, to_megatron(base)))
    lazymerge.merge(step, tmp_path / "out", hf_config=tmp_path / "base")
    assert_same_model(tmp_path / "out", base.truth)


def test_sizes_of_a_part_that_are_its_class_s():
    from lazymerge.conversions.hub import _filled

    config = {"text_config": {"hidden_size": 8, "head_dim": None}, "vision_config": {}, "vocab_size": 5}
    defaults = {
        "vocab_size": 9,
        "tie_word_embeddings": True,
        "text_config": {"vocab_size": 7, "head_dim": 4, "num_nextn_predict_layers": 1},
        "vision_config": {"num_heads": 2},
        "audio_config": {"num_heads": 3},
    }
    assert _filled(config, defaults) == {
        "text_config": {"hidden_size": 8, "head_dim": 4, "vocab_size": 7},
        "vision_config": {"num_heads": 2},
        "vocab_size": 5,
    }


@pytest.fixture
def gated(tmp_path):
    """A checkpoint of two tensor ranks, with a tensor in it that nobody knows; and the model's own folder."""
    base = original("llama", tmp_path / "base")
    step = megatron_run(tmp_path / "run", lambda step: write_torch(step, to_megatron(base), Parallel(tp=2)))
    for path in step.rglob("model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        state["model"][GATE] = torch.ones(8, 4)
        torch.save(state, path)
    return step, base.folder


GATE = "decoder.layers.0.self_attention.gate.weight"


def test_a_tensor_that_no_rule_knows_can_be_left_out(gated, tmp_path):
    src, hf = gated
    with refused(UnsupportedCheckpoint, GATE, "--param-mapping", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out", hf_config=hf)
    mapping = "decoder.layers.{}.self_attention.gate.weight"
    report = lazymerge.merge(src, tmp_path / "out", hf_config=hf, param_mapping=f"{mapping}:")
    assert_same_model(tmp_path / "out", load_file(hf / "model.safetensors"))
    assert GATE in report.left_out


def test_its_parts_are_not_put_together_by_guess(gated, tmp_path):
    src, hf = gated
    with refused(UnsupportedCheckpoint, GATE, "2 tensor ranks", "their parts", dst=tmp_path / "out"):
        mapping = "decoder.layers.{}.self_attention.gate.weight:gate.{}"
        lazymerge.merge(src, tmp_path / "out", hf_config=hf, check=False, param_mapping=mapping)
