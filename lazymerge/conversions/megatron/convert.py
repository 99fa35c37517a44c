"""A Megatron checkpoint under the hub's names and in its layouts. No byte of a tensor is read.

Every tensor is used by one rule of the family's table, or left out with a reason, or it is an error:
nothing is dropped because nobody knew it. Layers, experts and blocks have to be complete, as many as
config.json says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lazymerge.arrays import Array
from lazymerge.checkpoint import Checkpoint, Copy, Note
from lazymerge.conversions.megatron import head as heads
from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.agree import check_agreement, unconfirmed
from lazymerge.conversions.megatron.behaviour import differing
from lazymerge.conversions.megatron.beside import check_beside
from lazymerge.conversions.megatron.complete import check_blocks, check_experts, lacking_of_layers
from lazymerge.conversions.megatron.families import family_of, notes_on
from lazymerge.conversions.megatron.family import Config, Family, Misfit
from lazymerge.conversions.megatron.mapping import apply_mapping
from lazymerge.conversions.megatron.mtp import check_mtp
from lazymerge.conversions.megatron.table import CompiledRule, Match, Table
from lazymerge.conversions.megatron.vocabulary import cut_note, cut_vocabulary
from lazymerge.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    LazymergeError,
    PlanError,
    UnsupportedCheckpoint,
)
from lazymerge.fill import equal
from lazymerge.gather import Gather

if TYPE_CHECKING:
    import torch

_QUANTIZED = "quantization_config"
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Converted:
    """The checkpoint as the hub has it, and the fields that its config.json has to have instead.

    A field that is to be None has to go.
    """

    checkpoint: Checkpoint
    config_changes: dict[str, Any]


def convert(
    checkpoint: Checkpoint,
    config: Mapping[str, Any] | None,
    *,
    family: Family | None = None,
    mapping: Sequence[tuple[str, str]] = (),
    tied: bool | None = None,
    value_model: bool | None = None,
    force_shapes: bool = False,
) -> Converted:
    """The checkpoint, whose names are canonical (lazymerge.formats.megatron), as a Hugging Face model.

    config        what config.json holds
    family        the table; default: that of the config's model_type
    mapping       (OLD, NEW) pairs that come before the table (see `mapping.parse_mapping`)
    tied          True: the output layer is tied, whatever says otherwise; else all that say so must agree
    value_model   whether the output layer is a value head; None: its shape decides
    force_shapes  leave a vocabulary of the wrong size as it is, for a later step to cut or to fill

    Raises `SourceError` in its kinds for a checkpoint that does not go with the config, and `PlanError`
    for a mapping that cannot be followed.
    """
    if config is None:
        raise PlanError(
            "config.json: not found; Megatron's files do not say what model they hold",
            "give --hf-config DIR, the folder with the model's config.json",
        )
    notes = [] if family is None else notes_on(family, config, checkpoint.gathers)
    family = family or family_of(config)
    try:
        text = config.get("text_config")
        known = Config(text if isinstance(text, dict) else config, config, checkpoint.settings)
        check_beside(checkpoint.sidecars, config)
        work = _Conversion(checkpoint.with_notes(*notes), known, family, force_shapes)
        return work.run(mapping, tied, value_model)
    except Misfit as error:  # of the config itself; those of a tensor are caught where its name is known
        raise PlanError(f"config.json: the conversion {error.problem}", _about(error.fields)) from None


@dataclass(slots=True)
class _Job:
    """One application of a rule: the names that are its inputs so far."""

    rule: CompiledRule
    match: Match  # any of them: the numbers that all share
    inputs: dict[tuple[int, int], str] = field(default_factory=dict)  # (position, collected number) -> name


@dataclass(slots=True)
class _Conversion:
    """The state of one conversion."""

    checkpoint: Checkpoint
    config: Config
    family: Family
    force_shapes: bool
    table: Table = field(init=False)
    layers: int = field(init=False)
    sources: dict[str, Gather] = field(init=False)
    made: dict[str, Gather] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    became: dict[str, str] = field(default_factory=dict)  # Megatron name -> the first of what it became
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    shifted: int = 0

    def __post_init__(self) -> None:
        self.table = Table(self.family.rules)
        self.layers = self.config.layers
        self.sources = dict(self.checkpoint.gathers)

    def run(
        self, mapping: Sequence[tuple[str, str]], tied: bool | None, value_model: bool | None
    ) -> Converted:
        check_agreement(self.config, self.family)
        mapped, self.left_out = apply_mapping(mapping, self.sources)
        for name, new in mapped.items():
            self._make(new, self.sources[name], name)
        for name in (*mapped, *self.left_out):
            del self.sources[name]
        renamed = heads.OUTPUT in mapped or heads.OUTPUT in self.left_out
        if renamed and tied:
            raise PlanError(
                f"{heads.OUTPUT}: --param-mapping says what becomes of it, and --tie-word-embedding too",
                f"leave out one; --tie-word-embedding alone writes no output layer and sets {heads.FLAG}",
            )
        head = heads.Head() if renamed else self._head(tied, value_model)
        for name, new in head.names.items():
            self._make(new, self.sources.pop(name), name)
        for name, reason in head.left_out.items():
            self._note_untied(self.sources.pop(name))
            self.left_out[name] = reason
        self._cut_vocabulary()
        matches = self._matches()
        by_hand = {name: match for name in mapped if (match := self.table.find(name)) is not None}
        check_blocks(matches, self.config, by_hand)
        check_experts(matches, self.config, by_hand)
        for job in _jobs(matches.items()):
            self._apply(job)
        mapped_away = self.left_out.keys() - head.left_out.keys()
        check_mtp(self.checkpoint.gathers, matches, self.made, self.table, self.config, mapped_away)
        notes = (*head.notes, *self.notes, *self._notes(matches.values()))
        made = self.checkpoint.with_gathers(self.made, *notes, left_out=self.left_out)
        changes = dict(head.changes)
        if self.config.whole.get(_QUANTIZED) is not None:
            changes[_QUANTIZED] = None
        return Converted(replace(made, copies=self._copies()), changes)

    def _head(self, tied: bool | None, value_model: bool | None) -> heads.Head:
        if heads.is_value_head(self.sources, self.config, value_model):
            if tied:
                raise PlanError(
                    f"{heads.OUTPUT}: a value head of {self.sources[heads.OUTPUT].shape[0]} rows, which"
                    " --tie-word-embedding would leave out",
                    "leave out --tie-word-embedding",
                )
            return heads.value_head(self.sources, self.config)
        rule = self.table.find(heads.OUTPUT)
        mapped = rule is not None and any(name in self.made for name in rule.rule.hf)
        there = mapped or heads.OUTPUT in self.sources
        copied = heads.OUTPUT in self.checkpoint.left_out
        return heads.output_head(there, self.config, self.family, tied, copied=copied)

    def _note_untied(self, output: Gather) -> None:
        """Say so where an output layer is left out as tied to the embedding and has other values."""
        embedding = self.sources.get(EMBEDDING)
        if embedding is not None and output.shape and output.shape == embedding.shape:
            rows = min(self.config.count("vocab_size"), output.shape[0])  # the rest is padding
            words = output.narrow(0, 0, rows), embedding.narrow(0, 0, rows)
            if output.dtype is embedding.dtype and equal(*words):
                return
        text = f"{heads.OUTPUT}: left out by --tie-word-embedding, and its values are not the embedding's"
        self.notes.append(Note("warning", text, heads.OUTPUT, lossy=True))

    def _cut_vocabulary(self) -> None:
        for name in (EMBEDDING, heads.OUTPUT):
            if name in self.sources:
                whole = self.sources[name]
                cut = cut_vocabulary(name, whole, self.config, force=self.force_shapes)
                if cut is not whole:
                    self.notes.append(cut_note(name, whole, self.config))
                self.sources[name] = cut

    def _matches(self) -> dict[str, Match]:
        """The rule of every tensor that is left; those that the table drops are taken out."""
        matches: dict[str, Match] = {}
        unknown: list[str] = []
        for name in self.sources:
            match = self.table.find(name)
            if match is None:
                unknown.append(name)
            elif match.rule.dropped:
                self.left_out[name] = match.rule.dropped
            else:
                matches[name] = match
        if unknown:
            raise self._dead_end(unknown)
        return matches

    def _dead_end(self, unknown: list[str]) -> UnsupportedCheckpoint:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        nearest = ", ".join(self.table.nearest(unknown[0])) or "none"
        return UnsupportedCheckpoint(
            f"{unknown[0]}{more}: the table of {self.family.name} does not know it (nearest: {nearest})",
            f"say where it goes with --param-mapping {unknown[0]}:NEW, or leave it out with"
            f" --param-mapping {unknown[0]}: (nothing after the colon)",
        )

    def _apply(self, job: _Job) -> None:
        """Make the tensors of one application of a rule."""
        names = [self._inputs(job, position) for position in range(len(job.rule.megatron))]
        flat = [name for each in names for name in ([each] if isinstance(each, str) else each)]
        targets = [job.match.filled(name, self.layers) for name in job.rule.hf]
        if job.rule.layout is None and len(flat) == len(targets) == 1:
            self._make(targets[0], self.sources[flat[0]], flat[0])
            return
        dtypes = {self.sources[name].dtype.name for name in flat}
        if len(dtypes) > 1:
            raise InconsistentCheckpoint(
                f"{flat[0]}: {' and '.join(sorted(dtypes))} among the {len(flat)} tensors that become"
                f" {targets[0]}",
                "nothing is cast silently; save the checkpoint in one dtype",
            )
        for name in flat:
            self.became.setdefault(name, targets[0])
        for target, gather in zip(targets, self._laid_out(job, names, len(targets)), strict=True):
            self._make(target, gather, flat[0])

    def _inputs(self, job: _Job, position: int) -> str | list[str]:
        """The name of a rule's input, or all of them in order where it collects."""
        template = job.rule.megatron[position]
        numbers = sorted(number for at, number in job.inputs if at == position)
        if not numbers:
            missing = template.format_map({**job.match.numbers, job.rule.collected: 0})
            present = next(iter(job.inputs.values()))
            raise IncompleteCheckpoint(
                f"{missing}: not in the checkpoint, which has {present}; they go together",
                "give all of the checkpoint's files, or leave the other out with --param-mapping",
            )
        if f"{{{job.rule.collected}}}" not in template:
            return job.inputs[position, 0]
        return [job.inputs[position, number] for number in numbers]

    def _laid_out(self, job: _Job, names: list[str | list[str]], count: int) -> list[Gather]:
        """The layout's results, which are as many as the rule has names."""
        layout = job.rule.layout or layouts.as_they_are
        first = names[0] if isinstance(names[0], str) else names[0][0]
        wrap: Callable[[Gather], Any] = Array if getattr(layout, "moves", False) else _lazy
        inputs = [
            wrap(self.sources[each]) if isinstance(each, str) else [wrap(self.sources[name]) for name in each]
            for each in names
        ]
        try:
            result = layout(self.config, *inputs)
            made = [_gather_of(each) for each in (result if isinstance(result, tuple | list) else [result])]
        except Misfit as error:
            raise InconsistentCheckpoint(f"{first}: {error.problem}", _about(error.fields)) from None
        except LazymergeError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # a layout may be anyone's, and a hostile shape may break any of them
            reason = (str(error).splitlines() or [""])[0]
            raise UnsupportedCheckpoint(
                f"{first}: its layout in the table of {self.family.name} fails on shape"
                f" {self.sources[first].shape}: {type(error).__name__}: {reason}",
                "check that config.json is this model's; if it is, the table is wrong",
            ) from None
        if len(made) != count:
            raise UnsupportedCheckpoint(
                f"{first}: its layout gives {len(made)} results, expected {count} tensors",
                f"the table of {self.family.name} is wrong",
            )
        if layout in layouts.NORMS and made[0] is not self.sources[first]:
            self.shifted += 1
        return made

    def _make(self, name: str, gather: Gather, source: str) -> None:
        if name in self.made:
            raise InconsistentCheckpoint(
                f"{self.owners[name]} and {source} both become {name}",
                "they are two names for one tensor; leave one out with --param-mapping NAME:",
            )
        self.made[name] = gather
        self.owners[name] = source
        self.became.setdefault(source, name)

    def _copies(self) -> Callable[[], Iterator[Copy]]:
        """The pairs that should be equal, by what they became."""
        copies, became = self.checkpoint.copies, self.became
        return lambda: (copy._replace(name=became.get(copy.name, copy.name)) for copy in copies())

    def _notes(self, matches: Collection[Match]) -> list[Note]:
        notes = []
        if self.shifted:
            text = f"{self.shifted} norms are stored centred at zero on one side: 1 is added or taken away"
            notes.append(Note("info", text))
        tower = any(match.rule.layout is layouts.vision_qkv for match in matches)
        note = unconfirmed(self.config, tower=tower)
        notes += [*([] if note is None else [note]), *differing(self.config)]
        if self.config.whole.get(_QUANTIZED) is not None:
            text = f"config.json's {_QUANTIZED} is left out: the weights are not quantised"
            notes.append(Note("info", text))
        lacking = lacking_of_layers(matches, self.made)
        if lacking is not None:
            notes.append(Note("warning", lacking))
        mtp = [match for match in matches if "K" in match.numbers]
        if any("{M}" in name for match in mtp for name in match.rule.hf):
            text = "MTP layers share embedding and output layer: the hub's copies of them are not written"
            notes.append(Note("info", text))
        named = self.config.hf.get("num_nextn_predict_layers")
        if named and not mtp and self.table.find("mtp.layers.0.enorm.weight") is not None:
            layers = f"{named!r:.20} MTP layer{'' if named == 1 else 's'} (num_nextn_predict_layers)"
            text = f"config.json has {layers}, the checkpoint none"
            notes.append(Note("info", text))
        return notes


