"""Which family a model belongs to: those that are known, and one from the user's own file.

A family from elsewhere registers through the entry point group ``lazymerge.families``, or is the
object `FAMILY` of a Python file that the user names.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.megatron.family import Family
from lazymerge.conversions.megatron.table import Table, as_tuple
from lazymerge.errors import PlanError, UnsupportedCheckpoint

_HOW = (
    "give --family FILE.py, which has an object FAMILY as lazymerge/conversions/megatron/family.py describes,"
    " or install a package that registers one in the entry point group lazymerge.families"
)


def families() -> dict[str, Family]:
    """The families there are, by model type. Those of others come first."""
    found: dict[str, Family] = {}
    for entry in sorted(entry_points(group="lazymerge.families"), key=lambda entry: entry.name):
        try:
            family = entry.load()
        except Exception as error:  # whatever somebody's module raises
            raise PlanError(
                f"the family {entry.name} ({entry.value}) cannot be loaded: {_first_line(error)}",
                "update or uninstall the package that registers it",
            ) from None
        family = _checked(family, f"the family {entry.name} ({entry.value})")
        for model_type in family.model_types:
            found.setdefault(model_type, family)
    from lazymerge.conversions.megatron.tables import FAMILIES

    for family in FAMILIES:
        for model_type in family.model_types:
            found.setdefault(model_type, family)
    return found


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its model_type.

    Raises `UnsupportedCheckpoint` for an unknown one, with the known ones and how to add one.
    """
    model_type = config.get("model_type")
    known = families()
    if isinstance(model_type, str) and model_type in known:
        return known[model_type]
    close = difflib.get_close_matches(str(model_type)[:100], known, 1, cutoff=0.0)
    raise UnsupportedCheckpoint(
        f"config.json: no table for model_type {model_type!r:.60} (closest: {close[0]};"
        f" known: {', '.join(sorted(known))})",
        _HOW,
    )


def load_family(spec: str | Path) -> Family:
    """The object `FAMILY` of a Python file, or a known family by its name or model type.

    The file is the user's own code, run because he names it. Raises `PlanError`.
    """
    known = families()
    by_name = {family.name: family for family in known.values()} | known
    if str(spec) in by_name:
        return by_name[str(spec)]
    path = Path(spec)
    if not is_file(path):
        raise PlanError(
            f"--family {spec}: neither a file nor one of {', '.join(sorted(by_name))}",
            "give the path of a Python file with an object FAMILY",
        )
    loading = importlib.util.spec_from_file_location("lazymerge_family", path)
    if loading is None or loading.loader is None:
        raise PlanError(f"--family {spec}: no Python file", "give the path of a file that ends in .py")
    module = importlib.util.module_from_spec(loading)
    try:
        loading.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise PlanError(f"--family {spec}: {_first_line(error)}", "mend the file") from None
    return _checked(getattr(module, "FAMILY", None), f"--family {spec}: FAMILY")


def notes_on(family: Family, config: Mapping[str, Any], names: Iterable[str]) -> list[Note]:
    """What speaks against a family that somebody chose for the checkpoint with these names.

    A rule that is its own and fits nothing is probably misspelt; built-in ones are for models that differ.
    """
    notes = []
    model_type = config.get("model_type")
    if model_type not in family.model_types:
        text = f"the family {family.name} is for model_type {' and '.join(family.model_types) or 'none'}"
        notes.append(Note("info", f"{text}, config.json says {model_type!r:.60}"))
    known = [rule for each in families().values() for rule in each.rules]
    table = Table(family.rules)
    fitting = {each for name in names if (match := table.find(name)) for each in match.rule.megatron}
    for rule in family.rules:
        templates = as_tuple(rule.megatron)
        if rule not in known and not fitting & {
            each.replace("{p}", kind) for each in templates for kind in ("weight", "bias")
        }:
            notes.append(Note("info", f"{family.name}: no tensor of the checkpoint fits {templates[0]}"))
    return notes


def is_file(path: Path) -> bool:
    """Whether there is such a file; never an error."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _checked(family: object, where: str) -> Family:
    """The family, which is one and whose rules can be compiled."""
    if not isinstance(family, Family):
        raise PlanError(
            f"{where} is {type(family).__name__}, expected lazymerge.conversions.megatron.family.Family",
            "see a built-in table, such as lazymerge/conversions/megatron/tables/llama.py",
        )
    types: object = family.model_types
    problem = ""
    if not isinstance(types, tuple | list) or not all(isinstance(each, str) for each in types):
        problem = f"model_types is {types!r:.60}, expected a tuple of names"
    elif not all(isinstance(flag, bool) for flag in (family.tied, family.interleaved)):
        problem = f"tied is {family.tied!r:.60} and interleaved {family.interleaved!r:.60}, expected bool"
    if problem:
        raise PlanError(f"{where}: {problem}", "see lazymerge/conversions/megatron/family.py")
    try:
        Table(family.rules)
    except Exception as error:  # whatever the user has put into the rules
        raise PlanError(f"{where}: {_first_line(error)}", "mend its rules") from None
    return family


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
