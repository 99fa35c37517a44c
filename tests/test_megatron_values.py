"""What decides a conversion and could be wrong unseen: rows that are cut, fields that nobody wrote down,
tensors that the user places by hand, heads that no class loads.
"""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
from safetensors.torch import load_file

import lazymerge
from lazymerge.conversions.megatron.families import load_family
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, PlanError
from tests.checks import assert_same_model, refused
from tests.makers.megatron_files import megatron_run, write_torch
from tests.makers.megatron_inverse import to_megatron
from tests.makers.megatron_models import ask_here, original
from tests.test_megatron_convert import (
    EMBEDDING,
    HIDDEN,
    LLAMA,
    MIXTRAL,
    OUTPUT,
    converted,
    critic,
    llama,
    mixtral,
    values,
)
from tests.test_megatron_convert import refused as refused_here

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


@pytest.fixture(autouse=True)
def asked_here(monkeypatch):
    ask_here(monkeypatch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: the model of that name as `save_pretrained` wrote it."""
    known = {}

    def by_name(name):
        if name not in known:
            known[name] = original(name, tmp_path_factory.mktemp(name) / "base")
        return known[name]

    return by_name


def written(folder, model, change=None, **options):
    """A run of Megatron with that model; `change` may take away or alter tensors."""
    megatron = to_megatron(model)
    if change is not None:
        change(megatron)
    return megatron_run(folder / "run", lambda step: write_torch(step, megatron, **options))


def config_of(model, folder, *left_out, **fields):
    """A folder with the model's config.json, without some fields and with others."""
    folder.mkdir()
    config = {key: value for key, value in model.config.items() if key not in left_out} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def texts(report):
    return [note.text for note in report.notes]


# ---- rows of the vocabulary --------------------------------------------------------------------------------


def cut(settings, padding=None, vocabulary=120):
    source = llama(rows=128)
    if padding is not None:
        for name in (EMBEDDING, OUTPUT):
            source[name][vocabulary:] = padding
    made = converted(source, {**LLAMA, "vocab_size": vocabulary}, settings=settings)
    return [note for note in made.checkpoint.notes if "cut as padding" in note.text]


@pytest.mark.parametrize("trained", [119, 120])
def test_padding_that_the_trainer_confirms(trained):
    """Megatron-LM's vocab_size is often one less: a word of padding is added to the tokenizer's."""
    assert [note.level for note in cut({"vocab_size": trained})] == ["info", "info"]


@pytest.mark.parametrize("trained", [None, 50, 118])
def test_padding_that_config_alone_says_is_a_warning(trained):
    settings = {"vocab_size": trained, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1}
    notes = cut(settings)
    assert [(note.level, note.tensor) for note in notes] == [("warning", EMBEDDING), ("warning", OUTPUT)]
    said = "is not recorded" if trained is None else f"says {trained}"
    assert all(said in note.text and "the rows that are cut differ" in note.text for note in notes)


@pytest.mark.parametrize("padding", [0.0, torch.arange(4.0)])
def test_rows_that_are_alike_look_like_padding(padding):
    notes = cut({}, padding)
    assert [note.level for note in notes] == ["warning", "warning"]
    assert not any("differ" in note.text for note in notes)


def test_rows_that_would_take_long_to_read_are_not_read(monkeypatch):
    from lazymerge.conversions.megatron import vocabulary

    monkeypatch.setattr(vocabulary, "_MOST_READ", 8 * HIDDEN * 4 - 1)
    assert not any("differ" in note.text for note in cut({}))


# ---- arguments of the trainer ------------------------------------------------------------------------------

ARGUMENT, FIELD = "apply_layernorm_1p", "layernorm_zero_centered_gamma"


def test_norms_of_which_the_trainer_says_two_things():
    message = refused_here(InconsistentCheckpoint, llama(), settings={ARGUMENT: False, FIELD: True})
    assert ARGUMENT in message and FIELD in message


@pytest.mark.parametrize(
    ("settings", "centred"),
    [
        ({ARGUMENT: True, FIELD: False}, True),  # Megatron-LM's argument, which goes before the class's field
        ({ARGUMENT: True}, True),
        ({FIELD: True}, True),
        ({ARGUMENT: None, FIELD: True}, True),
        ({ARGUMENT: False, FIELD: False}, False),
        ({FIELD: False}, False),
    ],
    ids=str,
)
def test_norms_of_which_it_says_one(settings, centred):
    made = values(converted(llama(), settings=settings))["model.norm.weight"]
    assert torch.equal(made, llama()["decoder.final_layernorm.weight"] + centred)


def test_heads_that_nobody_recorded_are_named():
    (note,) = [note for note in converted(llama()).checkpoint.notes if "not recorded" in note.text]
    assert "num_attention_heads = 4, num_key_value_heads = 2, head_dim = 2" in note.text


# ---- fields that config.json leaves to its class -----------------------------------------------------------


def test_fields_of_the_class_are_not_called_those_of_the_config(saved, tmp_path):
    model = saved("llama")
    src = written(tmp_path, model)
    folder = config_of(model, tmp_path / "config", "num_attention_heads")
    words = ("trained with num_attention_heads = 4", "num_attention_heads = 32", "by default of its class")
    with refused(InconsistentCheckpoint, *words, dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out", hf_config=folder)
    folder = config_of(model, tmp_path / "said", num_attention_heads=8)
    with pytest.raises(InconsistentCheckpoint) as caught:
        lazymerge.merge(src, tmp_path / "out", hf_config=folder)
    assert "by default" not in str(caught.value)


def test_heads_of_a_vision_tower_that_its_class_has(saved, tmp_path):
    """Qwen2.5-VL's class has 16; with 2, which these have, the rows would be in another order."""
    model = saved("qwen2.5-vl")
    vision = {key: value for key, value in model.config["vision_config"].items() if key != "num_heads"}
    folder = config_of(model, tmp_path / "config", vision_config=vision)
    report = lazymerge.merge(written(tmp_path, model), tmp_path / "out", hf_config=folder)
    assert any("vision_config.num_heads = 16" in note.text for note in report.warnings)


@pytest.mark.parametrize(
    ("name", "settings", "fields"),
    [
        ("mixtral", {"num_local_experts": 8}, ["num_local_experts"]),
        (
            "qwen3-next",
            {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
            ["linear_num_key_heads", "linear_num_value_heads"],
        ),
    ],
)
def test_sizes_that_the_class_has(name, settings, fields, tmp_path, monkeypatch):
    from dataclasses import replace

    from tests.makers import megatron_models

    spec = megatron_models.SPECS[name]
    changed = replace(spec, settings={**spec.settings, **settings})
    monkeypatch.setitem(megatron_models.SPECS, name, changed)
    model = original(name, tmp_path / "base")
    folder = config_of(model, tmp_path / "config", *fields)
    report = lazymerge.merge(written(tmp_path, model), tmp_path / "out", hf_config=folder)
    assert_same_model(tmp_path / "out", model.truth)
    (text,) = [text for text in texts(report) if "leaves sizes to its class" in text]
    assert all(f"{field} = {settings[field]}" in text for field in fields)


# ---- what was not checked ----------------------------------------------------------------------------------


def test_a_merge_without_the_check_says_so(saved, tmp_path):
    model = saved("llama")
    src = written(tmp_path, model)
    report = lazymerge.merge(src, tmp_path / "out", hf_config=model.folder, check=False)
    assert [text for text in texts(report) if "--no-check" in text] == [
        "names and shapes are not checked: --no-check"
    ]
    report = lazymerge.merge(src, tmp_path / "checked", hf_config=model.folder)
    assert not any("--no-check" in text for text in texts(report))


# ---- families of the user's own ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ('("own",), (Rule("output_layer.weight", ()),)', "no name for the result"),
        ('("own",), (), tied="no"', "tied is 'no'"),
        ('("own",), (), interleaved=1', "interleaved 1"),
        ('"own", ()', "model_types is 'own'"),
        ("None, ()", "model_types is None"),
        ("(3,), ()", "model_types"),
    ],
)
def test_a_family_that_cannot_be_followed(family, problem, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from lazymerge.conversions.megatron.family import Family, Rule\n"
        + f'FAMILY = Family("own", {family})\n'
    )
    with pytest.raises(PlanError, match=problem):
        load_family(path)


def test_a_family_may_drop_a_tensor(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        textwrap.dedent("""
        from lazymerge.conversions.megatron.family import Family, Rule
        FAMILY = Family("own", ("own",), (Rule("output_layer.weight", (), dropped="not wanted"),))
        """)
    )
    assert load_family(path).rules[0].dropped == "not wanted"


# ---- tensors that the user places --------------------------------------------------------------------------

FC2 = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"


def test_a_tensor_of_one_expert_by_hand():
    """It is there, so that none is missing."""
    target = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    made = values(converted(mixtral(), MIXTRAL, mapping=[(FC2, target)]))
    expected = values(converted(mixtral(), MIXTRAL))
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in made)


