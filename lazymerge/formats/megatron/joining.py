"""How the parts that the tensor ranks hold of one tensor make it up: a table by name.

    rows        one after the other along dimension 0     linear_qkv, embedding, ...
    columns     along dimension 1                         linear_proj, linear_fc2, out_proj
    same        every rank holds all of it                norms, router, biases of the above
    gated       each rank [gate; up], the whole too       linear_fc1
    parts       each rank [query; key; ...]               in_proj, conv1d of a gated delta net

Values never decide. Where a name leaves it open, shapes do if they prove it: a `linear_fc1` is gated
if it has twice as many rows as its `linear_fc2` has columns; a down projection of multi-latent
attention is whole if it has all rows. A name that is not known is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.formats.megatron.grid import size
from lazymerge.formats.megatron.settings import is_gated
from lazymerge.gather import Gather, cat

_ROWS = re.compile(
    r"(^|\.)(embedding\.word_embeddings|output_layer|linear_qkv|linear_q_proj|linear_q_up_proj"
    r"|linear_kv_up_proj|eh_proj)\.(weight|bias)$|\.self_attention\.(A_log|dt_bias)$|\.softmax_offset$"
)
_COLUMNS = re.compile(r"\.(linear_proj|linear_fc2|out_proj)\.weight$")
_SAME = re.compile(
    r"(^|\.)\w*norm[0-9]?\.(weight|bias)$|\.layer_norm_(weight|bias)$"
    r"|\.(linear_proj|linear_fc2|out_proj)\.bias$"
    r"|\.router\.(weight|bias|expert_bias)$|\.shared_experts\.gate_weight$"
    r"|^embedding\.(position|tokentype)_embeddings\.weight$"
    r"|^visual\.|^vision_model\.(patch_embed|pos_embed|position_embeddings|conv1|class_token|ln_)"
)
_FC1 = re.compile(r"\.linear_fc1\.(weight|bias)$")
_DELTA = re.compile(r"\.self_attention\.(in_proj|conv1d)\.(weight|bias)$")
_DOWN = re.compile(r"\.self_attention\.linear_(q|kv|qkv)_down_proj\.weight$")
_OF_HEAD = re.compile(r"\.self_attention\.(q|k)_layernorm\.weight$")
_WHOLE_TOWER = "vision_model.blocks."
_SHARED_INTERLEAVE = ("moe_shared_expert_glu_interleave_size", "use_grouped_gemm_for_shared_expert")
_DAMAGED = "the files do not belong together, or the arguments in them were changed"


class Unjoined(UnsupportedCheckpoint):
    """A tensor whose name no rule knows, so that its parts cannot be put together."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors by name; `same` if the first rank's part is all of it and the others' are copies."""

    tensors: dict[str, Gather]
    same: bool = False


