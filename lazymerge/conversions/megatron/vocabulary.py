"""The padded vocabulary: rows that Megatron adds to embedding and output layer are cut off again.

It pads to a multiple of make_vocab_size_divisible_by (128) x the tensor-parallel size, so that the
surplus is always smaller than that. Nothing on disk says how many rows are real: config.json does. The
trainer's own vocab_size is the tokenizer's, or missing: what config.json says is not less than that.
"""

from __future__ import annotations

from lazymerge.checkpoint import Note
from lazymerge.conversions.megatron.family import Config
from lazymerge.errors import InconsistentCheckpoint
from lazymerge.fill import equal
from lazymerge.gather import Gather

_DIVISIBLE_BY = 128
_MOST_TENSOR_PARALLEL = 64
_MOST_READ = 1 << 30  # bytes; padding of usual models has 2 million, of 8192 rows of 16384 some 270 million


def cut_vocabulary(name: str, tensor: Gather, config: Config, *, force: bool = False) -> Gather:
    """The tensor with vocab_size rows, if what it has beyond is padding.

    Raises `InconsistentCheckpoint` for fewer rows, and for a surplus that padding does not explain;
    with `force` such a tensor comes back as it is.
    """
    wanted = config.count("vocab_size")
    rows = tensor.shape[0] if tensor.shape else 0
    if rows == wanted:
        return tensor
    if rows > wanted and _is_padding(rows, wanted, config):
        return tensor.narrow(0, 0, wanted)
    if force:
        return tensor
    fewer = "fewer than" if rows < wanted else "more, by no padding of Megatron's, than"
    trained = _setting(config, "vocab_size") or 0
    more = f" (it was trained with a vocabulary of {trained})" if trained > wanted else ""
    raise InconsistentCheckpoint(
        f"{name}: {rows} rows, {fewer} the {wanted} of vocab_size in config.json{more}",
        "vocab_size is probably that of another model; give the right config.json by --hf-config, or"
        " --force-shape-match to cut or to fill with zeros (--is-value-model if it is a value head)",
    )


def cut_note(name: str, whole: Gather, config: Config) -> Note:
    """What a merge says of the rows that were cut: a warning where only config.json says they are padding.

    There it reads them, if they are few bytes, to say whether they look like padding.
    """
    wanted = config.count("vocab_size")
    rows = whole.shape[0]
    text = (
        f"{name}: {rows - wanted} of {rows} rows are cut as padding; config.json has a vocabulary of {wanted}"
    )
    trained = _setting(config, "vocab_size")
    if trained is not None and trained + 1 >= wanted:  # Megatron-LM's is the tokenizer's, often one less
        return Note("info", text, name)
    said = f"says {trained}" if trained is not None else "is not recorded"
    text += f", which nothing else confirms: vocab_size of the trainer's arguments {said}"
    lossy = _differ(whole.narrow(0, wanted, rows - wanted))
    if lossy:
        text += "; the rows that are cut differ, as trained ones do"
    return Note("warning", text, name, lossy)


def _differ(rows: Gather) -> bool:
    """Whether the rows are known to differ: padding begins as one row, or as zeros, and stays alike."""
    count = rows.shape[0]
    if rows.nbytes > _MOST_READ:
        return False
    return not equal(rows.narrow(0, 0, count - 1), rows.narrow(0, 1, count - 1))


def _is_padding(rows: int, wanted: int, config: Config) -> bool:
    """Whether Megatron would pad a vocabulary of `wanted` to that many rows."""
    if (_setting(config, "vocab_size") or 0) > wanted:
        return False
    divisor = _setting(config, "make_vocab_size_divisible_by") or _DIVISIBLE_BY
    ranks = _setting(config, "tensor_model_parallel_size")
    padded = _setting(config, "padded_vocab_size")
    if padded is not None and padded != rows:
        return False
    if padded == rows or ranks is None:  # padded once, for the ranks that it was begun with
        sizes = [2**power for power in range(_MOST_TENSOR_PARALLEL.bit_length())] + [ranks or 1]
    else:
        sizes = [ranks]
    return any(rows % (divisor * size) == 0 and rows - wanted < divisor * size for size in sizes)


def _setting(config: Config, name: str) -> int | None:
    """A positive number among the trainer's arguments; None where there is none."""
    value = config.megatron.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
