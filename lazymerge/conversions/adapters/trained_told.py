"""What was recorded of a LoRA training beside its tensors, which do not show alpha: three places.

    lora_train_meta.json   beside the rank files, by verl: ``{"r": 8, "lora_alpha": 32, "task_type": ...}``,
                           alpha without its fraction, and 0 where verl did not know it
    --lora-config          adapter_config.json as PEFT writes it, or the folder that it is in
    --lora-alpha           a number

They have to agree. Nothing is taken for alpha that is not in one of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lazymerge.conversions.adapters.adapter import CONFIG
from lazymerge.errors import DamagedFile, InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from lazymerge.files.json_text import strict, why
from lazymerge.files.local import LocalFile, refuse_no_file

META = "lora_train_meta.json"
TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
"""PEFT's task types; it refuses any other."""

EXTRACT, ONLY, FOLD = "extract", "only", "fold"
BASE = "base"
"""Of a comparison: the base alone, for which alpha need not be known."""
_LARGEST = 16 << 20
"""Bytes of a file of JSON."""

_LARGEST_NUMBER = 1 << 32


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """What a user can say about LoRA in a checkpoint.

    mode    "extract": the base and the adapter; "only": the adapter alone; "fold": one model of both
    alpha   lora_alpha of every adapter
    config  adapter_config.json of the training, or a folder that holds it (for several adapters, in a folder
            of the adapter's name, as PEFT's save_pretrained writes them)
    """

    mode: str = EXTRACT
    alpha: float | None = None
    config: str | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of one adapter: `config` is the given adapter_config.json, empty if none was."""

    alpha: float
    rank: int | None = None
    task_type: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    rank_from: str = ""  # the file that says so


def told(adapter: str, adapters: tuple[str, ...], folders: Iterable[Path], options: LoraOptions) -> Told:
    """What the three places say of `adapter`, one of the checkpoint's `adapters`.

    `folders` may hold verl's file. Raises `PlanError` where none of them has an alpha,
    `InconsistentCheckpoint` where two contradict each other, and `DamagedFile` for a malformed one.
    """
    meta_path, meta = _meta(folders) if adapter == "default" or len(adapters) == 1 else (None, {})
    config_path, config = _given(adapter, adapters, options)
    if options.alpha is not None and not _is_number(options.alpha):
        raise PlanError(f"--lora-alpha {options.alpha}", "give a number from 0 on")
    alpha = _agreed(
        adapter,
        options.alpha,
        _Recorded(config_path, config.get("lora_alpha")),
        _Recorded(meta_path, meta.get("lora_alpha")),
    )
    rank, rank_from = (config["r"], config_path) if config else (meta.get("r"), meta_path)
    return Told(alpha, rank, config.get("task_type") or meta.get("task_type"), config, str(rank_from))


class _Recorded(NamedTuple):
    """What a file says alpha is; None where there is no such file, or it does not say."""

    path: Path | None
    alpha: float | None

    def __str__(self) -> str:
        return f"{self.path} has {self.alpha:g}"


def _agreed(adapter: str, alpha: float | None, config: _Recorded, meta: _Recorded) -> float:
    """The alpha that the user and the files agree on; verl's file has it without its fraction."""
    said = f"--lora-alpha {alpha or 0:g}"
    if config.alpha:
        if alpha is not None and alpha != config.alpha:
            raise _contradiction(said, str(config))
        alpha, said = config.alpha, str(config)
    if meta.alpha:
        if alpha is None and config.alpha is not None:  # 0
            raise _contradiction(str(config), str(meta))
        if alpha is not None and meta.alpha not in {alpha, int(alpha)}:
            raise _contradiction(said, str(meta))
        alpha = meta.alpha if alpha is None else alpha
    if alpha is not None:
        return alpha
    for recorded in (config, meta):
        if recorded.alpha is not None:
            raise PlanError(
                f"{recorded.path}: lora_alpha is 0, which verl writes where it does not know it",
                "give --lora-alpha N as in training, or --lora-alpha 0 if it was 0",
            )
    raise PlanError(
        f"the LoRA adapter {adapter!r} has no recorded alpha: no {META} beside the rank files",
        f"give --lora-alpha N as in training, or --lora-config with its {CONFIG}",
    )


def _contradiction(one: str, other: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        f"LoRA's alpha: {one}, {other}", "find out which one is of this training, and leave out the other"
    )


def recorded_in(folders: Iterable[Path]) -> Path | None:
    """verl's file in these folders, as it is taken into account; None if there is none."""
    return _meta(folders)[0]


def _meta(folders: Iterable[Path]) -> tuple[Path | None, Mapping[str, Any]]:
    """verl's file and what it says; several (of folders given together) have to be the same."""
    found = {path: _checked_meta(path) for folder in folders if os.path.lexists(path := folder / META)}
    if not found:
        return None, {}
    (first, content), *others = found.items()
    for path, other in others:
        if other != content:
            raise InconsistentCheckpoint(
                f"{first} has {dict(content)}, {path} has {dict(other)}", "remove the one of another training"
            )
    return first, content


