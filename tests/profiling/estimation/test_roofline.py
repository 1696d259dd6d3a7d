"""What estimates reckon seconds with."""

from __future__ import annotations

import torch

from varuna_capslog.profiling.estimation.roofline import speed_of


def test_a_processor_is_measured_once_for_each_number_of_threads() -> None:
    """Every estimate measured it anew, for a quarter of a second, and no two agreed in their seconds."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = speed_of("cpu")
        assert speed_of("cpu") is first
        torch.set_num_threads(2)
        assert (first.name, speed_of("cpu").name) == ("this cpu, 1 thread(s)", "this cpu, 2 thread(s)")
    finally:
        torch.set_num_threads(threads)
