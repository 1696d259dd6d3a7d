"""The seconds of a rank's own work."""

from __future__ import annotations

import time

import pytest
import torch

from varuna_capslog.engine.executor import Stopwatch


def test_only_what_is_done_inside_counts_and_is_taken_once() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch:
            time.sleep(0.02)
        time.sleep(0.05)
    assert 0.04 <= watch.take() < 0.1
    assert watch.take() == 0.0


def test_work_that_fails_counts_as_well() -> None:
    watch = Stopwatch(torch.device("cpu"))

    def fail() -> None:
        with watch:
            time.sleep(0.01)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert watch.take() >= 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here; the events have never run on one")
def test_on_cuda_the_work_of_the_device_counts() -> None:
    watch = Stopwatch(torch.device("cuda"))
    with watch:
        torch.cuda._sleep(100_000_000)
    assert watch.take() > 0.01
