"""The search for the largest value that fits, against trying every value; the candidate values."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from varuna_capslog.memory.inflight import waiting
from varuna_capslog.planning.largest import (
    coarse_sizes,
    enough_microbatches,
    image_of,
    largest_by_bytes,
    microbatch_sizes,
    microbatch_step,
)
from varuna_capslog.schedules import RunShape


@pytest.mark.parametrize("seed", range(20))
def test_a_search_by_bytes_finds_what_trying_every_value_finds(seed):
    draw = random.Random(seed)
    for _ in range(50):
        values = sorted(draw.sample(range(1, 2000), draw.randint(1, 60)))
        step, power, capacity = draw.uniform(0.1, 10), draw.choice([1.0, 1.3, 2.0]), draw.randint(1, 20000)
        start, tried = draw.choice(values), []

        def lack(value, tried=tried, step=step, power=power, capacity=capacity):
            return math.ceil(step * value**power) - capacity

        def asked(value, tried=tried, lack=lack):
            tried.append(value)
            return lack(value)

        rising = list(largest_by_bytes(values, asked, {0: -capacity, start: lack(start)}))
        assert rising == sorted(set(rising))
        assert (rising or [None])[-1] == max((value for value in values if lack(value) <= 0), default=None)
        assert len(tried) == len({*tried} - {start})
        if power == 1.0:
            assert len(tried) <= 3


def test_a_search_by_bytes_halves_where_the_line_leads_nowhere():
    tried = []
    steps = largest_by_bytes(range(1, 4097), lambda value: tried.append(value) or (1 if value > 3000 else -1), {1: -1})
    assert max(steps) == 3000
    assert len(tried) < 40


def test_sizes_lie_a_sixteenth_apart_at_most():
    sizes = coarse_sizes(64, 1000000)
    assert sizes[:32] == list(range(64, 33 * 64, 64))
    assert all(size % 64 == 0 for size in sizes[:-1])
    assert all(above <= size * 17 / 16 for size, above in itertools.pairwise(sizes[31:]))
    assert sizes[-1] == 1000000
    assert len(sizes) < 190
    assert coarse_sizes(64, 64) == [64]


def test_sizes_divide_the_samples_of_every_block():
    for samples in range(1, 61):
        for blocks in (1, 2, 3):
            wanted = [size for size in range(1, samples + 1) if samples % size == 0 and samples // size % blocks == 0]
            if samples % blocks == 0:
                assert microbatch_sizes(samples, blocks) == wanted


@pytest.mark.parametrize("schedule", ["1f1b", "varuna", "kfkb", "zb-h1", "interleaved"])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("replicas", [1, 2])
def test_stages_hold_no_more_from_enough_microbatches_on(schedule, stages, replicas):
    run = RunShape(12, schedule, schedule == "varuna", num_blocks=replicas)
    enough = enough_microbatches(run, replicas, stages, replicas, one_memory=True)
    assert enough is not None
    assert enough % replicas == 0
    assert enough >= 2 * run.num_blocks

    def held(count: int) -> object:
        return waiting(RunShape(count // replicas, schedule, run.recompute), stages, one_memory=True)

    assert all(held(count) == held(enough) for count in range(enough, 6 * enough, replicas))


def test_gpipe_grows_except_where_its_inputs_wait_in_other_memory():
    run = RunShape(8, "gpipe", recompute=True)
    assert enough_microbatches(run, 1, 2, 1, one_memory=True) is None
    assert enough_microbatches(run, 1, 2, 1, one_memory=False) == 8
    assert enough_microbatches(RunShape(8, "gpipe", recompute=False), 1, 2, 1, one_memory=False) is None
    assert enough_microbatches(RunShape(8, "1f1b-star"), 1, 2, 1, one_memory=True) is None  # limits are the plan's


def test_interleaved_rounds_are_whole():
    assert microbatch_step(RunShape(12, "interleaved", num_blocks=4), 6) == 12
    assert microbatch_step(RunShape(12, "1f1b", num_blocks=4), 6) == 4


def test_images_keep_the_ratio_in_steps_of_32():
    assert image_of(512, None) == [512, 512]
    assert image_of(640, [480, 640]) == [480, 640]
    assert image_of(1280, [640, 480]) == [1280, 960]
    assert image_of(32, [100, 1000]) == [32, 32]
