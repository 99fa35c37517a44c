"""Sidecars: what a model needs beside its weights, copied byte for byte.

Only known names are taken, only plain files (never links), and never a weight file. Nothing is changed but
fields of config.json that would not be true of the result: the dtype, where that of the weights was changed,
and what a conversion names.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.errors import DamagedFile, SourceError
from lazymerge.files.json_text import bounded, why
from lazymerge.files.local import LocalFile, refuse_no_file

CONFIG = "config.json"

_PARSED = (
    CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "chat_template.json",
    "configuration.json",
)
"""JSON files that are small; a malformed one is refused."""

_COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.tiktoken",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "vocab.model",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
)
_COPIED_PATTERNS = (re.compile(r"[\w.-]+\.tiktoken"), re.compile(r"additional_chat_templates/[\w.-]+\.jinja"))
_CODE = re.compile(r"\w[\w.-]*\.py")
_LARGEST_JSON = 16 << 20
_LARGEST = 1 << 30
"""Bytes beyond which a sidecar is refused: the first for files that are parsed."""


def is_sidecar(name: str) -> bool:
    """Whether a file of that name is one that goes with a model (its code apart)."""
    known = name in _PARSED or name in _COPIED
    return known or any(pattern.fullmatch(name) for pattern in _COPIED_PATTERNS)


@dataclass(frozen=True, slots=True)
class Sidecars:
    """Files to put beside the weights, name -> where from, and what config.json holds (None: not there).

    `contents` are the bytes of those that were parsed: what goes into the result is what was understood,
    whatever becomes of the file in the meantime.
    """

    files: Mapping[str, Path]
    config: Mapping[str, Any] | None
    notes: tuple[Note, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files.values())


def find_sidecars(folders: Iterable[Path], linked: Path | None = None) -> Sidecars:
    """The sidecars in these folders; where several have a name, the first one's file.

    `linked` is the one folder whose links are followed: the user has named it, and in the cache of
    the Hugging Face hub every file is a link. Raises `DamagedFile` for malformed JSON and
    `SourceError` for what is no plain file.
    """
    found: dict[str, Path] = {}
    contents: dict[str, bytes] = {}
    parsed: dict[str, Any] = {}
    for folder in folders:
        for name in [*_PARSED, *_COPIED, *_matching(folder)]:
            if name not in found and _is_there(folder / name, links=folder == linked):
                found[name] = folder / name
                if name in _PARSED:
                    contents[name] = _bytes(folder / name)
                    parsed[name] = _parse(folder / name, contents[name])
                elif name.endswith(".json"):
                    _check_braces(folder / name)
                else:
                    _opened(folder / name)
    config = parsed.get(CONFIG)
    notes: list[Note] = []
    if config is None:
        notes.append(
            Note("warning", "no config.json was found, so the result will not load; give --hf-config DIR")
        )
    _add_code(found, parsed, linked, notes)
    return Sidecars(found, config, tuple(notes), contents)


def _matching(folder: Path) -> list[str]:
    names = [path.name for path in folder.iterdir()]
    templates = folder / "additional_chat_templates"
    if templates.is_dir() and not templates.is_symlink():
        names += [f"{templates.name}/{path.name}" for path in templates.iterdir()]
    return sorted(name for name in names if any(pattern.fullmatch(name) for pattern in _COPIED_PATTERNS))


def _is_there(path: Path, *, links: bool) -> bool:
    """Whether there is such a file; anything else under that name is refused, links unless they may be."""
    try:
        mode = path.stat().st_mode if links or _in_hub_cache(path) else path.lstat().st_mode
    except OSError:
        if os.path.islink(path):
            refuse_no_file(path)
        return False
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "no plain file"
        raise SourceError(f"{path}: is {kind}", "put the file itself there, or give --hf-config DIR")
    return True


def _in_hub_cache(path: Path) -> bool:
    """Whether it is a link in the hub's cache: ``snapshots/REVISION/NAME -> ../../blobs/HASH``."""
    for folder in path.parents[:2]:  # NAME may be in a folder of its own
        if folder.parent.name == "snapshots":
            return path.resolve().parent == folder.parent.parent.resolve() / "blobs"  # no link itself
    return False