def _checked_meta(path: Path) -> dict[str, Any]:
    refuse_no_file(path)
    content = {key: value for key, value in _read_json(path).items() if value is not None}
    meta: dict[str, Any] = {key: content[key] for key in ("r", "lora_alpha", "task_type") if key in content}
    _check(path, meta, "lora_alpha", _is_number, "a number from 0 on")
    if meta.get("r") == 0:  # what verl's SFT trainer writes where it goes on from an adapter
        del meta["r"]
    _check(path, meta, "r", _is_rank, "a whole number from 0 on")
    _check(path, meta, "task_type", _is_one_of(TASKS), f"one of {', '.join(TASKS)}")
    return meta


def _given(
    adapter: str, adapters: tuple[str, ...], options: LoraOptions
) -> tuple[Path | None, Mapping[str, Any]]:
    """The adapter's config that --lora-config names, and what it says."""
    if options.config is None:
        return None, {}
    path = Path(options.config)
    if os.path.isdir(path):  # unlike Path's, these do not raise where a folder cannot be read
        own = path / adapter / CONFIG
        path = own if os.path.exists(own) or (len(adapters) > 1 and adapter != "default") else path / CONFIG
    elif len(adapters) > 1:
        raise PlanError(
            f"--lora-config {path}: one file, and the checkpoint has {len(adapters)} adapters"
            f" ({', '.join(adapters)})",
            f"give a folder with {CONFIG} of 'default', and of each other one in a folder of its name",
        )
    if not os.path.isfile(path):
        raise PlanError(
            f"--lora-config: {path} is not there", f"give the {CONFIG} of the training, or its folder"
        )
    return path, _checked_config(path)


def _checked_config(path: Path) -> dict[str, Any]:
    """adapter_config.json, of LoRA, with fields of the types that are used here."""
    config = _read_json(path)
    if config.get("peft_type") != "LORA":
        raise UnsupportedCheckpoint(
            f"{path}: peft_type is {config.get('peft_type')!r}, expected 'LORA'",
            "give the config of the LoRA",
        )
    if config.get("layer_replication"):
        raise UnsupportedCheckpoint(
            f"{path}: layer_replication, which makes layers that the base model does not have",
            "merge it with PEFT itself",
        )
    _check(path, config, "r", _is_rank, "a whole number from 1 on", required=True)
    for key in ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out"):
        _check(path, config, key, lambda value: isinstance(value, bool), "true or false")
    for key in ("modules_to_save", "target_parameters"):
        _check(path, config, key, _is_list_of(str), "a list of names")
    _check(path, config, "bias", _is_one_of(("none", "all", "lora_only")), "none, all or lora_only")
    _check(path, config, "rank_pattern", lambda value: _is_dict_of(value, _is_rank), "names with ranks")
    _check(path, config, "alpha_pattern", lambda value: _is_dict_of(value, _is_number), "names with numbers")
    _check(path, config, "trainable_token_indices", _is_tokens, "token numbers, or names with such")
    _check(path, config, "base_model_name_or_path", lambda value: isinstance(value, str), "a name")
    _check(path, config, "lora_alpha", _is_number, "a number from 0 on", required=True)
    _check(path, config, "task_type", _is_one_of(TASKS), f"one of {', '.join(TASKS)}")
    return config


def _check(
    path: Path, content: Mapping[str, Any], key: str, good: Any, expected: str, *, required: bool = False
) -> None:
    value = content.get(key)
    if (value is not None or required) and not good(value):
        raise DamagedFile(
            f"{path}: {key} is {json.dumps(value)[:60]}, expected {expected}", "mend it, or copy it again"
        )


def _is_number(value: Any) -> bool:
    return type(value) in {int, float} and 0 <= value <= _LARGEST_NUMBER


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= _LARGEST_NUMBER


def _is_one_of(names: tuple[str, ...]) -> Any:
    return lambda value: isinstance(value, str) and value in names


def _is_list_of(kind: type) -> Any:
    return lambda value: isinstance(value, list) and all(type(each) is kind for each in value)


def _is_dict_of(value: Any, good: Any) -> bool:
    return isinstance(value, dict) and all(map(good, value.values()))


def _is_tokens(value: Any) -> bool:
    return _is_list_of(int)(value) or _is_dict_of(value, _is_list_of(int))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a small file; `DamagedFile` for anything else."""
    file = LocalFile(path)
    if file.size > _LARGEST:
        raise DamagedFile(f"{path}: {file.size} bytes, expected at most {_LARGEST}", "this is no such file")
    try:
        content = strict(file.read(0, file.size).decode())
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: malformed JSON ({why(error)})", "repair it, or copy it again") from None
    if not isinstance(content, dict):
        raise DamagedFile(f"{path}: not a JSON object", "repair it, or copy it again")
    return content
