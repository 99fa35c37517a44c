"""The model that a config.json names, built by transformers on the meta device. Runs as a process.

    stdin    {"config": ..., "code": folder or null}            stdout    {"architecture": ...}
             the same, with "conversion": true                            ... and {"conversion": ...}
             the same, with "tensors": {name: [shape, dtype]}             {"conversion": ...} of these
             the same, with "found": {name: shape}                        {"fields": [[...], ...]}
             the same, with "classes": true                               {"classes": [class name, ...]}
                                                                          {"unknown": class name}
                                                                          {"refused": complaint}
                                                                          {"contradicts": complaint}
                                                                          {"too large": true}

Processor time and memory are bounded after the imports, so a config decides nothing but its own answer.
Names and shapes are those of `save_pretrained`: what transformers fuses at run time is undone by its own
reverse conversion, which is indifferent to tensors without data.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazymerge.conversions.architecture import from_plain
from lazymerge.conversions.config_fields import Build, explain
from lazymerge.conversions.dtypes import KEPT, without_numbers
from lazymerge.conversions.limits import bound
from lazymerge.conversions.model_process import ANSWER, MEMORY, SECONDS
from lazymerge.conversions.tied_names import tied_in

_CHOICES_OF_KERNELS = ("attn_implementation", "experts_implementation")
"""Settings that ask for packages which are not needed here, and may not be installed."""

_LABELS = ("id2label", "label2id")

_LISTS = "_MAPPING_NAMES"
"""How the lists of model_type -> class are called in transformers."""


_LISTED = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_MULTIMODAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_TOKEN_CLASSIFICATION",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION",
)
"""The lists whose classes a trainer may have built where config.json does not say which."""

_MOST_CLASSES = 8
"""Of those, each of which a process is started for; a config that names more of them names none."""


class Refused(Exception):
    """The class does not take the config; the text is the first line of why."""


class Contradiction(Refused):
    """What the config says cannot all be so, whatever the class."""


def build(config: Mapping[str, Any], code: Path | None = None) -> Any:
    """The model, without data; None if transformers has no class of that name. Raises `Refused`."""
    import torch
    from transformers.initialization import meta_device_safe_creation_ops, no_init_weights

    try:
        model_class, config_class = _classes(config, code)
        if model_class is None:
            return None
        _refuse_dtypes(config)
        plain = _with_floats(_without_kernels(copy.deepcopy(dict(config))))
        if model_class.__module__.startswith("transformers."):
            plain["model_type"] = _model_type(config, model_class)
        settings = config_class.from_dict(plain)
        settings._attn_implementation = "eager"
        with torch.device("meta"), no_init_weights(), meta_device_safe_creation_ops():
            model = model_class(settings)
    except (MemoryError, Refused):
        raise
    except Exception as error:  # whatever code that belongs to the config does with it
        raise Refused(_first_line(error)) from error
    return model if model.state_dict() else None


def _first_line(error: Exception) -> str:
    """What the error says first; where that only announces what is wrong, the next line too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {said}"[:500]


def describe(model: Any) -> dict[str, Any]:
    """`Architecture` of a model, as plain data."""
    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    tied = tied_in(model, state)
    shapes = _hub(model, {name: tensor for name, tensor in state.items() if name not in tied})
    hub_tied: dict[str, str] = {}
    for one, other in tied.items():
        ones, others = _hub(model, {one: state[one]}), _hub(model, {other: state[other]})
        shapes.update(ones)
        hub_tied.update(zip(ones, others, strict=True))
    unsaved = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    ignored = {f"^{re.escape(name)}$" for name in _hub(model, unsaved)}
    # Once these were saved; the loader leaves them for all classes that still have such a buffer.
    for ending, pattern in (
        ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
        ("position_ids", r"\.position_ids$"),
    ):
        if any(name.endswith(ending) for name in unsaved):
            ignored.add(pattern)
    return {
        "class_name": type(model).__name__,
        "shapes": shapes,
        "tied": hub_tied,
        "wide": _wide(model, state),
        "optional": sorted(model._keys_to_ignore_on_load_missing or ()),
        "ignored": sorted(ignored | set(model._keys_to_ignore_on_load_unexpected or ())),
        "swappable": _swappable(model),
        "parts": _parts(model, state),
        "defaults": _without_labels(json.loads(model.config.to_json_string(use_diff=False))),
    }


