"""LoRA in checkpoints: what no tensor shows (alpha above all), names that only look like it, and refusals."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazymerge
from lazymerge.conversions.adapters.fold import fold
from lazymerge.conversions.adapters.trained import LoraOptions, Split, split
from lazymerge.conversions.adapters.trained_names import told_apart
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    LazymergeError,
    PlanError,
    UnsupportedCheckpoint,
)
from tests.makers.peft_fsdp import MadeLora, build_base, peft_fsdp

META = {"r": 8, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
LORA = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "down_proj"]}
HYBRID = (("ddp", 2), ("fsdp", 2))

State = dict[str, torch.Tensor]


def peft_state(model_name: str = "llama", **fields: Any) -> State:
    """The state dict of a model with LoRA, by PEFT."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(build_base(model_name), LoraConfig(**{**LORA, **fields})).state_dict()


def write(folder: Path, state: State, meta: Any = META, config: dict[str, Any] | None = None) -> Path:
    """A full state dict, and beside it what verl writes."""
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "model.pt")
    (folder / "config.json").write_text(json.dumps(config or {"architectures": ["LlamaForCausalLM"]}))
    if meta is not None:
        (folder / "lora_train_meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    return folder


def opened(folder: Path, options: LoraOptions | None = None) -> Split:
    return split(lazymerge.open(folder), options, json.loads((folder / "config.json").read_text()))


def refused(kind: type[LazymergeError], *words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(LazymergeError) as caught:
        call()
    assert type(caught.value) is kind, repr(caught.value)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in {caught.value}"
    assert "\n" not in caught.value.problem
    assert caught.value.hint


def given(folder: Path, **fields: Any) -> str:
    """An adapter_config.json, by PEFT, with these fields."""
    from peft import LoraConfig

    folder.mkdir(parents=True, exist_ok=True)
    LoraConfig(**{**LORA, "target_modules": ["q_proj", "down_proj"]}).save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return str(folder)


def of_alpha(alpha: Any) -> dict[str, Any]:
    """verl's file with this alpha."""
    return {**META, "lora_alpha": alpha}


# ---- alpha -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state() -> State:
    return peft_state()


@pytest.mark.parametrize(
    ("meta", "alpha", "config", "expected"),
    [
        (META, None, None, 32),
        ({**META, "task_type": None}, None, None, 32),
        ({**META, "r": 0}, None, None, 32),
        (META, 32, None, 32),
        (None, 6, None, 6),
        (None, 0.5, None, 0.5),
        (None, None, {}, 32),
        (None, None, {"lora_alpha": 16.5}, 16.5),
        (of_alpha(16), None, {"lora_alpha": 16.5}, 16.5),  # verl writes it so
        (of_alpha(32.5), 32.5, None, 32.5),
        (of_alpha(0), 0, None, 0),
        (of_alpha(0), 12, None, 12),
        (of_alpha(0), None, {"lora_alpha": 12}, 12),
        (None, 12, {"lora_alpha": 0}, 12),  # verl's merger writes such configs
    ],
)
def test_alpha(tmp_path, state, meta, alpha, config, expected):
    folder = write(tmp_path / "checkpoint", state, meta)
    path = None if config is None else given(tmp_path / "given", **config)
    (adapter,) = opened(folder, LoraOptions(alpha=alpha, config=path)).adapters
    assert adapter.config["lora_alpha"] == expected
    assert type(adapter.config["lora_alpha"]) is type(expected)


@pytest.mark.parametrize(
    ("meta", "alpha", "config", "kind", "words"),
    [
        (None, None, None, PlanError, ["'default'", "no recorded alpha", "--lora-alpha N", "--lora-config"]),
        ({"r": 8}, None, None, PlanError, ["no recorded alpha"]),
        (of_alpha(0), None, None, PlanError, ["lora_train_meta.json", "lora_alpha is 0", "--lora-alpha 0"]),
        (None, None, {"lora_alpha": 0}, PlanError, ["adapter_config.json", "lora_alpha is 0"]),
        (META, 16, None, InconsistentCheckpoint, ["--lora-alpha 16", "lora_train_meta.json has 32"]),
        (META, 0, None, InconsistentCheckpoint, ["--lora-alpha 0", "lora_train_meta.json has 32"]),
        (META, None, {"lora_alpha": 16}, InconsistentCheckpoint, ["adapter_config.json has 16", "has 32"]),
        (META, None, {"lora_alpha": 0}, InconsistentCheckpoint, ["adapter_config.json has 0", "has 32"]),
        (of_alpha(32.5), 32, None, InconsistentCheckpoint, ["--lora-alpha 32", "has 32.5"]),
        ('{"lora_alpha": 16, "lora_alpha": 32}', None, None, DamagedFile, ["a key that is there twice"]),
        (None, 32, {"lora_alpha": 16}, InconsistentCheckpoint, ["--lora-alpha 32", "config.json has 16"]),
        (None, -1, None, PlanError, ["--lora-alpha -1"]),
        (None, float("nan"), None, PlanError, ["--lora-alpha nan"]),
        (of_alpha("32"), None, None, DamagedFile, ["lora_train_meta.json", 'lora_alpha is "32"']),
        (of_alpha(True), None, None, DamagedFile, ["lora_alpha is true"]),
        (of_alpha(10**400), None, None, DamagedFile, ["lora_alpha is 1000"]),
        ({**META, "r": -8}, None, None, DamagedFile, ["r is -8"]),
        ({**META, "task_type": "CHAT"}, None, None, DamagedFile, ['task_type is "CHAT"']),
        ({**META, "r": 16}, None, None, InconsistentCheckpoint, ["r is 16", "q_proj", "rank 8"]),
        ('{"r": 8', None, None, DamagedFile, ["lora_train_meta.json", "malformed JSON"]),
        ("[" * 100_000, None, None, DamagedFile, ["lora_train_meta.json"]),
        ("[8]", None, None, DamagedFile, ["not a JSON object"]),
    ],
)
def test_alpha_is_not_guessed(tmp_path, state, meta, alpha, config, kind, words):
    folder = write(tmp_path / "checkpoint", state, meta)
    path = None if config is None else given(tmp_path / "given", **config)
    options = LoraOptions(alpha=alpha, config=path)
    refused(kind, *words, call=lambda: opened(folder, options))


@pytest.mark.parametrize("mode", ["only", "fold"])
def test_alpha_is_not_guessed_in_any_mode(tmp_path, state, mode):
    folder = write(tmp_path, state, of_alpha(0))
    refused(PlanError, "lora_alpha is 0", call=lambda: opened(folder, LoraOptions(mode)))


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"peft_type": "IA3"}, UnsupportedCheckpoint, ["peft_type is 'IA3'"]),
        ({"r": 4}, InconsistentCheckpoint, ["adapter_config.json", "r is 4", "rank 8"]),
        ({"use_dora": True}, InconsistentCheckpoint, ["use_dora is True", "no magnitude vectors"]),
        ({"lora_bias": True}, InconsistentCheckpoint, ["lora_bias is True", "no biases"]),
        ({"trainable_token_indices": [1]}, InconsistentCheckpoint, ["[1]", "no trained rows"]),
        ({"bias": "some"}, DamagedFile, ['bias is "some"']),
        ({"use_rslora": "yes"}, DamagedFile, ["use_rslora"]),
        ({"rank_pattern": {"q_proj": "8"}}, DamagedFile, ["rank_pattern"]),
        ({"alpha_pattern": [3]}, DamagedFile, ["alpha_pattern"]),
        ({"layer_replication": [[0, 2]]}, UnsupportedCheckpoint, ["layer_replication"]),
        (
            {"target_modules": ["gate_proj", "down_proj"]},
            InconsistentCheckpoint,
            ["adapter_config.json", "layers.0.self_attn.q_proj", "does not target"],
        ),
        ({"target_modules": r".*down_proj"}, InconsistentCheckpoint, ["q_proj", "does not target"]),
        ({"layers_to_transform": [0]}, InconsistentCheckpoint, ["layers.1.", "layers_to_transform is [0]"]),
        ({"exclude_modules": ["q_proj"]}, InconsistentCheckpoint, ["q_proj", "exclude_modules"]),
    ],
)
def test_a_given_config_is_of_this_adapter(tmp_path, state, fields, kind, words):
    folder = write(tmp_path / "checkpoint", state)
    options = LoraOptions(config=given(tmp_path / "given", **fields))
    refused(kind, *words, call=lambda: opened(folder, options))


