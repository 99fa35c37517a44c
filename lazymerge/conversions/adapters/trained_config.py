"""adapter_config.json for an adapter that was taken out of a trainer's checkpoint.

PEFT finds the layers of an adapter by their names' endings, each at different strictness:

    target_modules, target_parameters  a name is the ending itself, or ends with a dot and the ending
    modules_to_save                    a name ends with its letters: "norm" is input_layernorm too
    rank_pattern                       a regular expression for such an ending

The shortest endings are taken that hit what has LoRA and nothing else in the model.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.adapters.patterns import Pattern
from lazymerge.conversions.adapters.promises import check_promises, missing_layers, told_idle
from lazymerge.conversions.adapters.settings import patterns_in, targeted_in
from lazymerge.conversions.adapters.targeted import idle
from lazymerge.conversions.adapters.trained_names import WRAPPER, Names
from lazymerge.conversions.adapters.trained_shapes import Target
from lazymerge.conversions.adapters.trained_told import EXTRACT, FOLD, ONLY, Told
from lazymerge.errors import InconsistentCheckpoint, PlanError, UnsupportedCheckpoint

HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Modules that PEFT trains as a whole for a task, named in modules_to_save or not."""

_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Values of `model_type` whose layers are transformers' Conv1D, with weights [in, out]."""

_CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""How the values of `init_lora_weights` begin that subtract the first A and B from the base."""

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


@dataclass(frozen=True, slots=True)
class Found:
    """An adapter in a checkpoint: what its names and shapes show.

    `saved` are the modules that are trained as a whole, `tokens` the rows that are trained of an embedding,
    by its module.
    """

    name: str
    targets: Sequence[Target]
    saved: Sequence[str]
    tokens: Mapping[str, int]
    dora: bool
    bias_of_b: bool


def make_config(
    found: Found, names: Names, told: Told, config: Mapping[str, Any], mode: str
) -> tuple[dict[str, Any], list[Note]]:
    """The fields of adapter_config.json, and what the user should know of them.

    `config` is the model's config.json. Raises `InconsistentCheckpoint` where a given config contradicts the
    tensors, and `PlanError` for what neither shows.
    """
    notes: list[Note] = []
    modules = {clean[: m.start()] for clean, _ in names.inside.values() for m in re.finditer(r"\.", clean)}
    parameters = [clean for clean, _ in names.inside.values()]
    _check_given(found, names, told, mode)
    rank = _rank(found, told)
    layers = [target.name for target in found.targets if not target.parameter]
    fields: dict[str, Any] = {
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "use_rslora": False,
        "alpha_pattern": {},
        "base_model_name_or_path": None,
        **told.config,
        "peft_type": "LORA",
        "task_type": _task_type(found, told, config, modules, notes),
        "r": rank,
        "lora_alpha": int(told.alpha) if told.alpha == int(told.alpha) else told.alpha,
        "rank_pattern": _rank_pattern(found.targets, rank),
        "target_modules": _target_modules(layers, modules),
        "modules_to_save": _modules_to_save(found.saved, modules) or None,
        "use_dora": found.dora,
        "fan_in_fan_out": _fan_in_fan_out(found.targets, told, config),
    }
    for key in ("exclude_modules", "layers_to_transform", "layers_pattern"):
        if key in fields:  # the layers are all named
            fields[key] = None
    if found.bias_of_b:
        fields["lora_bias"] = True
    on_parameters = [target.name for target in found.targets if target.parameter]
    if on_parameters or "target_parameters" in fields:
        fields["target_parameters"] = _target_parameters(on_parameters, parameters) or None
    _settle_init(fields, mode, notes)
    _settle_base(fields, config, notes)
    if mode == FOLD:
        notes = []  # of how it would be written
    if not told.config:
        notes.append(_note_unrecorded(found, names, mode))
        if _has_several_ranks(found):
            text = (
                f"the adapter {found.name!r} has layers of several ranks and is written with the alpha"
                f" {fields['lora_alpha']} for all: alpha_pattern is not recorded; --lora-config has it"
            )
            notes.append(Note("warning", text))
    notes += _promised(found, names, told, mode)
    if mode == EXTRACT and told.config.get("bias", "none") != "none":
        text = f"bias was {told.config['bias']!r}: the base is written with its biases as they were trained"
        notes.append(Note("info", text))
    return fields, notes


def _check_given(found: Found, names: Names, told: Told, mode: str) -> None:
    """Refuse a given config that is not of these tensors, and ask for one where they do not show enough."""
    given = told.config
    shown = {
        "use_dora": (found.dora, "magnitude vectors"),
        "lora_bias": (found.bias_of_b, "biases in lora_B"),
        "trainable_token_indices": (bool(found.tokens), "trained rows of an embedding"),
    }
    for key, (there, what) in shown.items():
        if given and bool(given.get(key)) != there:
            raise InconsistentCheckpoint(
                f"{told.rank_from}: {key} is {given.get(key)}, and the adapter {found.name!r} has"
                f" {'' if there else 'no '}{what}",
                "give the adapter_config.json of this training",
            )
    if not names.base and not given and _has_several_ranks(found):
        raise PlanError(
            f"the adapter {found.name!r} has layers of several ranks; without the base model it does not show"
            " whether some are LoRA on fused experts",
            "give --lora-config with the adapter_config.json of the training",
        )
    if mode == FOLD and not given and _has_several_ranks(found):
        raise PlanError(
            f"--lora {FOLD}: the adapter {found.name!r} has layers of several ranks, and whether their"
            " alpha is one (alpha_pattern) is not recorded",
            "give --lora-config with the adapter_config.json of the training",
        )


def _has_several_ranks(found: Found) -> bool:
    return len({target.rank for target in found.targets}) > 1


def _promised(found: Found, names: Names, told: Told, mode: str) -> Iterator[Note]:
    """What a given config says of other modules than those that have LoRA.

    Raises `InconsistentCheckpoint` where it does not target one of these.
    """
    if not told.config:
        return
    where = told.rank_from
    targeted = targeted_in(where, told.config)
    if isinstance(targeted.modules, Pattern) and not any(WRAPPER in part.source for part in names.parts):
        targeted = replace(targeted, modules=None)  # what it was matched with is a part of these names
    modules = [each.name.rpartition(".")[0] if each.parameter else each.name for each in found.targets]
    check_promises(where, modules, targeted)
    for key in ("rank_pattern",) if mode == FOLD else ("rank_pattern", "alpha_pattern"):  # folding tells it
        patterns = patterns_in(where, told.config, key)
        yield from told_idle(where, key, idle(patterns, [target.name for target in found.targets]))
    yield from missing_layers(where, targeted, modules, (clean for clean, _ in names.inside.values()))


def _rank(found: Found, told: Told) -> int:
    """What `r` is: as it was recorded, else the one that most layers have."""
    ranks = Counter(target.rank for target in found.targets)
    allowed = {told.rank, *(told.config.get("rank_pattern") or {}).values()} if told.config else None
    strange = [target for target in found.targets if allowed is not None and target.rank not in allowed]
    if told.rank is not None and (told.rank not in ranks or strange):
        target = (strange or found.targets)[0]
        raise InconsistentCheckpoint(
            f"{told.rank_from}: r is {told.rank}, and {target.name} has LoRA of rank {target.rank}",
            "it is of another training: remove it, or give its --lora-config",
        )
    return told.rank or ranks.most_common(1)[0][0]


def _endings(name: str) -> Iterator[str]:
    """The name's last component, its last two, and so on."""
    at = len(name)
    while at >= 0:
        at = name.rfind(".", 0, at)
        yield name[at + 1 :]


