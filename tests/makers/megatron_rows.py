"""The order of rows in Megatron's tensors, one head or row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def grouped_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """Per group: the rows of its query heads, then of its key, then of its value."""
    size = len(k) // groups
    pieces = []
    for group in range(groups):
        for head in range(group * (heads // groups), (group + 1) * (heads // groups)):
            pieces.append(q[head * size : (head + 1) * size])
        pieces.append(k[group * size : (group + 1) * size])
        pieces.append(v[group * size : (group + 1) * size])
    return torch.cat(pieces)


def grouped_qkv_with_gate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, groups: int
) -> torch.Tensor:
    """As `grouped_qkv`, with the group's gates behind its queries. In `q` each head is [query; gate]."""
    size = len(k) // groups
    pieces = []
    for group in range(groups):
        own = range(group * (heads // groups), (group + 1) * (heads // groups))
        for head in own:
            pieces.append(q[2 * head * size : (2 * head + 1) * size])
        for head in own:
            pieces.append(q[(2 * head + 1) * size : (2 * head + 2) * size])
        pieces.append(k[group * size : (group + 1) * size])
        pieces.append(v[group * size : (group + 1) * size])
    return torch.cat(pieces)


def per_head_qkv(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """[all q; all k; all v] as per head: its query, its key, its value (ConcatenatedQKVMapping)."""
    third = len(qkv) // 3
    size = third // heads
    pieces = []
    for head in range(heads):
        for part in range(3):
            start = part * third + head * size
            pieces.append(qkv[start : start + size])
    return torch.cat(pieces)


def gate_and_up(items: list[torch.Tensor], alternate: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The rows of gate and those of up, which come in turn (`alternate`) or one half after the other."""
    if alternate:
        return items[0::2], items[1::2]
    return items[: len(items) // 2], items[len(items) // 2 :]


@dataclass
class RowReader:
    """Rows of a tensor, from the first on."""

    tensor: torch.Tensor
    at: int = 0

    def read(self, rows: int) -> torch.Tensor:
        self.at += rows
        assert self.at <= len(self.tensor)
        return self.tensor[self.at - rows : self.at]
