"""Rates with which estimates compute seconds."""

from __future__ import annotations

import pytest
import torch

from varuna_capslog.base.gpus import GPUS
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.rates import CLASSES, GROUPS, HOST_SECONDS, Speed, speed_of


def test_a_processor_is_measured_once_for_each_number_of_threads() -> None:
    """Every estimate measured it anew, for a quarter of a second, and no two agreed in their seconds."""
    threads = torch.get_num_threads()
    first = speed_of("cpu", threads=1)
    assert speed_of("cpu", threads=1) is first
    assert (first.name, speed_of("cpu", threads=2).name) == ("this cpu, 1 thread(s)", "this cpu, 2 thread(s)")
    assert torch.get_num_threads() == threads


def test_bfloat16_is_faster_by_less_than_the_sheets_rates() -> None:
    """bfloat16 was slower than float32 on every card: its products got the rate of float32 and the cost of casts."""
    wide = {"product float32": 2.0 * 4096**3, "product bytes": 3 * 4 * 4096.0**2, "launch": 1}
    half = {"product half": 2.0 * 4096**3, "product bytes": 3 * 2 * 4096.0**2, "launch": 1}
    for name, gpu in GPUS.items():
        speed = Speed.of_gpu(name, gpu)
        ratio = speed.seconds(wide) / speed.seconds(half)
        assert 1 < ratio < gpu.half_flops / gpu.float32_flops * 1.3, name


def test_small_operators_take_as_long_as_the_host_needs_to_launch_them() -> None:
    speed = speed_of("cuda", "h200")
    assert speed.seconds({"bytes": 1000.0, "launch": 10}) == pytest.approx(10 * HOST_SECONDS)
    assert speed.seconds({"bytes": 1e12, "launch": 10}) == pytest.approx(1.13e12 / 4.8e12 + 10 * 7.5e-6)


def test_arithmetic_hides_the_bytes_of_a_product() -> None:
    """Products of scores were too fast where memory limits them, and large ones too slow."""
    speed = speed_of("cuda", "a100-40gb")
    for inner, exposed in ((64, True), (4096, False)):
        first, second = (
            torch.empty(*shape, dtype=torch.float16, device="meta") for shape in ((4096, inner), (inner, 4096))
        )
        work: Work = {}
        speed.count(work, torch.ops.aten.mm.default, [first, second], {}, first @ second)
        moved = 2 * (4096 * 4096 + 2 * 4096 * inner)
        assert ("bytes" in work) is exposed
        assert work["product bytes"] + work.get("bytes", 0) == pytest.approx(moved)
        arithmetic = work["product half"] * speed.seconds_of["product half"]
        assert work["product bytes"] * speed.seconds_of["bytes"] <= arithmetic * (1 + 1e-9)


def test_every_class_has_a_group_and_a_unit() -> None:
    units = {"half", "tf32", "float32", "bytes", "elements", "launches"}
    assert {entry.unit for entry in CLASSES.values()} == units
    assert {entry.group for entry in CLASSES.values()} == set(GROUPS)
    slow = Speed.of_gpu("h200", GPUS["h200"], {"memory": 2.0})
    assert slow.seconds({"bytes": 1e12}) == pytest.approx(2 * speed_of("cuda", "h200").seconds({"bytes": 1e12}))
