"""A critic whose config.json still names the language model that it was made of.

Trainers load a value model by `AutoModelForTokenClassification` or `...SequenceClassification` and save the
config that they were given, so that its `architectures` has a ...ForCausalLM, for which a loader would leave
`score` and draw an output layer at random. Which of the two classes it is, the tensors say: only the former
has a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.tying import HEADS

if TYPE_CHECKING:
    from lazymerge.conversions.architecture import Architecture

_LANGUAGE = "ForCausalLM"
_OUTPUT, _SCORE, _BIAS = "lm_head.weight", "score.weight", "score.bias"


def value_head_fields(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json has to say instead where a score is in place of the output layer; else {}."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    score = checkpoint.gathers.get(_SCORE)
    if not isinstance(name, str) or not name.endswith(_LANGUAGE) or score is None or len(score.shape) != 2:
        return {}
    if _OUTPUT in checkpoint.gathers:
        return {}
    kind = "ForTokenClassification" if _BIAS in checkpoint.gathers else "ForSequenceClassification"
    fields: dict[str, Any] = {"architectures": [name.removesuffix(_LANGUAGE) + kind]}
    rows = score.shape[0]
    labels = config.get("id2label")
    if (len(labels) if isinstance(labels, dict) else 2) != rows:
        fields["id2label"] = {str(row): f"LABEL_{row}" for row in range(rows)}
        fields["label2id"] = {f"LABEL_{row}": row for row in range(rows)}
    if config.get("num_labels", rows) != rows:
        fields["num_labels"] = rows
    return fields


def without_class(config: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[dict[str, Any], Note]:
    """The fields without the class, which transformers does not have: config.json keeps its own."""
    text = (
        f"the checkpoint has {_SCORE} and no {_OUTPUT}, and transformers has no class"
        f" {fields['architectures'][0]} that would load it: config.json keeps {config['architectures'][0]},"
        f" whose loader leaves {_SCORE} and makes an output layer at random"
    )
    kept = {key: value for key, value in fields.items() if key != "architectures"}
    return kept, Note("warning", text, _SCORE)


def without_output(architecture: Architecture) -> Architecture:
    """The class as it is without the output layer of a language model."""
    body = {name: shape for name, shape in architecture.shapes.items() if not name.endswith(HEADS)}
    return replace(architecture, shapes=body)


def value_head_note(config: Mapping[str, Any], fields: Mapping[str, Any]) -> Note:
    """What is said where they are written."""
    text = (
        f"the checkpoint has {_SCORE} and no {_OUTPUT}: config.json names {fields['architectures'][0]} in"
        f" place of {config['architectures'][0]}"
    )
    return Note("info", text, _SCORE)