@pytest.mark.parametrize("mode", ["extract", "only", "fold"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alpha_pattern": {"k_proj": 9}}, "alpha_pattern has k_proj, and nothing of that name has LoRA"),
        ({"rank_pattern": {"k_proj": 9}}, "rank_pattern has k_proj, and nothing of that name has LoRA"),
        (
            {"target_modules": ["q_proj", "down_proj", "o_proj"]},
            "target_modules name model.layers.0.self_attn.o",
        ),
    ],
)
def test_what_a_given_config_has_of_other_modules_is_told(tmp_path, state, fields, words, mode):
    folder = write(tmp_path / "checkpoint", state)
    done = opened(folder, LoraOptions(mode, config=given(tmp_path / "given", **fields)))
    notes = [note for note in done.base.notes if note.level == "warning"]
    if mode == "fold" and "alpha_pattern" in fields:  # told when it is folded
        result = fold(done.base, [(each, 1.0) for each in done.adapters], {})
        notes = [note for note in result.checkpoint.notes if note.level == "warning"]
    assert len([note for note in notes if words in note.text]) == 1


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_were_trained_are_told(tmp_path, state, bias):
    folder = write(tmp_path / "checkpoint", state)
    options = LoraOptions(config=given(tmp_path / "given", bias=bias))
    notes = [note.text for note in opened(folder, options).base.notes]
    assert f"bias was '{bias}': the base is written with its biases as they were trained" in notes


