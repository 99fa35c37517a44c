"""What is on top of the decoder: an output layer, one that is tied to the embedding, or a value head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.megatron.family import Config, Family
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, PlanError
from lazymerge.gather import Gather

OUTPUT, OUTPUT_BIAS = "output_layer.weight", "output_layer.bias"
FLAG = "tie_word_embeddings"
_VALUE_ARCHITECTURES = ("ForTokenClassification", "ForSequenceClassification")
_BIAS = "token_classification_bias"
_MOST_LABELS = 1 << 16
_HEED_TEXT = ("qwen2_5_vl",)
"""Models whose class in transformers 5 ties by a flag of text_config too; others ignore it there."""


@dataclass(frozen=True, slots=True)
class Head:
    """How the output layer goes into the result.

    `names` are those of its tensors that the table does not name (a value head's), `left_out` those
    that are not written and why, `changes` what config.json has to say differently.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def is_value_head(gathers: Mapping[str, Gather], config: Config, value_model: bool | None) -> bool:
    """Whether the output layer is a value head: it has one row, or one for each label of the config.

    `value_model` says so (or not) where it is known. Raises `IncompleteCheckpoint` for a value model
    without an output layer and `PlanError` for one whose output layer has the vocabulary's rows.
    """
    if value_model is False:
        return False
    output, vocabulary = gathers.get(OUTPUT), config.count("vocab_size")
    if value_model and output is None:
        raise IncompleteCheckpoint(
            f"{OUTPUT}: not in the checkpoint, expected the value head",
            "leave out --is-value-model, or give the critic's checkpoint",
        )
    if output is None or len(output.shape) != 2:
        return False
    rows = output.shape[0]
    if value_model and rows >= vocabulary:
        raise PlanError(
            f"{OUTPUT}: {rows} rows, as for a vocabulary of {vocabulary}; a value head has one",
            "leave out --is-value-model, or give the critic's checkpoint",
        )
    return bool(value_model) or (rows < vocabulary and rows in {1, _labels(config)})


def value_head(gathers: Mapping[str, Gather], config: Config) -> Head:
    """The output layer as the score of a ...ForTokenClassification, with what config.json says of it."""
    names = {OUTPUT: "score.weight"}
    if OUTPUT_BIAS in gathers:
        names[OUTPUT_BIAS] = "score.bias"
    rows = gathers[OUTPUT].shape[0]
    changes: dict[str, Any] = {} if _labels(config) == rows else _label_names(rows)
    if config.whole.get("num_labels", rows) != rows:  # it goes before the names of labels
        changes["num_labels"] = rows
    architecture = _architecture(config)
    if not architecture.endswith(_VALUE_ARCHITECTURES):
        architecture = _token_classification(config)
        if architecture:
            changes = {"architectures": [architecture], **changes}
    if architecture.endswith(_VALUE_ARCHITECTURES[0]):
        has_bias = OUTPUT_BIAS in gathers  # where the config does not say, transformers adds one of its own
        if config.whole.get(_BIAS, True) is not has_bias:
            changes[_BIAS] = has_bias
    notes = []
    if not architecture:
        text = "config.json names no architecture, so the result does not say that it has a value head"
        notes.append(Note("warning", text, OUTPUT))
    return Head(names=names, changes=changes, notes=tuple(notes))


def without_class(changes: Mapping[str, Any], kept: str) -> tuple[dict[str, Any], Note]:
    """The changes without the class that they name for a value head, which transformers does not have.

    `kept` is the class that it names already: it stays, so that a loader takes all but the head.
    """
    (named,) = changes["architectures"]
    text = (
        f"transformers has no class {named}, so that nothing of it loads the value head: config.json keeps"
        f" {kept}, whose loader leaves score.weight and makes an output layer at random"
    )
    left = {key: value for key, value in changes.items() if key not in {"architectures", _BIAS}}
    return left, Note("warning", text, OUTPUT)


def output_head(
    output_there: bool, config: Config, family: Family, tied: bool | None, *, copied: bool = False
) -> Head:
    """A vocabulary's output layer: written, or left out because it is tied to the embedding.

    `tied=True` decides it. Otherwise config.json, the trainer's arguments and what is in the files have
    to agree; `InconsistentCheckpoint`, with the three, if they do not. `copied` says that the files have one
    which was taken for a copy of the embedding, as the arguments say.
    """
    by_files = not output_there
    by_config, stated = _tied_by_config(config, family, by_files)
    untied = config.megatron.get("untie_embeddings_and_output_weights")
    by_trainer = None if not isinstance(untied, bool) else not untied
    if not tied and not (by_config == by_files and by_trainer in {None, by_files}):
        raise InconsistentCheckpoint(
            f"{OUTPUT}: {FLAG} is {str(by_config).lower()}{'' if stated else ' by default'} in config.json,"
            f" untie_embeddings_and_output_weights is {'not recorded' if by_trainer is None else untied},"
            f" and the checkpoint has {'an' if output_there else 'no'} output layer"
            + (", but the copy of the embedding that the arguments make of it" if copied else ""),
            f"mend {FLAG} in config.json, or give --tie-word-embedding, which writes no output layer and"
            f" sets {FLAG} to true",
        )
    if not (tied or by_config):
        return Head()
    changes = {} if config.whole.get(FLAG, family.tied) is True else {FLAG: True}
    if not output_there:
        return Head(changes=changes)
    return Head(
        left_out={OUTPUT: "tied to the embedding by --tie-word-embedding"},
        changes=changes,
    )


def _tied_by_config(config: Config, family: Family, by_files: bool) -> tuple[bool, bool]:
    """(Whether the config ties the output layer, whether it says so itself).

    A flag of text_config alone that the class ignores says nothing: then it is as the files have it.
    """
    for part in (config.whole, config.hf):
        flag = part.get(FLAG)
        if isinstance(flag, bool):
            heeded = part is config.whole or family.tied or config.whole.get("model_type") in _HEED_TEXT
            return (flag if heeded else by_files), True
        if flag is not None:
            raise PlanError(f"config.json: {FLAG} is {flag!r:.60}, expected true or false", "mend it")
    return family.tied, False


def _architecture(config: Config) -> str:
    """The class that config.json names first; "" where it names none."""
    names = config.whole.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _token_classification(config: Config) -> str:
    """The same model's class with a score for each token."""
    name = _architecture(config)
    return name.rpartition("For")[0] + _VALUE_ARCHITECTURES[0] if "For" in name else ""


def _label_names(count: int) -> dict[str, Any]:
    if count > _MOST_LABELS:
        raise PlanError(f"{OUTPUT}: {count} rows, expected a value head", "leave out --is-value-model")
    return {
        "id2label": {str(index): f"LABEL_{index}" for index in range(count)},
        "label2id": {f"LABEL_{index}": index for index in range(count)},
    }


def _labels(config: Config) -> int | None:
    """How many labels a config of a classifier has; None for any other."""
    if not _architecture(config).endswith(_VALUE_ARCHITECTURES):
        return None
    labels, number = config.whole.get("id2label"), config.whole.get("num_labels")
    if isinstance(labels, dict):
        return len(labels)
    return number if isinstance(number, int) and not isinstance(number, bool) else 2  # transformers' own
