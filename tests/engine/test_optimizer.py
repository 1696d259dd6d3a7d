"""The learning rate by step."""

from __future__ import annotations

import pytest

from varuna_capslog.engine.optimizer import LearningRate


def test_the_learning_rate_is_a_function_of_the_step() -> None:
    rate = LearningRate(1.0, warmup_steps=4, drop_steps=10, drop_factor=0.1)
    assert [rate.at(step) for step in (1, 2, 4, 10)] == [0.25, 0.5, 1.0, 1.0]
    assert [rate.at(step) for step in (11, 20, 21)] == pytest.approx([0.1, 0.1, 0.01])
