"""What an adapter adds to the weight of one module, as products of matrices.

    linear       W [out, in]          += scale * B @ A            A [r, in], B [out, r]
    Conv1D       W [in, out]          += scale * (B @ A)^T        GPT-2's, with fan_in_fan_out
    embedding    W [tokens, size]     += scale * (B @ A)^T        A [r, tokens], B [size, r]
    convolution  W [out, in, *kernel] += scale * B @ A            A [r, in, *kernel], B [out, r, 1, ...]

DoRA brings every output of W + scale * B @ A to the length that lora_magnitude_vector says. Outputs are rows
where the weight is not transposed, else columns.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lazymerge.boxes import Shape
from lazymerge.conversions.adapters.parts import Module, misshapen
from lazymerge.conversions.adapters.settings import Settings
from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.gather import Gather
from lazymerge.lowrank import Term


@dataclass(frozen=True, slots=True)
class Delta:
    """What one adapter adds to a matrix; `magnitude` is what the sum's rows (or `columns`) are scaled to."""

    term: Term
    magnitude: Gather | None = None
    columns: bool = False


def delta_of(
    module: Module, settings: Settings, shape: Shape, *, transposed: bool, name: str | None = None
) -> Delta:
    """What the module's tensors add to its weight of this shape, taken as a matrix of `shape[0]` rows.

    `name` is how patterns of the config call it, if not by the module's name. Raises `InconsistentCheckpoint`
    where shapes do not go together, and `UnsupportedCheckpoint` for grouped convolutions.
    """
    a, b = module.product
    name = name or module.name
    if len(shape) > 2 and (shape[0], *shape[2:]) == (b.shape[0], *a.shape[2:]) and shape[1] != a.shape[1]:
        raise UnsupportedCheckpoint(
            f"{settings.name}: {module.name} is a convolution of several groups, which is not folded",
            "merge it with PEFT's merge_and_unload",
        )
    check_rank(module, settings, name)
    if module.embedding or transposed:
        expected: Shape = (*a.shape[1:], b.shape[0])
    else:
        expected = (b.shape[0], *a.shape[1:])
    if shape != expected:
        raise InconsistentCheckpoint(
            f"{settings.name}: {module.name} is for a weight of shape {expected}, the base's has {shape}",
            "give the base that the adapter was trained on",
        )
    if any(size != 1 for size in b.shape[2:]):
        raise misshapen(module, settings.name)
    a, b = a.view((a.shape[0], a.numel // a.shape[0])), b.view((b.shape[0], b.shape[1]))
    turned = transposed or module.embedding
    if turned:
        a, b = b.permute([1, 0]), a.permute([1, 0])
    magnitude = _magnitude(module, settings, b.shape[0] if not turned else a.shape[1])
    return Delta(Term(b, a, settings.scale(name)), magnitude, turned)


def _magnitude(module: Module, settings: Settings, outputs: int) -> Gather | None:
    found = module.magnitude
    if (found is not None) != settings.dora:
        raise InconsistentCheckpoint(
            f"{settings.name}: use_dora is {str(settings.dora).lower()}, and {module.name} has"
            f" {'a' if found else 'no'} lora_magnitude_vector",
            "config and weights are not of one adapter; copy both again",
        )
    if found is None:
        return None
    if found.numel != outputs:
        raise InconsistentCheckpoint(
            f"{settings.name}: lora_magnitude_vector of {module.name} has {found.numel} elements,"
            f" expected {outputs}",
            "copy the adapter again",
        )
    return found.view((outputs,))


def bias_delta(module: Module, settings: Settings, shape: Shape) -> Delta:
    """What lora_B.bias adds to the bias of this shape, taken as a matrix of one column."""
    assert module.bias is not None
    if module.bias.shape != shape or len(shape) != 1:
        raise InconsistentCheckpoint(
            f"{settings.name}: lora_B.bias of {module.name} has shape {module.bias.shape}, the base's bias"
            f" {shape}",
            "give the base that the adapter was trained on",
        )
    return Delta(Term(module.bias.view((*shape, 1)), None, settings.scale(module.name)))


def check_rank(module: Module, settings: Settings, name: str, experts: int = 1) -> int:
    """The rank that the config gives the module (or parameter) `name`, which its matrices have to have.

    Raises `InconsistentCheckpoint` where they have not.
    """
    a, b = module.product
    rank = settings.rank(name)
    if a.shape[0] != rank * experts or b.shape[1] != rank * experts:
        found = a.shape[0] if a.shape[0] != rank * experts else b.shape[1]
        raise InconsistentCheckpoint(
            f"{settings.name}: {name} has the rank {found}, expected {rank * experts} by adapter_config.json"
            f"{f' ({experts} experts)' if experts > 1 else ''}",
            "config and weights are not of one adapter; correct r or rank_pattern",
        )
    return rank


def shown(names: Collection[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    first = ", ".join(list(names)[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"
