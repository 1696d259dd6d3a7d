"""Compares dividing a key-value cache by positions and by heads: seconds and bytes of both.

Where the cache is divided by positions every rank has all weights and decodes its own requests (the thesis's cache
parallelism with data parallelism around it, Sec. 4.4); where it is divided by heads every rank has a part of the heads
and columns and decodes all requests. Both are computed and the cheaper one is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_capslog.base import fields
from varuna_capslog.base.tables import Table
from varuna_capslog.base.units import format_bytes
from varuna_capslog.decoding.traffic import (
    HEADS,
    SHARDS,
    TOKEN_BYTES,
    DecoderShape,
    heads_bytes,
    most_positions,
    phases,
    refuse_heads,
    sequence_bytes,
)
from varuna_capslog.planners.seconds import Link

__all__ = ["DecodingDevice", "DecodingPlan", "ShardCost", "choose_shard"]


@dataclass(frozen=True)
class DecodingDevice:
    """Speed and memory of one rank's device; None: unknown, and not counted.

    Attributes:
        capacity_bytes: of its memory.
        bytes_per_second: at which weights and caches are read.
        flops: per second, in the type of the weights.
    """

    capacity_bytes: int | None = None
    bytes_per_second: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class ShardCost:
    """Cost of a way to divide the cache.

    Attributes:
        shard: `"sequence"` or `"heads"`.
        sent_bytes: bytes that one rank sends in all layers for one token of every request, the mean over ranks.
        link_seconds: of all exchanges of one token, one after the other, each on the rank that has most to send or
            receive; by positions also of the tokens themselves.
        device_seconds: of reading weights and caches, or of the products where these take longer; 0 where the device
            is not known.
        memory_bytes: weights and caches on the rank that holds most.
        refused: why this way is impossible; None where it is possible.
    """

    shard: str
    sent_bytes: float
    link_seconds: float
    device_seconds: float
    memory_bytes: int
    refused: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds for one token of every request."""
        return self.link_seconds + self.device_seconds


@dataclass(frozen=True)
class DecodingPlan:
    """The faster of the possible ways; where both are equally fast, the one that needs less memory.

    Attributes:
        shard: the way; None where neither is possible.
        why: one sentence.
        costs: of both ways.
    """

    shard: str | None
    why: str
    degree: int
    batch: int
    length: int
    costs: tuple[ShardCost, ShardCost]

    def _table(self) -> Table:
        rows = [
            [
                cost.shard,
                format_bytes(round(cost.sent_bytes)),
                f"{1e3 * cost.link_seconds:.3f}",
                f"{1e3 * cost.device_seconds:.3f}",
                format_bytes(cost.memory_bytes),
                "chosen" if cost.shard == self.shard else "no" if cost.refused else "slower",
            ]
            for cost in self.costs
        ]
        title = f"{self.batch} request(s) of {self.length} tokens on {self.degree} rank(s)"
        headings = ["shard", "sent for a token", "messages ms", "device ms", "memory of a rank", ""]
        return Table(title, headings, rows, left=(0, 5), notes=[self.why])

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()


def choose_shard(
    shape: DecoderShape, batch: int, length: int, degree: int, link: Link, device: DecodingDevice
) -> DecodingPlan:
    """Choose the faster way to decode.

    Args:
        batch: requests that are decoded together.
        length: tokens of each request, prompt and answer, for which there is room in the cache.
        degree: ranks.
        link: of each rank to all others; its messages of one exchange cost one latency.

    Raises:
        CapslogError: a number below 1.
    """
    for name, value in {"batch": batch, "length": length, "degree": degree}.items():
        fields.whole(value, name, 1)
    first, second = (_cost(shape, batch, length, degree, shard, link, device) for shard in SHARDS)
    possible = [cost for cost in (first, second) if cost.refused is None]
    if not possible:
        why = "; ".join(f"{cost.shard} is out: {cost.refused}" for cost in (first, second))
        return DecodingPlan(None, why, degree, batch, length, (first, second))
    best = min(possible, key=lambda cost: (cost.seconds, cost.memory_bytes))
    worse = second if best is first else first
    return DecodingPlan(best.shard, _why(best, worse), degree, batch, length, (first, second))


def _cost(
    shape: DecoderShape, batch: int, length: int, degree: int, shard: str, link: Link, device: DecodingDevice
) -> ShardCost:
    by_heads = shard == HEADS
    requests = batch if by_heads else -(-batch // degree)
    exchanges = shape.layers * phases(shape, batch, degree, shard)
    if exchanges and not by_heads:
        exchanges.append(float((degree - 1) * requests * TOKEN_BYTES))
    link_seconds = sum(
        link.latency_seconds + (0.0 if link.bandwidth is None else size / link.bandwidth) for size in exchanges
    )
    held = -(-shape.divided // degree) if by_heads else shape.divided
    positions = batch * length if by_heads else most_positions(batch, length, degree)
    cache = shape.layers * positions * 2 * shape.keys * shape.itemsize // (degree if by_heads else 1)
    weights = held + shape.output + shape.rest
    # only the rows of the tokens are read of the embeddings
    seconds = sum(_roof(numbers, requests, shape.itemsize, device) for numbers in (held, shape.output))
    if device.bytes_per_second is not None:
        seconds += cache / device.bytes_per_second
    memory = weights * shape.itemsize + cache
    refused = refuse_heads(shape, degree) if by_heads else None
    if refused is None and device.capacity_bytes is not None and memory > device.capacity_bytes:
        short = format_bytes(memory - device.capacity_bytes)
        refused = f"weights and cache need {format_bytes(memory)} on a rank, {short} more than it has"
    sent = shape.layers * (heads_bytes if by_heads else sequence_bytes)(shape, batch, degree)
    return ShardCost(shard, sent, link_seconds, seconds, memory, refused)


def _roof(numbers: int, requests: int, itemsize: int, device: DecodingDevice) -> float:
    """Return the seconds to multiply a matrix of so many numbers with the hidden states of so many requests."""
    read = 0.0 if device.bytes_per_second is None else numbers * itemsize / device.bytes_per_second
    multiplied = 0.0 if device.flops is None else 2 * numbers * requests / device.flops
    return max(read, multiplied)


def _why(best: ShardCost, worse: ShardCost) -> str:
    if worse.refused is not None:
        return f"{best.shard}: {worse.shard} is out, since {worse.refused}"
    if best.seconds == worse.seconds:
        return f"{best.shard}: both are as fast, and it needs no more memory"
    gained = {
        "messages": worse.link_seconds - best.link_seconds,
        "the devices' work": worse.device_seconds - best.device_seconds,
    }
    saves = [f"{1e3 * value:.3g} ms less for {name}" for name, value in gained.items() if value > 0]
    costs = [f"{-1e3 * value:.3g} ms more for {name}" for name, value in gained.items() if value < 0]
    return f"{best.shard}: {1e3 * best.seconds:.3g} ms for a token, {' and '.join(saves + costs)} than by {worse.shard}"