def test_fields_that_only_a_config_has(tmp_path, state):
    folder = write(tmp_path / "checkpoint", state)
    fields = {
        **{
            "use_rslora": True,
            "alpha_pattern": {"down_proj": 3},
            "lora_dropout": 0.1,
            "task_type": "CAUSAL_LM",
        },
        **{
            "base_model_name_or_path": "org/base",
            "target_modules": "all-linear",
            "init_lora_weights": "pissa",
        },
    }
    for path in (
        given(tmp_path / "given", **fields),
        given(tmp_path / "given", **fields) + "/adapter_config.json",
    ):
        done = opened(folder, LoraOptions(config=path))
        (adapter,) = done.adapters
        wanted = {**fields, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": True}
        assert {key: adapter.config[key] for key in fields} == wanted
        assert any("'pissa'" in note.text for note in done.base.notes)
    (adapter,) = opened(folder, LoraOptions("only", config=path)).adapters
    assert adapter.config["init_lora_weights"] == "pissa"  # the adapter goes with the base from before


def test_what_is_not_recorded_is_said(tmp_path, state):
    notes = [note.text for note in opened(write(tmp_path, state)).base.notes]
    assert any("use_rslora false" in text and "--lora-config" in text for text in notes)
    assert any("base_model_name_or_path" in text and "null" in text for text in notes)


@pytest.mark.parametrize(
    ("config", "task", "base"),
    [
        ({"architectures": ["LlamaForCausalLM"], "_name_or_path": "org/base"}, "CAUSAL_LM", "org/base"),
        ({"architectures": ["GPT2LMHeadModel"], "_name_or_path": ""}, "CAUSAL_LM", None),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "QUESTION_ANS", None),
        ({"architectures": [7], "_name_or_path": 7}, None, None),
        ({"architectures": "LlamaForCausalLM"}, None, None),
        ({"x": 1}, None, None),
    ],
)
def test_task_and_base_by_the_models_config(tmp_path, state, config, task, base):
    folder = write(tmp_path, state, {"r": 8, "lora_alpha": 32}, config)
    (adapter,) = opened(folder).adapters
    assert (adapter.config["task_type"], adapter.config["base_model_name_or_path"]) == (task, base)


@pytest.mark.parametrize("recorded", ["TOKEN_CLS", "CAUSAL_LM"])
def test_a_value_model_without_a_trained_head_has_no_task(tmp_path, recorded):
    """PEFT would look for the head in the adapter, and not find it; as CAUSAL_LM it would not load at all."""
    config = {"architectures": ["Qwen2ForTokenClassification"]}
    folder = write(tmp_path, peft_state("qwen2-value"), {**META, "task_type": recorded}, config)
    done = opened(folder)
    assert done.adapters[0].config["task_type"] is None
    assert any("score" in note.text for note in done.base.notes)
    assert "score.weight" in done.base.gathers


