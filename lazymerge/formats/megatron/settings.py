"""The trainer's arguments as plain values under Megatron-LM's names, whoever wrote them.

Megatron-LM saves its `args`, an ``argparse.Namespace``, in the checkpoint. Megatron-Bridge writes
``run_config.yaml`` beside it, whose section ``model`` is the model's config class field by field:

    _target_: megatron.bridge.models...Provider      the class
    num_moe_experts: 64                              a field, under the name of the config class
    params_dtype: {_target_: torch.bfloat16, _call_: false}
    attention_backend: {_target_: ...AttnBackend, _call_: true, _args_: [5], _name_: auto}

verl writes the fields of that class that are no functions to ``transformer_config.json``, as
``{"num_moe_experts": 64, "params_dtype": "torch.bfloat16", "attention_backend": "AttnBackend.flash"}``.

Where the config class calls a thing by another name than the arguments do, the value comes under
both. Several arguments say whether a feed-forward is gated: `is_gated` knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lazymerge.errors import DamagedFile, UnsupportedCheckpoint
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.inert_pickle import Global, Record
from lazymerge.files.json_text import read_object
from lazymerge.files.local import LocalFile

MAX_RUN_CONFIG = 1 << 20
"""Bytes: usual ones have 20 thousand. A model whose layers differ has 100 thousand in one text, and a mixture
of data as many in paths. The parser is slow: what is smaller than this takes two seconds at most."""

_MAX_NODES = 1 << 14
"""Values and keys in run_config.yaml; usual are 3 thousand."""

_MAX_PLAIN = 1 << 20
"""Values and characters in all arguments, what they share counted each time; usual are 20 thousand."""

_MAX_DEPTH = 8
_MAX_BITS = 64

_NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "num_moe_experts": ("num_experts", lambda value: value),
    "num_layers_in_first_pipeline_stage": ("decoder_first_pipeline_num_layers", lambda value: value),
    "num_layers_in_last_pipeline_stage": ("decoder_last_pipeline_num_layers", lambda value: value),
    "layernorm_zero_centered_gamma": ("apply_layernorm_1p", lambda value: value),
    "layernorm_epsilon": ("norm_epsilon", lambda value: value),
    "share_embeddings_and_output_weights": (
        "untie_embeddings_and_output_weights",
        lambda value: not value if isinstance(value, bool) else None,
    ),
}
"""The config class's name -> the argument's, and what its value becomes."""

_SILU = ("torch.nn.functional.silu", "torch._C._nn.silu")
_QUICK_GELU = "megatron.core.fusions.fused_bias_geglu.quick_gelu"


def settings_of(value: object) -> dict[str, Any]:
    """The arguments in an ``argparse.Namespace`` as it was recorded, or in a dict.

    Values are None, bool, int, float, str, lists, tuples and dicts of them; dtypes are their names and
    enums their values. What is none of these is left out, and a `value` of another kind has none; a number
    that no trainer counts to is a text that says so, which is refused where a number is wanted.
    """
    if isinstance(value, Record):
        value = value.attrs()
    if not isinstance(value, dict):
        return {}
    plain = _Plain()
    settings = {name: plain.of(item) for name, item in value.items() if isinstance(name, str)}
    return _with_arguments({name: item for name, item in settings.items() if item is not _OTHER})


def read_run_config(file: LocalFile) -> dict[str, Any]:
    """The model's settings in Megatron-Bridge's ``run_config.yaml``, by the names that Megatron-LM has.

    Raises `DamagedFile` for what is no YAML and `UnsupportedCheckpoint` for one without a model.
    """
    path = file.path
    if file.size > MAX_RUN_CONFIG:
        raise UnsupportedCheckpoint(
            f"{path}: {file.size} bytes, where {MAX_RUN_CONFIG} are read at most",
            "check that it is the run_config.yaml that Megatron-Bridge wrote",
        )
    import yaml  # type: ignore[import-untyped] # which no other checkpoint needs

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """``yaml.safe_load`` of a bounded number of values.

        Without merge keys, a few bytes of which can make millions of values, and without numbers of the base
        60 (``1:30``), which take the square of their length in time and which no library writes.
        """

        nodes = 0

        def compose_node(self, parent: object, index: object) -> Any:
            """Count what is read."""
            self.nodes += 1
            if self.nodes > _MAX_NODES:
                raise _no_run_config(path, f"more than {_MAX_NODES} values")
            return super().compose_node(parent, index)

        def flatten_mapping(self, node: object) -> None:
            """Leave ``<<`` as it is, which no value can be made of: an error."""

        def construct_number(self, node: Any) -> Any:
            """A number; with colons in it, the text that it is."""
            if ":" in node.value:
                return self.construct_scalar(node)
            whole = node.tag.endswith(":int")
            return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)
    try:
        config = yaml.load(file.read(0, file.size), Loader=Loader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" in line {mark.line + 1}"
        raise _no_run_config(path, f"{type(error).__name__}{line}") from None
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise UnsupportedCheckpoint(
            f"{path}: holds no section `model`",
            "check that it is the run_config.yaml that Megatron-Bridge wrote",
        )
    settings = _of_class(model)
    settings.update(_activation(model, settings))
    return settings


def read_transformer_config(file: LocalFile) -> dict[str, Any]:
    """The model's settings in verl's ``transformer_config.json``, by the names that Megatron-LM has.

    Raises `DamagedFile` for what is no JSON object, or is larger than any.
    """
    try:
        config = read_object(file, MAX_RUN_CONFIG)
    except ValueError as error:
        raise DamagedFile(
            f"{file.path}: not the JSON that verl writes ({error})",
            "copy it again, or move it away: then config.json alone says how the tensors are laid out",
        ) from None
    return _of_class(config)


def _of_class(config: dict[Any, Any]) -> dict[str, Any]:
    """The settings that a config class holds."""
    settings = settings_of(config)
    for name, value in settings.items():
        if isinstance(value, str) and value.removeprefix("torch.") in DTYPES:
            settings[name] = value.removeprefix("torch.")
    if "num_query_groups" in settings:  # the class has None where every head has a group of its own
        settings["group_query_attention"] = settings["num_query_groups"] is not None
    return settings


def _no_run_config(path: Path, why: str) -> DamagedFile:
    """The error, which shows nothing of the file: it may be a link to any other."""
    return DamagedFile(
        f"{path}: not the YAML that Megatron-Bridge writes ({why})",
        "copy it again, or move it away and give the Hugging Face config",
    )


def is_gated(settings: Mapping[str, Any]) -> bool | None:
    """Whether a ``linear_fc1`` is a gate and an up projection; None where the settings do not say."""
    said = [settings.get(name) for name in ("swiglu", "quick_geglu", "gated_linear_unit")]
    if any(value is True for value in said):
        return True
    return False if any(value is False for value in said) else None


def plain_number(value: object) -> int | None:
    """A number of at most 64 bits; None for anything else. Python refuses to print the longest ones."""
    return value if type(value) is int and value.bit_length() <= _MAX_BITS else None


_OTHER = object()
"""What is no plain value."""


class _Plain:
    """Plain values of recorded ones, as many and as long as an honest file has."""

    def __init__(self) -> None:
        self._left = _MAX_PLAIN

    def of(self, value: object, depth: int = 0) -> object:
        """The plain value, or `_OTHER`. An argument that is a number costs nothing, and so is never lost."""
        if depth or isinstance(value, str):
            self._left -= 1 + (len(value) if isinstance(value, str) else 0)
            if self._left < 0 or depth > _MAX_DEPTH:
                return _OTHER
        if value is None or isinstance(value, bool | int | float | str):
            return _scalar(value)
        if isinstance(value, DType):
            return value.name
        if isinstance(value, Record):
            return _enum_value(value)
        if isinstance(value, list | tuple):
            items = [self.of(item, depth + 1) for item in value]
            return _OTHER if _OTHER in items else type(value)(items)
        if isinstance(value, dict):
            return _target(value) if "_target_" in value else self._dict(value, depth)
        return _OTHER

    def _dict(self, value: dict[Any, Any], depth: int) -> dict[Any, Any]:
        items = {
            _scalar(key): self.of(item, depth + 1)
            for key, item in value.items()
            if isinstance(key, str | int | None) and self.of(key, depth + 1) is not _OTHER
        }
        return {key: item for key, item in items.items() if item is not _OTHER}


def _scalar(value: object) -> object:
    if type(value) is int and plain_number(value) is None:
        return f"a number of {value.bit_length()} bits"
    return value


def _enum_value(record: Record) -> object:
    """The value that an enum's member is called with."""
    plain = isinstance(record.cls, Global) and record.state is None and not record.items and not record.kwargs
    if plain and len(record.args) == 1 and isinstance(record.args[0], int | str):
        return _scalar(record.args[0])
    return _OTHER


def _target(value: dict[Any, Any]) -> object:
    """A dtype or the value of an enum in run_config.yaml."""
    target, args = value["_target_"], value.get("_args_")
    if isinstance(target, str) and target.removeprefix("torch.") in DTYPES and value.get("_call_") is False:
        return target.removeprefix("torch.")
    if "_name_" in value and isinstance(args, list) and len(args) == 1 and isinstance(args[0], int | str):
        return _scalar(args[0])
    return _OTHER


def _with_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, and those under a config class's name also under the argument's."""
    for name, (argument, convert) in _NAMES.items():
        if name in settings and argument not in settings:
            settings[argument] = convert(settings[name])
    return settings


def _activation(model: dict[Any, Any], settings: dict[str, Any]) -> dict[str, bool]:
    """The arguments that say what the config class says by its function and whether it is gated."""
    gated, function = settings.get("gated_linear_unit"), model.get("activation_func")
    target = function.get("_target_") if isinstance(function, dict) else None
    if not isinstance(gated, bool) or target is None:
        return {}
    return {"swiglu": gated and target in _SILU, "quick_geglu": gated and target == _QUICK_GELU}
