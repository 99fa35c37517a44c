"""Every model family through Megatron's form and back: a tiny random model of transformers, laid out by the
independent inverse of tests/makers, written as Megatron writes, merged. The bytes are those that
`save_pretrained` had written, and transformers computes the same logits from them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import lazymerge
from tests.checks import assert_same_model
from tests.makers.megatron_dist import write_torch_dist
from tests.makers.megatron_files import megatron_run, verl_run, write_torch
from tests.makers.megatron_inverse import LOCAL, LOCAL_DIST, to_megatron
from tests.makers.megatron_models import Original, ask_here, load, logits, original
from tests.makers.megatron_shards import Parallel

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


@dataclass(frozen=True)
class Case:
    """A family in one layout: `inverse` goes to `to_megatron`, `options` to the format's writer."""

    family: str
    write: Callable[..., None]
    parallel: Parallel
    inverse: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    folders: str = "megatron"  # or verl, verl2
    merge: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = "".join(
            f"-{name}{size}"
            for name, size in vars(self.parallel).items()
            if size not in {None, 1} or (name == "etp" and size)
        )
        form = self.write.__name__.removeprefix("write_")
        extra = [str(value) for value in (self.inverse | self.options).values()]
        return "-".join([f"{self.family}-{form}{sizes}", *extra]).replace(" ", "_")


def torch_files(family: str, parallel: Parallel = Parallel(), **options: Any) -> Case:  # noqa: B008 - frozen
    return _case(family, write_torch, parallel, options)


def torch_dist(family: str, parallel: Parallel = Parallel(), **options: Any) -> Case:  # noqa: B008 - frozen
    return _case(family, write_torch_dist, parallel, options)


def _case(family: str, write: Callable[..., None], parallel: Parallel, options: dict[str, Any]) -> Case:
    folders, merge = options.pop("folders", "megatron"), options.pop("merge", {})
    inverse = {
        name: options.pop(name)
        for name in ("norms", "padded_vocabulary", "post_norms", "tower", "down_cut")
        if name in options
    }
    return Case(family, write, parallel, inverse, options, folders, merge)


TP2PP2 = Parallel(tp=2, pp=2)
EXPERTS = Parallel(tp=2, pp=2, ep=2, dp=2)  # the full grid of files
DIAGONAL = Parallel(tp=2, pp=2, ep=2, etp=1)  # mp_rank_00_..._000 and mp_rank_01_..._001 alone
INTERLEAVED = Parallel(tp=2, pp=2, vpp=2, ep=2, etp=1, dp=2)

