"""What config.json has to say otherwise when embeddings or heads were saved whole, and what is tied.

    more tokens        the embedding has other rows than the base's: vocab_size; the head has to have as many
    another head       score, classifier: the class of the model, and its labels; a language model's head goes
    no longer tied     embedding and head have come apart: tie_word_embeddings false, and both are written

Whether they are tied changes what an adapter of one of them means. PEFT adapts the one layer that it is told
to, so that its model computes with two different weights from then on; folding keeps that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lazymerge.boxes import Shape
from lazymerge.conversions.adapters.settings import Settings
from lazymerge.conversions.tying import EMBEDDINGS, FLAG, HEADS, flags, tied_by_config
from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.gather import Gather

_CLASSES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
LABELLED = ("score.weight", "classifier.weight", "classifier.out_proj.weight", "qa_outputs.weight")
_LANGUAGE_MODEL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
_KIND = re.compile(r"(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|Model)$")


def embedding_of(gathers: Mapping[str, Gather]) -> str | None:
    """The name of the input embedding: the outermost that is called like one."""
    found = [name for name in gathers if ends_with(name, EMBEDDINGS)]
    return min(found, key=lambda name: (name.count("."), name), default=None)


def head_of(gathers: Mapping[str, Gather]) -> str | None:
    """The name of a language model's head, if it is there."""
    return next((name for name in gathers if ends_with(name, HEADS)), None)


def ends_with(name: str, endings: tuple[str, ...]) -> bool:
    """Whether the name is one of these, or ends with one after a dot."""
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def tied_head(gathers: Mapping[str, Gather], config: Mapping[str, Any]) -> str | None:
    """The name of the head that is tied to the input embedding, there or not; None if none is.

    A language model without a head has a tied one, if nothing says otherwise: its file could not be loaded.
    """
    head, embedding = head_of(gathers), embedding_of(gathers)
    if head is not None:
        return head if tied_by_config(config) else None
    said = set(flags(config))
    if (
        embedding is None
        or not _LANGUAGE_MODEL.search(_class(config))
        or (False in said and True not in said)
    ):
        return None
    if not ends_with(embedding, ("embed_tokens.weight", "wte.weight", "embed_in.weight")):
        return None  # of models with an encoder, where more is tied
    front = "language_model." if embedding.startswith("language_model.model.") else ""
    return f"{front}embed_out.weight" if embedding.endswith("embed_in.weight") else f"{front}lm_head.weight"


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say that head and embedding are two."""
    changes: dict[str, Any] = {FLAG: False}
    for key, part in config.items():
        if key.endswith("_config") and isinstance(part, dict) and part.get(FLAG):
            changes[key] = {**part, FLAG: False}
    return changes


def vocabulary_changes(
    before: Mapping[str, Gather], after: Mapping[str, Gather], config: Mapping[str, Any], head: str | None
) -> dict[str, Any]:
    """The fields that say how many tokens there are, if there are as many as before no more.

    `head` is what the head is called where its name does not show it. Raises `InconsistentCheckpoint` where
    embedding and head have different numbers of rows.
    """
    rows = {
        name: after[name].shape[0]
        for name in (embedding_of(after), head_of(after) or head)
        if name is not None and name in after and after[name].shape
    }
    grown = {name: count for name, count in rows.items() if before.get(name, after[name]).shape[0] != count}
    if not grown:
        return {}
    name, count = next(iter(grown.items()))
    was = before.get(name, after[name]).shape[0]
    for other, rest in rows.items():
        if rest != count:
            raise InconsistentCheckpoint(
                f"{name} has {count} rows with the adapter, but {other} has {rest}",
                "the adapter was saved without one of the two: save it with save_embedding_layers=True",
            )
    for key, part in config.items():
        if "vocab_size" not in config and isinstance(part, dict) and part.get("vocab_size") == was:
            return {key: {**part, "vocab_size": count}}
    return {"vocab_size": count}


def may_grow(name: str, settings: Settings) -> bool:
    """Whether a tensor that was saved whole may have another number of rows than the base's."""
    module = name.rpartition(".")[0]
    return ends_with(name, EMBEDDINGS + HEADS) or settings.is_saved_whole(module)


def head_changes(
    whole: Mapping[str, Shape],
    settings: Settings,
    config: Mapping[str, Any],
    find: Callable[[str], str | None],
) -> dict[str, Any]:
    """The fields that name the class and the labels of the head that was saved whole, if there is one.

    `whole` has the shapes of what was; `find` gives the base's name for one. Raises `UnsupportedCheckpoint`
    where it is not known which class has such a head, `InconsistentCheckpoint` where it is no matrix.
    """
    head = next((name for name in whole if ends_with(name, LABELLED)), None)
    if head is None:
        return {}
    if len(whole[head]) < 2:
        raise InconsistentCheckpoint(
            f"{settings.name}: {head} has shape {whole[head]}, expected (labels, size)",
            "copy the adapter again",
        )
    changes: dict[str, Any] = {}
    name = _class(config)
    kinds = [kind for kind in _CLASSES.values() if name.endswith(kind)]
    if name and not kinds and find(head) is not None:
        return _labels(whole[head][0], config)
    if name and not kinds:
        kind = _CLASSES.get(settings.task or "")
        if kind is None or not _KIND.search(name):
            raise UnsupportedCheckpoint(
                f"{settings.name}: it has {head}, which {name} has not, and its task_type is {settings.task}",
                "set architectures in the base's config.json to the class that it was trained as",
            )
        changes["architectures"] = [_KIND.sub(kind, name)]
        kinds = [kind]
    if kinds != ["ForQuestionAnswering"]:
        changes.update(_labels(whole[head][0], config))
    return changes


def _labels(count: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that give as many labels as the head has, under transformers' own names; none if they do."""
    named = config.get("id2label")
    if isinstance(named, dict) and len(named) == count:
        return {}
    labels = {index: f"LABEL_{index}" for index in range(count)}
    changes: dict[str, Any] = {
        "id2label": {str(index): label for index, label in labels.items()},
        "label2id": {label: index for index, label in labels.items()},
    }
    return {**changes, "num_labels": count} if "num_labels" in config else changes


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether the class that the config names has a language model's head; so if it names none."""
    name = _class(config)
    return not name or not name.endswith(tuple(_CLASSES.values()))


def _class(config: Mapping[str, Any]) -> str:
    """The class that the config names first; empty if it names none."""
    found = config.get("architectures")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""
