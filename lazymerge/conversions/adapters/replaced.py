"""What takes the place of a base's tensors, or of rows of them: trained biases, heads, token rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lazymerge.conversions.adapters.names import BaseNames
from lazymerge.conversions.adapters.parts import Whole
from lazymerge.conversions.adapters.settings import Settings
from lazymerge.conversions.adapters.sums import with_rows
from lazymerge.conversions.adapters.tied import Ties
from lazymerge.conversions.adapters.vocabulary import may_grow
from lazymerge.conversions.dtypes import Wanted, cast
from lazymerge.errors import InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from lazymerge.files.dtype import DTYPES, FLOATS
from lazymerge.fill import alike
from lazymerge.gather import Gather

GIVE_ITS_BASE = "give the base that the adapter was trained on"


class Replaced:
    """What has been found to be put in place of a base's tensors.

    `whole` are tensors, each with the adapter that it is of; `rows` are those of an embedding, with their
    numbers.
    """

    def __init__(self, base: Mapping[str, Gather], names: BaseNames, ties: Ties, wanted: Wanted) -> None:
        self._base = base
        self._names = names
        self._ties = ties
        self._wanted = wanted
        self.whole: dict[str, tuple[Gather, str]] = {}
        self.rows: dict[str, tuple[Gather, tuple[int, ...]]] = {}

    @property
    def touched(self) -> set[str]:
        """The tensors of the result that are not the base's."""
        return {*self.whole, *self.rows}

    def put(
        self, name: str, whole: Whole, settings: Settings, weight: float, summed: Collection[str]
    ) -> bool:
        """Put a whole tensor in the base's place; False if the base has none, and it is no new module.

        `summed` are the tensors that other adapters add to.
        """
        target = self._names.find(name)
        if target is None:
            if not settings.is_saved_whole(name.rpartition(".")[0]):
                return False
            self._refuse_shared(name, settings, weight, summed)
            self.whole[name] = whole.gather, settings.name
            return True
        base = self._base[target]
        gather = whole.gather
        if gather.shape != base.shape and (
            gather.shape[1:] != base.shape[1:]
            or len(gather.shape) < 1
            or not (may_grow(target, settings) or may_grow(whole.name, settings))
        ):
            raise InconsistentCheckpoint(
                f"{settings.name}: {whole.name} has shape {gather.shape}, the base's {target} {base.shape}",
                GIVE_ITS_BASE,
            )
        if gather.dtype is not base.dtype and not {gather.dtype.name, base.dtype.name} <= set(FLOATS):
            raise InconsistentCheckpoint(
                f"{settings.name}: {whole.name} is of {gather.dtype}, the base's {target} of {base.dtype}",
                "give the base that the adapter was trained on, not quantised",
            )
        kind = self._wanted.of(target, base.dtype)
        if gather.shape == base.shape and alike(cast(gather, kind, target), cast(base, kind, target)):
            return True  # a layer that was saved and not trained
        self._refuse_shared(target, settings, weight, summed)
        self.whole[target] = gather, settings.name
        return True

    def put_rows(
        self,
        module: str,
        rows: Gather,
        settings: Settings,
        weight: float,
        summed: Collection[str],
        before: Collection[str],
    ) -> bool:
        """Put rows in the place of an embedding's, and of what is tied to it; as `put`.

        `before` are the tensors whose place other adapters have taken: only the same one may do both.
        """
        target = self._names.find(f"{module}.weight")
        if target is None:
            return False
        base = self._base[target]
        if base.dtype.name not in FLOATS:
            raise quantised(settings, target, base)
        tokens = settings.tokens
        if isinstance(tokens, Mapping):
            tokens = next((each for key, each in tokens.items() if f".{module}".endswith(f".{key}")), None)
        shape = base.shape
        count = self.whole[target][0].shape[0] if target in self.whole else shape[0]
        if tokens is None or rows.shape != (len(tokens), *shape[1:]) or any(each >= count for each in tokens):
            raise InconsistentCheckpoint(
                f"{settings.name}: rows of shape {rows.shape} for the {len(tokens or ())} tokens of"
                f" trainable_token_indices in {target} {shape}",
                GIVE_ITS_BASE,
            )
        for name in self._ties.of(target):
            if name not in self.whole or name in before:
                self._refuse_shared(name, settings, weight, summed, "of which it has trained rows, that take")
            self.rows[name] = rows, tokens
        return True

    def _refuse_shared(
        self,
        target: str,
        settings: Settings,
        weight: float,
        summed: Collection[str],
        how: str = "which was saved whole and takes",
    ) -> None:
        """Refuse what would be a mixture of tensors that were trained whole."""
        if weight != 1:
            raise PlanError(
                f"{settings.name}: a weight of {weight:g} for {target}, {how} the base's place",
                "give it the weight 1",
            )
        if target in self.whole or target in self.rows:
            raise PlanError(
                f"{settings.name}: {target} was trained whole, or rows of it, by another adapter too",
                "fold one of the two only",
            )
        if target in summed:
            raise mixed(settings.name, target)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that products are added to: perhaps one that takes the base's place."""
        return self.value(name).shape

    def value(self, name: str) -> Gather:
        """The base's tensor, or what takes its place, in its own type."""
        return self.whole[name][0] if name in self.whole else self._base[name]

    def result(self, name: str, *, summed: bool) -> Gather:
        """The tensor with nothing added, if anything took its place in the type that it has to have.

        `summed` says that something is added, which is rounded then.
        """
        value = self.value(name)
        kind = self._wanted.of(name, self._base.get(name, value).dtype)
        if name in self.rows:
            if summed:
                kind = DTYPES["float64" if "float64" in {value.dtype.name, kind.name} else "float32"]
            rows, tokens = self.rows[name]
            return with_rows(cast(value, kind, name), cast(rows, kind, name), tokens)
        return cast(value, kind, name) if name in self.whole else value

    def same(self, one: str, other: str) -> bool:
        """Whether the same takes the place of both tensors."""
        if (one in self.rows) != (other in self.rows) or (one in self.whole) != (other in self.whole):
            return False
        return one not in self.whole or alike(self.whole[one][0], self.whole[other][0])

    def pairs(self, names: Sequence[str], summed: Collection[str]) -> list[tuple[Gather | None, Gather]]:
        """(the base's, what takes its place) of these tensors; in one type."""
        found = [(name, self.result(name, summed=name in summed)) for name in names]
        return [
            (cast(self._base[name], now.dtype, name) if name in self._base else None, now)
            for name, now in found
        ]


def mixed(adapter: str, target: str) -> PlanError:
    """The error for a tensor that one adapter adds to, and that another one trained."""
    return PlanError(
        f"{adapter}: {target} was trained whole, or rows of it, by one adapter, and another has LoRA of it",
        "fold one of the two only",
    )


def quantised(settings: Settings, name: str, base: Gather) -> UnsupportedCheckpoint:
    """The error for a base to which nothing can be added."""
    return UnsupportedCheckpoint(
        f"{settings.name}: {name} of the base is of {base.dtype}, to which nothing can be added",
        "give the base that is not quantised",
    )