# ---- several adapters, and adapters alone ------------------------------------------------------------------


def two_adapters() -> State:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(build_base("llama"), LoraConfig(**LORA))
        model.add_adapter("style", LoraConfig(r=2, target_modules=["k_proj"]))
    return model.state_dict()


def test_alpha_of_several_adapters(tmp_path):
    folder = write(tmp_path / "checkpoint", two_adapters())
    refused(PlanError, "'style'", "no recorded alpha", call=lambda: opened(folder))  # verl's file is of one
    root = Path(given(tmp_path / "given"))
    one = LoraOptions(config=str(root / "adapter_config.json"))
    refused(PlanError, "default, style", "a folder", call=lambda: opened(folder, one))
    both = LoraOptions(config=str(root))
    refused(PlanError, "style/adapter_config.json is not there", call=lambda: opened(folder, both))
    given(root / "style", r=2, lora_alpha=5, target_modules=["k_proj"])
    configs = [adapter.config for adapter in opened(folder, both).adapters]
    assert [(config["r"], config["lora_alpha"]) for config in configs] == [(8, 32), (2, 5)]
    assert [config["target_modules"] for config in configs] == [["q_proj", "down_proj"], ["k_proj"]]


def test_adapters_alone(make, tmp_path):
    made: MadeLora = make(_lora_only)
    checkpoint = lazymerge.open(made.leaf)
    done = split(checkpoint, LoraOptions(), {})
    (adapter,) = done.adapters
    assert not done.base.gathers
    assert any("alone" in note.text for note in done.base.notes)
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]
    assert sorted(adapter.config["target_modules"]) == sorted(layers)
    assert len(adapter.gathers) == 8
    refused(PlanError, "adapters alone", call=lambda: split(checkpoint, LoraOptions("fold"), {}))


def _lora_only(root: Path) -> MadeLora:
    return peft_fsdp(root, "llama", {"default": LORA}, meta=META, lora_only=True)


def test_ranks_of_adapters_alone_are_asked_for(tmp_path):
    """What looks like rank 48 may be rank 8 on each of 6 experts."""
    fields = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    state = {name: tensor for name, tensor in peft_state("qwen3-moe", **fields).items() if "lora_" in name}
    folder = write(tmp_path, state)
    refused(PlanError, "several ranks", "--lora-config", call=lambda: opened(folder))
    fields["target_parameters"] = ["experts.down_proj", "experts.gate_up_proj"]
    state = {name: tensor for name, tensor in peft_state("qwen3-moe", **fields).items() if "lora_" in name}
    folder = write(tmp_path, state)
    refused(UnsupportedCheckpoint, "LoRA on parameters", call=lambda: opened(folder))


def test_one_alpha_for_several_ranks_is_not_guessed(tmp_path):
    """Where ranks have patterns, alpha may have them too."""
    fields = {"rank_pattern": {"down_proj": 4}}
    folder = write(tmp_path / "checkpoint", peft_state(**fields))
    refused(PlanError, "several ranks", "alpha_pattern", call=lambda: opened(folder, LoraOptions("fold")))
    for mode in ("extract", "only"):
        warnings = [n for n in opened(folder, LoraOptions(mode)).base.notes if n.level == "warning"]
        assert any("the alpha 32 for all: alpha_pattern is not recorded" in note.text for note in warnings)
    path = given(tmp_path / "given", alpha_pattern={"down_proj": 5}, **fields)
    for mode in ("extract", "only", "fold"):
        done = opened(folder, LoraOptions(mode, config=path))
        assert done.adapters[0].config["alpha_pattern"] == {"down_proj": 5}
        assert not [note for note in done.base.notes if note.level == "warning"]


def test_a_model_that_peft_was_injected_into(make):
    made: MadeLora = make(_injected)
    done = split(lazymerge.open(made.leaf), None, {})
    assert set(done.base.gathers) == set(made.base)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in done.adapters[0].gathers
    assert done.adapters[0].config["target_modules"] == ["q_proj", "down_proj"]


