"""Compares two ways to divide a key-value cache, by positions and by heads: seconds and bytes. Imports no torch.

By positions, every rank has all weights and decodes its own requests (cache parallelism and data parallelism of the
thesis, Sec. 4.4). By heads, every rank has a part of the heads and columns and decodes all requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_capslog.base import fields
from varuna_capslog.base.tables import Table
from varuna_capslog.base.units import format_bytes
from varuna_capslog.planners.seconds import Link

__all__ = [
    "HEADS",
    "SEQUENCE",
    "SHARDS",
    "DecoderShape",
    "DecodingDevice",
    "DecodingPlan",
    "ShardCost",
    "choose_shard",
    "described_sequence_bytes",
    "heads_bytes",
    "most_positions",
    "phases",
    "printed_heads_bytes",
    "printed_sequence_bytes",
    "refuse_heads",
    "sequence_bytes",
]


# -- Bytes that ranks send while they decode: as printed in the thesis, corrected, and as we send them.
#
# Source: chapter 4 of the thesis, "cache parallelism" (Sec. 4.4, the two formulas under "Communication"), which divides
# a key-value cache along the sequence, and tensor parallelism, which divides it by heads. Symbols of the thesis: N
# ranks, B requests, hidden size E, H heads. Every function returns the bytes that one rank sends for one token of every
# request and one layer: the mean over the ranks and, where the token's position matters, over N successive tokens.


TOKEN_BYTES = 8
"""Bytes of a token number, which ranks exchange where positions are divided."""
SEQUENCE, HEADS = "sequence", "heads"
SHARDS = (SEQUENCE, HEADS)
"""Ways to divide a key-value cache over ranks."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder that decide the cost of decoding.

    Attributes:
        layers: layers with attention.
        width: elements of a hidden state (E).
        heads, kv_heads: heads of queries (H), and of keys and values. head_dim: elements of a head.
        inner: columns of the feed-forward.
        itemsize: bytes of one element in weights, caches and messages.
        divided: elements of all attention and feed-forward matrices, which sharding by heads divides.
        output: elements of the matrix that computes logits. rest: of all other weights; every rank has both whole.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    itemsize: int
    divided: int = 0
    output: int = 0
    rest: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "inner", "itemsize"):
            fields.whole(getattr(self, name), name, 1)

    @property
    def queries(self) -> int:
        """Elements of the queries of one token in one layer; E where all heads together have the hidden size."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of the keys of one token in one layer; its values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def sum_itemsize(self) -> int:
        """Bytes of one log-sum-exp, which has at least float32."""
        return max(4, self.itemsize)


def refuse_heads(shape: DecoderShape, degree: int) -> str | None:
    """Return the reason why sharding by heads cannot have this degree; None where it can."""
    sizes = {"heads": shape.heads, "key-value heads": shape.kv_heads, "columns of the feed-forward": shape.inner}
    for name, size in sizes.items():
        if size % degree:
            return f"the degree {degree} does not divide the {size} {name}"
    return None


def printed_sequence_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """Bytes (N-1)/N 3BE + (N-1) B (E+2H) / 2, as printed: all-gather of q, k, v, all-to-all of (o, m, s)."""
    gathered = (degree - 1) * 3 * batch * shape.width / degree
    return (gathered + (degree - 1) * batch * (shape.width + 2 * shape.heads) / 2) * shape.itemsize


def printed_heads_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """Bytes 4 (N-1) B E, as printed: two all-reduces."""
    return 4 * (degree - 1) * batch * shape.width * shape.itemsize


def described_sequence_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """Bytes (N-1)/N B (4E+2H): the printed formula, corrected to the thesis's description. The all-to-all sends an N-th
    of each rank's results to every other rank, so that "/ 2" must be "/ N". With fewer key-value heads, q, k and v
    together have Q + 2K elements instead of 3E. m and s have the same type as the other elements.
    """
    numbers = shape.queries + 2 * shape.keys + shape.queries + 2 * shape.heads
    return (degree - 1) * batch * numbers * shape.itemsize / degree


def heads_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """Bytes 4 (N-1)/N B E: the printed formula, corrected: in each of two all-reduces a rank sends 2 (N-1)/N of the
    summed elements. A ring sends this much, and so does `decoder`: every rank sums a slice and sends it to all others.
    """
    return 4 * (degree - 1) * batch * shape.width * shape.itemsize / degree


def sequence_bytes(shape: DecoderShape, batch: int, degree: int) -> float:
    """Bytes (N-1)/N B (2Q + 2K/N + H) that we send: q to all ranks, new k and v to the one rank that keeps them, (o,
    log-sum-exp) back. Q and K are the elements of one token's queries and keys; where both are E, the sum in brackets
    is 2E + 2E/N + H. One log-sum-exp has the same information as the maximum and the sum in the thesis.
    """
    numbers = 2 * shape.queries + 2 * shape.keys / degree
    return (degree - 1) * batch * (numbers * shape.itemsize + shape.heads * shape.sum_itemsize) / degree


def phases(shape: DecoderShape, batch: int, degree: int, shard: str) -> list[float]:
    """Return the bytes of each exchange of one layer, in order, on the rank that sends or receives most, instead of the
    mean: where N does not divide the batch, some ranks have one more request.
    """
    if degree == 1:
        return []
    if shard == HEADS:
        slices = _shares(batch * shape.width, degree)
        # a slice goes to the rank that sums it, then the sum to all: a rank's sent and received bytes change places
        largest = max(max(sum(slices) - size, (degree - 1) * size) for size in slices)
        return [float(largest * shape.itemsize)] * 4
    query, pair = shape.queries * shape.itemsize, 2 * shape.keys * shape.itemsize / degree
    result = query + shape.heads * shape.sum_itemsize
    sent = returned = 0.0
    for requests in _shares(batch, degree):
        others = batch - requests
        sent = max(sent, (degree - 1) * requests * (query + pair), others * (query + pair))
        returned = max(returned, others * result, (degree - 1) * requests * result)
    return [sent, returned]


def most_positions(batch: int, length: int, degree: int) -> int:
    """Return the largest number of positions on a rank, for `batch` requests of `length` tokens. Position p of request
    i is on rank (p + i) mod N: shares of one request differ by at most one position, those of many requests hardly.
    """
    rounds, remainder = divmod(length, degree)
    # the remaining positions of request i are on the ranks (rounds * N + i) mod N and after it
    extra = [0] * degree
    for request in range(min(batch, degree)):
        times = len(range(request, batch, degree))
        for place in range(remainder):
            extra[(request + place) % degree] += times
    return batch * rounds + max(extra)


def _shares(count: int, degree: int) -> list[int]:
    return [count // degree + (rank < count % degree) for rank in range(degree)]


# -- comparison of both ways to divide a key-value cache


@dataclass(frozen=True)
class DecodingDevice:
    """Speed and memory of one rank's device; None: unknown, and not counted. bytes_per_second: reading of weights and
    caches. flops: operations per second, in the type of the weights.
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
        link_seconds: seconds of all exchanges for one token of every request, one after another, each on the rank that
            sends or receives most; by positions, with the exchange of the tokens themselves.
        device_seconds: seconds to read weights and caches, or to multiply if longer; 0 for an unknown device.
        memory_bytes: weights and caches on the rank with most.
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
    """Choice of the faster possible way to decode; between equally fast ways, of the way with less memory.

    Attributes:
        shard: the chosen way; None where neither is possible.
        why: reason, one sentence.
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
    """Choose the faster way to decode. Raises CapslogError for a number below 1.

    Args:
        batch: requests that are decoded together. degree: ranks.
        length: tokens of each request, prompt and answer, for which the cache has room.
        link: of each rank to all others; all its messages of one exchange together cost one latency.
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
    # of the embeddings (in `rest`) only the tokens' rows are read, which are not counted
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
    """Return the seconds to multiply a matrix of `numbers` with the hidden states of `requests`."""
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