def _without_labels(config: Any) -> Any:
    """The config, of its parts too, without the names of labels, which transformers makes of their number."""
    if isinstance(config, dict):
        return {key: _without_labels(each) for key, each in config.items() if key not in _LABELS}
    return config


def _wide(model: Any, state: Mapping[str, Any]) -> dict[str, list[str]]:
    """By half type, what a loader keeps in float32 and router biases: names of both forms, numbers as 0."""
    from transformers.core_model_loading import build_glob_alternation

    strict = set(model._keep_in_fp32_modules_strict or ())
    found = {}
    for dtype, globs in (
        ("bfloat16", strict),
        ("float16", strict | set(model._keep_in_fp32_modules or ())),
    ):
        pattern = build_glob_alternation(sorted(globs))[0] if globs else re.compile(r"(?!)")
        kept = [name for name in state if name.rpartition(".")[2] in KEPT or pattern.search(name)]
        names = {*kept, *_hub(model, {name: state[name] for name in kept})}
        found[dtype] = sorted({without_numbers(name) for name in names})
    return found


def classes(config: Mapping[str, Any]) -> list[str]:
    """Classes of transformers that `architectures` has, or else that are listed for `model_type`.

    None where these are more than `_MOST_CLASSES`.
    """
    from transformers.models.auto import modeling_auto

    names = config.get("architectures")
    given = dict.fromkeys(each for each in names if isinstance(each, str)) if isinstance(names, list) else {}
    if len(given) > _MOST_CLASSES:
        return []
    found = [name for name in given if name.isidentifier() and _known(name) is not None]
    if found:
        return found
    for key in _LISTED:
        listed = vars(modeling_auto).get(f"{key}{_LISTS}", {}).get(config.get("model_type"), ())
        found += [listed] if isinstance(listed, str) else listed
    return [name for name in dict.fromkeys(found) if _known(name) is not None]


def _classes(config: Mapping[str, Any], code: Path | None) -> tuple[Any, Any]:
    """The classes of the model and of its config; None for both if transformers does not know the model."""
    name = config["architectures"][0]
    references = config.get("auto_map") if code is not None else None
    reference = _reference(references, name)
    if reference is not None and isinstance(references, dict):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        model_class: Any = get_class_from_dynamic_module(reference, str(code), local_files_only=True)
        config_reference = references.get("AutoConfig")
        if not isinstance(config_reference, str):
            return model_class, model_class.config_class
        # "repository--file.Class" names where it was published; the file is in the folder
        where = config_reference.rpartition("--")[2]
        return model_class, get_class_from_dynamic_module(where, str(code), local_files_only=True)
    known = _known(name)
    return (None, None) if known is None else (known, known.config_class)


def _known(name: str) -> Any:
    """The model class of transformers of that name; None if it is none, or cannot be imported here."""
    import transformers

    try:
        known: Any = getattr(transformers, name, None)
    except (ImportError, RuntimeError):  # it needs a package that is not installed
        return None
    is_model = isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)
    return known if is_model and known.config_class is not None else None


def _refuse_dtypes(config: Mapping[str, Any]) -> None:
    """Raise `Contradiction` for a type of elements that is none."""
    import torch

    for key in ("dtype", "torch_dtype"):
        name = config.get(key)
        if not isinstance(name, str) or name == "auto":
            continue
        if not isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype):
            raise Contradiction(f"{key} is {name!r:.40}, which is no type of elements")


def _model_type(config: Mapping[str, Any], model_class: Any) -> str:
    """The config's model_type; the class's own one where transformers does not know it (such as kimi_k2).

    Raises `Contradiction` for the type of another model: `AutoModelForCausalLM` would go by it, not by the
    class.
    """
    from transformers import CONFIG_MAPPING

    given, own = config.get("model_type"), str(model_class.config_class.model_type)
    if not isinstance(given, str) or given == own or given not in CONFIG_MAPPING:
        return own
    if not _may_have(given, model_class.__name__):
        raise Contradiction(
            f"architectures has {model_class.__name__}, whose model_type is {own}, and model_type is {given}"
        )
    return given


def _may_have(model_type: str, name: str) -> bool:
    """Whether transformers' own lists have the class of this name for models of that type."""
    from transformers.models.auto import modeling_auto

    listed = [vars(modeling_auto)[key].get(model_type) for key in vars(modeling_auto) if key.endswith(_LISTS)]
    return any(name == each or (isinstance(each, tuple) and name in each) for each in listed)


