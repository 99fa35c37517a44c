"""LoRA through a whole merge: extracted, alone, folded; adapters of PEFT folded into any checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import lazymerge
from lazymerge.cli import cli
from lazymerge.errors import BudgetError, InconsistentCheckpoint, NotACheckpoint, PlanError
from tests.checks import assert_same_model, assert_same_tensors, refused
from tests.makers.peft_fsdp import PROMPT, MadeLora, peft_fsdp

PLAIN = {
    "r": 8,
    "lora_alpha": 32,
    "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}
META = {"r": 8, "lora_alpha": 32, "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeLora:
    return peft_fsdp(tmp_path_factory.mktemp("lora"), "llama", {"default": PLAIN}, meta=META)


@pytest.fixture(scope="module")
def folded(made: MadeLora) -> dict[str, torch.Tensor]:
    """float32(W) + scale * (B @ A), by torch."""
    adapter = load_file(made.reference() / "adapter_model.safetensors")
    truth = dict(made.base)
    for name, a in adapter.items():
        if name.endswith("lora_A.weight"):
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            truth[weight] = truth[weight] + 4.0 * (adapter[name.replace("lora_A", "lora_B")] @ a)
    return truth


def logits(folder: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(PROMPT)).logits


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_extract_is_the_default(made: MadeLora, out: Path):
    report = lazymerge.merge(made.root, out, verify=True)
    assert_same_model(out, made.base)
    ours, reference = out / "lora_adapter/adapter_model.safetensors", made.reference()
    assert ours.read_bytes() == (reference / ours.name).read_bytes()
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(out)
    model = peft.PeftModel.from_pretrained(base, out / "lora_adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=torch.tensor(PROMPT)).logits, made.logits["default"])
    assert "lora_adapter/adapter_model.safetensors" in report.files
    assert lazymerge.verify(out).same
    with open(ours, "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x01\x02\x03")
    assert not lazymerge.verify(out).same


def test_only(made: MadeLora, out: Path):
    report = lazymerge.merge(made.root, out, lora="only", verify=True)
    assert {path.name for path in out.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "lazymerge-manifest.json",
    }
    assert "PeftModel.from_pretrained" in report.how_to_load
    assert {name for name, why in report.left_out.items() if why == "--lora only"} == set(made.base)
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (made.reference() / name).read_bytes()


def test_fold(made: MadeLora, out: Path, folded: dict[str, torch.Tensor]):
    lazymerge.merge(made.root, out, lora="fold", verify=True)
    assert not (out / "lora_adapter").exists()
    found = load_file(out / "model.safetensors")
    assert set(found) == set(folded)
    for name, tensor in folded.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits(out), made.logits["default"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("again", ["folder", "bin", "ranks"])
def test_an_adapter_given_as_a_folder(made: MadeLora, tmp_path: Path, out: Path, again: str, folded, source):
    """Into a Hugging Face model, a full state dict, and rank files; the same bytes as folding at once."""
    lazymerge.merge(made.root, tmp_path / "at once", lora="fold")
    lazymerge.merge(made.root, tmp_path / "parts")
    base = {"folder": tmp_path / "parts", "bin": tmp_path / "full"}.get(again)
    if again == "bin":
        source(base, made.base, json.loads((made.sidecars / "config.json").read_text()))
    adapter = str(tmp_path / "parts/lora_adapter")
    if again == "ranks":
        base = made.root
        with refused(PlanError, "--adapter: no base is written", dst=out):
            lazymerge.merge(base, out, adapter=adapter, lora="only")
        return
    lazymerge.merge(base, out, adapter=adapter)
    assert_same_model(out, load_file(tmp_path / "at once/model.safetensors"))


def test_weights(made: MadeLora, tmp_path: Path, out: Path):
    """Twice half is once; the folder's name may have an equals sign."""
    lazymerge.merge(made.root, tmp_path / "parts")
    odd = tmp_path / "a=b"
    shutil.copytree(tmp_path / "parts/lora_adapter", odd)
    lazymerge.merge(tmp_path / "parts", out, adapter=[f"{odd}=0.5", f"{odd}=0.5"])
    lazymerge.merge(tmp_path / "parts", tmp_path / "once", adapter=str(odd))
    one, other = load_file(out / "model.safetensors"), load_file(tmp_path / "once/model.safetensors")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-7)


