"""Hub names of a checkpoint that ran under transformers 5: what `save_pretrained` writes is the truth."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch.distributed.tensor import Replicate, Shard

import lazymerge
from lazymerge.boxes import Piece
from lazymerge.checkpoint import Checkpoint, Copy
from lazymerge.compute import read
from lazymerge.conversions import architecture as module
from lazymerge.conversions import meta_model, runtime_names
from lazymerge.conversions.architecture import Architecture
from lazymerge.conversions.dtypes import cast_to
from lazymerge.conversions.expressions import Named, from_plain, to_plain
from lazymerge.conversions.hub import HubOptions, to_hub
from lazymerge.conversions.model_process import Contradiction
from lazymerge.conversions.recording import recorded
from lazymerge.conversions.runtime_names import Conversion, converted, to_hub_names
from lazymerge.conversions.value_head import value_head_fields
from lazymerge.elements import dtype_of, in_memory
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from lazymerge.files.dtype import DTYPES
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.gather import Constant, Shards, of_region
from lazymerge.prepare import of_training
from lazymerge.sidecars import find_sidecars
from lazymerge.tensor import LazyTensor
from lazymerge.tiling import check
from tests.makers import tiny_models
from tests.makers.dtensors import dtensors
from tests.makers.layout import Made, edit_rank


@pytest.fixture
def here(monkeypatch) -> list[dict[str, Any]]:
    """The model is built in this process; what is asked."""
    asked = []

    def ask(request: dict[str, Any]) -> dict[str, Any] | None:
        asked.append(request)
        code = None if request["code"] is None else Path(request["code"])
        try:
            answer = meta_model._answer(json.loads(json.dumps(request)), code)
        except meta_model.Contradiction as error:
            raise Contradiction(str(error), "mend it") from error
        except meta_model.Refused as error:
            raise InconsistentCheckpoint(str(error), "mend it") from error
        return None if "unknown" in answer else json.loads(json.dumps(answer))

    monkeypatch.setattr(module, "_ask", ask)
    monkeypatch.setattr(runtime_names, "_ask", ask)
    return asked


def sharded(root: Path, model: Any, saved: Path) -> Made:
    """verl's files of two ranks with the model's own tensors, and the config that it saved."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    entries = {
        name: (tensor, (Shard(_dim(tensor)),)) if name in parameters and tensor.dim() else tensor
        for name, tensor in model.state_dict().items()
    }
    made = dtensors(root, (("fsdp", 2),), entries)
    shutil.copy(saved / "config.json", made.sidecars)
    return made


def _dim(tensor: torch.Tensor) -> int:
    return next((dim for dim, size in enumerate(tensor.shape) if size % 2 == 0), 0)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def assert_same(merged: Path, saved: Path) -> None:
    ours, theirs = tensors_of(merged), tensors_of(saved)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape, name
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(_bytes(ours[name]), _bytes(tensor)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def hub_of(state: Mapping[str, torch.Tensor], config: Mapping[str, Any], **options: Any) -> Checkpoint:
    """What these tensors become, checked."""
    return to_hub(checkpoint_of(state), config, HubOptions(**options)).checkpoint


def merged_as_saved(key: str, tmp_path: Path) -> Any:
    model = tiny_models.filled(tiny_models.class_of(key))
    model.save_pretrained(tmp_path / "saved")
    made = sharded(tmp_path / "run", model, tmp_path / "saved")
    lazymerge.merge(made.root, tmp_path / "merged")
    assert_same(tmp_path / "merged", tmp_path / "saved")
    return model


# ---- what save_pretrained writes -------------------------------------------------------------------------


PARTS = 24
"""Of the table: what is in it is only known once transformers is imported."""

REPRESENTATIVE = [
    "llama",
    "qwen3_moe",
    "mixtral",
    "qwen2_moe",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_vl_moe",
    "qwen2_5_vl",
    "llama4",
    "glm4_moe",
    "qwen3_next",
    "gemma3",
    "ernie4_5_vl_moe",  # experts of text and vision in one list
    "inkling2_loop_text",  # a padded vocabulary, interleaved halves, indexed queries
    "kimi_k25",  # heads permuted for rotary embeddings
    "marian",  # tensors that its class does not save
    "Qwen3MoeForTokenClassification",
    "Qwen2ForSequenceClassification",
]


@pytest.mark.parametrize("key", REPRESENTATIVE)
def test_a_merge_is_what_save_pretrained_writes(here, tmp_path, key):
    model = merged_as_saved(key, tmp_path)
    again, told = type(model).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told.values()), told
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of a tiny model
@pytest.mark.parametrize("part", range(PARTS))
def test_every_entry_of_the_table(here, tmp_path, part):
    for key in tiny_models.entries()[part::PARTS]:
        if key not in tiny_models.NOT_BUILT:
            merged_as_saved(key, tmp_path / key)