class Joiner:
    """Joins the tensors of one pipeline chunk. `parts` of a tensor are its ranks', in their order.

    `shapes` are those of the first rank's tensors in this chunk. Raises `UnsupportedCheckpoint` for
    what the table does not know and `InconsistentCheckpoint` for shapes that contradict the arguments.
    """

    def __init__(self, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._settings = settings
        self._shapes = shapes
        self._whole_tower = any(name.startswith(_WHOLE_TOWER) for name in shapes)

    def join(self, name: str, parts: Sequence[Gather]) -> Joined:
        """The tensor of this name, or those that it is several of."""
        check_alike(name, parts)
        if not parts[0].shape:
            return self._number(name, parts)
        if ".shared_experts.linear_fc1." in name and all(map(self._settings.get, _SHARED_INTERLEAVE)):
            raise UnsupportedCheckpoint(
                f"{name}: gate and up in turn ({_SHARED_INTERLEAVE[0]})",
                "this is not read yet: please report it",
            )
        if _DELTA.search(name):
            return self._delta(name, parts)
        if _DOWN.search(name) and ("_qkv_" in name or len(parts) > 1):
            return self._down(name, parts)
        if len(parts) == 1:
            return Joined({name: parts[0]})
        if self._is_same(name, parts):
            return Joined({name: parts[0]}, same=True)
        if _ROWS.search(name) and not self._is_head_of_another_kind(name, parts):
            return Joined({name: cat(parts, 0)})
        if _COLUMNS.search(name) and len(parts[0].shape) == 2:
            return Joined({name: cat(parts, 1)})
        if _FC1.search(name):
            fc2 = self._shapes.get(re.sub(r"\.linear_fc1\.\w+$", ".linear_fc2.weight", name))
            return Joined({name: join_fc1(name, parts, fc2, self._settings)})
        raise Unjoined(
            f"{name}: saved by {len(parts)} tensor ranks, and it is not known how their parts of shape"
            f" {parts[0].shape} make up the tensor",
            "save the checkpoint in the torch_dist format, which says so, or leave the tensor out with"
            f" --param-mapping {name}:",
        )

    def _number(self, name: str, parts: Sequence[Gather]) -> Joined:
        if len(parts) == 1 or self._is_same(name, parts):
            return Joined({name: parts[0]}, same=True)
        raise UnsupportedCheckpoint(
            f"{name}: a number without dimensions on each of {len(parts)} tensor ranks",
            "it is not known which one counts; save the checkpoint with one tensor rank",
        )

    def _is_same(self, name: str, parts: Sequence[Gather]) -> bool:
        shape = parts[0].shape
        if self._whole_tower and name.startswith("vision_model."):
            return True
        if name.startswith("output_layer.") and shape[:1] == (1,):
            return True  # a value head: no vocabulary leaves one row to each rank
        if ".mixer." in name:
            return False
        kv_channels = size(self._settings, "kv_channels", None)
        if _OF_HEAD.search(name) and not self._settings.get("multi_latent_attention"):
            return kv_channels is None or shape == (kv_channels,)  # else over all heads, and sharded
        return _SAME.search(name) is not None

    def _is_head_of_another_kind(self, name: str, parts: Sequence[Gather]) -> bool:
        """Whether an output layer is not the vocabulary's: a value head's rows may be whole on every rank."""
        padded = size(self._settings, "padded_vocab_size", None)
        rows = parts[0].shape[0] * len(parts)
        return name.startswith("output_layer.") and padded is not None and rows != padded

    def _down(self, name: str, parts: Sequence[Gather]) -> Joined:
        q = self._size(name, "q_lora_rank") if "_kv_" not in name else 0
        kv = self._size(name, "kv_lora_rank") + self._size(name, "qk_pos_emb_head_dim")
        whole = {"q": q, "kv": kv, "qkv": q + kv}[_found(_DOWN, name)]
        rows, ranks = parts[0].shape[0], len(parts)
        if rows != whole and (rows * ranks != whole or q % ranks):
            raise InconsistentCheckpoint(
                f"{name}: {rows} rows on each of {ranks} tensor ranks, expected {whole} (all on each),"
                f" or {whole / ranks:g}",
                _DAMAGED,
            )
        same = rows == whole
        shared = list(parts[:1] if same else parts)
        if "_qkv_" not in name:
            return Joined({name: cat(shared, 0)}, same)
        first = q if same else q // ranks
        return Joined(
            {
                name.replace("_qkv_", "_q_"): cat([part.narrow(0, 0, first) for part in shared], 0),
                name.replace("_qkv_", "_kv_"): cat(
                    [part.narrow(0, first, rows - first) for part in shared], 0
                ),
            },
            same,
        )

    def _delta(self, name: str, parts: Sequence[Gather]) -> Joined:
        if self._settings.get("experimental_attention_variant") == "gdn2":
            raise UnsupportedCheckpoint(
                f"{name}: of a gated delta net of the second kind (gdn2)",
                "it is not known yet: please report it",
            )
        heads = self._size(name, "linear_num_value_heads")
        key = self._size(name, "linear_num_key_heads") * self._size(name, "linear_key_head_dim")
        value = heads * self._size(name, "linear_value_head_dim")
        sizes = {"query": key, "key": key, "value": value}
        if _found(_DELTA, name) == "in_proj":
            sizes |= {"z": value, "beta": heads, "alpha": heads}
        rows, ranks = parts[0].shape[0], len(parts)
        if rows * ranks != sum(sizes.values()) or any(whole % ranks for whole in sizes.values()):
            raise InconsistentCheckpoint(
                f"{name}: {rows} rows on each of {ranks} tensor ranks, expected"
                f" {sum(sizes.values()) / ranks:g} by the arguments linear_*",
                _DAMAGED,
            )
        tensors, start = {}, 0
        for part, whole in sizes.items():
            each = whole // ranks
            tensors[f"{name}.{part}"] = cat([rank.narrow(0, start, each) for rank in parts], 0)
            start += each
        return Joined(tensors)

    def _size(self, name: str, setting: str) -> int:
        value = size(self._settings, setting, None)
        if value is None:
            raise UnsupportedCheckpoint(
                f"{name}: its rows are divided by the argument {setting}, which is not recorded",
                "save the checkpoint with its `args`, or in the torch_dist format",
            )
        return value


def join_fc1(
    name: str, parts: Sequence[Gather], fc2: tuple[int, ...] | None, settings: Mapping[str, Any]
) -> Gather:
    """A ``linear_fc1`` of its ranks' parts: gate and up each joined, if it is gated.

    `fc2` is the shape of a rank's ``linear_fc2.weight``, which proves it.
    """
    rows = parts[0].shape[0]
    said = None if name.startswith("vision_") else is_gated(settings)
    gated = said
    if fc2 is not None and len(fc2) == 2 and rows in (fc2[1], 2 * fc2[1]):
        gated = rows == 2 * fc2[1]
    elif fc2 is not None:
        gated = None
    if gated is None or (said is not None and gated != said):
        raise InconsistentCheckpoint(
            f"{name}: {rows} rows of each rank, with linear_fc2 of shape {fc2}: neither gate and up nor"
            f" one projection (args: {'not said' if said is None else 'gated' if said else 'not gated'})",
            _DAMAGED,
        )
    if not gated:
        return cat(parts, 0)
    if rows % 2:
        raise InconsistentCheckpoint(f"{name}: {rows} rows, which are no gate and up", _DAMAGED)
    half = rows // 2
    return cat([part.narrow(0, start, half) for start in (0, half) for part in parts], 0)


def without_interleave(name: str, fc1: Gather, block: int, ranks: int = 1) -> Gather:
    """[gate; up] of a ``linear_fc1`` whose blocks of `block` rows are of the gate and of up in turn.

    With several `ranks` it is their halves, the first of each one before the second of any.
    """
    rows, *rest = fc1.shape
    if rows % (2 * ranks * block):
        raise InconsistentCheckpoint(
            f"{name}: {rows} rows, which are not those of {ranks} ranks in pairs of blocks of {block}"
            " (moe_mlp_glu_interleave_size)",
            _DAMAGED,
        )
    halves = fc1.view((2, ranks, rows // (2 * ranks), *rest))
    of_ranks = halves.permute((1, 0, *range(2, len(halves.shape))))
    blocks = of_ranks.view((ranks, rows // (2 * ranks * block), 2, block, *rest))
    return blocks.permute((2, 0, 1, *range(3, len(blocks.shape)))).view((rows, *rest))


def check_alike(name: str, parts: Sequence[Gather]) -> None:
    """Refuse parts that differ in dtype or shape."""
    first = parts[0]
    for part in parts:
        if part.shape != first.shape or part.dtype is not first.dtype:
            raise InconsistentCheckpoint(
                f"{name}: {first.dtype} of shape {first.shape} on one rank, {part.dtype} of shape"
                f" {part.shape} on another",
                "the files do not belong to one save",
            )


def _found(pattern: re.Pattern[str], name: str) -> str:
    match = pattern.search(name)
    return match[1] if match else ""
