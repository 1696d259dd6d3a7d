"""Cutting a minibatch: tensors, lists of targets, nested structures, and inputs that must not be cut silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.executor import Microbatches, scatter


def test_every_kind_of_input_is_cut_or_handed_on() -> None:
    inputs: dict[str, Any] = {
        "images": torch.arange(5).view(5, 1),
        "targets": [{"label": index} for index in range(5)],
        "nested": {"mask": torch.arange(5) > 2, "pair": (torch.arange(5), 7)},
        "for all": torch.zeros(1, 4),
        "scalar": torch.tensor(3.0),
        "none": None,
        "words": ["a", "b"],
    }
    parts = scatter(inputs, 5, 2)
    assert parts.sizes == [2, 2, 1]
    assert [part["images"].flatten().tolist() for part in parts.values()] == [[0, 1], [2, 3], [4]]
    assert [[target["label"] for target in part["targets"]] for part in parts.values()] == [[0, 1], [2, 3], [4]]
    assert parts[1]["nested"]["mask"].tolist() == [False, True]
    assert parts[2]["nested"]["pair"][0].tolist() == [4]
    assert parts[2]["nested"]["pair"][1] == 7
    assert all(part["for all"] is inputs["for all"] and part["scalar"] is inputs["scalar"] for part in parts.values())
    assert all(part["none"] is None and part["words"] == ["a", "b"] for part in parts.values())


def test_a_batch_of_another_size_is_refused() -> None:
    # Varuna would run it with microbatches missing
    with pytest.raises(CapslogError, match="input 'x' has 6 rows, but Varuna was built for 8"):
        scatter({"x": torch.zeros(6, 2)}, 8, 2)


def test_one_sample_is_no_tensor_for_all() -> None:
    assert scatter({"x": torch.zeros(1, 2)}, 1, 1).sizes == [1]


def test_microbatches_are_taken_as_they_are() -> None:
    microbatches = [{"x": torch.zeros(2, size)} for size in (3, 5)]
    parts = scatter(Microbatches(microbatches, sizes=[2, 1]), 3, 2)
    assert [part["x"].shape[1] for part in parts.values()] == [3, 5]
    assert parts.sizes == [2, 1]
    with pytest.raises(CapslogError, match="2 microbatches were given, but Varuna was built for 4"):
        scatter(Microbatches(microbatches), 8, 2)
    with pytest.raises(CapslogError, match="one positive size for each"):
        Microbatches(microbatches, sizes=[1])