@pytest.mark.slow
def test_what_is_not_built_still_cannot_be():
    """An entry that can be built by now has to be tested."""
    for key in tiny_models.NOT_BUILT:
        model_class = tiny_models.class_of(key)
        if model_class is not None:
            with pytest.raises(Exception, match=r"."):
                tiny_models.tiny(model_class)


def of_ranks(key: str, ranks: int) -> Any:
    return pytest.param(key, ranks, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("key", "ranks"),
    [
        ("qwen3_moe", 3),  # which nothing divides
        ("mixtral", 2),
        of_ranks("deepseek_v3", 4),
        of_ranks("qwen3_next", 2),
        of_ranks("gemma3", 3),
        of_ranks("qwen2_5_vl", 4),
        of_ranks("qwen3_vl_moe", 3),
        of_ranks("kimi_k25", 2),
    ],
)
def test_ranks_of_fully_shard(here, tmp_path, key, ranks):
    """FSDP2 itself, and verl's names for the files."""
    made, saved = tiny_models.fsdp2_of(key, tmp_path / "run", ranks)
    lazymerge.merge(made.root, tmp_path / "merged")
    assert_same(tmp_path / "merged", saved)


def test_another_dtype_is_kept(here, tmp_path):
    model = tiny_models.filled(tiny_models.class_of("qwen3_moe")).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    made = sharded(tmp_path / "run", model, tmp_path / "saved")
    lazymerge.merge(made.root, tmp_path / "merged")
    assert_same(tmp_path / "merged", tmp_path / "saved")


# ---- which form a checkpoint has -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> tuple[Any, Path]:
    """A Qwen3-MoE as it runs, and the folder that it saved."""
    model = tiny_models.filled(tiny_models.class_of("qwen3_moe"))
    saved = tmp_path_factory.mktemp("moe") / "saved"
    model.save_pretrained(saved)
    return model, saved


