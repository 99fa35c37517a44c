"""Names as the model has them: without what wrappers put in front, and only those that are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lazymerge.checkpoint import Checkpoint
from lazymerge.errors import InconsistentCheckpoint, PlanError

ANYWHERE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""What FSDP1, activation checkpointing and torch.compile put before any module they wrap."""

IN_FRONT = "module."
"""What DistributedDataParallel and others put before all names, if it is before all of them."""


def strip_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the names of the unwrapped model.

    Raises `InconsistentCheckpoint` if two names become one.
    """
    names = {name: _without_wrappers(name) for name in checkpoint.gathers}
    while names and all(new.startswith(IN_FRONT) for new in names.values()):
        names = {old: _without_wrappers(new.removeprefix(IN_FRONT)) for old, new in names.items()}
    owners: dict[str, str] = {}
    for old, new in names.items():
        if new in owners:
            raise InconsistentCheckpoint(
                f"{owners[new]} and {old} are both {new} without the wrappers' prefixes",
                "save the state dict again with one of them renamed or left out",
            )
        owners[new] = old
    if all(old == new for old, new in names.items()):
        return checkpoint
    return checkpoint.renamed(names)


def _without_wrappers(name: str) -> str:
    *parents, last = name.split(".")
    return ".".join([*(part for part in parents if part not in ANYWHERE), last])


def select(checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]) -> Checkpoint:
    """The tensors whose names match a pattern of `include` (all, if there is none) and none of `exclude`.

    Patterns are those of a shell: ``*`` matches dots too. A pattern that matches no whole name is tried on
    what follows each dot: ``lora_*`` for all that is called so, wherever it is. One that matches nothing is
    a `PlanError`.
    """
    wanted, unwanted = (
        {name for pattern in patterns for name in _matching(checkpoint, option, pattern)}
        for option, patterns in (("--include", include), ("--exclude", exclude))
    )
    reasons = {}
    for name in checkpoint.gathers:
        if include and name not in wanted:
            reasons[name] = "not among --include"
        elif name in unwanted:
            reasons[name] = "excluded by --exclude"
    if not reasons:
        return checkpoint
    kept = {name: gather for name, gather in checkpoint.gathers.items() if name not in reasons}
    return checkpoint.with_gathers(kept, left_out=reasons)


def _matching(checkpoint: Checkpoint, option: str, pattern: str) -> list[str]:
    for match in (fnmatchcase, _matches_an_end):
        found = [name for name in checkpoint.gathers if match(name, pattern)]
        if found:
            return found
    raise PlanError(
        f"{option} {pattern!r} matches none of {len(checkpoint.gathers)} tensors",
        f"names look like {next(iter(checkpoint.gathers), '')}; * matches dots too",
    )


def _matches_an_end(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[at:]), pattern) for at in range(1, len(parts)))
