"""What config.json says and nothing confirms, or something else contradicts: noted, warned of, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lazymerge
from lazymerge.conversions.megatron.agree import check_agreement
from lazymerge.conversions.megatron.behaviour import differing
from lazymerge.conversions.megatron.beside import check_beside
from lazymerge.conversions.megatron.family import Config
from lazymerge.conversions.megatron.head import output_head
from lazymerge.conversions.megatron.tables import FAMILIES
from lazymerge.conversions.megatron.vocabulary import cut_vocabulary
from lazymerge.elements import in_memory
from lazymerge.errors import (
    DamagedFile,
    InconsistentCheckpoint,
    PlanError,
    SourceError,
    UnsupportedCheckpoint,
)
from tests.checks import assert_same_model, refused
from tests.makers.megatron_dist import write_torch_dist
from tests.makers.megatron_files import verl_run
from tests.makers.megatron_inverse import to_megatron
from tests.makers.megatron_models import ask_here, original
from tests.makers.megatron_shards import Parallel
from tests.test_megatron_convert import (
    HIDDEN,
    LAYERS,
    LLAMA,
    OUTPUT,
    converted,
    glm_with_mtp,
    llama,
    numbered,
    values,
)

SAMPLES = Path(__file__).parent / "data" / "megatron"
FAMILY = {family.name: family for family in FAMILIES}
ALL = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 2,
    "apply_layernorm_1p": False,
    "rotary_interleaved": False,
}


@pytest.fixture(autouse=True)
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_here(monkeypatch)


# ---- what nothing confirms ---------------------------------------------------------------------------------


def unrecorded(settings: dict[str, Any], tensors: Any = None, config: Any = LLAMA) -> list[str]:
    notes = converted(tensors or llama(), config, settings=settings).checkpoint.notes
    return [note.text for note in notes if "record" in note.text]


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("num_attention_heads", "num_attention_heads = 4"),
        ("num_query_groups", "num_key_value_heads = 2"),
        ("group_query_attention", "num_key_value_heads = 2"),
        ("kv_channels", "head_dim = 2"),
        ("apply_layernorm_1p", "whether norms are centred"),
        ("rotary_interleaved", "the order of rotary dimensions"),
    ],
)
def test_a_number_that_the_arguments_lack_is_named_alone(lost: str, said: str) -> None:
    assert unrecorded(ALL) == []
    (text,) = unrecorded({name: value for name, value in ALL.items() if name != lost})
    assert f"do not record {said}: taken from" in text


def test_heads_of_a_vision_tower_are_never_recorded() -> None:
    config = {
        **LLAMA,
        "model_type": "qwen2_5_vl",
        "text_config": LLAMA,
        "vision_config": {"depth": 1, "num_heads": 2},
        "tie_word_embeddings": False,
    }
    tower = {"vision_model.decoder.layers.0.self_attention.linear_qkv.weight": numbered(12, 4)}
    (text,) = unrecorded(ALL, llama() | tower, config)
    assert "do not record vision_config.num_heads = 2:" in text
    assert unrecorded(ALL, llama(), config) == []


# ---- what is computed --------------------------------------------------------------------------------------


def warned(hf: dict[str, Any], **args: Any) -> list[str]:
    return [note.text for note in differing(Config(hf, hf, args)) if note.level == "warning"]


@pytest.mark.parametrize(
    ("hf", "args", "words"),
    [
        (
            {"rope_theta": 10000.0},
            {"rotary_base": 1000000},
            ("rope_theta is 10000.0", "rotary_base = 1000000"),
        ),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rotary_base": 10000}, ("rope_theta is 500000.0",)),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            {"rotary_base": 10000},
            ("is 500000.0",),
        ),
        ({"rms_norm_eps": 1e-6}, {"norm_epsilon": 1e-5}, ("rms_norm_eps is 1e-06", "norm_epsilon = 1e-05")),
        ({"partial_rotary_factor": 0.5}, {"rotary_percent": 1.0}, ("partial_rotary_factor is 0.5", "= 1.0")),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, {"rotary_percent": 1}, ("factor is 0.5",)),
        ({"hidden_act": "gelu"}, {"swiglu": True}, ("hidden_act is 'gelu'", "swiglu = True")),
        ({"hidden_act": "silu"}, {"swiglu": False, "gated_linear_unit": True}, ("swiglu = False",)),
    ],
)
def test_settings_that_change_what_is_computed(
    hf: dict[str, Any], args: dict[str, Any], words: tuple[str, ...]
) -> None:
    (text,) = warned(hf, **args)
    assert all(word in text for word in words)
    made = converted(llama(), {**LLAMA, **hf}, settings=args)
    assert text in [note.text for note in made.checkpoint.notes]
    assert torch.equal(values(made)["model.norm.weight"], values(converted(llama()))["model.norm.weight"])


@pytest.mark.parametrize(
    ("hf", "args"),
    [
        ({"rope_theta": 10000}, {"rotary_base": 10000.0}),
        ({"rms_norm_eps": 1e-6}, {"norm_epsilon": 9.9999999e-07}),
        ({}, {"rotary_base": 1, "rotary_percent": 0.1, "norm_epsilon": 1.0, "swiglu": False}),
        ({"rope_theta": 1e4, "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.5, "hidden_act": "gelu"}, {}),
        # each kind of layer has its own
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_theta": 1e6}, {"rotary_base": 1}),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, {"rotary_base": 10000}),
        ({"rope_theta": 1e6}, {"rotary_base": (10000, 1000000)}),
        # of no use
        ({"rope_theta": 1e6}, {"rotary_base": 10000, "position_embedding_type": "learned_absolute"}),
        ({"partial_rotary_factor": 0.5}, {"rotary_percent": 1.0, "multi_latent_attention": True}),
        ({"hidden_act": "silu"}, {"swiglu": False, "quick_geglu": True}),  # gpt-oss
        # no number
        ({"rope_theta": 10**400, "rms_norm_eps": float("nan")}, {"rotary_base": 1, "norm_epsilon": 1e-5}),
        ({"rope_theta": "x", "rope_parameters": [1]}, {"rotary_base": True}),
    ],
)
def test_settings_that_are_not_comparable(hf: dict[str, Any], args: dict[str, Any]) -> None:
    assert warned(hf, **args) == []


def test_latent_attention_that_is_not_interleaved() -> None:
    hf = {"kv_lora_rank": 12, "rope_interleave": False}
    with pytest.raises(UnsupportedCheckpoint, match="rope_interleave is false"):
        check_agreement(Config(hf, hf, {}), FAMILY["deepseek_v3"])
    for other in ({**hf, "rope_interleave": True}, {"rope_interleave": False}, {"kv_lora_rank": 12}):
        check_agreement(Config(other, other, {}), FAMILY["deepseek_v3"])


# ---- the config that lies with the checkpoint --------------------------------------------------------------


@pytest.fixture
def beside(tmp_path: Path) -> Any:
    """`beside(given, own)`: checks two configs, the first of which is used."""

    def check(given: dict[str, Any], own: dict[str, Any] | str) -> None:
        for name, config in (("given", given), ("own", own)):
            (tmp_path / name).mkdir(exist_ok=True)
            text = config if isinstance(config, str) else json.dumps(config)
            (tmp_path / name / "config.json").write_text(text)
        check_beside([tmp_path / "given", tmp_path / "none", tmp_path / "own"], given)

    return check


@pytest.mark.parametrize(
    "field",
    [
        *("num_attention_heads", "num_key_value_heads", "head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ],
)
def test_configs_that_mean_other_orders_of_rows(beside: Any, tmp_path: Path, field: str) -> None:
    with pytest.raises(InconsistentCheckpoint) as caught:
        beside({field: 8}, {field: 4})
    assert f"{field} is 8 in {tmp_path}/given/config.json, and 4 in {tmp_path}/own/" in caught.value.problem
    with pytest.raises(InconsistentCheckpoint, match=f"{field} is 8"):
        beside({"text_config": {field: 8}, field: 4}, {field: 4})  # as older vision models have it
    beside({"text_config": {field: 8}}, {"text_config": {field: 8}})
    beside({field: 8}, {field: None})


def test_configs_of_latent_attention_call_different_things_head_dim(beside: Any) -> None:
    latent = {"kv_lora_rank": 12, "head_dim": 4, "num_key_value_heads": 1}
    beside(latent, {**latent, "head_dim": 12, "num_key_value_heads": 4})


def test_configs_whose_towers_differ(beside: Any) -> None:
    with pytest.raises(InconsistentCheckpoint, match=r"vision_config\.num_heads is 8"):
        beside({"vision_config": {"num_heads": 8}}, {"vision_config": {"num_heads": 4}})
    with pytest.raises(InconsistentCheckpoint, match="rope_interleave is True"):
        beside({"rope_interleave": True}, {"rope_interleave": False})


def test_configs_that_differ_in_what_decides_no_order(beside: Any) -> None:
    beside({"rope_theta": 1, "vocab_size": 9, "num_hidden_layers": 2}, {"rope_theta": 2, "vocab_size": 8})


@pytest.mark.parametrize("text", ["{", "[]", "x" * (1 << 21)])
def test_a_config_beside_that_cannot_be_compared(beside: Any, text: str) -> None:
    with pytest.raises(DamagedFile, match=r"own/config\.json: cannot be compared"):
        beside({}, text)


def test_a_config_that_contradicts_the_checkpoints_own(tmp_path: Path) -> None:
    case = SAMPLES / "verl2_te_qwen2_value"
    config = json.loads((case / "hf" / "config.json").read_text())
    (tmp_path / "hf").mkdir()

    def given(**fields: Any) -> Path:
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **fields}))
        return tmp_path / "hf"

    words = ("num_attention_heads is 8", "and 4", "hf/config.json", "huggingface/config.json", "--hf-config")
    wrong = given(num_attention_heads=8, num_key_value_heads=4)
    with refused(InconsistentCheckpoint, *words, dst=tmp_path / "out"):
        lazymerge.merge(case / "ckpt", tmp_path / "out", hf_config=wrong)
    lazymerge.merge(case / "ckpt", tmp_path / "out", hf_config=given(rope_theta=7.0))


# ---- verl's transformer_config.json ------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [1, 2])
def test_the_config_that_verl_saves_decides_as_arguments_do(tmp_path: Path, schema: int) -> None:
    base = original("mixtral", tmp_path / "base")
    megatron = to_megatron(base)

    def write(folder: Path) -> None:
        write_torch_dist(folder, megatron, Parallel(ep=2, dp=2), block=8, arguments_recorded=False)

    src = verl_run(tmp_path / "run", write, base.folder, schema=schema)
    settings = {
        "moe_mlp_glu_interleave_size": 8,
        "moe_grouped_gemm": True,
        "gated_linear_unit": True,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "num_moe_experts": 4,
    }
    (src / "transformer_config.json").write_text(json.dumps(settings))
    lazymerge.merge(src, tmp_path / "out")
    assert_same_model(tmp_path / "out", base.truth)
    (src / "transformer_config.json").write_text(json.dumps({**settings, "num_attention_heads": 8}))
    words = ("num_attention_heads is 4", "trained with num_attention_heads = 8")
    with refused(InconsistentCheckpoint, *words, dst=tmp_path / "other"):
        lazymerge.merge(src, tmp_path / "other")


# ---- the output layer, the vocabulary, flags ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "top", "text", "tied"),
    [  # what transformers 5.24 has as config.tie_word_embeddings; None: either
        ("qwen3_vl", None, True, None),
        ("qwen3_vl", None, False, None),
        ("qwen3_vl", False, True, False),
        ("qwen3_vl", True, False, True),
        ("qwen2_5_vl", None, True, True),
        ("qwen2_5_vl", None, False, False),
    ],
)
def test_a_tie_flag_in_text_config(model: str, top: bool | None, text: bool, tied: bool | None) -> None:
    hf = {"tie_word_embeddings": text}
    whole = {"model_type": model, "text_config": hf} | ({} if top is None else {"tie_word_embeddings": top})
    for there in (True, False):
        if tied in (None, not there):
            head = output_head(there, Config(hf, whole, {}), FAMILY[model], None)
            expected = {"tie_word_embeddings": True} if not there and top is not True else {}
            assert head.changes == expected
        else:
            with pytest.raises(InconsistentCheckpoint):
                output_head(there, Config(hf, whole, {}), FAMILY[model], None)


@pytest.mark.parametrize("new", ["", "x.weight"])
def test_an_output_layer_with_two_orders(new: str) -> None:
    with pytest.raises(PlanError, match="--tie-word-embedding too"):
        converted(llama(), tied=True, mapping=[(OUTPUT, new)])


@pytest.mark.parametrize("ranks", [3, 6, 12])
def test_padding_for_ranks_that_are_no_power_of_two(ranks: int) -> None:
    settings = {"tensor_model_parallel_size": ranks, "padded_vocab_size": 128 * ranks}
    config = Config({"vocab_size": 120}, {}, settings)
    whole = in_memory(torch.zeros(128 * ranks, HIDDEN))
    assert cut_vocabulary("x", whole, config).shape == (120, HIDDEN)


def test_padding_that_no_such_ranks_explain() -> None:
    settings = {"tensor_model_parallel_size": 5, "padded_vocab_size": 128 * 6}
    config = Config({"vocab_size": 120}, {}, settings)
    with pytest.raises(InconsistentCheckpoint, match="by no padding"):
        cut_vocabulary("x", in_memory(torch.zeros(128 * 6, HIDDEN)), config)


def test_a_part_of_an_mtp_layer_is_not_left_out_alone() -> None:
    whole, config = glm_with_mtp()
    with pytest.raises(PlanError, match=r"a part of this MTP layer, not mtp\.layers\.0\.transformer_layer"):
        converted(whole, config, mapping=[("mtp.layers.{}.{}.weight", "")])
    unknown = {"mtp.layers.0.transformer_layer.gate.weight": numbered(2)}
    converted(whole | unknown, config, mapping=[(name, "") for name in unknown])


def test_mtp_layers_of_qwen3() -> None:
    """Megatron-Bridge, models/qwen/qwen3_bridge.py."""
    whole, config = glm_with_mtp()
    inner = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
    made = values(converted(whole, {**config, "model_type": "qwen3"}))
    for ours, theirs in {**inner, "final_layernorm": "norm"}.items():
        assert torch.equal(made[f"mtp.{theirs}.weight"], whole[f"mtp.layers.0.{ours}.weight"])
    last = {name for name in made if name.startswith(f"model.layers.{LAYERS - 1}.")}
    mtp = {name for name in made if name.startswith("mtp.layers.0.")}
    assert len(last) == 9
    assert {name.partition("layers.0.")[2] for name in mtp} == {name.split(".", 3)[3] for name in last}


def test_a_file_in_place_of_its_folder(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "verl2_te_qwen2_value" / "hf" / "config.json", tmp_path)
    file = tmp_path / "config.json"
    src = SAMPLES / "verl2_te_qwen2_value" / "ckpt"
    with refused(SourceError, "config.json: a file, not a folder", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out", hf_config=file)
