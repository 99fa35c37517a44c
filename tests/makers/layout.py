"""The folder around the weights: verl's file names, and the sidecars of a Hugging Face model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

JUNK = b"not a torch file: whoever reads this made a mistake"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "sat", "on", "a", "mat", "é"]
REMOTE_CODE = "class XForCausalLM:\n    raise RuntimeError('remote code must not run')\n"


@dataclass(frozen=True)
class Made:
    """A checkpoint on disk, and the tensors that went into it before they were sharded."""

    root: Path
    leaf: Path  # the folder of the rank files
    truth: dict[str, torch.Tensor] = field(repr=False)
    world_size: int
    mesh: tuple[tuple[str, int], ...] = ()
    fsdp_version: int = 0  # 0: no fsdp_config.json
    placements: dict[str, str] = field(default_factory=dict, repr=False)  # of rank 0, as torch prints them
    tied: tuple[tuple[str, ...], ...] = ()  # names of one and the same parameter
    saved: dict[str, torch.Tensor] | None = field(default=None, repr=False)  # None: as `truth`

    @property
    def hub_truth(self) -> dict[str, torch.Tensor]:
        """The tensors by the names and in the layouts that the hub has."""
        return self.truth if self.saved is None else self.saved

    @property
    def sidecars(self) -> Path:
        """The folder of config, tokenizer and their kin."""
        return self.leaf / "huggingface"

    def rank_file(self, rank: int, kind: str = "model") -> Path:
        """The file of one rank in verl's layout."""
        return rank_file(self.leaf, self.world_size, rank, kind)


def copy_of(made: Made, root: Path) -> Made:
    """The same checkpoint under another root, for a test that will damage it."""
    shutil.copytree(made.root, root, dirs_exist_ok=True)
    return replace(made, root=root, leaf=root / made.leaf.relative_to(made.root))


def renamed(made: Made, root: Path, pattern: str) -> Path:
    """A folder with the rank files alone under other names, as "rank_{rank}.pt"; accelerate without DCP
    calls them "pytorch_model_fsdp_0_rank{rank}.bin". Sidecars lie beside them.
    """
    shutil.copytree(made.sidecars, root, dirs_exist_ok=True)
    for rank in range(made.world_size):
        shutil.copy(made.rank_file(rank), root / pattern.format(rank=rank, world_size=made.world_size))
    return root


def edit_rank(made: Made, rank: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites one rank's file after `change` has altered its state dict: of a DTensor `_local_tensor` can
    be set, or altered in place. For a copy of a checkpoint.
    """
    path = made.rank_file(rank)
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def rank_file(leaf: Path, world_size: int, rank: int, kind: str = "model") -> Path:
    """verl's name of a rank's file."""
    return leaf / f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def verl_leaf(root: Path, step: int = 7, role: str = "actor") -> Path:
    """The folder that verl writes ranks to, made if it is not there."""
    leaf = root / f"global_step_{step}" / role
    leaf.mkdir(parents=True, exist_ok=True)
    return leaf


def write_verl_surroundings(root: Path, leaf: Path, world_size: int, fsdp_version: int) -> None:
    """All of verl's files beside the model files: pointer, configuration, optimizer and extra state."""
    step = leaf.parent.name.rpartition("_")[2]
    (root / "latest_checkpointed_iteration.txt").write_text(step)
    for rank in range(world_size):
        rank_file(leaf, world_size, rank, "optim").write_bytes(JUNK)
        rank_file(leaf, world_size, rank, "extra_state").write_bytes(JUNK)
    if fsdp_version:
        config = {"FSDP_version": fsdp_version, "world_size": world_size}
        (leaf / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def write_huggingface_dir(
    model: nn.Module | None, folder: Path, *, remote_code: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Writes config.json and every kind of sidecar; of a model without a config, a config of its name.

    No model at all: a config that names no class.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model, dtype)
    if remote_code:
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
        (folder / "modeling_x.py").write_text(REMOTE_CODE)
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": 0, "eos_token_id": [5, 6], "temperature": 0.6}
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "preprocessor_config.json", {"do_rescale": True, "image_mean": [0.5, 0.5, 0.5]})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_tokenizer(folder)


def _config(model: nn.Module | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """What `config.save_pretrained` writes, with the architecture and dtype that a loaded model has."""
    if model is None:
        return {"model_type": "zoo"}
    if not hasattr(model, "config"):
        return {"architectures": [type(model).__name__], "model_type": "zoo"}
    from transformers import PretrainedConfig

    assert isinstance(model.config, PretrainedConfig)
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    inner = model.base_model.model if hasattr(model, "base_model") and _is_adapted(model) else model
    config["architectures"] = [type(inner).__name__]
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def _is_adapted(model: nn.Module) -> bool:
    return any("lora_A" in name for name, _ in model.named_parameters())


def _write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer that loads, and the files that byte-pair tokenizers have beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(special))  # as transformers 4 wrote it
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n", encoding="utf-8")


def _tokenizer_config(special: dict[str, str]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(i): {"content": WORDS[i], **flags} for i in range(3)},
        **special,
        "additional_special_tokens": ["<s>"],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