def _exact_endings(wanted: Sequence[str], others: Iterable[str]) -> list[str] | None:
    """The shortest endings that all of `wanted` have and none of `others`; None if there are none."""
    unwanted = {ending for name in others for ending in _endings(name)}
    chosen: dict[str, None] = {}
    for name in wanted:
        if not any(ending in chosen for ending in _endings(name)):
            exact = next((ending for ending in _endings(name) if ending not in unwanted), None)
            if exact is None:
                return None
            chosen[exact] = None
    return list(chosen)


def _target_modules(layers: Sequence[str], modules: Collection[str]) -> list[str] | str:
    if not modules:  # whatever the base model is, these are the layers
        return list(layers)
    has_lora = set(layers)
    exact = _exact_endings(layers, (name for name in modules if name not in has_lora))
    return "|".join(map(re.escape, layers)) if exact is None else exact


def _target_parameters(wanted: Sequence[str], parameters: Sequence[str]) -> list[str]:
    has_lora = set(wanted)
    exact = _exact_endings(wanted, (name for name in parameters if name not in has_lora))
    if exact is None:
        raise UnsupportedCheckpoint(
            f"{wanted[0]}: PEFT has no way to name it without another parameter whose name ends alike",
            "merge it with PEFT itself",
        )
    return exact


