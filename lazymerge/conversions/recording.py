"""transformers' way from run-time to hub names, recorded: run once on tensors without data, kept as data.

transformers 5 fuses experts, renames parts and permutes heads when it loads a model, and undoes it in
`save_pretrained`. Here that undoing runs on lazy tensors over named sources that nobody can read, so what is
left of it is which elements of which tensors make up each tensor of the hub.

    {"moves": {hub name: expression}, "runtime": {name: shape}, "unsaved": [name, ...], "tied": {name: name}}

`moves` has only what changes in name or in layout, `tied` the ties by run-time names. Runs in the process of
lazymerge.conversions.meta_model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch

from lazymerge.conversions.expressions import Named, NotMoved, names_in, to_plain
from lazymerge.conversions.tied_names import tied_in
from lazymerge.elements import dtype_of
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.gather import of_region
from lazymerge.tensor import LazyTensor

Tensors = Mapping[str, tuple[tuple[int, ...], DType]]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def recorded(model: Any, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The conversion of a model's own tensors, or of a checkpoint's: name -> [shape, dtype name].

    Of a checkpoint's tensors those are converted that the model has, in any of its layers. Where the
    conversion is not mere moving, or does not take the tensors, the answer is ``{"impossible": why}``.
    """
    own = _own_tensors(model)
    tensors: Tensors = own
    if given is not None:
        alike = {_NUMBER.sub("0", name) for name in own}
        tensors = {
            name: (tuple(shape), DTYPES[dtype])
            for name, (shape, dtype) in given.items()
            if _NUMBER.sub("0", name) in alike
        }
    unsaved = [name for name in model._keys_to_ignore_on_save or () if name in tensors]
    tensors = {name: each for name, each in tensors.items() if name not in unsaved}
    try:
        moves = _moves(model, tensors)
    except Exception as error:  # a conversion is any code, and meets tensors here that it may not expect
        return {"impossible": f"{type(error).__name__}: {error}".splitlines()[0][:500]}
    changed = {name for expression in moves.values() for name in names_in(expression)}
    return {
        "moves": moves,
        "runtime": {name: list(shape) for name, (shape, _) in tensors.items() if name in changed},
        "unsaved": unsaved,
        "tied": tied_in(model, tensors),
    }


def _own_tensors(model: Any) -> dict[str, tuple[tuple[int, ...], DType]]:
    return {
        name: (tuple(each.shape), dtype_of(each.dtype))
        for name, each in model.state_dict().items()
        if isinstance(each, torch.Tensor)
    }


def _moves(model: Any, tensors: Tensors) -> dict[str, Any]:
    """Hub name -> expression, of all that change; raises `NotMoved` if a tensor gets lost or is computed."""
    from transformers.core_model_loading import revert_weight_conversion

    lazy: dict[str, torch.Tensor] = {
        name: _named(name, shape, dtype) for name, (shape, dtype) in tensors.items()
    }
    made = {}
    for name, each in revert_weight_conversion(model, lazy).items():
        try:
            made[name] = to_plain(cast(LazyTensor, each).lazy_gather)
        except NotMoved as error:
            raise NotMoved(f"{name}: {error}") from None
    lost = set(tensors) - {name for expression in made.values() for name in names_in(expression)}
    if lost:
        raise NotMoved(f"{min(lost)} is in no tensor of the hub")
    return {name: expression for name, expression in made.items() if expression != name}


def _named(name: str, shape: tuple[int, ...], dtype: DType) -> LazyTensor:
    source = Named(name, 0)
    return LazyTensor(of_region(Region(source, 0, dtype, shape, contiguous_strides(shape))))
