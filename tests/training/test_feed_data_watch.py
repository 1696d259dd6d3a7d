"""A data set that hangs: noticed by the rank itself, since alone on its device it has no neighbour that would."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.training.test_feed import TinyData
from varuna_capslog.base.failures import Failure, is_consequence
from varuna_capslog.model.workload import LateTargets, Minibatch
from varuna_capslog.training.feed import DataLate, DataWatch, Feed
from varuna_capslog.training.loop import Boundaries


class Hanging:
    """A read that hangs until the watch has called; the watch is that of a process that would end."""

    def __init__(self) -> None:
        self.errors: list[DataLate] = []
        self._called = threading.Event()
        self.watch = DataWatch(0.2)
        self.watch.late = self._late

    def _late(self, error: DataLate) -> None:
        self.errors.append(error)
        self._called.set()

    def __call__(self, *_: object) -> Any:
        assert self._called.wait(60), "nobody noticed"
        return {}


@pytest.mark.parametrize("door", ["training", "targets of an evaluation"])
def test_the_rank_says_that_it_waits_for_its_data(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device nothing was said, `pipeline.timeout_seconds` had no effect, and SIGTERM ended nothing
    (pytorch/pytorch#1355, facebookresearch/detr#21)."""
    hanging = Hanging()
    if door == "training":
        data = TinyData(8)
        monkeypatch.setattr(data, "load", hanging)
        feed = Feed(data, 8, 2, seed=0, local=[0], watch=hanging.watch)
        samples = feed.minibatch(1).sample_ids[0]
        feed.loader(1)(0)
        feed.close()
    else:
        boundaries = Boundaries.__new__(Boundaries)
        boundaries._watch = hanging.watch
        samples = [3, 4]
        minibatch = Minibatch([{}], [LateTargets(hanging)], {}, [samples])
        boundaries._watched(minibatch).targets[0].read()
    (error,) = hanging.errors
    assert f"it waits for its data: the samples {samples} were not read within pipeline.timeout_seconds=0.2" in str(
        error
    )
    failure = Failure(0, str(error), error.kind, 0.0, stage=0, step=3)
    assert failure.sentence().startswith("rank 0 (stage 0) does not answer at step 3: it waits for its data")
    assert not is_consequence(failure)


def test_waits_that_end_call_nobody() -> None:
    """Many short waits are no long wait, and a feed that is not watched starts no thread."""
    hanging, unwatched = Hanging(), DataWatch(0.01)
    minibatch = Minibatch([{}], [{}], {}, [[1]])
    for watch in (hanging.watch, unwatched):
        for _ in range(100):
            with watch.waiting(minibatch, 0):
                pass
    time.sleep(0.5)
    assert not hanging.errors
    assert unwatched._thread is None
