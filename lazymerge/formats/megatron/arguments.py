"""The trainer's arguments in a distributed checkpoint, which may be in any of these places:

    common.pt                a dict of what all ranks have in common, args among it
    common_state/shard_0_1   an object of the checkpoint: a list that holds the same (mcore 0.19 on)
    args                     an object of the checkpoint (torch_dcp)
    run_config.yaml          where Megatron-Bridge wrote it
    transformer_config.json  beside dist_ckpt/, or model/ that holds it: verl, if it saves `extra`
    nowhere                  verl otherwise

``metadata.json`` says whether there has to be a common.pt: it names a ``common_backend`` then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lazymerge.errors import DamagedFile, IncompleteCheckpoint
from lazymerge.files.inert_pickle import Record
from lazymerge.files.json_text import read_object
from lazymerge.files.local import LocalFile, refuse_no_file
from lazymerge.files.torch_file import read_torch_file
from lazymerge.formats.dcp import DcpFolder
from lazymerge.formats.megatron.found import Found
from lazymerge.formats.megatron.settings import (
    plain_number,
    read_run_config,
    read_transformer_config,
    settings_of,
)
from lazymerge.formats.zarr import ZarrFolder

COMMON = "common.pt"
RUN_CONFIG = "run_config.yaml"
TRANSFORMER_CONFIG = "transformer_config.json"
BACKEND = "metadata.json"
LEAF = "dist_ckpt"  # the folder that verl saves with Megatron
_MAX_BACKEND = 1 << 16  # bytes; usual are 116
_COMMON_OBJECT = "common_state/shard_0_1"
_ARGS_OBJECT = "args"


def read_arguments(folder: Path, store: DcpFolder | ZarrFolder, found: Found) -> dict[str, Any]:
    """The trainer's arguments, from where they were recorded first; {} if nowhere.

    Adds the files that it opens, and the iteration that is recorded beside the arguments, to `found`. Raises
    `IncompleteCheckpoint` where the checkpoint says that they were saved in a file which is not here.
    """
    if _has_common(folder):
        found.files.append(LocalFile(folder / COMMON))
        args = _args_in(found.files[-1].name, read_torch_file(found.files[-1]), found)
        if args is not None:
            return settings_of(args)
    if isinstance(store, DcpFolder):
        if _COMMON_OBJECT in store.objects:
            value = store.load_object(_COMMON_OBJECT)
            where = f"{_COMMON_OBJECT} in {folder}"
            args = _args_in(where, value[0] if isinstance(value, list) and value else value, found)
            if args is not None:
                return settings_of(args)
        if _ARGS_OBJECT in store.objects:
            return settings_of(store.load_object(_ARGS_OBJECT))
    for path in (folder / RUN_CONFIG, *(each / TRANSFORMER_CONFIG for each in _of_verl(folder))):
        if os.path.lexists(path):
            refuse_no_file(path)
            found.files.append(LocalFile(path))
            read = read_run_config if path.name == RUN_CONFIG else read_transformer_config
            return read(found.files[-1])
    return {}


def _of_verl(folder: Path) -> list[Path]:
    """The folders above dist_ckpt/ where verl may have left its config: one more from 0.9 on."""
    above = Path(os.path.abspath(folder))  # "." has no parent
    if above.name != LEAF:
        return []
    return [above.parent, *([above.parent.parent] if above.parent.name == "model" else [])]


def _has_common(folder: Path) -> bool:
    """Whether what all ranks have in common is in a file; refuses where it must be and is not there."""
    if os.path.lexists(folder / COMMON):
        refuse_no_file(folder / COMMON)
        return True
    backend = _backend(folder)
    if "common_backend" in backend:
        raise IncompleteCheckpoint(
            f"{folder / COMMON}: not there, though {BACKEND} says that what all ranks have in common was"
            f" saved apart (common_backend is {str(backend['common_backend'])[:40]!r})",
            "copy it too: it holds the arguments that say how rows are ordered and norms are centred",
        )
    return False


def _args_in(where: str, common: object, found: Found) -> object:
    """The arguments in the dict of what all ranks have in common; None if it has none."""
    if not isinstance(common, dict):
        raise DamagedFile(f"{where}: no dict of what all ranks have in common", "copy the checkpoint again")
    found.iteration = plain_number(common.get("iteration"))
    args = common.get("args")
    return args if isinstance(args, Record | dict) else None


def _backend(folder: Path) -> dict[str, Any]:
    """What metadata.json says of how the folder was written; {} without one. Raises `DamagedFile`."""
    if not os.path.lexists(folder / BACKEND):
        return {}
    refuse_no_file(folder / BACKEND)
    try:
        return read_object(LocalFile(folder / BACKEND), _MAX_BACKEND)
    except ValueError as error:
        raise DamagedFile(
            f"{folder / BACKEND}: does not say how it was saved ({error})", "copy it again"
        ) from None
