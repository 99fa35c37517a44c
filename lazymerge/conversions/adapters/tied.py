"""Tensors of the base that are tied, and what becomes of that when an adapter is for one of them.

PEFT adapts the one layer that it is told to, so that its model computes with two different weights from then
on. Folding keeps that: both are written, and config.json says that they are tied no more. A model with an
encoder and a decoder can not say so: more hangs on the flag there (T5 scales its output by it).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.adapters.vocabulary import (
    embedding_of,
    is_language_model,
    tied_head,
    untied,
)
from lazymerge.errors import UnsupportedCheckpoint
from lazymerge.gather import Gather

if TYPE_CHECKING:
    from lazymerge.conversions.architecture import Architecture

_WITH_PEFT = "merge it with PEFT's merge_and_unload, and see whether what it saves loads as it was"


class Ties:
    """What a base ties, by its config and, where it is known, by its class.

    Names that the base leaves to a loader to tie are put into `base`, with the values that they would have,
    and are in `absent`.
    """

    def __init__(
        self, base: dict[str, Gather], config: Mapping[str, Any], architecture: Architecture | None
    ) -> None:
        self._config = config
        self._encodes = bool(config.get("is_encoder_decoder"))
        self._class = "its class"
        pairs: dict[str, str] = {}
        if architecture is None:
            head = tied_head(base, config) if is_language_model(config) else None
            embedding = embedding_of(base)
            if head is not None and embedding is not None:
                pairs[head] = embedding
        else:
            pairs = dict(architecture.tied)
            self._encodes |= bool(architecture.defaults.get("is_encoder_decoder"))
            self._class = architecture.class_name
        self._pairs = {one: other for one, other in pairs.items() if other in base}
        self.absent = tuple(one for one in self._pairs if one not in base)
        base.update({one: base[self._pairs[one]] for one in self.absent})

    def of(self, name: str) -> list[str]:
        """The tensor, and those that it is tied to: PEFT trains the rows of all as one."""
        first = self._pairs.get(name, name)
        tied = [one for one, other in self._pairs.items() if other == first]
        return [first, *tied]

    def settle(
        self,
        gathers: dict[str, Gather],
        touched: Collection[str],
        same: Callable[[str, str], bool],
        *,
        keeps: bool,
    ) -> tuple[list[tuple[str, str]], dict[str, Any], list[Note]]:
        """Keep what is tied so in the result, or say that it is so no more.

        `same` says whether the same is done to two tensors, `keeps` whether PEFT kept them tied in training.
        Gives the pairs that have come apart, what config.json has to say of it, and notes. Raises
        `UnsupportedCheckpoint` where it cannot say so.
        """
        apart: list[tuple[str, str]] = []
        notes: list[Note] = []
        for one, other in self._pairs.items():
            if one not in gathers or other not in gathers:  # a head that was left out
                continue
            own = sorted({one, other}.intersection(touched))
            if not own:
                continue
            if same(one, other) or (keeps and one not in touched):
                gathers[one] = gathers[other]
                continue
            text = f"{one} and {other} are tied in the base, the adapter is for {' and '.join(own)}"
            if self._encodes:
                raise UnsupportedCheckpoint(
                    f"{text}, and config.json cannot say that they are two in {self._class}", _WITH_PEFT
                )
            apart.append((one, other))
            notes.append(Note("warning", f"{text}: both are written, and tied no more", one))
        if not apart:
            for name in self.absent:
                gathers.pop(name, None)
        return apart, untied(self._config) if apart else {}, notes
