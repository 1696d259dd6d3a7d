"""Where the loss finds its targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from varuna_capslog.model.workload import HostTargets, LateTargets, known_targets

META = torch.device("meta")  # any device that is not the CPU


class Batch:
    """As a batch of transformers', which is no dict."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def to(self, device: torch.device) -> Batch:
        return Batch(self.labels.to(device))


def test_tensors_are_moved_wherever_they_lie() -> None:
    """A loss that compared targets as they came with outputs on a GPU ended the run."""
    one = torch.ones(2)
    for targets in (one, [one], (one, {"a": [one]}), LateTargets(lambda: [one])):
        found: Any = known_targets(targets, META)
        while not isinstance(found, Tensor):
            found = next(iter(found.values() if isinstance(found, dict) else found))
        assert found.device == META
    assert known_targets(Batch(one), META).labels.device == META


def test_what_is_for_the_host_and_what_is_no_tensor_stays() -> None:
    own = HostTargets(boxes=torch.ones(2, 4), image_id=3)
    numbers = torch.ones(2).numpy()
    found = known_targets([own, numbers, "name", None, 5], META)
    assert found[0] is own
    assert found[1] is numbers
    assert found[2:] == ["name", None, 5]


def test_on_a_cpu_targets_are_not_looked_through() -> None:
    targets = [torch.ones(2)]
    assert known_targets(targets, torch.device("cpu")) is targets
    assert known_targets(LateTargets(lambda: targets), torch.device("cpu")) is targets