def test_an_expert_left_out_is_missing_all_the_same():
    message = refused_here(IncompleteCheckpoint, mixtral(), MIXTRAL, mapping=[(FC2, "")])
    assert "2 experts, expected 3" in message


def test_experts_that_are_put_together_need_all_of_them():
    config = {**MIXTRAL, "model_type": "qwen3_vl_moe"}
    message = refused_here(IncompleteCheckpoint, mixtral(), config, mapping=[(FC2, "elsewhere")])
    assert "2 experts, expected 3" in message


def test_a_layer_by_hand():
    names = [name for name in llama() if ".layers.1." in name]
    made = converted(llama(), mapping=[(name, f"mine.{name}") for name in names])
    assert len(made.checkpoint) == 3 + 9 + len(names)
    message = refused_here(IncompleteCheckpoint, llama(), mapping=[(name, "") for name in names])
    assert "1 decoder layers, expected 2" in message


def test_a_layer_that_is_too_much_can_be_placed():
    """It was never counted against config.json, and is none of the decoder's then."""
    names = [name for name in llama(3) if ".layers.2." in name]
    made = converted(llama(3), mapping=[(name, f"mine.{name}") for name in names])
    assert len(made.checkpoint) == 3 + 2 * 9 + len(names)


PROJ = "decoder.layers.0.self_attention.linear_proj.weight"


