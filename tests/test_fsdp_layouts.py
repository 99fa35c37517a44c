"""Every layout in which FSDP leaves its tensors, merged and compared with what was sharded."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Partial, Replicate, Shard

import lazymerge
from lazymerge.errors import InconsistentCheckpoint, LazymergeError, PlanError, UnsupportedCheckpoint
from lazymerge.output import Destination
from tests.checks import assert_same_model, assert_same_tensors, refused, tied_away
from tests.makers.dtensors import Local, PerRank, Placed, dtensors
from tests.makers.fixtures import FULL_RECIPES, RECIPES
from tests.makers.layout import Made, copy_of, edit_rank
from tests.makers.models import MODELS
from tests.makers.odd_tensors import TWO_BY_TWO, odd_tensors
from tests.makers.old_torch import old_checkpoint

FOUR = (("a", 4),)
BOTH_ROWS = (Shard(0), Shard(0))
DRAW = torch.Generator().manual_seed(3)
UNCHECKED = "names are kept as they are, and not checked: "
NO_CLASS = f"{UNCHECKED}config.json names no class (architectures)"


def real(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW).to(dtype)


# ---- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RECIPES, *FULL_RECIPES])
def test_a_sharded_model_is_what_went_in(checkpoint, tmp_path, name):
    made = checkpoint(name)
    options = {"lora_alpha": 16} if name == "fsdp2-lora" else {}
    report = lazymerge.merge(made.root, tmp_path / "out", component=made.leaf.name, **options)
    assert_same_model(tmp_path / "out", made.hub_truth, tied=tied_away(made))
    assert [note.text for note in report.notes] == notes_on(name)
    assert list(report.left_out) == tied_away(made)
    if name == "fsdp2-lora":
        found = load_file(tmp_path / "out/lora_adapter/adapter_model.safetensors")
        lora = {n.replace(".default.", "."): tensor for n, tensor in made.truth.items() if "lora_" in n}
        assert_same_tensors(found, lora)


def notes_on(name: str) -> list[str]:
    """What the report of that recipe has to say."""
    if "zoo" in name or name == "full-legacy":
        return [f"{UNCHECKED}transformers has no class Zoo"]
    if name == "fsdp2-moe":  # two layers of six experts, with three projections each
        made = "model.layers.0.mlp.experts.down_proj as model.layers.0.mlp.experts.0.down_proj.weight"
        return [
            "4 tensors of the running model are written as the 36 that the hub has of them:"
            f" {made} and others"
        ]
    if name == "fsdp2-lora":
        return [
            "base_model_name_or_path of the adapter is null:"
            " neither config.json nor a --lora-config names it",
            "the adapter 'default' is written with use_rslora false, which its files do not record;"
            " --lora-config takes the settings of the training",
        ]
    return []


@pytest.mark.parametrize(
    ("name", "model_name", "loader"),
    [
        ("fsdp2-llama", "llama", "AutoModelForCausalLM"),
        ("fsdp2-llama-tied", "llama-tied", "AutoModelForCausalLM"),
        ("fsdp2-qwen2", "qwen2", "AutoModelForCausalLM"),
        ("fsdp2-gpt2", "gpt2", "AutoModelForCausalLM"),
        ("fsdp2-qwen3", "qwen3", "AutoModelForCausalLM"),
        ("fsdp2-tp", "llama", "AutoModelForCausalLM"),
        ("fsdp1-hsdp", "qwen2-37", "AutoModelForCausalLM"),
        ("full-model-pt", "gpt2", "AutoModelForCausalLM"),
        ("fsdp2-value", "qwen2-value", "AutoModelForTokenClassification"),
    ],
)
def test_transformers_computes_the_same_with_the_result(checkpoint, tmp_path, name, model_name, loader):
    import transformers

    made = checkpoint(name)
    lazymerge.merge(made.root, tmp_path / "out", component=made.leaf.name)
    model, info = getattr(transformers, loader).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {kind: names for kind, names in info.items() if names} == {}
    before = MODELS[model_name]().eval()
    before.load_state_dict(made.truth)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        after, logits = model.eval()(tokens).logits, before(tokens).logits
    assert torch.isfinite(logits).all()
    assert bool((after == logits).all())  # a comparison of bools keeps pytest from printing models


# ---- names of a full state dict ----------------------------------------------------------------------------

WRAPPED_NAMES: dict[str, Callable[[str], str]] = {
    "module": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "module of compiled": lambda name: f"module._orig_mod.{name}",
    "compiled of module": lambda name: f"_orig_mod.module.{name}",
    "twice": lambda name: f"module.module.{name}",
    "fsdp": lambda name: "_fsdp_wrapped_module." + name.replace("0.", "0._fsdp_wrapped_module."),
    "checkpointed": lambda name: name.replace("0.", "0._checkpoint_wrapped_module."),
    "all": lambda name: (
        "module._fsdp_wrapped_module._orig_mod."
        + name.replace("0.", "0._fsdp_wrapped_module._checkpoint_wrapped_module.")
    ),
}
NAMES = {
    "model.embed.weight": real(4, 3),
    "model.layers.0.q.weight": real(3, 3),
    "model.layers.10.q.weight": real(3, 3),
    "score": real(2),
}


@pytest.mark.parametrize("wrapper", list(WRAPPED_NAMES))
@pytest.mark.parametrize("filename", ["pytorch_model.bin", "model.pt"])
def test_prefixes_of_wrappers_are_stripped(tmp_path, wrapper, filename):
    state = {WRAPPED_NAMES[wrapper](name): tensor for name, tensor in NAMES.items()}
    torch.save(state, tmp_path / filename)
    lazymerge.merge(tmp_path / filename, tmp_path / "out")
    assert_same_model(tmp_path / "out", NAMES)


def test_a_part_that_is_called_module_keeps_its_name(tmp_path):
    truth = {"module.weight": real(2), "head.module.weight": real(2), "head.weight": real(2)}
    torch.save(truth, tmp_path / "model.pt")
    lazymerge.merge(tmp_path / "model.pt", tmp_path / "out")
    assert_same_model(tmp_path / "out", truth)


@pytest.mark.parametrize("key", ["model", "state_dict"])
@pytest.mark.parametrize("zip_format", [True, False])
def test_a_state_dict_inside_of_a_training_state(tmp_path, key, zip_format):
    state = {"epoch": 3, key: NAMES, "optimizer": {"lr": 0.1}}
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=zip_format)
    report = lazymerge.merge(tmp_path / "model.pt", tmp_path / "out")
    assert_same_model(tmp_path / "out", NAMES)
    assert set(report.left_out) == {"epoch", "optimizer"}


def test_names_in_rank_files_are_stripped_and_their_copies_compared(tmp_path):
    """A warning about replicas also where the name that differs had a prefix."""
    differs = PerRank(tuple(real(2) for _ in range(4)))
    entries = {"module.x": (real(6, 2), (Shard(0),)), "module.differs": differs}
    made = dtensors(tmp_path / "run", FOUR, entries)
    report = lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", {n.removeprefix("module."): t for n, t in made.truth.items()})
    assert [note.tensor for note in report.warnings] == ["differs"]


# ---- releases of torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.1", "2.4", "2.7", "2.9", "2.12"])
@pytest.mark.parametrize(
    "name", ["fsdp2-tp-rows", "fsdp2-tp-uneven", "fsdp2-hsdp-tp", "fsdp2-hsdp", "fsdp1-uneven", "fsdp1-tp"]
)
def test_files_of_older_torch(checkpoint, tmp_path, name, version):
    made = old_checkpoint(checkpoint(name), tmp_path / "old", version)
    lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth, tied=tied_away(made))


@pytest.mark.parametrize("version", ["2.1", "2.5", "2.10"])
def test_meshes_of_older_torch(odd_meshes_checkpoint, tmp_path, version):
    made = old_checkpoint(odd_meshes_checkpoint, tmp_path / "old", version)
    lazymerge.merge(made.root, tmp_path / "out", fsdp_version=1)  # cut left to right, not by FSDP2 over TP
    assert_same_model(tmp_path / "out", made.truth)


@pytest.mark.parametrize("options", [{"zip_format": False}, {"python": (3, 10)}, {"cuda": 3}], ids=str)
def test_files_of_older_torch_in_other_surroundings(checkpoint, tmp_path, options):
    made = old_checkpoint(checkpoint("fsdp2-hsdp"), tmp_path / "old", "2.4", **options)
    lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)


def torch_2_4(root: Path, rows: int, *, over_tp: bool, fsdp_version: int) -> Made:
    """Rows that two mesh dimensions cut, written by a torch that did not say which of them went first."""
    order = {0: (1, 0)} if over_tp else {}
    entries = {"x": Placed(real(rows, 3), BOTH_ROWS, order=order), "norm": real(3)}
    made = dtensors(root / "new", (("dp", 2), ("tp", 2)), entries, fsdp_version=fsdp_version)
    return old_checkpoint(made, root / "old", "2.4")


@pytest.mark.parametrize(("fsdp_version", "over_tp"), [(2, True), (1, False)])
@pytest.mark.parametrize("rows", [6, 7, 8])
@pytest.mark.parametrize("said_by", ["config", "option"])
def test_the_order_of_cuts_by_the_version_of_fsdp(tmp_path, fsdp_version, over_tp, rows, said_by):
    in_config, option = (fsdp_version, None) if said_by == "config" else (0, fsdp_version)
    made = torch_2_4(tmp_path, rows, over_tp=over_tp, fsdp_version=in_config)
    lazymerge.merge(made.root, tmp_path / "out", fsdp_version=option)
    assert_same_model(tmp_path / "out", made.truth)


@pytest.mark.parametrize("way", ["killed", "increment"])
def test_a_version_of_fsdp_that_was_mended_in_between(tmp_path, monkeypatch, way):
    """Of two merges that make one result, the first has read other rows: nothing of it may stay."""
    order = {0: (1, 0)}
    entries = {f"x{i}": Placed(real(8, 3), BOTH_ROWS, order=order) for i in range(3)}
    made = dtensors(tmp_path / "new", (("dp", 2), ("tp", 2)), entries, fsdp_version=1)
    made, out = old_checkpoint(made, tmp_path / "old", "2.4"), tmp_path / "out"
    if way == "increment":
        lazymerge.merge(made.root, out, include="x0")
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Destination, "publish", lambda *args, **options: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                lazymerge.merge(made.root, out, max_shard_size=100)
    config = made.leaf / "fsdp_config.json"
    config.write_text(config.read_text().replace('"FSDP_version": 1', '"FSDP_version": 2'))
    with pytest.raises(LazymergeError, match=r"fsdp_config\.json: has changed"):
        lazymerge.merge(made.root, out, max_shard_size=100)
    shutil.rmtree(out)
    lazymerge.merge(made.root, out)
    assert_same_model(out, made.truth)


@pytest.mark.parametrize("over_tp", [True, False])
def test_the_order_of_cuts_by_the_shapes(tmp_path, over_tp):
    """Six rows: the ranks hold 2, 2, 1, 1 of them or 2, 1, 2, 1."""
    made = torch_2_4(tmp_path, 6, over_tp=over_tp, fsdp_version=0)
    lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)


@pytest.mark.parametrize("over_tp", [True, False])
@pytest.mark.parametrize("rows", [7, 8])
def test_the_order_of_cuts_is_asked_for(tmp_path, over_tp, rows):
    made = torch_2_4(tmp_path, rows, over_tp=over_tp, fsdp_version=0)
    with refused(UnsupportedCheckpoint, "x: ", "--fsdp-version", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out")


@pytest.mark.parametrize("over_tp", [True, False])
def test_one_tensor_settles_the_order_for_all(tmp_path, over_tp):
    """Eight rows fit both orders, six only one: they come from one save."""
    order = {0: (1, 0)} if over_tp else {}
    entries = {f"x{rows}": Placed(real(rows, 3), BOTH_ROWS, order=order) for rows in (8, 6)}
    made = dtensors(tmp_path / "new", (("dp", 2), ("tp", 2)), entries, fsdp_version=0)
    made = old_checkpoint(made, tmp_path / "old", "2.4")
    lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)


def test_tensors_that_settle_it_differently_are_refused(tmp_path):
    entries = {
        "x": Placed(real(6, 3), BOTH_ROWS, order={0: (1, 0)}),
        "y": Placed(real(6, 3), BOTH_ROWS),
    }
    made = dtensors(tmp_path / "new", (("dp", 2), ("tp", 2)), entries, fsdp_version=0)
    made = old_checkpoint(made, tmp_path / "old", "2.4")
    with refused(InconsistentCheckpoint, "y was cut", "x in that of FSDP2", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out")


def test_a_version_of_fsdp_that_the_shapes_contradict(tmp_path):
    made = torch_2_4(tmp_path, 6, over_tp=True, fsdp_version=0)
    with refused(InconsistentCheckpoint, "x: rank 1", "(2, 3)", "(1, 3)", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out", fsdp_version=1)


# ---- single tensors ----------------------------------------------------------------------------------------


def test_odd_tensors(odd_tensors_checkpoint, tmp_path):
    """Placements, orders, sub-meshes, padded and strided storages, element types: see `odd_tensors`."""
    made = odd_tensors_checkpoint
    report = lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)
    assert [note.text for note in report.notes if note.level == "info"] == [NO_CLASS]
    assert [note.tensor for note in report.warnings] == ["differs"]


def test_odd_tensors_in_the_legacy_container(tmp_path):
    made = dtensors(tmp_path / "run", TWO_BY_TWO, odd_tensors(), zip_format=False)
    lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)


def test_several_meshes_in_a_file(odd_meshes_checkpoint, tmp_path):
    """Some leave ranks out."""
    made = odd_meshes_checkpoint
    report = lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)
    assert [note.text for note in report.notes] == [NO_CLASS]


@pytest.mark.parametrize("rows", range(10))
def test_rows_that_ranks_do_not_divide(tmp_path, rows):
    """Also 0 rows and fewer than there are ranks: over 4, torch cuts 5 into 2, 2, 1 and 0."""
    entries = {"rows": (real(rows, 3), (Shard(0),)), "columns": (real(3, rows), (Shard(1),))}
    made = dtensors(tmp_path / "run", FOUR, entries)
    lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)


def test_complex128_has_no_place_in_safetensors_but_in_a_bin(tmp_path):
    made = dtensors(
        tmp_path / "run", FOUR, {"wave": (torch.randn(6, 2, dtype=torch.complex128), (Shard(0),))}
    )
    with refused(PlanError, "wave", "complex128", "bin", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out")
    lazymerge.merge(made.root, tmp_path / "bin", output_format="bin")
    assert_same_tensors(torch.load(tmp_path / "bin/pytorch_model.bin", weights_only=True), made.truth)


# ---- partial values ----------------------------------------------------------------------------------------


def partial(root: Path, parts: list[torch.Tensor], operation: str = "sum") -> Made:
    entry = Local(tuple(parts), (Partial(operation),), parts[0].shape)
    return dtensors(root, (("a", len(parts)),), {"x": entry})


@pytest.mark.parametrize(("ranks", "operation"), [(4, "sum"), (12, "sum"), (4, "avg")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_partial_values_are_added_in_the_order_of_ranks(tmp_path, ranks, operation, dtype):
    """In fp32 for half types; twelve ranks are not in the order of their names as text."""
    parts = [(real(40, 30) * 10 ** (rank % 5)).to(dtype) for rank in range(ranks)]
    expected, other = parts[0].float(), parts[-1].float()
    for part, previous in zip(parts[1:], reversed(parts[:-1]), strict=True):
        expected, other = expected + part.float(), other + previous.float()
    divisor = ranks if operation == "avg" else 1
    rounded = sum(parts[1:], parts[0]) / divisor
    expected, other = (expected / divisor).to(dtype), (other / divisor).to(dtype)
    assert not torch.equal(expected, other) or dtype != torch.float32, "the order makes no difference"
    assert not torch.equal(expected, rounded) or dtype == torch.float32, "the width makes no difference"
    lazymerge.merge(partial(tmp_path / "run", parts, operation).root, tmp_path / "out")
    assert_same_model(tmp_path / "out", {"x": expected})


def test_partial_integers(tmp_path):
    parts = [torch.arange(6) * 10**rank for rank in range(4)]
    lazymerge.merge(partial(tmp_path / "run", parts).root, tmp_path / "out")
    assert_same_model(tmp_path / "out", {"x": torch.arange(6) * 1111})


@pytest.mark.parametrize("other", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("partial_first", [True, False])
def test_partial_values_of_shards_and_of_replicas(tmp_path, other, partial_first):
    placements = (Partial(), other) if partial_first else (other, Partial())
    made = dtensors(tmp_path / "run", TWO_BY_TWO, {"x": Placed(torch.arange(35).reshape(5, 7), placements)})
    lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)


@pytest.mark.parametrize("operation", ["max", "min", "product"])
def test_other_reductions_are_refused(tmp_path, operation):
    made = partial(tmp_path / "run", [real(3) for _ in range(2)], operation)
    with refused(UnsupportedCheckpoint, "x: ", operation, "full_tensor", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out")


# ---- plain entries -----------------------------------------------------------------------------------------


def test_plain_entries_beside_shards_that_happen_to_be_equal(tmp_path):
    """What is sharded is said by each entry: neither by the first key nor by a look at the values."""
    entries = {
        "plain": torch.ones(2, 3),
        "sharded": (torch.ones(8, 3), (Shard(0),)),
        "zeros": (torch.zeros(4), (Shard(0),)),
        "step": torch.tensor(7),
        "replicated": (torch.ones(2, 3), (Replicate(),)),
    }
    made = dtensors(tmp_path / "run", FOUR, entries)
    report = lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)
    assert [note.text for note in report.notes] == [NO_CLASS]


@pytest.mark.parametrize("differing", [1, 2, 3])
def test_a_plain_entry_that_differs(tmp_path, differing):
    values = tuple(torch.full((3,), float(rank == differing)) for rank in range(4))
    made = dtensors(tmp_path / "run", FOUR, {"same": real(3), "rotary": PerRank(values)})
    report = lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)
    (note,) = report.warnings
    assert note.tensor == "rotary"
    assert made.rank_file(differing).name in note.text
    with refused(InconsistentCheckpoint, "rotary", made.rank_file(differing).name, dst=tmp_path / "strict"):
        lazymerge.merge(made.root, tmp_path / "strict", strict=True)


@pytest.mark.parametrize("equal", [False, True])
def test_a_rank_of_another_save(tmp_path, equal):
    """One that agrees with rank 0 in nothing is refused; where a copy is equal, it only drifted."""
    entries = {
        f"w{i}": PerRank(tuple(torch.full((3,), float(rank == 2)) for rank in range(4))) for i in range(3)
    }
    same = {"same": real(3)} if equal else {}
    made = dtensors(tmp_path / "run", FOUR, {**entries, **same})
    if equal:
        report = lazymerge.merge(made.root, tmp_path / "out")
        assert [note.tensor for note in report.warnings] == list(entries)
    else:
        other = made.rank_file(2).name
        with refused(InconsistentCheckpoint, other, "all 3 tensors", "another save", dst=tmp_path / "out"):
            lazymerge.merge(made.root, tmp_path / "out")
        lazymerge.merge(made.root, tmp_path / "out", check_copies=False)
    assert_same_model(tmp_path / "out", made.truth)


def test_copies_need_not_be_compared(tmp_path):
    made = dtensors(tmp_path / "run", FOUR, {"rotary": PerRank(tuple(real(3) for _ in range(4)))})
    report = lazymerge.merge(made.root, tmp_path / "out", check_copies=False)
    assert_same_model(tmp_path / "out", made.truth)
    assert [note.text for note in report.notes] == [NO_CLASS]


def test_a_plain_entry_of_two_shapes(tmp_path):
    made = dtensors(tmp_path / "run", FOUR, {"x": PerRank((real(3), real(3), real(2), real(3)))})
    with refused(InconsistentCheckpoint, "x: ", "(3,)", "rank 2", "(2,)", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out")


def test_an_entry_that_is_sharded_on_some_ranks_only(checkpoint, tmp_path):
    made = copy_of(checkpoint("fsdp2-hsdp"), tmp_path / "run")
    name = "model.norm.weight"
    edit_rank(made, 3, lambda state: state.update({name: made.truth[name]}))
    with refused(InconsistentCheckpoint, name, "plain", "distributed", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_checkpoint(copied, checkpoint):
    """It shares files and gathers, and is a mapping of its own."""
    made = checkpoint("fsdp2-llama")
    opened = lazymerge.open(made.root)
    other = copied(opened)
    assert list(other) == list(opened)
    assert all(other.gathers[name] is opened.gathers[name] for name in opened)
    other.gathers.clear()
    assert len(opened) == len(made.truth)


def test_a_checkpoint_cannot_be_pickled(checkpoint):
    with pytest.raises(TypeError, match="Open it again, or send a plan as JSON"):
        pickle.dumps(lazymerge.open(checkpoint("fsdp2-llama").root))