def config_of(saved: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((saved / "config.json").read_text())
    return config


def checkpoint_of(tensors: Mapping[str, torch.Tensor], kind: str = "fsdp", **more: Any) -> Checkpoint:
    return Checkpoint({name: in_memory(tensor) for name, tensor in tensors.items()}, kind, **more)


@pytest.mark.parametrize("kind", ["fsdp", "huggingface"])
def test_hub_names_stay_the_same_gathers(here, moe, kind):
    _, saved = moe
    given = checkpoint_of(tensors_of(saved), kind)
    assert to_hub_names(given, config_of(saved)) is given


def test_what_does_not_change_is_the_very_same_gather(here, moe):
    model, saved = moe
    given = checkpoint_of(model.state_dict())
    named = to_hub_names(given, config_of(saved))
    assert set(named) == set(tensors_of(saved))
    kept = [name for name in named if name in given]
    assert len(kept) == len(given) - 4  # two fused tensors in each of two layers
    assert all(named.gathers[name] is given.gathers[name] for name in kept)
    (note,) = named.notes
    assert note.level == "info"
    assert "4 tensors of the running model" in note.text


def test_a_mixture_of_both_forms_is_refused(here, moe):
    model, saved = moe
    state, hub = model.state_dict(), tensors_of(saved)
    mixed = {name: tensor for name, tensor in state.items() if "layers.1." not in name}
    mixed |= {name: tensor for name, tensor in hub.items() if "layers.1." in name}
    with pytest.raises(
        InconsistentCheckpoint, match=r"model\.layers\.0\.mlp\.experts\.\w+ is a name"
    ) as caught:
        to_hub_names(checkpoint_of(mixed), config_of(saved))
    assert "model.layers.1.mlp.experts.0." in caught.value.problem
    assert "--names runtime" in caught.value.hint


def test_equal_names_are_told_apart_by_shape():
    value = torch.arange(8.0).reshape(2, 4)
    architecture = Architecture("X", {"w": (4, 2)})
    transposing = Conversion({"w": ["pick", "w", [1, 0], []]}, {"w": (2, 4)})
    made = converted(checkpoint_of({"w": value}), architecture, transposing)
    assert torch.equal(read(made.gathers["w"]), value.T)
    given = checkpoint_of({"w": value.T})
    assert converted(given, architecture, transposing) is given


def test_experts_that_only_the_loader_turns_stay(here, tmp_path):
    """Qwen3-VL-MoE's are transposed on the hub; `save_pretrained` leaves them, and the loader takes both."""
    model = tiny_models.filled(tiny_models.class_of("qwen3_vl_moe"))
    model.save_pretrained(tmp_path / "saved")
    config = config_of(tmp_path / "saved")
    state = {n: t.mT if ".experts." in n else t for n, t in model.state_dict().items()}
    assert any(".experts." in name for name in state)
    found = hub_of(state, config)
    assert all(torch.equal(found[name].materialize(), tensor) for name, tensor in state.items())


def test_a_name_that_would_be_there_twice_is_refused():
    """`a` becomes `b`, and what is called `b` lacks what it needs to become another."""
    moves = {"b": "a", "c": ["cat", 0, ["b", "gone"]]}
    shapes = {"a": (2,), "b": (2,), "gone": (2,)}
    given = checkpoint_of({"a": torch.zeros(2), "b": torch.ones(2)})
    with pytest.raises(InconsistentCheckpoint, match="b is in the checkpoint already"):
        converted(given, Architecture("X", {"b": (2,), "c": (4,)}), Conversion(moves, shapes))


SQUARE = Architecture("X", {"w": (4, 4)}, config={})
TRANSPOSING = Conversion({"w": ["pick", "w", [1, 0], []]}, {"w": (4, 4)})


@pytest.mark.parametrize(
    ("version", "kind", "converted_"),
    [("5.24.0", "fsdp", True), ("4.57.1", "fsdp", False), ("5.24.0", "huggingface", False)],
)
def test_where_names_and_shapes_are_alike_the_version_decides(version, kind, converted_):
    value = torch.arange(16.0).reshape(4, 4)
    architecture = replace(SQUARE, config={"transformers_version": version})
    given = checkpoint_of({"w": value}, kind)
    made = converted(given, architecture, TRANSPOSING)
    assert torch.equal(read(made.gathers["w"]), value.T if converted_ else value)


def test_a_config_that_is_given_does_not_say_what_ran(tmp_path):
    """--hf-config may be a base model of before transformers 5; the checkpoint has its own of the run."""
    base, own = tmp_path / "base", tmp_path / "run" / "huggingface"
    config = {"model_type": "x", "transformers_version": "4.57.1"}
    for folder in (base, own):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    seen = {}
    for folder in (base, own):
        sidecars = find_sidecars([folder, own], folder)
        seen[folder] = of_training(sidecars, folder, [folder, own])
    assert seen == {base: {"model_type": "x"}, own: config}


@pytest.mark.parametrize("version", [None, 5, "main"])
def test_where_nothing_decides_it_is_asked_for(version):
    architecture = replace(SQUARE, config={"transformers_version": version})
    with pytest.raises(InconsistentCheckpoint, match="transformers_version"):
        converted(checkpoint_of({"w": torch.zeros(4, 4)}), architecture, TRANSPOSING)


# ---- checkpoints that are not what the config says -------------------------------------------------------


def test_more_experts_than_the_config_says_are_refused_by_what_would_fit(here, moe):
    model, saved = moe
    config = config_of(saved)
    assert config["num_local_experts"] == 4
    with pytest.raises(InconsistentCheckpoint) as caught:
        hub_of(model.state_dict(), {**config, "num_local_experts": 3})
    assert "num_local_experts = 4 would fit, it says 3" in caught.value.hint
    assert "--no-check" in caught.value.hint


@pytest.mark.parametrize(
    "change", [{"num_local_experts": 3}, {"num_hidden_layers": 1}, {"moe_intermediate_size": 5}]
)
def test_without_the_check_the_tensors_themselves_are_converted(here, moe, change):
    model, saved = moe
    found = hub_of(model.state_dict(), {**config_of(saved), **change}, check=False)
    hub = tensors_of(saved)
    assert set(found) == set(hub)
    assert all(torch.equal(found[name].materialize(), hub[name]) for name in hub)


def test_a_missing_fused_tensor_is_missing(here, moe):
    model, saved = moe
    state = dict(model.state_dict())
    del state["model.layers.1.mlp.experts.down_proj"]
    with pytest.raises(IncompleteCheckpoint, match=r"missing: model\.layers\.1\.mlp\.experts\.0\.down_proj"):
        hub_of(state, config_of(saved))
    found = hub_of(state, config_of(saved), check=False)
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in found


GRIDS = {  # (rows, columns) of the pieces that a [6, 4] is made of
    "rows": [(0, 1, 0, 4), (1, 4, 0, 4), (4, 6, 0, 4)],
    "empty": [(0, 3, 0, 4), (3, 3, 0, 4), (3, 6, 0, 4)],
    "grid": [(0, 3, 0, 2), (3, 6, 0, 2), (0, 3, 2, 4), (3, 6, 2, 4)],
    "uneven": [(0, 6, 0, 1), (0, 2, 1, 4), (2, 5, 1, 4), (5, 6, 1, 4)],
}


@pytest.mark.parametrize("grid", GRIDS)
def test_many_tensors_are_cut_from_one_that_is_in_pieces(grid):
    whole = torch.arange(24).reshape(6, 4)
    pieces = [
        Piece((top, left), next(in_memory(whole[top:bottom, left:right]).pieces()).region)
        for top, bottom, left, right in GRIDS[grid]
    ]
    given = Checkpoint({"w": Shards((6, 4), DTYPES["int64"], Constant(pieces))}, "fsdp")
    moves = {f"w.{row}.weight": ["pick", "w", [1], [[0, row]]] for row in range(6)}
    moves["w.columns"] = ["pick", "w", [[1, 1, 2, 2], 0], []]
    named = converted(given, Architecture("X", {}), Conversion(moves, {"w": (6, 4)}))
    for row in range(6):
        check("w", named.gathers[f"w.{row}.weight"])
        assert torch.equal(read(named.gathers[f"w.{row}.weight"]), whole[row])
    assert torch.equal(read(named.gathers["w.columns"]), whole[:, 1::2].T)


def test_tensors_of_different_types_in_one_are_refused():
    halves = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, dtype=torch.float16)}
    joining = Conversion({"w": ["cat", 0, ["a", "b"]]}, {"a": (2, 3), "b": (2, 3)})
    with pytest.raises(InconsistentCheckpoint, match="w cannot be made of a, b: parts of different types"):
        converted(checkpoint_of(halves), Architecture("X", {"w": (4, 3)}), joining)


