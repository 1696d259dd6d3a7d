"""The choice against seconds that are added up here from every number that travels, and the sentences it gives."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from tests.decoding.test_choice_traffic import LLAMA_7B, exchanges, random_shape
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.decoding.choice import HEADS, SEQUENCE, SHARDS, DecodingDevice, choose_shard
from varuna_capslog.planners.seconds import Link

MODEL = dataclasses.replace(LLAMA_7B, layers=32, divided=32 * 202375168, output=131072000, rest=131338240)
LINK = Link(25e9, 20e-6)
A100 = DecodingDevice(80 << 30, 2e12, 300e12)


def seconds_of(shape, batch, length, degree, shard, link, device):
    """Worked out rank by rank; the slowest reads and multiplies for as long as this says."""
    total = 0.0
    for sent_bytes, received_bytes in exchanges(shape, batch, degree, shard) if degree > 1 else ():
        total += link.latency_seconds + max([*sent_bytes.values(), *received_bytes.values()]) / degree / link.bandwidth
    total *= shape.layers
    if shard == SEQUENCE and degree > 1:  # every rank tells the others the tokens of its requests
        homed = len([i for i in range(batch) if i % degree == 0])
        total += link.latency_seconds + 8 * homed * (degree - 1) / link.bandwidth
    slowest = 0.0
    for rank in range(degree):
        rank_batch = batch if shard == HEADS else len([i for i in range(batch) if i % degree == rank])
        matrices = [shape.divided / (degree if shard == HEADS else 1), shape.output]
        spent = 0.0
        for numbers in matrices:
            spent += max(numbers * shape.itemsize / device.bytes_per_second, 2 * numbers * rank_batch / device.flops)
        slowest = max(slowest, spent)
    cached = [0] * degree
    for request in range(batch):
        for position in range(length):
            cached[(position + request) % degree] += 1
    positions = batch * length / degree if shard == HEADS else max(cached)
    pair = 2 * shape.kv_heads * shape.head_dim * shape.itemsize
    return total + slowest + shape.layers * positions * pair / device.bytes_per_second


def test_the_faster_way_is_chosen():
    draw = random.Random(5)
    chosen = []
    for _ in range(150):
        shape = dataclasses.replace(
            random_shape(draw), inner=60, divided=60 * draw.randint(1, 50), output=draw.randint(0, 500)
        )
        batch, length, degree = draw.randint(1, 7), draw.randint(1, 9), draw.randint(1, 4)
        link = Link(10 ** draw.uniform(2, 6), draw.choice((0.0, 1e-4)))
        device = DecodingDevice(None, 10 ** draw.uniform(3, 6), 10 ** draw.uniform(3, 6))
        plan = choose_shard(shape, batch, length, degree, link, device)
        expected = {shard: seconds_of(shape, batch, length, degree, shard, link, device) for shard in SHARDS}
        for cost in [cost for cost in plan.costs if cost.refused is None]:
            assert cost.seconds == pytest.approx(expected[cost.shard], rel=1e-9)
        if shape.heads % degree or shape.kv_heads % degree:
            assert plan.shard == SEQUENCE
            assert "does not divide the" in plan.why
        else:
            assert expected[plan.shard] <= min(expected.values()) * (1 + 1e-9)
            chosen.append(plan.shard)
    assert min(chosen.count(shard) for shard in SHARDS) > 10


def test_where_each_wins():
    """Many requests over a slow link: messages decide. One request: the weights that each rank must read decide."""
    slow = choose_shard(MODEL, 512, 1024, 4, Link(1e9, 50e-6), A100)
    assert slow.shard == SEQUENCE
    assert slow.why.startswith("sequence: 2")
    assert "less for messages" in slow.why
    alone = choose_shard(MODEL, 1, 131072, 4, LINK, A100)
    assert alone.shard == HEADS
    assert "less for the devices' work and 1.21 ms more for messages than by sequence" in alone.why
    few = dataclasses.replace(MODEL, kv_heads=2)
    assert choose_shard(few, 1, 131072, 4, LINK, A100).why == (
        "sequence: heads is out, since the degree 4 does not divide the 2 key-value heads"
    )


def test_memory_decides_where_only_one_way_fits():
    """Weights of 12.6 GiB and 64 GiB of keys and values: a quarter of either is on a rank, or of the cache alone."""
    by_heads = choose_shard(MODEL, 4, 32768, 4, Link(1e6), DecodingDevice(24 << 30))
    assert by_heads.shard == HEADS
    assert (
        "sequence is out, since weights and cache need 28.55 GiB on a rank, 4.55 GiB more than it has" in by_heads.why
    )
    assert choose_shard(MODEL, 4, 32768, 4, Link(1e6), DecodingDevice(32 << 30)).shard == SEQUENCE
    none = choose_shard(MODEL, 4, 32768, 4, LINK, DecodingDevice(8 << 30))
    assert none.shard is None
    assert none.why.startswith("sequence is out: weights and cache need 28.55 GiB")
    assert "; heads is out: weights and cache need 19.5 GiB" in none.why
    assert str(none).count(" no ") == 2


def test_one_rank_is_as_fast_either_way():
    plan = choose_shard(MODEL, 4, 1024, 1, LINK, A100)
    assert plan.why == "sequence: both are as fast, and it needs no more memory"
    assert math.isclose(plan.costs[0].memory_bytes, plan.costs[1].memory_bytes)


def test_numbers_below_one_are_refused():
    for name, numbers in {"batch": (0, 1, 1), "length": (1, 0, 1), "degree": (1, 1, 0)}.items():
        with pytest.raises(CapslogError, match=f"{name} is 0; it must be at least 1"):
            choose_shard(MODEL, *numbers, LINK, A100)
