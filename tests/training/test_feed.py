"""Which samples make which step: a pure function of seed and step."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from tests.engine.workload import TinyData
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.model.workload import Minibatch, known_targets
from varuna_capslog.training.feed import Feed, evaluation_groups

CPU = torch.device("cpu")


def feed(count: int = 22, local: range = range(4), seed: int = 0) -> Feed:
    return Feed(TinyData(count), minibatch_size=8, microbatch_size=2, seed=seed, local=local)


def test_an_epoch_shows_every_sample_at_most_once_and_another_epoch_another_order() -> None:
    plan = feed()
    assert plan.steps_per_epoch == 2
    seen = [sample for step in (1, 2) for group in plan.minibatch(step).sample_ids for sample in group]
    assert len(seen) == len(set(seen)) == 16
    assert [plan.epoch(step) for step in (1, 2, 3, 5)] == [0, 0, 1, 2]
    assert plan.minibatch(3).sample_ids != plan.minibatch(1).sample_ids


def test_a_step_is_the_same_from_wherever_one_asks() -> None:
    forwards = feed()
    expected = [forwards.minibatch(step).sample_ids for step in range(1, 12)]
    backwards = feed()
    assert [backwards.minibatch(step).sample_ids for step in range(11, 0, -1)] == expected[::-1]
    assert feed(seed=1).minibatch(1).sample_ids != expected[0]


def test_loading_ahead_gives_the_right_tensors() -> None:
    plan = feed(local=range(2, 4))
    for step in range(1, 5):
        load, minibatch = plan.loader(step), plan.minibatch(step)
        for microbatch in (2, 3):
            assert load(microbatch)["x"].equal(TinyData(22).load(minibatch, microbatch)["x"])
    plan.close()


class Noted(TinyData):
    """Remembers what it has loaded."""

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        self.loaded = [*getattr(self, "loaded", []), tuple(minibatch.recipes[microbatch])]
        return super().load(minibatch, microbatch)


def test_what_several_stages_of_a_rank_take_is_loaded_once_and_none_of_it_stays() -> None:
    """Two stages of which one takes half of the microbatches, and comes to them after the other one has taken all."""
    data = Noted(64)
    plan = Feed(data, minibatch_size=8, microbatch_size=2, seed=0, local=[0, 0, 1, 1, 2, 3])
    for step in range(1, 7):
        load, minibatch = plan.loader(step), plan.minibatch(step)
        for microbatch in (0, 1, 2, 3, 0, 1):
            assert load(microbatch)["x"].equal(TinyData(64).load(minibatch, microbatch)["x"])
    plan.close()
    assert len(set(data.loaded)) == len(data.loaded)
    assert {step for step, _ in plan._loads} <= {7}


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(CapslogError, match=r"has 7 samples, fewer than train.minibatch_size=8"):
        feed(7)


def test_an_evaluation_covers_every_sample_once() -> None:
    """In minibatches of at most three microbatches of two samples; the layout has no say in it."""
    groups = evaluation_groups(23, 2, 3)
    assert [sample for group in groups for part in group for sample in part] == list(range(23))
    assert [[len(part) for part in group] for group in groups] == [[2, 2, 2]] * 3 + [[2, 2, 1]]


class Late(TinyData):
    """Reads inputs and targets together, slowly, and cannot read microbatch 3 of the second step."""

    ahead = 2

    def begin(self, minibatch: Minibatch, microbatch: int) -> Late:
        self.begun = [*getattr(self, "begun", []), tuple(minibatch.recipes[microbatch])]
        late = Late(22)
        late.asked = minibatch, microbatch
        return late

    def result(self) -> tuple[dict[str, Tensor], object]:
        time.sleep(0.01)
        minibatch, microbatch = self.asked
        if minibatch.sample_ids == Feed(self, 8, 2, 0, []).minibatch(2).sample_ids and microbatch == 3:
            raise CapslogError("sample 9 is damaged")
        return self.load(minibatch, microbatch), microbatch


def test_targets_are_read_with_the_inputs_once_and_waiting_is_counted() -> None:
    data = Late(22)
    plan = Feed(data, 8, 2, 0, local=[0, 1], judged=[1, 2])
    plan.begin(1)
    assert len(data.begun) == 2
    load, minibatch = plan.loader(1), plan.minibatch(1)
    for microbatch in (0, 1):
        assert load(microbatch)["x"].equal(TinyData(22).load(minibatch, microbatch)["x"])
    assert [known_targets(minibatch.targets[microbatch], CPU) for microbatch in (1, 2)] == [1, 2]
    assert data.begun[:3] == [tuple(recipe) for recipe in minibatch.recipes[:3]]
    assert len(set(data.begun)) == len(data.begun) <= 5
    report = plan.report()
    assert report.failure is None
    assert 0.04 <= report.waited_seconds < 0.4
    assert plan.report().waited_seconds == 0


def test_what_cannot_be_read_is_zeros_and_told_at_the_vote() -> None:
    plan = Feed(Late(22), 8, 2, 0, local=[3], judged=[3])
    assert plan.loader(2)(3)["x"].count_nonzero() == 0
    with pytest.raises(StepRefused, match="sample 9 is damaged"):
        known_targets(plan.minibatch(2).targets[3], CPU)
    assert plan.report().failure == "sample 9 is damaged"
    assert plan.loader(1)(3)["x"].count_nonzero() > 0
    assert plan.report().failure is None
