"""The error for a checkpoint and a config.json that contradict each other, and what would mend that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, LazymergeError

if TYPE_CHECKING:
    from lazymerge.conversions.architecture import Architecture, Differences, Shape

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_NUMBERED = re.compile(r"\.\d+\.")
_OF_MTP = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.")
"""What only the layers have that predict further tokens (DeepSeek-V3, GLM-4.5)."""

_FUSED = {
    *("query_key_value", "c_attn", "att_proj", "W_pack", "kv_proj", "to_kv"),
    *("kv_a_proj_with_mqa", "kv_b_proj"),
    *("input_linear", "ff_proj", "Wi", "w12"),  # the halves of a gated MLP
    *("in_proj", "in_proj_weight", "in_proj_bias", "in_proj_ba", "x_proj", "conv1d"),  # Mamba, delta layers
}
"""What tensors of several projections are called, besides all names with ``qkv`` or ``gate_up``."""

_FLAG = "tie_word_embeddings"
_TIES = " (which makes another model, unless it was trained with its head tied to its embedding)"

_SHOWN = 5


def contradiction(
    found: Mapping[str, Shape],
    architecture: Architecture,
    differences: Differences,
    probable_fields: Callable[[Architecture, Mapping[str, Shape]], list[Any]],
    *,
    may_be_forced: bool = False,
) -> LazymergeError:
    """The error for tensors that the config and the checkpoint, with the shapes `found`, do not agree on.

    `probable_fields` gives the values of config.json that would fit, as `config_fields.explain` has them;
    `may_be_forced` says that the user could have shapes changed.
    """
    said = []
    sizes = differences.misshapen.items()
    if sizes:
        said.append(listed([f"{name} is {_size(is_)}, not {_size(want)}" for name, (is_, want) in sizes]))
    if differences.missing:
        said.append(f"missing: {listed(differences.missing)}")
    if differences.surplus:
        said.append(f"not in the model: {listed(differences.surplus)}")
    count = len(differences.wrong)
    problem = (
        f"{count} tensor{'s do' if count > 1 else ' does'} not fit the {architecture.class_name} of"
        f" config.json: {'; '.join(said)}"
    )
    hint = _of_another_class(found, architecture)
    if not hint:
        clauses = list(_clauses(found, architecture, differences, probable_fields))
        hint = f"in config.json, {', and '.join(clauses)}" if clauses else ""
    hint = hint or "see whether config.json is this checkpoint's own"
    if (
        may_be_forced
        and sizes
        and all(len(is_) == len(want) and not is_fused(name) for name, (is_, want) in sizes)
    ):
        hint += "; --force-shape-match crops or pads to its shapes"
    hint += "; --no-check merges what is there"
    only_missing = not differences.misshapen and not differences.surplus
    return (IncompleteCheckpoint if only_missing else InconsistentCheckpoint)(problem, hint)


def _of_another_class(found: Mapping[str, Shape], architecture: Architecture) -> str:
    """That no name of a layer is the model's, with one of either side; "" if there is one."""
    own, theirs = _numbered(architecture.shapes), _numbered(found)
    if not theirs or any(name in found for name in own):
        return ""
    layer = _NUMBERED.search(own[0])
    tail = own[0][layer.start() :] if layer else own[0]
    alike = next((name for name in theirs if name.endswith(tail)), theirs[0])
    return (
        f"the names are those of another class: the checkpoint has {alike}, {architecture.class_name} has"
        f" {own[0]}; see whether config.json is this checkpoint's own"
    )


def _numbered(names: Mapping[str, Shape]) -> list[str]:
    """The names of layers; all names where there are none."""
    return [name for name in names if _NUMBERED.search(name)] or list(names)


def _clauses(
    found: Mapping[str, Shape],
    architecture: Architecture,
    differences: Differences,
    probable_fields: Callable[[Architecture, Mapping[str, Shape]], list[Any]],
) -> Iterator[str]:
    """Which values of config.json would fit; none if no single one does."""
    mtp, clause = _unannounced_mtp(architecture, differences)
    if mtp:
        yield clause
    if differences.wrong <= mtp:
        return
    for group in probable_fields(architecture, {name: found[name] for name in found if name not in mtp}):
        yield (
            " or ".join(f"{each['field']} = {json.dumps(each['fits'])}" for each in group)
            + f" would fit, it says {' and '.join(dict.fromkeys(json.dumps(each['is']) for each in group))}"
            + (_TIES if any(each["field"].endswith(_FLAG) and each["fits"] for each in group) else "")
        )


def _unannounced_mtp(architecture: Architecture, differences: Differences) -> tuple[frozenset[str], str]:
    """The tensors of MTP layers that config.json does not count, and what would count them."""
    text = architecture.config.get("text_config")
    front, text = ("text_config.", text) if isinstance(text, dict) else ("", architecture.config)
    layers, key = text.get("num_hidden_layers"), "num_nextn_predict_layers"
    layer_of = {name: int(at[1]) for name in differences.unexpected if (at := _LAYER.search(name))}
    of_mtp = {layer for name, layer in layer_of.items() if _OF_MTP.search(name)}
    if (
        type(layers) is not int
        or not of_mtp
        or min(of_mtp) != layers
        or max(of_mtp) != layers + len(of_mtp) - 1
    ):
        return frozenset(), ""
    says = f"says {json.dumps(text[key]):.20}" if key in text else "has none"
    clause = f"{front}{key} = {len(of_mtp)} would fit, it {says}"
    return frozenset(name for name, layer in layer_of.items() if layer in of_mtp), clause


def is_fused(name: str) -> bool:
    """Whether a tensor of this name is several projections, one behind the other."""
    last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    return last in _FUSED or "qkv" in last or "gate_up" in last


def are_fields(values: Any) -> bool:
    """Whether these are fields that would fit, as `config_fields.explain` gives them."""
    return isinstance(values, list) and all(
        isinstance(group, list) and group and all(map(_is_field, group)) for group in values
    )


def _is_field(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("field"), str)
        and isinstance(value.get("is"), int)
        and isinstance(value.get("fits"), int)
    )


def listed(items: Sequence[str]) -> str:
    """The first five, and how many more there are."""
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _size(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a scalar"
