"""How the tensors of the hub lie in Megatron's: functions of whole tensors that read nothing.

They are written with the methods that tensors and `lazymerge.arrays.Array` share, so that converting needs no
torch; on a `torch.Tensor` they do the same.

Each function is a `family.Layout`. d is head_dim, G the number of key/value groups, n the query heads
of a group, f the width of a feed-forward, E the number of experts.

    linear_qkv rows      per group: n query heads, a key head, a value head, d rows each
    gated attention      per group: n query heads, n gate heads, a key head, a value head
    linear_fc1 rows      [gate; up], f rows each
    norms                w, or w - 1 where the trainer was told to centre them at zero
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazymerge.arrays import cat, stack
from lazymerge.conversions.megatron.family import Config, Misfit, moves, positive
from lazymerge.errors import InconsistentCheckpoint

if TYPE_CHECKING:
    import torch

HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


@moves
def as_they_are(config: Config, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors without a change."""
    return tensors


# ---- attention ---------------------------------------------------------------------------------------------


@moves
def split_qkv(config: Config, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of the grouped rows; heads in the order of their numbers."""
    groups, each, width = _grouping(config, qkv, parts=1)
    heads = qkv.view(groups, each + 2, width, *qkv.shape[1:])
    query, key, value = heads[:, :each], heads[:, each], heads[:, each + 1]
    return _rows(query, qkv), _rows(key, qkv), _rows(value, qkv)


@moves
def split_gated_qkv(config: Config, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where the attention's output is gated: q has [query; gate] for every head."""
    groups, each, width = _grouping(config, qkv, parts=2)
    heads = qkv.view(groups, 2 * each + 2, width, *qkv.shape[1:])
    query = stack([heads[:, :each], heads[:, each : 2 * each]], dim=2)
    key, value = heads[:, 2 * each], heads[:, 2 * each + 1]
    return _rows(query, qkv), _rows(key, qkv), _rows(value, qkv)


@moves
def joined_qkv(config: Config, qkv: torch.Tensor) -> torch.Tensor:
    """[all q; all k; all v] in one tensor."""
    return cat(split_qkv(config, qkv))


@moves
def vision_qkv(config: Config, qkv: torch.Tensor) -> torch.Tensor:
    """[all q; all k; all v] of a vision tower, whose groups are single heads of q, k and v."""
    heads = positive(config.vision, "num_heads", "num_attention_heads")
    if heads is None:
        raise Misfit("needs vision_config.num_heads, which config.json does not have", "vision_config")
    _check_rank(qkv)
    if qkv.shape[0] % (3 * heads):
        raise Misfit(
            f"has {qkv.shape[0]} rows, expected a multiple of {3 * heads} (q, k and v of {heads} heads)",
            "vision_config.num_heads",
        )
    return _rows(qkv.view(heads, 3, -1, *qkv.shape[1:]).transpose(0, 1), qkv)


@moves
def split_mla_down(config: Config, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q_a_proj and kv_a_proj_with_mqa out of the fused down projection of MLA."""
    fields = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    query, latent, rope = (config.count(field) for field in fields)
    _check_rows(fused, query + latent + rope, " + ".join(fields), *fields)
    return fused[:query], fused[query:]


def _grouping(config: Config, qkv: torch.Tensor, parts: int) -> tuple[int, int, int]:
    """(G, n, d) of grouped rows in which every query head has `parts` parts; checked against the rows.

    head_dim is the config's, or else what the rows say; never hidden_size / heads, which it need not be.
    """
    heads = config.count("num_attention_heads")
    groups = config.count_or_none("num_key_value_heads") or heads
    if heads % groups:
        raise Misfit(
            f"cannot be split: {heads} num_attention_heads are no multiple of {groups} num_key_value_heads",
            *HEADS[:2],
        )
    _check_rank(qkv)
    all_heads = parts * heads + 2 * groups
    width = config.count_or_none("head_dim")
    shown = f"({parts * heads} + 2 x {groups}) heads"
    if width is None and qkv.shape[0] % all_heads:
        raise Misfit(f"has {qkv.shape[0]} rows, expected a multiple of {shown}", *HEADS)
    width = width or qkv.shape[0] // all_heads
    _check_rows(qkv, all_heads * width, f"{shown} x {width}", *HEADS)
    return groups, heads // groups, width


# ---- gated delta net ---------------------------------------------------------------------------------------


DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def join_delta_net(
    config: Config,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    z: torch.Tensor,
    beta: torch.Tensor,
    alpha: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """in_proj_qkvz and in_proj_ba: the parts of each key head together."""
    groups = config.count(DELTA[0])
    sizes = _delta_sizes(config)
    parts = (query, key, value, z, beta, alpha)
    for part, size in zip(parts, sizes, strict=True):
        _check_rows(part, size, "its heads", *DELTA)
    by_head = [part.view(groups, -1, *part.shape[1:]) for part in parts]
    qkvz, ba = cat(by_head[:4], dim=1), cat(by_head[4:], dim=1)
    return _rows(qkvz, query), _rows(ba, beta)


@moves
def split_delta_net(config: Config, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same out of the one tensor [query; key; value; z; beta; alpha]."""
    sizes = _delta_sizes(config)
    _check_rows(fused, sum(sizes), "query, key, value, z, beta and alpha", *DELTA)
    return join_delta_net(config, *fused.split(list(sizes)))  # type: ignore[no-untyped-call]


@moves
def join_rows(config: Config, *parts: torch.Tensor) -> torch.Tensor:
    """The parts one below the other, as in a delta net's convolution [query; key; value]."""
    for part in parts:
        _check_rank(part)
    return cat(parts)


def _delta_sizes(config: Config) -> tuple[int, int, int, int, int, int]:
    """Rows of query, key, value, z, beta and alpha."""
    keys, values, key_width, value_width = (config.count(field) for field in DELTA)
    if values % keys:
        raise Misfit(f"cannot be split: {values} value heads are no multiple of {keys} key heads", *DELTA[:2])
    return keys * key_width, keys * key_width, values * value_width, values * value_width, values, values


# ---- feed-forward and experts ------------------------------------------------------------------------------


@moves
def split_gate_up(config: Config, fc1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gate and up: the halves."""
    _check_halves(fc1)
    gate, up = fc1.chunk(2)
    return gate, up


@moves
def stacked(config: Config, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(E, ...): the experts' tensors as they are."""
    _check_alike(experts)
    return stack(list(experts))


@moves
def stacked_transposed(config: Config, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(E, columns, rows): the experts' matrices transposed; of fc1, [gate | up] side by side."""
    matrices = stacked(config, experts)
    if matrices.dim() != 3:
        raise Misfit(f"has shape {tuple(experts[0].shape)}, expected a matrix")
    return matrices.transpose(1, 2)


@moves
def published_stacked(config: Config, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Qwen3-VL-MoE: `stacked_transposed`, as published; square matrices as they are.

    transformers 5 holds them untransposed and, to load what was published, transposes by the shape:
    those that are square it takes as they are.
    """
    matrices = stacked_transposed(config, experts)
    return matrices.transpose(1, 2) if matrices.shape[1] == matrices.shape[2] else matrices


@moves
def interleaved(config: Config, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """gpt-oss: gate and up rows in turns (g0, u0, g1, ...), then matrices transposed: (E, columns, 2f).

    The rows are counted off last, so that the tensor is few boxes of a larger rank, not one for each row.
    """
    for fc1 in experts:
        _check_halves(fc1)
    whole = stacked(config, experts)
    halves = whole.view(len(experts), 2, -1, *whole.shape[2:])  # (E, 2, f) or (E, 2, f, columns)
    in_turns = halves.transpose(1, 2) if halves.dim() == 3 else halves.permute(0, 3, 2, 1)
    return in_turns.flatten(-2)


# ---- norms -------------------------------------------------------------------------------------------------


@moves
def norm(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """A norm that the hub stores as it is, and so does Megatron unless it was told to centre them."""
    return weight + 1 if is_centred(config) else weight


@moves
def centred_norm(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """A norm that both store as w - 1 (Gemma, Qwen3-Next), unless Megatron was told not to."""
    return weight - 1 if is_centred(config) is False else weight


@moves
def uncentred_norm(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """A norm that the hub stores as it is in a model whose norms Megatron centres."""
    return weight if is_centred(config) is False else weight + 1


_CENTRED_FIELD = "layernorm_zero_centered_gamma"
NORMS = (norm, centred_norm, uncentred_norm)
"""The layouts that may compute something; all others move elements."""


def is_centred(config: Config) -> bool | None:
    """Whether Megatron stored norms as w - 1; None where its settings do not say.

    Megatron-LM hands its argument on to the field of the class, so that the argument goes before a field
    that is off. A field that is on was set by somebody else.
    """
    argument, field = (config.megatron.get(name) for name in ("apply_layernorm_1p", _CENTRED_FIELD))
    if argument is False and field is True:
        raise InconsistentCheckpoint(
            f"the trainer's arguments contradict each other: apply_layernorm_1p is False, {_CENTRED_FIELD} is"
            " True, so that norms may be stored as they are or less 1",
            "give a table of your own by --family FILE.py, whose layouts of norms do not ask",
        )
    return next((value for value in (argument, field) if isinstance(value, bool)), None)


# ---- multi-token prediction --------------------------------------------------------------------------------


@moves
def swapped_halves(config: Config, projection: torch.Tensor) -> torch.Tensor:
    """MiMo: the columns for the hidden state before those for the embedding."""
    if projection.dim() != 2 or projection.shape[1] % 2:
        raise Misfit(f"has shape {tuple(projection.shape)}, expected a matrix of two halves", "hidden_size")
    embedding, hidden = projection.chunk(2, dim=1)
    return cat([hidden, embedding], dim=1)


# ---- shapes ------------------------------------------------------------------------------------------------


def _rows(parts: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Heads and what they are made of counted off as rows; what one row is, is as in the tensor `of`."""
    return parts.reshape(-1, *of.shape[1:])


def _check_rank(tensor: torch.Tensor) -> None:
    if tensor.dim() < 1:
        raise Misfit("is a single number, expected a weight or a bias")


def _check_rows(tensor: torch.Tensor, rows: int, made_of: str, *fields: str) -> None:
    _check_rank(tensor)
    if tensor.shape[0] != rows:
        raise Misfit(f"has {tensor.shape[0]} rows, expected {rows} ({made_of})", *fields)


def _check_halves(fc1: torch.Tensor) -> None:
    _check_rank(fc1)
    if fc1.shape[0] % 2:
        raise Misfit(f"has {fc1.shape[0]} rows, expected two halves, gate and up", "intermediate_size")


def _check_alike(experts: Sequence[torch.Tensor]) -> None:
    shapes = sorted({tuple(expert.shape) for expert in experts})
    if len(shapes) != 1:
        raise Misfit(f"differs in shape between experts: {shapes[0]} and {shapes[-1]}")