def _rank_pattern(targets: Sequence[Target], rank: int) -> dict[str, int]:
    """Patterns for the layers that have another rank."""
    pattern: dict[str, int] = {}
    for other in dict.fromkeys(target.rank for target in targets if target.rank != rank):
        wanted = [target.name for target in targets if target.rank == other]
        exact = _exact_endings(wanted, (target.name for target in targets if target.rank != other))
        keys = [f"^{re.escape(name)}" for name in wanted] if exact is None else map(re.escape, exact)
        pattern |= dict.fromkeys(keys, other)
    return pattern


def _modules_to_save(saved: Sequence[str], modules: Collection[str]) -> list[str]:
    """The shortest endings whose letters end the names of these modules, and of no other one."""
    backwards = sorted(name[::-1] for name in modules)
    trained = set(saved)
    chosen: list[str] = []
    for name in saved:
        if any(name.endswith(ending) for ending in chosen):
            continue
        exact = next((e for e in _endings(name) if set(_with_letters(e, backwards)) <= trained), None)
        if exact is None:
            raise UnsupportedCheckpoint(
                f"{name}: trained as a whole, and PEFT has no way to name it without another module",
                "merge it with PEFT itself",
            )
        chosen.append(exact)
    return chosen


def _with_letters(ending: str, backwards: Sequence[str]) -> list[str]:
    """The modules whose names end with these letters."""
    start = bisect_left(backwards, ending[::-1])
    stop = bisect_left(backwards, f"{ending[::-1]}\U0010ffff")
    return [name[::-1] for name in backwards[start:stop]]


def _task_type(
    found: Found, told: Told, config: Mapping[str, Any], modules: Collection[str], notes: list[Note]
) -> str | None:
    """As it was recorded, else by config.json's class; None where PEFT would not load the adapter for it.

    verl writes CAUSAL_LM where it does not know, and PEFT cannot load that for a model that has another task.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    of_class = next((task for end, task in _TASKS.items() if name.endswith(end)), None)
    task = told.task_type or of_class
    if task == "CAUSAL_LM" and of_class is not None and of_class != task:
        notes.append(Note("info", f"task_type {task} is not that of {name}: {of_class} is taken"))
        task = of_class
    heads = HEADS.get(task or "", ())
    backwards = sorted(module[::-1] for module in modules)
    extra = [m for head in heads for m in _with_letters(head, backwards) if m not in found.saved]
    if extra:
        text = (
            f"task_type is left open: for {task} PEFT would look for {extra[0]}, which is not in the adapter"
        )
        notes.append(Note("info", text))
        return None
    return task


def _fan_in_fan_out(targets: Sequence[Target], told: Told, config: Mapping[str, Any]) -> bool:
    """Whether weights are [in, out]; square ones alone do not show it."""
    shown = [target.transposed for target in targets if target.transposed is not None]
    if shown:
        return any(shown)
    return bool(told.config.get("fan_in_fan_out", config.get("model_type") in _CONV1D))


def _settle_init(fields: dict[str, Any], mode: str, notes: list[Note]) -> None:
    """The checkpoint's base is what an initialisation like PiSSA made of it: not to be done again."""
    init = fields["init_lora_weights"]
    if not isinstance(init, str) or not init.startswith(_CHANGE_THE_BASE):
        return
    if mode == ONLY:
        text = f"init_lora_weights is {init!r}: the adapter is for the base model as it was before training"
    else:
        text = f"init_lora_weights was {init!r}: what it changed in the base is in the base that is written"
        none: dict[str, Any] = {
            "eva_config": None,
            "corda_config": None,
            "lora_ga_config": None,
            "loftq_config": {},
        }
        fields |= {"init_lora_weights": True, **{key: none[key] for key in none if key in fields}}
    notes.append(Note("info", text))


def _settle_base(fields: dict[str, Any], config: Mapping[str, Any], notes: list[Note]) -> None:
    """base_model_name_or_path: of a given config, else of config.json."""
    name = fields["base_model_name_or_path"] or config.get("_name_or_path")
    fields["base_model_name_or_path"] = name if isinstance(name, str) and name else None
    if fields["base_model_name_or_path"] is None:
        text = (
            "base_model_name_or_path of the adapter is null: neither config.json nor a --lora-config names it"
        )
        notes.append(Note("info", text))


def _note_unrecorded(found: Found, names: Names, mode: str) -> Note:
    """What no tensor and no file of the trainer shows, and how it is written."""
    done = "folded in" if mode == FOLD else "written"
    text = f"the adapter {found.name!r} is {done} with use_rslora false, which its files do not record"
    biases = any(clean.endswith(".bias") for clean, _ in names.inside.values())
    if biases and mode == ONLY:
        text += ", and without the biases of the base, which do not show whether they were trained"
    return Note("info", f"{text}; --lora-config takes the settings of the training")
