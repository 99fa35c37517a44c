"""The inverse and the writers against checkpoints that Megatron itself wrote (tests/data/megatron).

Hugging Face weights of a sample, laid out by the inverse and cut by the writers, give the sample's own
tensors: the same names and chunks, the same bytes. What is compared was read with torch.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from transformers import AutoConfig

from tests.checks import raw
from tests.makers.megatron_dist import write_torch_dist
from tests.makers.megatron_files import write_torch
from tests.makers.megatron_inverse import LOCAL, TE, Megatron, to_megatron
from tests.makers.megatron_models import Original
from tests.makers.megatron_shards import Parallel

SAMPLES = Path(__file__).parent.parent / "data" / "megatron"
TP2PP2 = Parallel(tp=2, pp=2)
STEP = "ckpt/iter_0000100"
VERL = "ckpt/global_step_100/actor/dist_ckpt"
DIST = {
    "td_te_qwen2_tp2pp2": (STEP, TP2PP2),
    "td_te_qwen3_tp2_optim": (STEP, Parallel(tp=2, dp=2)),
    "td_te_dsv3_tp2ep2pp2": (STEP, Parallel(tp=2, pp=2, ep=2, dp=2, etp=1)),
    "verl_te_qwen3moe_ep2_vpp": (VERL, Parallel(pp=2, vpp=2, ep=2, dp=2)),
}
TORCH = {
    "torch_local_llama_vpp": (Parallel(pp=2, vpp=2), LOCAL, "local"),
    "torch_te_qwen3moe_tp2ep2pp2": (Parallel(tp=2, pp=2, ep=2, etp=1), TE, "te"),
    "torch_oldnames_llama_tp2pp2": (TP2PP2, LOCAL, "te"),
}
OLD_NAMES = {"torch_oldnames_llama_tp2pp2": "encoder"}


@pytest.mark.parametrize("name", DIST)
def test_torch_dist_has_the_keys_chunks_and_bytes_of_megatrons_own(name: str, tmp_path: Path) -> None:
    where, parallel = DIST[name]
    genuine = SAMPLES / name / where
    write_torch_dist(tmp_path, _sample_model(name, TE, _rows(genuine)), parallel)
    theirs, ours = _tensors(genuine), _tensors(tmp_path)
    assert set(theirs) == set(ours)
    for key, (metadata, tensor) in theirs.items():
        assert metadata.size == ours[key][0].size, key
        assert _chunks(metadata) == _chunks(ours[key][0]), key
        _assert_same(key, tensor, ours[key][1])


@pytest.mark.parametrize("name", TORCH)
def test_torch_files_have_the_names_and_bytes_of_megatrons_own(name: str, tmp_path: Path) -> None:
    parallel, norms, experts = TORCH[name]
    step = SAMPLES / name / STEP
    rows = _load(next(step.glob("mp_rank_00*/*.pt")))["args"].padded_vocab_size
    model = _sample_model(name, norms, rows)
    write_torch(tmp_path, model, parallel, experts=experts, old_names=OLD_NAMES.get(name))
    folders = sorted(path.name for path in step.iterdir())
    assert folders == sorted(path.name for path in tmp_path.iterdir())
    for folder in folders:
        theirs = _load(step / folder / "model_optim_rng.pt")
        ours = _load(tmp_path / folder / "model_optim_rng.pt")
        chunks = [key for key in theirs if key.startswith("model")]
        assert chunks == [key for key in ours if key.startswith("model")]
        for chunk in chunks:
            _assert_same_weights(_flat(theirs[chunk]), _flat(ours[chunk]))
        _assert_same_arguments(theirs["args"], ours["args"])


def _sample_model(name: str, norms: str, rows: int) -> Megatron:
    """The sample's Hugging Face model in Megatron's form. Router biases are float32 in Megatron only."""
    folder = SAMPLES / name / "hf"
    truth = load_file(folder / "model.safetensors")
    for key in truth:
        if key.endswith("e_score_correction_bias"):
            truth[key] = truth[key].float()
    config = json.loads((folder / "config.json").read_text())
    text = AutoConfig.from_pretrained(folder).to_dict()
    model = to_megatron(Original(name, folder, config, text, truth), norms=norms, padded_vocabulary=rows)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        model.tensors[key][config["vocab_size"] :] = 7  # what the samples were made with
    return model


def _rows(folder: Path) -> int:
    size = _metadata(folder).state_dict_metadata["embedding.word_embeddings.weight"].size
    return int(size[0])


def _metadata(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


def _tensors(folder: Path) -> dict[str, tuple[TensorStorageMetadata, torch.Tensor]]:
    """Every tensor of the model, put together by torch."""
    found = {
        key: entry
        for key, entry in _metadata(folder).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and "optimizer" not in key
    }
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in found.items()}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return {key: (entry, state[key]) for key, entry in found.items()}


def _chunks(metadata: TensorStorageMetadata) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in metadata.chunks}


def _assert_same(name: str, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert theirs.dtype == ours.dtype, name
    assert theirs.shape == ours.shape, name
    assert raw(theirs) == raw(ours), name


def _assert_same_weights(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    weights = {key for key in theirs if not key.endswith("_extra_state")}
    assert weights == {key for key in ours if not key.endswith("_extra_state")}
    for key in weights:
        _assert_same(key, theirs[key], ours[key])


def _flat(state: dict[str, Any], at: str = "") -> dict[str, Any]:
    """A state dict whose modules may be nested."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        flat |= _flat(value, f"{at}{key}/") if isinstance(value, dict) else {at + key: value}
    return flat


def _assert_same_arguments(theirs: Any, ours: Any) -> None:
    """Those that both have: older versions do not know them all."""
    names = (vars(ours).keys() & vars(theirs).keys()) - {"rank", "world_size"}
    assert len(names) > 30
    for name in names:
        assert getattr(theirs, name) == getattr(ours, name), name


class _Anything:
    """Stands for any class of megatron's."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Anything if module.startswith("megatron") else super().find_class(module, name)


def _load(path: Path) -> dict[str, Any]:
    lenient: Any = ModuleType("lenient")
    lenient.Unpickler, lenient.load = _Unpickler, pickle.load
    content: dict[str, Any] = torch.load(path, pickle_module=lenient, weights_only=False)
    return content