def test_what_was_placed_is_not_called_absent():
    target = "model.layers.0.self_attn.o_proj.weight"
    warnings = [
        n.text for n in converted(llama(), mapping=[(PROJ, target)]).checkpoint.notes if n.level == "warning"
    ]
    assert warnings == []
    moved = [
        n.text for n in converted(llama(), mapping=[(PROJ, "x")]).checkpoint.notes if n.level == "warning"
    ]
    assert moved == [f"{target} is not in the checkpoint, though layer 1 has its own"]


def test_what_a_rule_of_one_layer_wrote_is_not_called_absent():
    from dataclasses import replace

    from lazymerge.conversions.megatron.families import family_of
    from lazymerge.conversions.megatron.family import Rule

    family = family_of(LLAMA)
    own = replace(family, rules=(Rule(PROJ, "model.layers.0.self_attn.o_proj.weight"), *family.rules))
    made = converted(llama(), family=own)
    assert [note.text for note in made.checkpoint.notes if note.level == "warning"] == []
    assert made.checkpoint.keys() == converted(llama()).checkpoint.keys()


# ---- value heads -------------------------------------------------------------------------------------------


def test_a_number_of_labels_that_is_another(saved, tmp_path):
    """transformers takes num_labels before the names of labels."""
    assert converted(critic(), {**LLAMA, "num_labels": 5}).config_changes["num_labels"] == 1
    assert "num_labels" not in converted(critic(), {**LLAMA, "num_labels": 1}).config_changes
    model = saved("qwen2-value")
    folder = config_of(
        model, tmp_path / "config", "id2label", "label2id", architectures=["Qwen2ForCausalLM"], num_labels=5
    )
    lazymerge.merge(written(tmp_path, model), tmp_path / "out", hf_config=folder)
    assert_same_model(tmp_path / "out", model.truth)
    import transformers

    loaded, info = transformers.Qwen2ForTokenClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert loaded.num_labels == 1
    assert not info["missing_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("name", ["qwen3-vl", "glm4-moe"])
def test_a_value_head_that_no_class_loads(name, saved, tmp_path, monkeypatch):
    model = saved(name)

    def to_critic(megatron):
        megatron.tensors[OUTPUT] = torch.ones(1, 32, dtype=torch.bfloat16)
        megatron.whole.add(OUTPUT)

    src = written(tmp_path, model, to_critic)
    report = lazymerge.merge(src, tmp_path / "out", hf_config=model.folder)
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == (model.truth.keys() - {"lm_head.weight"}) | {"score.weight"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == model.config["architectures"]
    (warning,) = [note.text for note in report.warnings if "no class" in note.text]
    assert "ForTokenClassification" in warning and model.config["architectures"][0] in warning
    assert not any("not checked" in text for text in texts(report))


def test_the_rest_of_such_a_model_is_checked(saved, tmp_path):
    model = saved("glm4-moe")

    def to_critic(megatron):
        megatron.tensors[OUTPUT] = torch.ones(1, 32, dtype=torch.bfloat16)
        megatron.whole.add(OUTPUT)
        del megatron.tensors["decoder.final_layernorm.weight"]

    src = written(tmp_path, model, to_critic)
    with refused(IncompleteCheckpoint, "model.norm.weight", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out", hf_config=model.folder)