def _add_code(
    found: dict[str, Path], parsed: Mapping[str, Any], linked: Path | None, notes: list[Note]
) -> None:
    """The Python files of a model that brings its own code: all beside the file that has an auto_map."""
    for name, content in parsed.items():
        modules = _auto_map_modules(content.get("auto_map"))
        if not modules:
            continue
        folder = found[name].parent
        for path in sorted(folder.iterdir()):
            is_code = _CODE.fullmatch(path.name) and path.name not in found
            if is_code and _is_there(path, links=folder == linked):
                _opened(path)
                found[path.name] = path
        for module in modules:
            if f"{module}.py" not in found:
                notes.append(
                    Note(
                        "warning", f"{name} names {module}.py in its auto_map, and {folder} does not hold it"
                    )
                )


def _auto_map_modules(auto_map: object) -> list[str]:
    """The modules of an auto_map that belong to the folder itself (not ``owner/repo--module.Class``)."""
    if not isinstance(auto_map, dict):
        return []
    names = [n for value in auto_map.values() for n in (value if isinstance(value, list) else [value])]
    local = [n for n in names if isinstance(n, str) and "--" not in n and "." in n]
    return sorted({name.rpartition(".")[0] for name in local})


def _opened(path: Path) -> LocalFile:
    """The file, which can be read and is not larger than such a file can be."""
    file = LocalFile(path)
    limit = _LARGEST_JSON if path.name in _PARSED else _LARGEST
    if file.size > limit:
        raise SourceError(
            f"{path}: {file.size} bytes, expected at most {limit}", "this is no such file; remove it"
        )
    return file


def _bytes(path: Path) -> bytes:
    file = _opened(path)
    return file.read(0, file.size)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(bounded(raw.decode()))  # as loaders read it: no byte order mark, no UTF-16
    except (ValueError, RecursionError) as error:
        raise DamagedFile(
            f"{path}: malformed JSON ({why(error)})", "repair it, or give --hf-config DIR"
        ) from None
    if not isinstance(content, dict):
        raise DamagedFile(f"{path}: not a JSON object", "repair it, or give --hf-config DIR")
    return content


def _check_braces(path: Path) -> None:
    """A large JSON file is not parsed (that takes many times its size); a cut one is still found."""
    file = _opened(path)
    head = file.read(0, min(64, file.size)).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    tail = file.read(max(0, file.size - 64), min(64, file.size)).rstrip()[-1:]
    if (head, tail) not in {(b"{", b"}"), (b"[", b"]")}:
        raise DamagedFile(
            f"{path}: malformed JSON (starts with {head!r}, ends with {tail!r})", "copy it again"
        )


def config_dtype(config: Mapping[str, Any] | None) -> str | None:
    """The dtype that a config names, in its new or its old field; None if it names none."""
    for key in ("dtype", "torch_dtype"):
        value = (config or {}).get(key)
        if isinstance(value, str):
            return value.removeprefix("torch.")
    return None


def with_dtype(raw: bytes, dtype: str) -> bytes:
    """config.json with another dtype in the fields that it has (or a new one), and not a byte else changed.

    Fields of sub-configs that name a dtype follow, since loaders of a part read those.
    """
    text = raw.decode()
    wanted = _set_dtype(json.loads(text), dtype)
    edited = re.sub(r'("(?:torch_)?dtype"\s*:\s*)(?:"[^"\\]*"|null)', rf'\g<1>"{dtype}"', text)
    if json.loads(edited) == wanted:
        return edited.encode()
    return _as_json(wanted)


def with_fields(raw: bytes, changes: Mapping[str, Any]) -> bytes:
    """config.json with other values in these fields, without those that are None; without any, as it was."""
    if not changes:
        return raw
    config = {**json.loads(raw), **changes}
    return _as_json({key: value for key, value in config.items() if key not in changes or value is not None})


def _as_json(config: Any) -> bytes:
    """The config as transformers writes it; half of a surrogate pair, which JSON can hold, stays escaped."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        return (json.dumps(config, indent=2) + "\n").encode()


def _set_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    changed = {
        key: dtype if key in {"dtype", "torch_dtype"} and (value is None or isinstance(value, str)) else value
        for key, value in config.items()
    }
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict) and {"dtype", "torch_dtype"} & set(value):
            changed[key] = _set_dtype(value, dtype)
    if not {"dtype", "torch_dtype"} & set(config):
        changed["dtype"] = dtype
    return changed