def test_a_conversion_that_computes_is_refused():
    impossible = Conversion({}, {}, impossible="w is computed")
    with pytest.raises(UnsupportedCheckpoint, match=r"X: .* w is computed"):
        converted(checkpoint_of({"w": torch.zeros(1)}), Architecture("X", {"w": (1,)}), impossible)


def test_a_reverse_conversion_that_reads_values_is_told(monkeypatch):
    import transformers.core_model_loading as loading

    monkeypatch.setattr(
        loading, "revert_weight_conversion", lambda model, state: {n: t.abs() for n, t in state.items()}
    )
    model = tiny_models.tiny(tiny_models.class_of("llama"))
    assert "values of" in recorded(model)["impossible"]


def test_a_reverse_conversion_that_loses_a_tensor_is_told(monkeypatch):
    import transformers.core_model_loading as loading

    monkeypatch.setattr(
        loading, "revert_weight_conversion", lambda model, state: dict(list(state.items())[1:])
    )
    model = tiny_models.tiny(tiny_models.class_of("llama"))
    assert "is in no tensor of the hub" in recorded(model)["impossible"]


# ---- classes that transformers does not have or take ------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "level", "said"),
    [
        (None, "info", "there is no config.json"),
        ({}, "info", "names no class"),
        ({"architectures": ["NoSuchModel"]}, "info", "no class NoSuchModel"),
        ({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}, "warning", "ZeroDivisionError"),
        (
            {"architectures": ["LlamaForSquares"], "model_type": "llama"},
            "warning",
            "LlamaForTokenClassification, LlamaForSequenceClassification, and the tensors fit none of them",
        ),
    ],
)
def test_names_are_kept_with_a_note_where_no_model_can_be_built(here, config, level, said):
    given = checkpoint_of({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 3)})
    found = to_hub(given, config, HubOptions()).checkpoint
    assert found.gathers == given.gathers
    (note,) = found.notes
    assert note.level == level
    assert said in note.text


# ---- names, copies, memory of answers ---------------------------------------------------------------------


def test_names_runtime_keeps_them_and_checks_all_the_same(here, moe):
    model, saved = moe
    state = dict(model.state_dict())
    found = hub_of(state, config_of(saved), names="runtime")
    assert list(found) == list(state)
    del state["model.norm.weight"]
    with pytest.raises(IncompleteCheckpoint, match=r"model\.norm\.weight"):
        hub_of(state, config_of(saved), names="runtime")
    with pytest.raises(PlanError, match="--names both"):
        hub_of(state, config_of(saved), names="both")


def test_copies_are_named_by_the_first_tensor_that_they_became(here, moe):
    model, saved = moe
    name = "model.layers.0.mlp.experts.down_proj"
    piece = next(in_memory(model.state_dict()[name]).pieces()).region
    given = checkpoint_of(
        model.state_dict(),
        copies=lambda: iter([Copy(name, piece, piece), Copy("model.norm.weight", piece, piece)]),
    )
    named = to_hub_names(given, config_of(saved))
    copies = list(named.copies())
    assert [copy.source for copy in copies] == [name, None]
    first, other = [copy.name for copy in copies]
    assert first == "model.layers.0.mlp.experts.0.down_proj.weight"
    assert first in named
    assert other == "model.norm.weight"