def test_increments_with_the_adapter_first(made: MadeLora, out: Path):
    """--include 'lora_*' is the adapter; the same command without it adds the base."""
    lazymerge.merge(made.root, out, include="lora_*")
    before = (out / "lora_adapter/adapter_model.safetensors").stat()
    assert not list(out.glob("*.safetensors"))
    report = lazymerge.merge(made.root, out, verify=True)
    assert_same_model(out, made.base)
    assert report.tensors == len(made.base)
    after = (out / "lora_adapter/adapter_model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_increments_with_the_base_first(made: MadeLora, out: Path):
    lazymerge.merge(made.root, out, exclude="lora_*")
    assert_same_model(out, made.base)
    assert not (out / "lora_adapter").exists()
    lazymerge.merge(made.root, out, verify=True)
    name = "adapter_model.safetensors"
    assert (out / "lora_adapter" / name).read_bytes() == (made.reference() / name).read_bytes()
    assert json.loads((out / "lora_adapter/adapter_config.json").read_text())["lora_alpha"] == 32


def test_verifying_compares_base_and_adapter(made: MadeLora, tmp_path: Path, out: Path):
    """Without an alpha too, which only the adapter's config needs; what is not compared is said."""
    root = tmp_path / "run"
    shutil.copytree(made.root, root)
    for meta in root.rglob("lora_train_meta.json"):
        meta.unlink()
    lazymerge.merge(made.root, out)
    report = lazymerge.verify(root, out)
    assert report.same
    assert report.comparison.tensors == len(made.base) + 12
    report = lazymerge.verify(root, out, base_only=True)
    assert report.same
    assert report.comparison.tensors == len(made.base)
    shutil.rmtree(out / "lora_adapter")
    assert not lazymerge.verify(root, out).same


@pytest.mark.parametrize("mode", ["extract", "only", "fold"])
def test_alpha_is_not_guessed(made: MadeLora, tmp_path: Path, out: Path, mode: str):
    root = tmp_path / "run"
    shutil.copytree(made.root, root)
    for meta in root.rglob("lora_train_meta.json"):
        meta.unlink()
    with refused(PlanError, "alpha", dst=out):
        lazymerge.merge(root, out, lora=mode)
    lazymerge.merge(root, out, lora="extract", lora_alpha=32)
    config = json.loads((out / "lora_adapter/adapter_config.json").read_text())
    assert (config["lora_alpha"], config["r"]) == (32, 8)


def test_an_adapter_that_changes_nothing_has_its_exit_code(made: MadeLora, tmp_path: Path):
    lazymerge.merge(made.root, tmp_path / "parts")
    adapter = tmp_path / "parts/lora_adapter/adapter_model.safetensors"
    zero = {name: torch.zeros_like(t) if "lora_A" in name else t for name, t in load_file(adapter).items()}
    save_file(zero, adapter)
    flags = ["--adapter", str(adapter.parent)]
    done = CliRunner().invoke(cli, ["merge", str(tmp_path / "parts"), str(tmp_path / "out"), *flags])
    assert done.exit_code == 4, done.stderr
    assert "warning: " in done.stdout
    assert_same_model(tmp_path / "out", made.base)


def test_an_adapter_of_another_model(made: MadeLora, tmp_path: Path, out: Path):
    lazymerge.merge(made.root, tmp_path / "parts")
    folder = tmp_path / "parts/lora_adapter"
    tensors = load_file(folder / "adapter_model.safetensors")
    moved = {name.replace("layers.0.mlp", "layers.7.mlp"): tensor for name, tensor in tensors.items()}
    assert set(moved) != set(tensors)
    save_file(moved, folder / "adapter_model.safetensors")
    with refused(InconsistentCheckpoint, "layers.7", dst=out):
        lazymerge.merge(tmp_path / "parts", out, adapter=str(folder))


@pytest.mark.parametrize("options", [{"lora": "fold"}, {"lora_alpha": 3}, {"lora": "merge"}])
def test_options_for_lora_where_there_is_none(checkpoint: Any, out: Path, options: dict[str, Any]):
    with refused(PlanError, "--lora", dst=out):
        lazymerge.merge(checkpoint("fsdp2-llama").root, out, **options)


def test_names_of_adapters_lead_nowhere_else(made: MadeLora, source, tmp_path: Path, out: Path):
    """A stranger's checkpoint whose adapter is called ../../x."""
    state = {
        "base_model.model.a.base_layer.weight": torch.ones(4, 4),
        "base_model.model.a.lora_A./tmp/x.weight": torch.ones(2, 4),
        "base_model.model.a.lora_B./tmp/x.weight": torch.ones(4, 2),
    }
    src = source(tmp_path / "src", state, {})
    with pytest.raises(lazymerge.LazymergeError, match="/tmp/x"):
        lazymerge.merge(src, out, lora_alpha=1)
    assert not Path("/tmp/x").is_dir() or not (Path("/tmp/x") / "adapter_config.json").exists()


def test_folding_at_different_budgets_gives_the_same_bytes(made: MadeLora, tmp_path: Path):
    found = []
    for number, (ram, workers) in enumerate([(None, 1), ("700MB", 2), ("2GB", 4)]):
        lazymerge.merge(made.root, tmp_path / str(number), lora="fold", max_ram=ram, max_workers=workers)
        found.append(load_file(tmp_path / str(number) / "model.safetensors"))
    for each in found[1:]:
        assert_same_tensors(each, found[0])


def test_folding_one_of_several_is_asked_for(made: MadeLora, source, tmp_path: Path, out: Path):
    state = {name: tensor.clone() for name, tensor in made.trained.items()}
    both = state | {name.replace(".default.", ".other."): t for name, t in state.items() if ".lora_" in name}
    config = json.loads((made.sidecars / "config.json").read_text())
    src = source(tmp_path / "src", both, config)
    with refused(PlanError, "holds 2 adapters (default, other)", dst=out):
        lazymerge.merge(src, out, lora="fold", lora_alpha=32)


def test_what_was_recorded_goes_from_stage_to_stage(made: MadeLora, tmp_path: Path, out: Path):
    """The trainer's file on alpha, which lies beside the rank files."""
    lazymerge.merge(made.root, tmp_path / "merged", stage="merge")
    lazymerge.merge(tmp_path / "merged", out, stage="convert", lora="fold")
    lazymerge.merge(made.root, tmp_path / "at once", lora="fold")
    assert_same_model(out, load_file(tmp_path / "at once/model.safetensors"))


def test_a_fold_is_called_so(made: MadeLora, out: Path):
    """Nothing that is said of an adapter's files is said where none are written."""
    report = lazymerge.merge(made.root, out, lora="fold")
    texts = [note.text for note in report.notes if "adapter" in note.text]
    assert texts == [
        "the adapter 'default' is folded in with use_rslora false, which its files do not record;"
        " --lora-config takes the settings of the training"
    ]


def test_a_budget_for_verifying_is_refused_before_the_merge(made: MadeLora, out: Path, monkeypatch):
    """Where merging would fit, and comparing would not."""
    from lazymerge import compare

    monkeypatch.setattr(compare, "_TEMPORARY", 10**12)
    with refused(BudgetError, "comparing", dst=out):
        lazymerge.merge(made.root, out, verify=True)
    lazymerge.merge(made.root, out)


@pytest.mark.parametrize("pattern", ["*lora_*", "lora_adapter/*"])
def test_alpha_of_an_adapter_that_is_left_out_is_not_asked_for(
    made: MadeLora, tmp_path: Path, out: Path, pattern: str
):
    root = tmp_path / "copy"
    shutil.copytree(made.root, root)
    for meta in root.rglob("lora_train_meta.json"):
        meta.unlink()
    lazymerge.merge(root, out, exclude=[pattern])
    assert_same_model(out, made.base)
    assert not (out / "lora_adapter").exists()
    with refused(PlanError, "no recorded alpha", dst=out / "b"):
        lazymerge.merge(root, out / "b", exclude=["*lora_B*"])


@pytest.mark.parametrize("lora", ["extract", "only", "fold"])
def test_lora_of_which_ranks_differ(tmp_path: Path, lora: str):
    src = of_two_ranks(tmp_path / "src", ["q_proj"])
    report = lazymerge.merge(src, tmp_path / "out", lora=lora, fsdp_version=2)
    assert [note.text for note in report.notes if "q_proj.lora_B.weight differs between" in note.text]
    with refused(InconsistentCheckpoint, "lora_B.weight differs between", dst=tmp_path / "strict"):
        lazymerge.merge(src, tmp_path / "strict", lora=lora, strict=True, fsdp_version=2)


@pytest.mark.parametrize("lora", ["only", "fold"])
def test_lora_of_two_runs(tmp_path: Path, out: Path, lora: str):
    """All three tensors that both ranks have are others."""
    src = of_two_ranks(tmp_path / "src", ["q_proj", "k_proj", "v_proj"])
    with refused(InconsistentCheckpoint, "it is of another save", dst=out):
        lazymerge.merge(src, out, lora=lora, fsdp_version=2)


def of_two_ranks(folder: Path, modules: list[str]) -> Path:
    """Rank files with LoRA on these modules; the second has lora_B alone, with other values."""
    state: dict[str, torch.Tensor] = {}
    other: dict[str, torch.Tensor] = {}
    for module in modules:
        name = f"base_model.model.model.layers.0.self_attn.{module}"
        state[f"{name}.base_layer.weight"] = torch.randn(6, 5)
        state[f"{name}.lora_A.default.weight"] = torch.randn(2, 5)
        state[f"{name}.lora_B.default.weight"] = torch.randn(6, 2)
        other[f"{name}.lora_B.default.weight"] = state[f"{name}.lora_B.default.weight"] + 1
    folder.mkdir()
    torch.save(state, folder / "model_world_size_2_rank_0.pt")
    torch.save(other, folder / "model_world_size_2_rank_1.pt")
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 16}))
    return folder