def _injected(root: Path) -> MadeLora:
    return peft_fsdp(root, "llama", {"default": LORA}, meta=META, injected=True)


@pytest.mark.parametrize(
    ("rename", "front"),
    [
        (lambda name: f"pretrained_model.{name}", "pretrained_model."),
        (lambda name: name.replace(".base_layer.", "."), ""),  # PEFT before 0.6
        (lambda name: name.removesuffix(".weight") if "magnitude" in name else name, ""),
    ],
)
def test_other_forms_of_the_names(tmp_path, rename, front):
    state = {rename(name): tensor for name, tensor in peft_state(use_dora=True).items()}
    done = opened(write(tmp_path, {**state, "v_head.weight": torch.zeros(1, 4)}))
    base = [*(front + name for name in build_base("llama").state_dict()), "v_head.weight"]
    assert set(done.base.gathers) == set(base)
    assert len(done.adapters[0].gathers) == 12
    assert done.adapters[0].config["use_dora"] is True
    assert all(name.startswith("base_model.model.model.layers.") for name in done.adapters[0].gathers)


# ---- not LoRA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.lora_router.weight", "model.layers.0.q_proj.weight"],
        ["attn.lora_A.weight", "attn.lora_B.weight", "attn.weight"],
        ["attn.lora_A.q.weight", "attn.lora_B.q.weight", "attn.q.weight"],
        ["model.base_layer.weight", "model.head.weight"],
        ["base_model.model.layers.0.weight", "base_model.model.norm.weight"],
        [],
    ],
)
def test_names_that_only_look_like_it(tmp_path, names):
    assert told_apart(names) is None
    if names:
        torch.save({name: torch.zeros(2, 2) for name in names}, tmp_path / "model.pt")
        checkpoint = lazymerge.open(tmp_path)
        assert split(checkpoint) == Split(checkpoint, ())


def test_modules_that_look_like_it_beside_lora(tmp_path):
    state = peft_state()
    mine = {
        "base_model.model.model.lora_router.weight": torch.zeros(1),
        "base_model.model.base_layer.x": torch.zeros(1),
    }
    done = opened(write(tmp_path, {**state, **mine}))
    assert {"model.lora_router.weight", "base_layer.x"} < set(done.base.gathers)