def _reference(references: Any, name: str) -> str | None:
    """The entry of an auto_map for the class of that name, without a repository's name in front."""
    if not isinstance(references, dict):
        return None
    for entry in references.values():
        for each in entry if isinstance(entry, list) else [entry]:
            if isinstance(each, str) and each.rpartition(".")[2] == name:
                return each.rpartition("--")[2]
    return None


def _without_kernels(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            key: _without_kernels(value)
            for key, value in config.items()
            if key.strip("_").removesuffix("_internal") not in _CHOICES_OF_KERNELS
        }
    return config


def _with_floats(value: Any) -> Any:
    """What JSON has no number for, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in {"Infinity", "-Infinity", "NaN"}:
            return float(value["__float__"])
        return {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _hub(model: Any, state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Hub names and shapes of these tensors of the model."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: list(each.shape) for name, each in revert_weight_conversion(model, dict(state)).items()}


def _swappable(model: Any) -> list[str]:
    """Patterns of the tensors that the loader transposes if their shape is not the model's (Qwen3-VL-MoE)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    return [
        re.escape(pattern)
        for transform in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(transform, WeightConverter)
        and any(isinstance(each, Transpose) and each.check_dims for each in transform.operations)
        for pattern in transform.source_patterns
    ]


def _parts(model: Any, state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Hub names of what a model of several kinds of input has beside the text model, by part."""
    from transformers import PreTrainedModel

    try:
        text = model.config.get_text_config()
    except ValueError:  # several, of which none is the text model (Musicgen)
        return {}
    if text is model.config:
        return {}
    whole, parts = model.base_model, {}
    front = next((f"{name}." for name, module in model.named_modules() if name and module is whole), "")
    for name, part in whole.named_children():
        has_text = any(
            isinstance(m, PreTrainedModel) and type(m.config) is type(text) for m in part.modules()
        )
        if has_text or part is model.get_output_embeddings():
            continue
        names = _hub(model, {key: value for key, value in state.items() if key.startswith(f"{front}{name}.")})
        if names:
            parts[name] = list(names)
    return parts


def main() -> None:
    """Read a request from stdin and write the answer to stdout; nothing else is written there."""
    answer_to = os.dup(1)
    os.dup2(2, 1)  # what anyone prints
    request = json.loads(sys.stdin.buffer.read())
    import torch  # noqa: F401
    import transformers  # noqa: F401

    bound(SECONDS, MEMORY)
    code = None if request["code"] is None else Path(request["code"])
    try:
        answer = json.dumps(_answer(request, code))
        if len(answer) > ANSWER:
            answer = json.dumps({"too large": True})
    except Refused as error:
        kind = "contradicts" if isinstance(error, Contradiction) else "refused"
        answer = json.dumps({kind: str(error)})
    except ImportError:  # of what this module needs, in a version that does not have it: no answer
        raise
    except Exception as error:
        short = isinstance(error, MemoryError) or "bad_alloc" in str(error)
        answer = json.dumps({"too large": True} if short else {"refused": _first_line(error)})
    with os.fdopen(answer_to, "w") as out:
        out.write(answer)


def _answer(request: dict[str, Any], code: Path | None) -> dict[str, Any]:
    config = request["config"]
    if "classes" in request:
        return {"classes": classes(config)}
    model = build(config, code)
    if model is None:
        return {"unknown": config["architectures"][0]}
    if "tensors" in request:
        return {"conversion": _conversion(model, request["tensors"])}
    description = describe(model)
    architecture = from_plain(description, config)
    if "found" not in request:
        conversion = {"conversion": _conversion(model)} if "conversion" in request else {}
        return {"architecture": description, **conversion}
    found = {name: tuple(shape) for name, shape in request["found"].items()}
    return {"fields": explain(architecture, model.config.to_dict(), found, _builder(code))}


def _conversion(model: Any, tensors: Mapping[str, Any] | None = None) -> dict[str, Any]:
    from lazymerge.conversions.recording import recorded  # lazy tensors, which few questions need

    return recorded(model, tensors)


def _builder(code: Path | None) -> Build:
    """Architectures of changed configs; None for one that is not taken."""

    def built(config: Mapping[str, Any]) -> Any:
        try:
            model = build(config, code)
        except Refused:
            return None
        return None if model is None else from_plain(describe(model), config)

    return built


if __name__ == "__main__":
    main()