def test_one_question_for_both_and_none_the_second_time(here, moe, tmp_path, monkeypatch):
    model, saved = moe
    monkeypatch.setenv("LAZYMERGE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        found = hub_of(model.state_dict(), config_of(saved))
        assert set(found) == set(tensors_of(saved))
        assert len(here) == 1


def test_a_kept_answer_that_does_not_fit_is_asked_again(here, moe):
    model, saved = moe
    found = runtime_names.architecture_and_conversion(config_of(saved), None)
    assert found is not None
    architecture, conversion = found
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    odd = replace(conversion, moves={**conversion.moves, name: ["view", conversion.moves[name], [7]]})
    asked = len(here)
    named = converted(checkpoint_of(model.state_dict()), architecture, odd)
    assert len(here) == asked + 1
    assert named[name].shape == tensors_of(saved)[name].shape


def test_copies_of_each_tensor_of_a_join_are_compared():
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    piece = next(in_memory(state["b"]).pieces()).region
    joining = Conversion({"w": ["cat", 0, ["a", "b"]]}, {"a": (2, 3), "b": (2, 3)})
    given = checkpoint_of(state, copies=lambda: iter([Copy("b", piece, piece)]))
    (copy,) = converted(given, Architecture("Some", {"w": (4, 3)}), joining).copies()
    assert (copy.name, copy.source) == ("w", "b")


@pytest.mark.parametrize("strict", [False, True])
def test_replicas_that_differ_are_named_as_the_ranks_have_them(moe, tmp_path, strict):
    model, saved = moe
    entries = {name: (tensor, (Replicate(),)) for name, tensor in model.state_dict().items()}
    made = dtensors(tmp_path / "run", (("ddp", 2),), entries)
    shutil.copy(saved / "config.json", made.sidecars)
    name = "model.layers.1.mlp.experts.gate_up_proj"

    def change(state: dict[str, Any]) -> None:
        state[name]._local_tensor[3, 15, 5] += 1  # of expert 3 alone

    edit_rank(made, 1, change)
    if strict:
        with pytest.raises(InconsistentCheckpoint, match=rf"{re.escape(name)} differs between"):
            lazymerge.merge(made.root, tmp_path / "merged", strict=True)
        return
    (warning,) = lazymerge.merge(made.root, tmp_path / "merged").warnings
    assert warning.text.startswith(f"{name} differs between")
    assert_same(tmp_path / "merged", saved)


DEEP = "a"
for _ in range(200):
    DEEP = ["view", DEEP, [1]]


@pytest.mark.parametrize(
    "damaged",
    [
        {"moves": 7},
        {"moves": {"w": 7}, "runtime": {}, "unsaved": []},
        {"moves": {"w": "a"}, "runtime": {}, "unsaved": []},
        {"moves": {"w": "a"}, "runtime": {"a": [-1]}, "unsaved": []},
        {"moves": {"w": "a"}, "runtime": {"a": [1]}},
        {"moves": {"w": DEEP}, "runtime": {"a": [1]}, "unsaved": []},
    ],
)
def test_a_damaged_answer_is_asked_again(here, moe, tmp_path, monkeypatch, damaged):
    model, saved = moe
    monkeypatch.setenv("LAZYMERGE_CACHE", str(tmp_path / "cache"))
    for asked in (1, 2):
        assert set(hub_of(model.state_dict(), config_of(saved))) == set(tensors_of(saved))
        assert len(here) == asked
        for path in (tmp_path / "cache").rglob("*.json"):
            path.write_text(json.dumps(damaged))


CONVERTING = """
import json, sys
from pathlib import Path
from lazymerge.conversions.runtime_names import to_hub_names
from lazymerge.formats.registry import OpenOptions, open_checkpoint
root, config = map(Path, sys.argv[1:])
found = to_hub_names(open_checkpoint([root], OpenOptions()), json.loads(config.read_text()))
print(json.dumps([list(found), sorted({"torch", "transformers"} & set(sys.modules))]))
"""


def test_the_process_that_merges_imports_neither_torch_nor_transformers(moe, tmp_path):
    model, saved = moe
    made = sharded(tmp_path / "run", model, saved)
    done = subprocess.run(
        [sys.executable, "-c", CONVERTING, made.root, saved / "config.json"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(Path(lazymerge.__file__).parents[1])},
        check=False,
    )
    assert done.stderr == b""
    names, loaded = json.loads(done.stdout)
    assert set(names) == set(tensors_of(saved))
    assert loaded == []


# ---- value heads and tied tensors -------------------------------------------------------------------------


def test_a_value_head_beside_a_language_model_is_kept_and_noted(here, moe):
    model, saved = moe
    state = {
        **model.state_dict(),
        "v_head.summary.weight": torch.randn(1, 32),
        "v_head.summary.bias": torch.ones(1),
    }
    found = hub_of(state, config_of(saved))
    assert torch.equal(found["v_head.summary.weight"].materialize(), state["v_head.summary.weight"])
    assert [note.level for note in found.notes] == ["info", "warning"]
    assert "v_head.summary.weight, v_head.summary.bias" in found.notes[1].text


@pytest.mark.parametrize(("kind", "bias"), [("TokenClassification", True), ("SequenceClassification", False)])
def test_a_critic_under_the_config_of_its_language_model(here, tmp_path, kind, bias):
    """config.json then says what the tensors are, and a loader takes all of them."""
    model = tiny_models.filled(tiny_models.class_of(f"Qwen3MoeFor{kind}"))
    model.config.num_labels = 2
    assert ("score.bias" in model.state_dict()) is bias
    model.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps({**config_of(tmp_path / "saved"), "architectures": ["Qwen3MoeForCausalLM"]}))
    made = sharded(tmp_path / "run", model, tmp_path / "saved")
    report = lazymerge.merge(made.root, tmp_path / "merged")
    assert_same(tmp_path / "merged", tmp_path / "saved")
    assert config_of(tmp_path / "merged")["architectures"] == [f"Qwen3MoeFor{kind}"]
    assert any("Qwen3MoeForCausalLM" in note.text for note in report.notes)
    _, told = type(model).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told.values()), told