@pytest.mark.parametrize("weight", ["0,5", "abc", "1_0", ""])
def test_what_is_no_weight(made: MadeLora, tmp_path: Path, out: Path, weight: str):
    lazymerge.merge(made.root, tmp_path / "parts")
    adapter = tmp_path / "parts/lora_adapter"
    with refused(PlanError, f"{weight!r} is no weight", dst=out):
        lazymerge.merge(tmp_path / "parts", out, adapter=f"{adapter}={weight}")
    with refused(NotACheckpoint, f"nothing={weight}", dst=out):
        lazymerge.merge(tmp_path / "parts", out, adapter=f"{tmp_path}/nothing={weight}")


def test_lora_beside_a_base_with_another_adapter_in_it(made: MadeLora, tmp_path: Path, out: Path):
    lazymerge.merge(made.root, tmp_path / "parts")
    adapter = str(tmp_path / "parts/lora_adapter")

    def told(**options: Any) -> list[str]:
        report = lazymerge.merge(made.root, out, adapter=adapter, overwrite=True, **options)
        return [n.text for n in report.notes if n.level == "warning" and "was trained on a base" in n.text]

    (text,) = told()
    assert text.startswith(f"lora_adapter/ was trained on a base without {adapter}")
    assert told(lora="fold") == told(exclude=["lora_adapter/*"]) == []