CASES = [
    # dense: pipelines, tensor parallelism beyond the groups, tied and untied, padded and not
    torch_files("llama", TP2PP2, padded_vocabulary=256),
    torch_files("llama", Parallel(pp=2, vpp=2), norms=LOCAL),
    torch_files("llama", Parallel(pp=3, first=1, last=1)),
    torch_files("llama", Parallel(tp=4), padded_vocabulary=512),
    torch_files("llama-tied", Parallel(pp=2), padded_vocabulary=128),
    torch_files("llama-tied", Parallel(tp=2), norms=LOCAL),
    torch_files("llama-mha", TP2PP2),
    torch_dist("llama", TP2PP2, norms=LOCAL_DIST, padded_vocabulary=256),
    torch_dist("llama", TP2PP2, stacked=False, prefix="module."),
    torch_dist("llama-tied", Parallel(tp=2), padded_vocabulary=256),
    torch_files("mistral", TP2PP2),
    torch_dist("mistral", Parallel(tp=4), common="inside"),
    torch_files("mistral", Parallel(tp=2, pp=2), norms=LOCAL, old_names="encoder", padded_vocabulary=256),
    torch_files("llama-tied", Parallel(pp=2), norms=LOCAL, old_names="encoder"),
    torch_files("llama-mha", Parallel(tp=2), norms=LOCAL, old_names="transformer"),
    torch_dist("llama", TP2PP2, backend="zarr", padded_vocabulary=256),
    torch_dist("llama", TP2PP2, singletons=True),
    torch_files("qwen2", Parallel(tp=4, pp=2, vpp=2), padded_vocabulary=512),
    torch_files("qwen2", Parallel(tp=2, dp=2)),
    torch_dist("qwen2", Parallel(tp=4), folders="verl", arguments_recorded=False),
    torch_dist("qwen2-tied", TP2PP2, folders="verl2", arguments_recorded=False),
    torch_files("qwen3", Parallel(tp=4, pp=2, first=1), padded_vocabulary=512),
    torch_dist("qwen3", Parallel(tp=4), optimizer=True, padded_vocabulary=512),
    # value heads
    torch_files("qwen2-value", TP2PP2, merge={"is_value_model": True}),
    torch_dist("qwen2-value", Parallel(tp=2), merge={"is_value_model": True}, padded_vocabulary=256),
    torch_dist("qwen2-reward", Parallel(tp=2), merge={"is_value_model": True}, folders="verl"),
    # experts
    torch_files("qwen2-moe", EXPERTS),
    torch_dist("qwen2-moe", EXPERTS, folders="verl", arguments_recorded=False),
    torch_files("qwen3-moe", DIAGONAL, padded_vocabulary=256),
    torch_files("qwen3-moe", INTERLEAVED, norms=LOCAL, experts="local"),
    torch_files("qwen3-moe", Parallel(pp=2, ep=4, dp=4), experts="grouped"),
    torch_dist("qwen3-moe", INTERLEAVED, optimizer=True, common="inside"),
    torch_dist("qwen3-moe", EXPERTS, norms=LOCAL_DIST, folders="verl2", arguments_recorded=False),
    torch_files("mixtral", EXPERTS, padded_vocabulary=256),
    torch_files("mixtral", Parallel(ep=2, dp=2), norms=LOCAL, experts="local"),
    torch_files("mixtral", Parallel(tp=4, ep=2, etp=2)),
    torch_files("mixtral", EXPERTS, experts="single", block=8),
    torch_dist("mixtral", EXPERTS, stacked=False),
    torch_dist("mixtral", EXPERTS, singletons=True),
    torch_dist("mixtral", EXPERTS, block=8),
    torch_dist("mixtral", EXPERTS, backend="zarr", norms=LOCAL_DIST),
    torch_files("deepseek-v2", EXPERTS),
    torch_dist("deepseek-v2", EXPERTS),
    torch_files("deepseek-v2-lite", DIAGONAL, norms=LOCAL, experts="local", down_cut=True),
    torch_dist("deepseek-v2-lite", EXPERTS, norms=LOCAL_DIST),
    torch_files("deepseek-v3", Parallel(tp=2, ep=2, dp=2), norms=LOCAL, experts="local", down_cut=True),
    torch_dist("deepseek-v3", EXPERTS, folders="verl", arguments_recorded=False),
    torch_dist("deepseek-v3", EXPERTS, down_cut=True),
    torch_files("deepseek-v3", EXPERTS, down_cut=True, fused_down=True),
    torch_files("deepseek-v3-mtp", DIAGONAL),
    torch_files("deepseek-v3-mtp", Parallel(pp=2), mtp_layer="transformer_layer", padded_vocabulary=128),
    torch_dist("deepseek-v3-mtp", EXPERTS, optimizer=True, padded_vocabulary=256),
    torch_files("moonlight", EXPERTS),
    torch_dist("moonlight", EXPERTS, common="inside"),
    torch_files("glm4-moe", EXPERTS),
    torch_dist("glm4-moe", Parallel(tp=4, ep=2, etp=1)),
    torch_files("gpt-oss", EXPERTS),
    torch_files("gpt-oss", Parallel(tp=4, ep=2, etp=1, dp=2), norms=LOCAL, experts="local"),
    torch_dist("gpt-oss", EXPERTS),
    torch_files("qwen3-next", Parallel(tp=2, pp=3, ep=2, dp=2)),
    torch_dist("qwen3-next", EXPERTS),
    torch_files("qwen3-next-one-group", Parallel(tp=2, ep=2, etp=1)),
    torch_dist("qwen3-next-one-group", Parallel(tp=2, ep=2, etp=1)),
    torch_files("llama4", EXPERTS),
    torch_dist("llama4", EXPERTS, padded_vocabulary=256),
    # other norms, fused tensors
    torch_files("glm4", TP2PP2, norms=LOCAL),
    torch_dist("glm4", Parallel(tp=4)),
    torch_files("gemma2", TP2PP2, padded_vocabulary=256),
    torch_dist("gemma2", TP2PP2),
    torch_files("gemma3", Parallel(tp=4), post_norms="mbridge"),
    torch_dist("gemma3", TP2PP2),
    torch_files("phi3", Parallel(tp=4, pp=2), norms=LOCAL),
    torch_dist("phi3", TP2PP2, padded_vocabulary=256),
    # vision towers
    torch_files("qwen2.5-vl", TP2PP2),
    torch_dist("qwen2.5-vl", TP2PP2, folders="verl", arguments_recorded=False),
    torch_dist("qwen2.5-vl", Parallel(tp=4), tower="module"),
    torch_files("qwen3-vl", TP2PP2, tower="module"),
    torch_dist("qwen3-vl", TP2PP2),
    torch_files("qwen3-vl-tied", TP2PP2),
    torch_files("qwen3-vl-moe", EXPERTS),
    torch_dist("qwen3-vl-moe", EXPERTS, tower="module", stacked=False),
]


@pytest.fixture(autouse=True)
def _ask_here(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_here(monkeypatch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Original, torch.Tensor]]:
    """`saved(name)`: that model as `save_pretrained` wrote it, and its logits."""
    known: dict[str, tuple[Original, torch.Tensor]] = {}

    def by_name(name: str) -> tuple[Original, torch.Tensor]:
        if name not in known:
            made = original(name, tmp_path_factory.mktemp(name))
            known[name] = (made, logits(load(name, made.folder)))
        return known[name]

    return by_name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_family_comes_back_bit_for_bit(
    case: Case, saved: Callable[[str], tuple[Original, torch.Tensor]], tmp_path: Path
) -> None:
    model, expected = saved(case.family)
    src = write(case, model, tmp_path / "run")
    config = None if case.folders != "megatron" else config_only(model, tmp_path / "config")
    lazymerge.merge(src, tmp_path / "merged", hf_config=config, **case.merge)
    assert_same_model(tmp_path / "merged", model.truth)
    assert torch.equal(logits(load(case.family, tmp_path / "merged")), expected)


def write(case: Case, model: Original, root: Path) -> Path:
    """The model as a checkpoint of that case; the path that a user would give."""
    megatron = to_megatron(model, **case.inverse)

    def write_step(folder: Path) -> None:
        case.write(folder, megatron, case.parallel, **case.options)

    if case.folders == "megatron":
        return megatron_run(root, write_step).parent
    return verl_run(root, write_step, model.folder, schema=2 if case.folders == "verl2" else 1)


def config_only(model: Original, folder: Path) -> Path:
    """A base model's folder without its weights."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (model.folder / name).exists():
            shutil.copy(model.folder / name, folder)
    return folder
