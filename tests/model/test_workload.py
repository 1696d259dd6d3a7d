"""Devices on which the loss finds its targets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import HostTargets, LateTargets, Workload, known_targets

META = torch.device("meta")  # any device that is not the CPU


class Batch:
    """Batch like transformers', which is no dict."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def to(self, device: torch.device) -> Batch:
        return Batch(self.labels.to(device))


def test_tensors_are_moved_wherever_they_lie() -> None:
    """A loss that compared unmoved targets with outputs on a GPU ended the run."""
    tensor = torch.ones(2)
    for targets in (tensor, [tensor], (tensor, {"a": [tensor]}), LateTargets(lambda: [tensor])):
        moved: Any = known_targets(targets, META)
        while not isinstance(moved, Tensor):
            moved = next(iter(moved.values() if isinstance(moved, dict) else moved))
        assert moved.device == META
    assert known_targets(Batch(tensor), META).labels.device == META


def test_what_is_for_the_host_and_what_is_no_tensor_stays() -> None:
    host_targets = HostTargets(boxes=torch.ones(2, 4), image_id=3)
    numbers = torch.ones(2).numpy()
    moved = known_targets([host_targets, numbers, "name", None, 5], META)
    assert moved[0] is host_targets
    assert moved[1] is numbers
    assert moved[2:] == ["name", None, 5]


def test_on_a_cpu_targets_are_not_looked_through() -> None:
    targets = [torch.ones(2)]
    assert known_targets(targets, torch.device("cpu")) is targets
    assert known_targets(LateTargets(lambda: targets), torch.device("cpu")) is targets


def test_a_workload_without_predictions_says_what_to_do_instead(tmp_path: Path) -> None:
    """`capslog predict` of a run on own data ended with "unexpected NotImplementedError ...; this is a defect"."""
    with pytest.raises(CapslogError, match="'sums' draws no predictions on images; `capslog export RUN_DIR"):
        Workload.predict(cast(Workload, SimpleNamespace(name="sums")), cast(Chain, None), [], tmp_path)