def _lazy(gather: Gather) -> torch.Tensor:
    from lazymerge.tensor import LazyTensor  # torch, which only the layouts of others need

    return LazyTensor(gather)


def _gather_of(made: object) -> Gather:
    """The gather of what a layout has made: an `Array`, a lazy tensor or a real one."""
    if isinstance(made, Array):
        return made.gather
    import torch

    from lazymerge.elements import in_memory
    from lazymerge.tensor import LazyTensor

    if not isinstance(made, torch.Tensor):
        raise TypeError(f"it gives {type(made).__name__}, expected a tensor")
    return made.lazy_gather if isinstance(made, LazyTensor) else in_memory(made)


def _jobs(matches: Iterable[tuple[str, Match]]) -> Iterable[_Job]:
    """The matches put together by rule and by the numbers that its results have."""
    jobs: dict[tuple[int, ...], _Job] = {}
    for name, match in matches:
        rule = match.rule
        key = (rule.index, *(match.numbers.get(kept, -1) for kept in rule.kept))
        job = jobs.setdefault(key, _Job(rule, match))
        job.inputs[match.position, match.numbers.get(rule.collected, 0)] = name
    return jobs.values()


def _about(fields: tuple[str, ...]) -> str:
    if not fields:
        return "the file that it comes from is not what it should be, or config.json is another model's"
    return f"check {', '.join(fields)} in config.json (--hf-config DIR gives another)"
