"""The formulas against a list of every number that must travel, made request by request and token by token."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.decoding.choice import (
    HEADS,
    SEQUENCE,
    DecoderShape,
    described_sequence_bytes,
    heads_bytes,
    most_positions,
    phases,
    printed_heads_bytes,
    printed_sequence_bytes,
    refuse_heads,
    sequence_bytes,
)

LLAMA_7B = DecoderShape(1, 4096, 32, 32, 128, 11008, 2)
"""One layer, as in the thesis's evaluation (Sec. 4.5.1)."""


def random_shape(draw: random.Random) -> DecoderShape:
    kv = draw.randint(1, 4)
    heads, size, itemsize = kv * draw.randint(1, 4), draw.randint(1, 8), draw.choice((2, 4, 8))
    return DecoderShape(draw.randint(1, 3), draw.choice((heads * size, 7)), heads, kv, size, 12, itemsize)


Moved = tuple[Counter[int], Counter[int]]


def exchanges(shape: DecoderShape, batch: int, degree: int, shard: str) -> list[Moved]:
    """Bytes that each rank sends and those that it receives in each exchange of one layer, over N tokens."""
    moved: list[Moved] = []

    def move(exchange: int, source: int, to: int, count: int) -> None:
        while len(moved) <= exchange:
            moved.append((Counter(), Counter()))
        if source != to:
            moved[exchange][0][source] += count
            moved[exchange][1][to] += count

    for token in range(degree):
        if shard == HEADS:
            for reduced in (0, 2):
                for number in range(batch * shape.width):
                    # slices as torch.tensor_split makes them
                    owner = next(r for r in range(degree) if number in _slice(batch * shape.width, degree, r))
                    for rank in range(degree):
                        move(reduced, rank, owner, shape.itemsize)
                        move(reduced + 1, owner, rank, shape.itemsize)
            continue
        for request in range(batch):
            home, position = request % degree, 10 * degree + token
            for rank in range(degree):
                move(0, home, rank, shape.heads * shape.head_dim * shape.itemsize)
                result = shape.heads * shape.head_dim * shape.itemsize + shape.heads * max(4, shape.itemsize)
                move(1, rank, home, result)
            pair = 2 * shape.kv_heads * shape.head_dim * shape.itemsize
            move(0, home, (position + request) % degree, pair)
    return moved


def _slice(count: int, degree: int, rank: int) -> range:
    sizes = [count // degree + (part < count % degree) for part in range(degree)]
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


@pytest.mark.parametrize("shard", [SEQUENCE, HEADS])
def test_formulas_against_every_number_that_travels(shard):
    draw = random.Random(3)
    formula = {SEQUENCE: sequence_bytes, HEADS: heads_bytes}[shard]
    for _ in range(60):
        shape, batch, degree = random_shape(draw), draw.randint(1, 7), draw.randint(2, 5)
        counted = exchanges(shape, batch, degree, shard)
        sent = sum(sum(sent_bytes.values()) for sent_bytes, _ in counted) / degree / degree
        assert formula(shape, batch, degree) == pytest.approx(sent, rel=1e-12)
        busiest = [
            max([*sent_bytes.values(), *received_bytes.values()]) / degree for sent_bytes, received_bytes in counted
        ]
        assert phases(shape, batch, degree, shard) == pytest.approx(busiest, rel=1e-12)


def test_one_rank_sends_nothing():
    for formula in (sequence_bytes, heads_bytes, described_sequence_bytes):
        assert formula(LLAMA_7B, 32, 1) == 0
    assert phases(LLAMA_7B, 32, 1, SEQUENCE) == phases(LLAMA_7B, 32, 1, HEADS) == []


def test_what_the_thesis_prints_and_what_it_means():
    """Cache parallelism sends 2 to 4.5 times less than tensor parallelism as printed, and more as described."""
    assert printed_sequence_bytes(LLAMA_7B, 32, 4) == 2 * (3 / 4 * 3 * 32 * 4096 + 3 * 32 * (4096 + 64) / 2)
    assert printed_heads_bytes(LLAMA_7B, 32, 4) == 2 * 4 * 3 * 32 * 4096
    for degree, printed, sent in ((2, 16384 / 8224, 12352), (4, 49152 / 15456, 10304), (8, 114688 / 25312, 9280)):
        ratio = printed_heads_bytes(LLAMA_7B, 32, degree) / printed_sequence_bytes(LLAMA_7B, 32, degree)
        assert ratio == pytest.approx(printed)
        ratio = heads_bytes(LLAMA_7B, 32, degree) / described_sequence_bytes(LLAMA_7B, 32, degree)
        assert ratio == pytest.approx(1 / (1 + 64 / (4 * 4096)))  # 0.4 % more
        ratio = heads_bytes(LLAMA_7B, 32, degree) / sequence_bytes(LLAMA_7B, 32, degree)
        assert ratio == pytest.approx(
            4 * 4096 / sent
        )  # 2E + 2E/N + 2H, as a log-sum-exp is float32: 1.3, 1.6 and 1.8 times


def test_the_largest_share_of_positions():
    for batch in range(1, 8):
        for length in range(1, 12):
            for degree in range(1, 6):
                shares = Counter((p + i) % degree for i in range(batch) for p in range(length))
                assert most_positions(batch, length, degree) == max(shares.values())


def test_degrees_that_do_not_divide():
    shape = DecoderShape(1, 48, 6, 2, 8, 90, 2)
    assert refuse_heads(shape, 2) is None
    assert refuse_heads(shape, 3) == "the degree 3 does not divide the 2 key-value heads"
    assert refuse_heads(shape, 4) == "the degree 4 does not divide the 6 heads"
    wide = DecoderShape(1, 48, 4, 4, 8, 90, 2)
    assert refuse_heads(wide, 4) == "the degree 4 does not divide the 90 columns of the feed-forward"
    with pytest.raises(CapslogError, match="kv_heads is 0; it must be at least 1"):
        DecoderShape(1, 48, 6, 0, 8, 90, 2)
