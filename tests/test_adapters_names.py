"""Which tensor of a base a name in an adapter means."""

from __future__ import annotations

import pytest

from lazymerge.conversions.adapters.names import BaseNames
from lazymerge.conversions.runtime_names import Conversion

Q = "layers.0.self_attn.q_proj.weight"


def test_of_several_that_could_be_meant_none_is() -> None:
    names = BaseNames({f"model.{Q}", f"language_model.{Q}"})
    assert names.find(Q) is None
    assert names.find(f"transformer.{Q}") is None
    assert names.find(f"model.{Q}") == f"model.{Q}"


@pytest.mark.parametrize("hub", [f"model.{Q}", f"language_model.model.{Q}", Q])
@pytest.mark.parametrize("name", [f"model.{Q}", Q, f"language_model.model.{Q}"])
def test_one_that_lies_otherwise_is_not_found_however_it_is_spelt(hub: str, name: str) -> None:
    turned = ["view", ["pick", ["view", f"model.{Q}", [2, 2, 4]], [0, 1, 2], []], [4, 4]]
    names = BaseNames({hub, "model.norm.weight"}, Conversion({hub: turned}, {f"model.{Q}": (4, 4)}))
    assert names.find(name) is None
    assert names.is_relaid(name)
    assert names.find(name, relaid=True) == hub
    assert names.find("norm.weight") == "model.norm.weight"