def test_a_critic_of_one_label_gets_names_for_it():
    found = value_head_fields(
        checkpoint_of({"score.weight": torch.zeros(1, 4), "score.bias": torch.zeros(1)}),
        {"architectures": ["XForCausalLM"], "num_labels": 3},
    )
    assert found == {
        "architectures": ["XForTokenClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "num_labels": 1,
    }
    both = checkpoint_of({"score.weight": torch.zeros(1, 4), "lm_head.weight": torch.zeros(3, 4)})
    assert value_head_fields(both, {"architectures": ["XForCausalLM"]}) == {}


CRITICS = [("OlmoeForCausalLM", True), ("Gemma3ForCausalLM", False)]


@pytest.mark.parametrize(("name", "moves"), CRITICS)
def test_a_critic_whose_class_does_not_exist_is_converted_as_its_language_model(here, name, moves):
    model = tiny_models.filled(getattr(transformers, name))
    state = dict(model.state_dict())
    del state["lm_head.weight"]
    state |= {"score.weight": torch.randn(1, model.config.hidden_size), "score.bias": torch.ones(1)}
    config = {**json.loads(model.config.to_json_string()), "architectures": [name]}
    hub = to_hub(checkpoint_of(state), config, HubOptions())
    assert "architectures" not in hub.config_changes
    assert len(hub.config_changes["id2label"]) == 1
    assert any(name in note.text and "score.weight" in note.text for note in hub.checkpoint.notes[:1])
    assert hub.checkpoint.notes[0].level == "warning"
    assert ("model.layers.0.mlp.experts.0.up_proj.weight" in hub.checkpoint) is moves
    del state["model.norm.weight"]
    with pytest.raises(IncompleteCheckpoint, match=r"model\.norm\.weight"):
        to_hub(checkpoint_of(state), config, HubOptions())


@pytest.mark.parametrize("differ", [False, True])
def test_what_a_model_ties_is_written_once_if_it_is_equal(here, tmp_path, differ):
    model = tiny_models.filled(tiny_models.class_of("t5"))
    model.save_pretrained(tmp_path / "saved")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "encoder.embed_tokens.weight" in state
    if differ:
        state["encoder.embed_tokens.weight"][0, 0] += 1
    found = hub_of(state, config_of(tmp_path / "saved"))
    tied = set(state) - set(tensors_of(tmp_path / "saved"))
    assert set(found) == set(state) - tied | ({"encoder.embed_tokens.weight"} if differ else set())
    assert ("encoder.embed_tokens.weight" in found.left_out) is not differ


TIED = ["MambaForCausalLM", "OpenAIGPTLMHeadModel", "CTRLLMHeadModel"]


@pytest.mark.parametrize("name", TIED)
def test_the_class_says_what_its_embedding_is_called(here, name):
    """No list of names knows these."""
    model = tiny_models.filled(getattr(transformers, name))
    config = {**json.loads(model.config.to_json_string()), "architectures": [name]}
    ((head, embedding),) = model.all_tied_weights_keys.items()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert set(hub_of(state, config)) == set(state) - {head}
    alone = {key: tensor for key, tensor in state.items() if key != embedding}
    assert set(hub_of(alone, config)) == set(state) - {head}
    state[head] += 1
    found = hub_of(state, config)
    for key in (head, embedding):
        assert torch.equal(found[key].materialize(), state[key])
    (note,) = found.notes
    assert (note.level, note.tensor) == ("warning", head)


@pytest.mark.parametrize("key", ["qwen2_5_vl", "step3p7", "gemma3", "paligemma"])
@pytest.mark.parametrize("names", ["hub", "runtime"])
def test_a_head_alone_is_written_under_the_embeddings_name_of_its_form(here, tmp_path, key, names):
    made = tiny_models.tiny(tiny_models.class_of(key)).config
    made.tie_word_embeddings = made.text_config.tie_word_embeddings = True
    model = tiny_models.class_of(key)(made)
    model.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    ((head, embedding),) = model.all_tied_weights_keys.items()
    whole = set(state) - {head} if names == "runtime" else set(tensors_of(tmp_path))
    del state[embedding]
    assert set(hub_of(state, config_of(tmp_path), names=names)) == whole


@pytest.mark.parametrize("left", ["lm_head.weight", "decoder.embed_tokens.weight"])
def test_of_several_that_are_tied_one_is_enough(here, tmp_path, left):
    model = tiny_models.filled(transformers.T5ForConditionalGeneration)
    model.save_pretrained(tmp_path)
    shared = {"shared.weight", *model.all_tied_weights_keys}
    state = {name: each for name, each in model.state_dict().items() if name not in shared or name == left}
    found = hub_of(state, config_of(tmp_path))
    assert set(found) == set(tensors_of(tmp_path))
    assert torch.equal(found["shared.weight"].materialize(), model.shared.weight)


@pytest.mark.parametrize(
    "name", ["Pop2PianoForConditionalGeneration", "MusicgenForConditionalGeneration", "InklingAudioModel"]
)
def test_odd_classes_are_merged_without_a_warning(here, tmp_path, name):
    """A class that does not tie what config.json does; two text models; a part that knows of no ties."""
    model = tiny_models.filled(getattr(transformers, name))
    model.save_pretrained(tmp_path)
    found = hub_of(model.state_dict(), config_of(tmp_path))
    assert set(found) == set(tensors_of(tmp_path))
    assert found.notes == ()


def test_a_rename_never_replaces_a_tensor():
    given = checkpoint_of({"a": torch.zeros(1), "b": torch.ones(1)})
    with pytest.raises(InconsistentCheckpoint, match="a and b would both be b"):
        given.renamed({"a": "b", "b": "b"})


# ---- what config.json does not say, or says otherwise ----------------------------------------------------


LOST = [None, "Qwen3MoeForCausalLM", [], ["AutoModelForCausalLM"], ["Foo", "Qwen3MoeForCausalLM"], ["Foo"]]


@pytest.mark.parametrize("architectures", LOST, ids=str)
def test_a_class_that_is_not_said_is_found_by_the_tensors(here, moe, architectures):
    model, saved = moe
    hub = to_hub(
        checkpoint_of(model.state_dict()),
        {**config_of(saved), "architectures": architectures},
        HubOptions(),
    )
    assert set(hub.checkpoint) == set(tensors_of(saved))
    assert hub.config_changes == {}
    first = hub.checkpoint.notes[0]
    assert first.level == "info"
    assert "the tensors are those of Qwen3MoeForCausalLM" in first.text


def test_the_prefix_of_fully_shard_goes(here, moe):
    model, saved = moe
    config = {**config_of(saved), "architectures": ["FSDPQwen3MoeForCausalLM"]}
    hub = to_hub(checkpoint_of(model.state_dict()), config, HubOptions())
    assert set(hub.checkpoint) == set(tensors_of(saved))
    assert hub.config_changes == {"architectures": ["Qwen3MoeForCausalLM"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [({"model_type": "llama"}, "model_type is llama"), ({"dtype": "foo"}, "dtype is 'foo'")],
)
def test_a_config_that_contradicts_itself_is_refused(here, moe, change, said):
    model, saved = moe
    config = {**config_of(saved), **change}
    with pytest.raises(InconsistentCheckpoint, match=said):
        hub_of(model.state_dict(), config)
    kept = hub_of(model.state_dict(), config, check=False)
    assert list(kept) == list(model.state_dict())
    assert [note.level for note in kept.notes] == ["warning"]


# ---- quantised models and types ---------------------------------------------------------------------------


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def quantised(moe) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The experts as a folder of the hub has them in FP8."""
    _, saved = moe
    state = tensors_of(saved)
    for name in [name for name in state if ".experts." in name]:
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = torch.ones(1, 1)
    return state, {**config_of(saved), "quantization_config": FP8}


def test_a_quantised_folder_is_written_as_it_is(here, quantised):
    state, config = quantised
    found = to_hub(checkpoint_of(state, "huggingface"), config, HubOptions()).checkpoint
    assert list(found) == list(state)
    assert [note.text.split(":")[0] for note in found.notes] == [
        "48 tensors are quantised (fp8) or go with one"
    ]
    without = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    with pytest.raises(IncompleteCheckpoint, match=r"missing: model\.norm\.weight"):
        hub_of(without, config)


def packed(kind: str, name: str) -> dict[str, torch.Tensor]:
    stem = name.removesuffix(".weight")
    if kind == "gptq":
        tails = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32}
        return {f"{stem}.{tail}": torch.zeros(2, 4, dtype=dtype) for tail, dtype in tails.items()}
    more = {f"{name}.{tail}": torch.zeros(4) for tail in ("absmax", "quant_map")}
    state = {f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}
    return {name: torch.zeros(64, 1, dtype=torch.uint8), **more, **state}


@pytest.mark.parametrize("kind", ["gptq", "bitsandbytes"])
def test_packed_tensors_are_not_missing_nor_too_many(here, moe, kind):
    _, saved = moe
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(saved).items():
        state |= packed(kind, name) if "_proj.weight" in name else {name: tensor}
    config = {**config_of(saved), "quantization_config": {"quant_method": kind}}
    assert list(hub_of(state, config)) == list(state)


def test_fused_blocks_of_mxfp4(here, tmp_path):
    model = tiny_models.filled(tiny_models.class_of("gpt_oss"))
    model.save_pretrained(tmp_path)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(tmp_path).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            state[f"{name}_blocks"] = torch.zeros(4, 8, 1, 16, dtype=torch.uint8)
            state[f"{name}_scales"] = torch.zeros(4, 8, 1, dtype=torch.uint8)
        else:
            state[name] = tensor
    config = {**config_of(tmp_path), "quantization_config": {"quant_method": "mxfp4"}}
    assert list(hub_of(state, config)) == list(state)


def test_quantised_tensors_under_run_time_names_are_refused(here, moe):
    model, saved = moe
    state = {
        name: tensor.to(torch.float8_e4m3fn) if ".experts." in name else tensor
        for name, tensor in model.state_dict().items()
    }
    with pytest.raises(UnsupportedCheckpoint, match="quantised"):
        hub_of(state, {**config_of(saved), "quantization_config": FP8})


def test_a_config_that_says_quantised_of_what_is_not(here, moe):
    model, saved = moe
    found = hub_of(model.state_dict(), {**config_of(saved), "quantization_config": FP8})
    assert set(found) == set(tensors_of(saved))
    assert [note.level for note in found.notes] == ["info", "warning"]


def test_a_quantised_folder_is_not_cast(source, quantised, tmp_path):
    state, config = quantised
    src = source(tmp_path / "src", state, {**config, "architectures": ["NobodysModel"], "model_type": None})
    with pytest.raises(PlanError, match="quantised"):
        lazymerge.merge(src, tmp_path / "out", dtype="bfloat16")


ROUTERS = {
    "deepseek_v4": "model.layers.1.ffn.gate.bias",
    "step3p7": "model.layers.1.moe.router_bias",
    "inkling2_loop_text": "model.llm.layers.1.mlp.gate.bias",
}


@pytest.mark.parametrize("key", ROUTERS)
@pytest.mark.parametrize("form", ["runtime", "hub"])
def test_a_router_bias_keeps_its_width_whatever_the_hub_calls_it(here, tmp_path, key, form):
    model = tiny_models.filled(tiny_models.class_of(key))
    model.save_pretrained(tmp_path)
    state = dict(model.state_dict()) if form == "runtime" else tensors_of(tmp_path)
    hub = to_hub(checkpoint_of(state), config_of(tmp_path), HubOptions())
    assert hub.architecture is not None
    cast = cast_to(hub.checkpoint, DTYPES["bfloat16"], hub.architecture.wide)
    assert cast.gathers[ROUTERS[key]].dtype.name == "float32"
    assert (
        cast.gathers[
            "model.embed_tokens.weight" if key != "inkling2_loop_text" else "model.llm.embed.weight"
        ].dtype.name
        == "bfloat16"
    )


# ---- expressions -----------------------------------------------------------------------------------------


BASES = {"a": torch.arange(24).reshape(2, 3, 4), "b": torch.arange(100, 124).reshape(2, 3, 4)}


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: a,
        lambda a, b: a[1].T[::2],
        lambda a, b: a.reshape(6, 4)[1:, 2:],
        lambda a, b: torch.cat([a, b], 1).transpose(0, 1),
        lambda a, b: torch.stack([a, b])[1, :, [0, 2]],
        lambda a, b: a[:, [-1, 0]],
        lambda a, b: torch.cat([a, a.new_zeros(2, 1, 4)], 1),
        lambda a, b: a[:, :, :1].expand(2, 3, 5),
    ],
)
def test_an_expression_travels(change):
    lazy = {}
    for name, tensor in BASES.items():
        shape = tuple(tensor.shape)
        region = Region(Named(name, 0), 0, dtype_of(tensor.dtype), shape, contiguous_strides(shape))
        lazy[name] = LazyTensor(of_region(region))
    plain = json.loads(json.dumps(to_plain(change(lazy["a"], lazy["b"]).lazy_gather)))
    made = from_plain(plain, {name: in_memory(tensor) for name, tensor in BASES.items()})
    assert torch.equal(read(made), change(BASES["a"], BASES["b"]))


@pytest.mark.parametrize(
    "plain",
    [
        None,
        7,
        {},
        [],
        ["pick"],
        ["pick", "a", [0, 1], []],
        ["pick", "a", [0, 1, 1], []],
        ["pick", "a", [0, 1, [2, 0, 1, 5]], []],
        ["pick", "a", [0, 1, [2, -1, 1, 2]], []],
        ["pick", "a", [0, 1, [2, 0, 0, 2]], []],
        ["pick", "a", [0, 1, [2, 0, 1, -2]], []],
        ["pick", "a", [0, 1, [2, 0.5, 1, 2]], []],
        ["pick", "a", [0, 1], [[2, 4]]],
        ["pick", "a", [0, 1], [[7, 0]]],
        ["view", "a", [5]],
        ["view", "a", [-24, -1]],
        ["view", "a", 24],
        ["cat", 3, ["a", "b"]],
        ["cat", 0, []],
        ["cat", 0, ["a", ["view", "b", [24]]]],
        ["cat", 0, [["zeros", [1, 3, 4]]]],
        ["zeros", [1]],
    ],
)
def test_what_is_no_expression_of_these_tensors_is_refused(plain):
    with pytest.raises((ValueError, TypeError, KeyError, IndexError)):
        read(from_plain(plain, {name: in_memory(tensor) for name, tensor in BASES.items()}))