@pytest.mark.parametrize(
    "kind", ["IA3", "LoHa", "LoKr", "OFT", "Vera", "AdaLora", "LNTuning", "TrainableTokens"]
)
def test_other_methods_are_refused_by_name(kind):
    import peft

    fields: dict[str, Any] = {"target_modules": ["q_proj"]}
    fields |= {"IA3": {"feedforward_modules": []}, "AdaLora": {"total_step": 10}}.get(kind, {})
    if kind == "TrainableTokens":
        fields = {"token_indices": [1, 2]}
    if kind == "LNTuning":
        fields = {"target_modules": ["input_layernorm"]}
    if kind == "OFT":
        fields |= {"oft_block_size": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(build_base("llama"), getattr(peft, f"{kind}Config")(**fields))
    names = list(model.state_dict())
    theirs = set(names) - {f"base_model.model.{name}" for name in build_base("llama").state_dict()}
    with pytest.raises(UnsupportedCheckpoint) as caught:
        told_apart(names)
    assert str(caught.value).partition(":")[0] in theirs


def test_prompt_tuning_is_refused_by_name():
    names = ["base_model.model.embed_tokens.weight", "prompt_encoder.default.embedding.weight"]
    refused(UnsupportedCheckpoint, "prompt_encoder.default", call=lambda: told_apart(names))


IDLE = [LoraOptions("fold"), LoraOptions("only"), LoraOptions(alpha=3), LoraOptions(config="x")]


@pytest.mark.parametrize("options", IDLE)
def test_options_without_lora(tmp_path, options):
    folder = write(tmp_path, dict(build_base("llama").state_dict()))
    refused(PlanError, "there is no LoRA", call=lambda: opened(folder, options))


def test_unknown_mode(tmp_path, state):
    folder = write(tmp_path, state)
    refused(PlanError, "--lora", "extract, only or fold", call=lambda: opened(folder, LoraOptions("merge")))


# ---- tensors that do not fit together ----------------------------------------------------------------------

Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.default.weight", f"{Q}.lora_B.default.weight"
zeros = torch.zeros


def without(*names: str) -> Callable[[State], State]:
    return lambda state: {name: tensor for name, tensor in state.items() if name not in names}


def having(changes: State) -> Callable[[State], State]:
    return lambda state: {**state, **changes}


def adapter_called(name: str) -> Callable[[State], State]:
    return lambda state: {key.replace(".default.", f".{name}."): tensor for key, tensor in state.items()}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (without(B), IncompleteCheckpoint, ["q_proj", "no lora_B"]),
        (without(A), IncompleteCheckpoint, ["q_proj", "no lora_A"]),
        (having({B: zeros(16, 4)}), InconsistentCheckpoint, [A, "[8, 16]", "[16, 4]"]),
        (having({A: zeros(8, 7)}), InconsistentCheckpoint, [A, "[8, 7]", "weight [16, 16]"]),
        (having({A: zeros(8)}), InconsistentCheckpoint, [A, "[8]"]),
        (having({A: zeros(0, 16), B: zeros(16, 0)}), InconsistentCheckpoint, [A, "[0, 16]"]),
        (having({f"{Q}.lora_B.default.bias": zeros(16)}), InconsistentCheckpoint, ["a bias"]),
        (having({f"{Q}.lora_magnitude_vector.default": zeros(16)}), InconsistentCheckpoint, ["a magnitude"]),
        (having({f"{Q}.lora_embedding_A.default": zeros(8, 4)}), IncompleteCheckpoint, ["lora_embedding_B"]),
        (having({f"{Q}.lora_diag.default": zeros(8)}), UnsupportedCheckpoint, ["lora_diag"]),
        (having({f"{Q}.weight": zeros(1)}), InconsistentCheckpoint, [f"{Q}.base_layer.weight", "both"]),
        (
            having({"n.original_module.w": zeros(1), "n.modules_to_save.x.w": zeros(1)}),
            UnsupportedCheckpoint,
            ["n.modules_to_save.x.w", "outside"],
        ),
        (adapter_called("a/b"), UnsupportedCheckpoint, ["'a/b'"]),
        (
            having({f"x.{Q}.base_layer.weight": zeros(1), f"x.{A}": zeros(1)}),
            UnsupportedCheckpoint,
            [f"x.{A}"],
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, state, change, kind, words):
    folder = write(tmp_path, change(state))
    refused(kind, *words, call=lambda: opened(folder))


def test_an_adapter_without_lora(tmp_path, state):
    more = {f"{Q}.k.original_module.w": zeros(1), f"{Q}.k.modules_to_save.x.w": zeros(1)}
    folder = write(tmp_path, {**state, **more})
    options = LoraOptions(alpha=32)
    refused(IncompleteCheckpoint, "'x'", "on no layer", call=lambda: opened(folder, options))


def test_rows_of_an_embedding_need_their_numbers(tmp_path):
    folder = write(tmp_path / "checkpoint", peft_state(trainable_token_indices=[3, 5]))
    refused(PlanError, "2 trained rows", "trainable_token_indices", call=lambda: opened(folder))
    options = LoraOptions(config=given(tmp_path / "given", trainable_token_indices=[3, 5, 7]))
    refused(InconsistentCheckpoint, "2 trained rows", "names 3", call=lambda: opened(folder, options))


def test_copies_of_base_and_adapter(make):
    made: MadeLora = make(_hybrid)
    checkpoint = lazymerge.open(made.leaf)
    before = [copy.name for copy in checkpoint.copies()]
    done = split(checkpoint, None, {})
    names = {copy.name for copy in done.base.copies()}
    assert len(before) == len(list(done.base.copies()))
    assert set(done.base.gathers) < names
    assert f"{Q}.lora_A.weight" in names
    alone = {copy.name for copy in split(checkpoint, LoraOptions("only"), {}).base.copies()}
    assert alone == {name.replace(".default.", ".") for name in before if "lora_" in name}


def _hybrid(root: Path) -> MadeLora:
    return peft_fsdp(root, "llama", {"default": LORA}, HYBRID, meta=META)
